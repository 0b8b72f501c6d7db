"""Local rollouts: one sampled turn at a state inside a trace (PivotRL, section 2 and Algorithm 1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from turntree.core import seeds
from turntree.core.completion import Completion, GenerationRequest, Sampling
from turntree.core.cost import NO_COST
from turntree.core.errors import InputError, TurntreeError
from turntree.core.foreign import reason_of
from turntree.core.labels import Rewards
from turntree.core.messages import Message, action_kind
from turntree.core.progress import progress
from turntree.core.protocols import Engine, Renderer, TurnState, TurnVerifier
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.render.turns import calls_of
from turntree.rollout.live import CutTurns, RendererFault, sampled_turn

PATH_TOO_LONG = "path_above_train_max_tokens"
_JUDGED = "+cut_turns=judge"
_REASON = 160  # characters of what a chat template says


@dataclass(frozen=True)
class Prompted:
    """A candidate with its prompt already in tokens (rendered once, sampled many times)."""

    state: TurnState
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """What a state may need, in tokens: `completion` is the longest sampled turn, `context` the engine's and `path` the
    trainer's limit for prompt and completion together. `demonstrations`: the demonstrated turn must fit too, because
    a policy that cannot say it cannot be rewarded for it."""

    completion: int
    context: int
    path: int
    demonstrations: bool = True


def render(state: TurnState, renderer: Renderer) -> Prompted:
    return Prompted(state, renderer.prompt(state.history, state.tools))


def that_fit(
    states: Iterable[TurnState], renderer: Renderer, limits: Limits
) -> tuple[list[tuple[int, Prompted]], Counter[str]]:
    """The states that can be sampled and trained on, rendered, each with its place; the others counted by reason."""
    fitting: list[tuple[int, Prompted]] = []
    skipped = Counter[str]()
    for place, state in enumerate(states):
        try:
            said = renderer.completion(state.demonstration) if limits.demonstrations else ()
            if said and calls_of(renderer.parse(said, state.tools)) != calls_of(state.demonstration):
                raise InputError("its calls are read otherwise, and no rollout could match them", field="tool_calls")
            prompted = render(state, renderer)
        except BaseException as error:  # a template may raise anything; other states may still be rendered
            reason = reason_of(error).removeprefix("InputError: ")
            skipped[f"renderer_error: {reason[:_REASON]}"] += 1
            continue
        path = len(prompted.prompt_ids) + limits.completion
        if len(said) > limits.completion:
            skipped["demonstration_above_max_tokens"] += 1
        elif path > limits.context:
            skipped["prompt_above_context"] += 1
        elif path > limits.path:
            skipped[PATH_TOO_LONG] += 1
        else:
            fitting.append((place, prompted))
    return fitting, skipped


def local_request(
    item: Prompted, sampling: Sampling, *, seed: int, sample: int, occurrence: int = 0
) -> GenerationRequest:
    """The request for one sample at a state. Its draws depend on `seed`, the state's id and these numbers only."""
    key = seeds.derive(seed, "local", item.state.id, occurrence, sample)
    return GenerationRequest(prompt_ids=item.prompt_ids, sampling=sampling, seed=key)


def occurrences_of(prompted: Sequence[Prompted]) -> list[int]:
    """How often the state of each item came before it."""
    seen: Counter[str] = Counter()
    found: list[int] = []
    for item in prompted:
        found.append(seen[item.state.id])
        seen[item.state.id] += 1
    return found


def sample_local(
    prompted: Sequence[Prompted],
    engine: Engine,
    renderer: Renderer,
    sampling: Sampling,
    group_size: int,
    seed: int,
    *,
    occurrences: Sequence[int] | None = None,
) -> list[RolloutTree]:
    """`group_size` sampled actions at every state, as trees of one prompt node and one-turn leaves (one wave).

    The draws of (state, sample) depend on `seed`, the state's id and the sample's number only. A state may occur
    several times in one wave; its occurrences are numbered (`occurrences`: in the wave that this is a part of).
    """
    requests = [
        local_request(item, sampling, seed=seed, sample=sample, occurrence=occurrence)
        for item, occurrence in zip(prompted, occurrences or occurrences_of(prompted), strict=True)
        for sample in range(group_size)
    ]
    completions = iter(engine.generate(requests))
    trees: list[RolloutTree] = []
    for item in prompted:
        tree = RolloutTree(item.state.id)
        root = tree.add(None, NodeKind.PROMPT, item.prompt_ids, messages=item.state.history)
        for _ in range(group_size):
            _add(tree, root.id, next(completions), item.state, renderer)
        trees.append(tree)
    return trees


def _add(tree: RolloutTree, parent: int, completion: Completion, state: TurnState, renderer: Renderer) -> int:
    """Append a local rollout; its leaf."""
    try:
        action = sampled_turn(renderer, completion.token_ids, completion, state.tools)
        stop = StopReason.MAX_TOKENS if action.cut else StopReason.COMPLETED
    except RendererFault as fault:
        action, stop = Message("assistant", str(fault)), StopReason.RENDERER_ERROR
    leaf = tree.add_completion(parent, completion, action).id
    tree.stop(leaf, stop)
    return leaf


def judge_turn(verifier: TurnVerifier, state: TurnState, action: Message, *, cut_turns: CutTurns = "fail") -> Verdict:
    """The verdict on one sampled action; where it was cut by the token limit and `cut_turns` is "fail", 0 unasked.

    A right call followed by endless text gets no reward, because that would teach a policy not to stop. A cut turn is
    an outcome, not a failure, so the verdict has a reward.
    """
    if action.cut and cut_turns == "fail":
        return Verdict(0.0, "cut by the token limit", action_kind(action))
    return _judged(lambda: [verifier.judge(state, action)], [(state, action)])[0]


def _judged(judge: Callable[[], list[Verdict]], pairs: Sequence[tuple[TurnState, Message]]) -> list[Verdict]:
    """What a verifier says of some actions; nothing of any of them where it fails."""
    try:
        return judge()
    except TurntreeError:  # the verifier's own word, which ends the run
        raise
    except BaseException as error:
        why = f"the verifier raised {reason_of(error)}"
        return [Verdict(None, why, action_kind(action)) for _, action in pairs]


def judge_demonstrated(verifier: TurnVerifier, states: Sequence[TurnState], seed: int = 0) -> list[Verdict]:
    """The verdicts on the demonstrated actions themselves, which should be 1. No reward where the verifier does not
    compare with them."""
    if verifier.compares:
        return judge_turns(verifier, [(state, state.demonstration) for state in states], seed=seed)
    kinds = (action_kind(state.demonstration) for state in states)
    return [Verdict(None, "not compared with the demonstration", kind) for kind in kinds]


def judge_turns(
    verifier: TurnVerifier,
    pairs: Sequence[tuple[TurnState, Message]],
    *,
    cut_turns: CutTurns = "fail",
    seed: int = 0,
    quiet: bool = True,
) -> list[Verdict]:
    """`judge_turn` on all pairs, in order: together, side by side or one by one, as the verifier says (`batches`,
    `concurrency`). `seed`: of what it draws. Unless `quiet`, with a bar for what is not judged together."""
    if verifier.batches:
        failed = [cut_turns == "fail" and action.cut for _, action in pairs]
        open_ = [pair for pair, cut in zip(pairs, failed, strict=True) if not cut]
        found = iter(_judged(lambda: verifier.judge_all(open_, seed), open_))
        return [judge_turn(verifier, *pair) if cut else next(found) for pair, cut in zip(pairs, failed, strict=True)]

    def judged(pair: tuple[TurnState, Message]) -> Verdict:
        return judge_turn(verifier, *pair, cut_turns=cut_turns)

    def verdicts() -> Iterator[Verdict]:
        done = 0
        while done < len(pairs) and verifier.concurrency <= 1:  # it may be known after some
            yield judged(pairs[done])
            done += 1
        places = min(verifier.concurrency, len(pairs) - done) or 1
        with ThreadPoolExecutor(places, thread_name_prefix="turntree-verdicts") as pool:
            yield from pool.map(judged, pairs[done:])

    return list(progress(verdicts(), "verdicts", total=len(pairs), quiet=quiet))


def rule_name(verifier: TurnVerifier, cut_turns: CutTurns) -> str:
    """The verifier name that profiles and pivots record. Rewards under different names must not be mixed."""
    return verifier.name if cut_turns == "fail" else f"{verifier.name}{_JUDGED}"


def cut_turns_of(name: str) -> CutTurns:
    """The `cut_turns` of a `rule_name`."""
    return "judge" if name.endswith(_JUDGED) else "fail"


def score_wave(
    grown: Sequence[tuple[RolloutTree, TurnState]],
    verifier: TurnVerifier,
    *,
    cut_turns: CutTurns = "fail",
    seed: int = 0,
) -> list[Rewards]:
    """The verdict on every leaf of every tree, as `judge_turn` gives it: all actions are judged together, and equal
    ones of a tree once. `seed`: of what a verifier draws."""
    asked: dict[tuple[int, str], tuple[TurnState, Message]] = {}
    keys: list[dict[int, str | Verdict]] = []  # of each tree: the key of a leaf's action, or the verdict on a fault
    for number, (tree, state) in enumerate(grown):
        of_leaves: dict[int, str | Verdict] = {}
        for leaf in tree.leaves():
            action = tree[leaf].message
            assert action is not None
            if tree.stop_reason(leaf) is StopReason.RENDERER_ERROR:
                of_leaves[leaf] = Verdict(None, action.content)
                continue
            thought = "" if verifier.compares else action.reasoning  # which it may judge
            of_leaves[leaf] = key = repr((action.content, action.tool_calls, action.cut, thought))
            asked.setdefault((number, key), (state, action))
        keys.append(of_leaves)
    judged = judge_turns(verifier, list(asked.values()), cut_turns=cut_turns, seed=seed)
    verdicts = dict(zip(asked, judged, strict=True))
    scored: list[Rewards] = []
    for number, ((tree, _), of_leaves) in enumerate(zip(grown, keys, strict=True)):
        of_tree: dict[int, Verdict] = {}
        for leaf, key in of_leaves.items():
            of_tree[leaf] = verdict = verdicts[number, key] if isinstance(key, str) else key
            if isinstance(key, str) and verdict.cost != NO_COST:
                verdicts[number, key] = replace(verdict, cost=NO_COST)  # it was judged once
        scored.append(Rewards(of_tree))
        scored[-1].check(tree)
    return scored
