"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const [tree, list, detail, groupBox, onlyBox, colourBox, findBox, hits] =
    ["tree", "rows", "detail", "group", "only", "colour", "find", "hits"].map(at);
  const AHEAD = 20; // rows drawn above and below those in view
  let shown = [];        // the groups that the filter leaves
  let group = null;      // the one that is shown
  let scale = {};        // what its colours are relative to
  let drawn = new Map(); // its rows that exist, by place: those in view and the chosen one
  let chosen = -1;       // the place of its chosen node
  let found = [];        // places of the nodes that hold what is looked for

  const make = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const rewardsOf = (one) => one.nodes.filter((node) => node.end).map((node) => node.end.reward);
  const scoredOf = (one) => rewardsOf(one).filter((reward) => reward !== null);
  const forksOf = (one) => one.nodes.filter((node) => (node.decisions || []).some((d) => d.action === "fork")).length;
  const mixed = (one) => new Set(scoredOf(one)).size > 1;
  const pushed = (one) => one.nodes.some(({ credit }) => credit && Math.max(credit[0], -credit[1]) > 1e-12);
  const tests = {
    all: () => true,
    mixed,
    forked: (one) => forksOf(one) > 0,
    cut: (one) => one.cut !== null,
    same: (one) => scoredOf(one).length > 0 && !mixed(one),
  };

  function callText(call) {
    const said = Object.values(call.arguments).map((value) => (typeof value === "string" ? value : JSON.stringify(value)));
    return `${call.name}(${said.join(", ")})`;
  }
  function saidBy(node) {
    const parts = (node.messages || []).flatMap((message) => [
      message.content, ...(message.tool_calls || []).map((call) => callText(call.function)), message.reasoning_content,
    ]);
    return parts.filter(Boolean).join(" ").replace(/\s+/g, " ").trim();
  }
  function textOf(node) {
    const text = saidBy(node);
    if (text) return text.slice(0, 400);
    if (node.kind === "completion" && node.ids.length) return "(shared start) " + words(node.ids);
    return node.ids.length ? words(node.ids) : "(nothing)";
  }
  const word = (id) => (data.words[id] === undefined ? ` ${id} ` : data.words[id]);
  const words = (ids) => ids.slice(0, 60).map(word).join("");

  function use(one) {
    if (one.cut !== null) return `cut at turn ${one.cut}`;
    if (tests.same(one) && !pushed(one)) return "no gradient: all rewards equal";
    return one.learned ? "learned from" : "not learned from";
  }

  // groups

  function listGroups() {
    const test = tests[onlyBox.value];
    shown = data.groups.filter(test);
    groupBox.replaceChildren(...shown.map((one, index) => {
      const scored = scoredOf(one);
      const told = scored.length ? `mean ${mean(scored).toFixed(2)}` : "no reward";
      const option = make("option", "", `${one.id} · ${one.task} · ${told}${forksOf(one) ? ` · ${plural(forksOf(one), "fork")}` : ""}${one.cut === null ? "" : " · cut"}`);
      option.value = index;
      return option;
    }));
    const kept = shown.indexOf(group);
    draw(Math.max(0, kept >= 0 ? kept : shown.findIndex(mixed)));  // first one that teaches: its rewards differ
  }

  function draw(index) {
    chosen = -1;
    group = shown[index] || null;
    closeDetail();
    tree.scrollTop = 0;
    if (!group) {
      list.style.setProperty("--count", 2);
      list.replaceChildren(make("p", "empty", "No group is like that."));
      at("summary").textContent = hits.textContent = "";
      return;
    }
    groupBox.value = index;
    const scored = scoredOf(group);
    const rewards = rewardsOf(group);
    scale = {
      middle: scored.length ? mean(scored) : 0,
      mixed: mixed(group),
      peak: group.nodes.reduce((peak, { credit }) => (credit ? Math.max(peak, credit[0], -credit[1]) : peak), 1e-9),
    };
    const told = [
      `iteration ${group.iteration}`, `task ${group.task}`, plural(rewards.length, "rollout"),
      scored.length ? `mean reward ${scale.middle.toFixed(3)}` : "no reward",
      plural(forksOf(group), "fork"), `${group.nodes.length} nodes`,
      use(group),
    ];
    const parts = group.nodes.filter((node) => node.part).length;
    if (parts) told.push(plural(parts, "part"));
    if (rewards.length > scored.length) told.push(`${rewards.length - scored.length} censored`);
    if (data.unread) told.push(`${plural(data.unread, "line")} of the file could not be read`);
    if (data.left_out) told.push(`${plural(data.left_out, "earlier group")} not on this page`);
    at("summary").textContent = told.join(" · ");
    list.style.setProperty("--count", group.nodes.length);
    find();
  }

  // Rows are of one height and placed by number, so only those in view need to exist: a group may have thousands.
  function drawRows(anew = false) {
    if (!group) return;
    if (anew) drawn.clear();
    const high = list.clientHeight / group.nodes.length;
    const block = (pixels) => Math.floor(pixels / high / AHEAD) * AHEAD;
    const first = Math.max(0, block(tree.scrollTop) - AHEAD);
    const last = Math.min(group.nodes.length, block(tree.scrollTop + tree.clientHeight) + 2 * AHEAD);
    const wanted = new Set(chosen >= 0 && chosen < first ? [chosen] : []);
    for (let place = first; place < last; place++) wanted.add(place);
    if (chosen >= last) wanted.add(chosen);
    if (wanted.size === drawn.size && [...wanted].every((place) => drawn.has(place)) && !anew) return;
    drawn = new Map([...wanted].map((place) => [place, drawn.get(place) || rowOf(group.nodes[place], place)]));
    list.replaceChildren(...drawn.values());
  }

  function tint(node) {
    if (colourBox.value === "entropy") {
      if (!node.entropies || !node.entropies.length) return "transparent";
      return `rgba(var(--heat), ${Math.min(1, mean(node.entropies) / 1.5).toFixed(3)})`;
    }
    if (!node.credit) return "transparent";
    const [positive, negative] = node.credit;
    const total = positive + negative;
    if (Math.abs(total) < 1e-12) return "var(--line)";
    return `color-mix(in srgb, var(${total > 0 ? "--good" : "--bad"}) ${Math.round(25 + 75 * Math.min(1, Math.abs(total) / scale.peak))}%, transparent)`;
  }

  function rowOf(node, place) {
    const row = make("div", `row ${node.kind}`);
    row.id = `row-${place}`;
    row.dataset.place = place;
    row.style.setProperty("--place", place);
    row.style.borderLeftColor = tint(node);
    const told = { role: "treeitem", "aria-level": node.lane + 1, "aria-selected": place === chosen };
    Object.assign(told, { "aria-posinset": place + 1, "aria-setsize": group.nodes.length });
    for (const [name, value] of Object.entries(told)) row.setAttribute(name, value);
    row.classList.toggle("found", found.includes(place));
    const lanes = make("span", "lanes");
    for (let lane = 0; lane < Math.min(node.lane, 24); lane++) {
      lanes.append(make("i", lane === node.lane - 1 && startsLane(node) ? "fork" : ""));
    }
    if (node.start > 1) row.classList.add("start");
    const turn = make("span", "turn", { prompt: "task", completion: `turn ${node.turn}` }[node.kind] || "");
    row.append(lanes, turn, make("span", "said", textOf(node)));
    for (const decision of node.decisions || []) {
      if (["pass", "part"].includes(decision.action)) continue;
      row.append(make("span", "mark", decision.actor === "agent" ? decision.reason : decision.action));
    }
    if (node.part) row.append(make("span", "end", `part of ${node.part}`));
    if (node.end) {
      const reward = node.end.reward;
      const compared = reward !== null && scale.mixed; // without variance no reward is better than another
      const kind = compared ? (reward > scale.middle ? "good" : "bad") : "";
      row.append(make("span", `end ${kind}`, 
        (node.end.number ? `${node.end.number}: ` : "") + (reward === null ? node.end.stop : `reward ${+reward.toFixed(3)}`)));
    }
    return row;
  }
  const startsLane = (node) => node.parent === null || group.nodes[node.parent].lane < node.lane;

  // one node

  function choose(place) {
    if (!group || place < 0 || place >= group.nodes.length) return;
    mark(place);
    drawRows();
    drawn.get(place).scrollIntoView({ block: "nearest" });
    showDetail(group.nodes[place]);
  }
  // The tree keeps the focus and names the chosen row, which may be scrolled out of view.
  function mark(place) {
    drawn.get(chosen)?.setAttribute("aria-selected", "false");
    chosen = place;
    drawn.get(chosen)?.setAttribute("aria-selected", "true");
    if (place >= 0) tree.setAttribute("aria-activedescendant", `row-${place}`);
    else tree.removeAttribute("aria-activedescendant");
  }

  function section(title, ...content) {
    detail.append(make("h3", "", title), ...content);
  }
  function facts(pairs) {
    const list = make("dl");
    for (const [name, value] of pairs) list.append(make("dt", "", name), make("dd", "", String(value)));
    return list;
  }

  function showDetail(node) {
    detail.replaceChildren();
    const close = make("button", "close", "Close");
    close.type = "button";
    close.onclick = closeDetail;
    const names = { prompt: "Task", completion: `Turn ${node.turn}`, observation: `Answer to turn ${node.turn}` };
    detail.append(close, make("h2", "", names[node.kind]));
    for (const message of node.messages || []) {
      section(message.name ? `${message.role}: ${message.name}` : message.role);
      if (message.reasoning_content) detail.append(make("p", "empty", "thought:"), make("pre", "", message.reasoning_content));
      if (message.content) detail.append(make("pre", "", message.content));
      for (const { function: call } of message.tool_calls || []) {
        detail.append(make("pre", "", `${call.name} ${JSON.stringify(call.arguments, null, 2)}`));
      }
    }
    if (node.end) {
      const { stop, reward, reason, success } = node.end;
      const pairs = [["ended", stop], ["reward", reward === null ? "none (censored)" : reward], ["because", reason]];
      if (success !== undefined) pairs.push(["task solved", success ? "yes" : "no"]);
      section("Verdict", facts(pairs));
    }
    for (const decision of node.decisions || []) {
      const numbers = Object.entries(decision.numbers).map(([name, value]) => [name, value]);
      section(`${decision.actor}: ${decision.action}`, facts([["because", decision.reason], ...numbers]));
    }
    if (node.credit) {
      const [positive, negative, weight] = node.credit;
      section("Credit", facts([["P (up)", positive], ["N (down)", negative], ["m (weight)", weight]]));
    } else if (node.kind === "completion") {
      section("Credit", make("p", "empty", group.learned ? "This node was not trained." : "Nothing was learned from this group."));
    }
    if (node.ids.length) section(`${plural(node.ids.length, "token")}${node.logprobs ? ", coloured by entropy" : ""}`, tokens(node));
    const pairs = [["node", node.id], ["kind", node.kind]];
    if (node.version !== undefined) pairs.push(["policy version", node.version]);
    if (node.entropies && node.entropies.length) pairs.push(["mean entropy", `${mean(node.entropies).toFixed(4)} nats a token`]);
    if (node.logprobs && node.logprobs.length) pairs.push(["log-probability", node.logprobs.reduce((sum, value) => sum + value, 0).toFixed(4)]);
    section("Facts", facts(pairs));
    if (node.kind === "prompt") {
      const said = Object.entries(group.meta).filter(([, value]) => value === null || typeof value !== "object");
      if (said.length) section("This group", facts(said));
    }
    if (node.kind === "prompt" && group.tools.length) {
      section("Tools", make("pre", "", JSON.stringify(group.tools, null, 2)));
    }
    detail.scrollTop = 0;
    detail.classList.add("open");
  }

  function tokens(node) {
    const box = make("div", "tokens");
    const most = Math.min(node.ids.length, 2000);
    for (let place = 0; place < most; place++) {
      const id = node.ids[place];
      const one = make("span", "", word(id));
      const told = [`token ${id}`];
      if (node.logprobs) told.push(`log-probability ${node.logprobs[place]}`);
      if (node.entropies) {
        told.push(`entropy ${node.entropies[place]} nats`);
        one.style.background = `rgba(var(--heat), ${Math.min(0.85, node.entropies[place] / 2.5).toFixed(3)})`;
      }
      one.title = told.join(", ");
      box.append(one);
    }
    if (most < node.ids.length) box.append(make("span", "", ` … and ${node.ids.length - most} more`));
    return box;
  }

  function closeDetail() {
    mark(-1);
    detail.classList.remove("open");
    detail.replaceChildren(make("p", "empty", "Choose a node to read it: what was said, its tokens, why it forked, its credit."));
  }

  // Looks through whole messages, drawn or not; the browser's own search sees drawn rows only.
  function find() {
    const wanted = findBox.value.trim().toLowerCase();
    const places = wanted && group ? group.nodes.map((node, place) => (
      `${saidBy(node)} ${node.end ? node.end.reason : ""}`.toLowerCase().includes(wanted) ? place : -1)) : [];
    found = places.filter((place) => place >= 0);
    hits.textContent = wanted ? `${found.length} found` : "";
    drawRows(true);
  }
  function chooseFound(by) {
    if (!found.length) return;
    const next = by > 0 ? found.findIndex((place) => place > chosen) : found.findLastIndex((place) => place < chosen);
    const which = next >= 0 ? next : by > 0 ? 0 : found.length - 1;
    choose(found[which]);
    hits.textContent = `${which + 1} of ${found.length}`;
  }

  // events

  tree.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) choose(Number(row.dataset.place));
  });
  tree.addEventListener("scroll", () => drawRows());
  new ResizeObserver(() => drawRows()).observe(tree);
  groupBox.onchange = () => draw(Number(groupBox.value));
  onlyBox.onchange = listGroups;
  colourBox.onchange = () => drawRows(true);
  findBox.oninput = () => {
    find();
    if (found.length) tree.scrollTop = (list.clientHeight / group.nodes.length) * (found[0] - 3);
  };
  findBox.onkeydown = (event) => {
    if (event.key === "Enter") chooseFound(event.shiftKey ? -1 : 1);
  };
  const step = (by) => {
    const next = Number(groupBox.value) + by;
    if (shown[next]) draw(next);
  };
  at("before").onclick = () => step(-1);
  at("after").onclick = () => step(1);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      if (document.activeElement === findBox) findBox.blur();
      else closeDetail();
      return;
    }
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey || !group) return;
    const page = Math.max(1, Math.floor((tree.clientHeight / list.clientHeight) * group.nodes.length) - 1);
    const last = group.nodes.length - 1;
    const moves = {
      ArrowDown: () => choose(chosen + 1),
      ArrowUp: () => choose(Math.max(0, chosen - 1)),
      PageDown: () => choose(Math.min(last, chosen + page)),
      PageUp: () => choose(Math.max(0, chosen - page)),
      Home: () => choose(0),
      End: () => choose(last),
      ArrowLeft: () => chosen >= 0 && group.nodes[chosen].parent !== null && choose(group.nodes[chosen].parent),
      ArrowRight: () => chosen >= 0 && choose(group.nodes.findIndex((node) => node.parent === chosen)),
      "[": () => step(-1),
      "]": () => step(1),
      "/": () => findBox.focus(),
    };
    if (moves[event.key]) {
      event.preventDefault();
      moves[event.key]();
    }
  });
  at("legend").textContent = " Left edge: green pushes a turn up, orange down; or entropy. Reward: green above the mean of the group, orange not above it, grey where all are equal. Blue: a fork.";
  listGroups();
})();
