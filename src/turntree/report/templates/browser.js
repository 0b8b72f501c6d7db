"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const [tree, detail, groupBox, onlyBox, colourBox, findBox] =
    ["tree", "detail", "group", "only", "colour", "find"].map(at);
  let shown = [];   // the groups that the filter leaves
  let group = null; // the one that is drawn
  let drawn = [];   // its rows
  let chosen = -1;  // its chosen node

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
  function textOf(node) {
    const parts = (node.messages || []).flatMap((message) => [
      message.content, ...(message.calls || []).map(callText),
    ]);
    const text = parts.filter(Boolean).join(" ").replace(/\s+/g, " ").trim();
    if (text) return text.slice(0, 400);
    if (node.kind === "completion" && node.ids.length) return "(the shared beginning of a turn) " + words(node.ids);
    return node.ids.length ? words(node.ids) : "(nothing)";
  }
  const word = (id) => (data.words[id] === undefined ? ` ${id} ` : data.words[id]);
  const words = (ids) => ids.slice(0, 60).map(word).join("");

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
    draw(kept >= 0 ? kept : 0);
  }

  function draw(index) {
    chosen = -1;
    group = shown[index] || null;
    closeDetail();
    if (!group) {
      tree.replaceChildren(make("p", "empty", "No group is like that."));
      at("summary").textContent = "";
      return;
    }
    groupBox.value = index;
    const scored = scoredOf(group);
    const rewards = rewardsOf(group);
    const middle = scored.length ? mean(scored) : 0;
    const peak = Math.max(1e-9, ...group.nodes.map((node) => (node.credit ? Math.max(node.credit[0], -node.credit[1]) : 0)));
    const rows = document.createDocumentFragment();
    group.nodes.forEach((node, place) => rows.append(rowOf(node, place, middle, peak)));
    drawn = [...rows.children];
    tree.replaceChildren(rows);
    tree.scrollTop = 0;
    const told = [
      `iteration ${group.iteration}`, `task ${group.task}`, plural(rewards.length, "rollout"),
      scored.length ? `mean reward ${middle.toFixed(3)}` : "no reward",
      plural(forksOf(group), "fork"), `${group.nodes.length} nodes`,
      group.cut === null ? (group.learned ? "learned from" : "not learned from") : `cut at turn ${group.cut}`,
    ];
    if (rewards.length > scored.length) told.push(`${rewards.length - scored.length} censored`);
    if (data.unread) told.push(`${plural(data.unread, "line")} of the file could not be read`);
    if (data.left_out) told.push(`${plural(data.left_out, "earlier group")} not on this page`);
    at("summary").textContent = told.join(" · ");
    if (findBox.value) find();
    if (drawn.length) drawn[0].tabIndex = 0;
  }

  function tint(node, peak) {
    if (colourBox.value === "entropy") {
      if (!node.entropies || !node.entropies.length) return "transparent";
      return `rgba(var(--heat), ${Math.min(1, mean(node.entropies) / 1.5).toFixed(3)})`;
    }
    if (!node.credit) return "transparent";
    const [positive, negative] = node.credit;
    const total = positive + negative;
    if (Math.abs(total) < 1e-12) return "var(--line)";
    return `color-mix(in srgb, var(${total > 0 ? "--good" : "--bad"}) ${Math.round(25 + 75 * Math.min(1, Math.abs(total) / peak))}%, transparent)`;
  }

  function rowOf(node, place, middle, peak) {
    const row = make("div", `row ${node.kind}`);
    row.dataset.place = place;
    row.setAttribute("role", "treeitem");
    row.setAttribute("aria-level", node.lane + 1);
    row.setAttribute("aria-selected", "false");
    row.tabIndex = -1;
    row.style.borderLeftColor = tint(node, peak);
    const lanes = make("span", "lanes");
    for (let lane = 0; lane < Math.min(node.lane, 24); lane++) {
      lanes.append(make("i", lane === node.lane - 1 && startsLane(node) ? "fork" : ""));
    }
    if (node.start > 1) row.classList.add("start");
    const turn = make("span", "turn", node.kind === "completion" ? `turn ${node.turn}` : "");
    row.append(lanes, turn, make("span", "said", textOf(node)));
    for (const decision of node.decisions || []) {
      if (decision.action !== "pass") row.append(make("span", "mark", decision.action));
    }
    if (node.end) {
      const reward = node.end.reward;
      const kind = reward === null ? "" : reward > middle ? "good" : "bad";
      row.append(make("span", `end ${kind}`, reward === null ? node.end.stop : `reward ${+reward.toFixed(3)}`));
    }
    return row;
  }
  const startsLane = (node) => node.parent === null || group.nodes[node.parent].lane < node.lane;

  // one node

  function choose(place, focus = true) {
    const rows = drawn;
    if (place < 0 || place >= group.nodes.length) return;
    if (chosen >= 0) {
      rows[chosen].setAttribute("aria-selected", "false");
      rows[chosen].tabIndex = -1;
    }
    chosen = place;
    rows[place].setAttribute("aria-selected", "true");
    rows[place].tabIndex = 0;
    if (focus) rows[place].focus(); // a click has the row in sight and the focus already
    showDetail(group.nodes[place]);
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
      if (message.content) detail.append(make("pre", "", message.content));
      for (const call of message.calls || []) {
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
    detail.classList.remove("open");
    if (chosen < 0) detail.replaceChildren(make("p", "empty", "Choose a node to read it: what was said, its tokens, why it forked, its credit."));
  }

  function find() {
    const wanted = findBox.value.trim().toLowerCase();
    group.nodes.forEach((node, place) => {
      drawn[place].classList.toggle("found", wanted !== "" && textOf(node).toLowerCase().includes(wanted));
    });
  }

  // events

  tree.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) choose(Number(row.dataset.place), false);
  });
  groupBox.onchange = () => draw(Number(groupBox.value));
  onlyBox.onchange = listGroups;
  colourBox.onchange = () => {
    const kept = chosen;
    draw(Number(groupBox.value));
    if (kept >= 0) choose(kept, false);
  };
  findBox.oninput = () => {
    find();
    const first = tree.querySelector(".found");
    if (first) first.scrollIntoView({ block: "center" });
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
    const moves = {
      ArrowDown: () => choose(chosen + 1),
      ArrowUp: () => choose(Math.max(0, chosen - 1)),
      Home: () => choose(0),
      End: () => choose(group.nodes.length - 1),
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
  at("legend").textContent = " Left edge: green pushes a turn up, orange down; or entropy. Blue: a fork.";
  listGroups();
})();
