"""Every reader of a file or setting that people hand in: a good input, and how it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mutations.more_readers import MORE
from turntree.core.cost import NO_COST
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.pivots.profile import Draft, Judge, ProfileConfig
from turntree.pivots.samples import Sample
from turntree.pivots.select import SelectConfig
from turntree.pivots.summary import ProfileSummary
from turntree.run.artifacts import PROFILE
from turntree.run.files import file_hash
from turntree.traces.candidates import candidates
from turntree.traces.schema import Trace, read_traces, write_traces
from turntree.verify.strict import StrictMatch

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
MESSAGES = (
    Message("system", "Be brief."),
    Message("user", "What is 2 + 2? \u00fc"),
    Message("assistant", "", (ToolCall("add", {"a": 2, "b": [2, {"c": None}]}, id="c1"),)),
    Message("tool", "4", tool_call_id="c1", name="add"),
    Message("assistant", "It is 4."),
)
TRACES = [
    Trace(id=f"t{i}", messages=MESSAGES, tools=(TOOL,), split="train", success=True, meta={"skip_turns": {}, "n": i})
    for i in range(3)
]


@dataclass(frozen=True)
class Reader:
    """`good` writes a good input to a path; `read` reads one, or raises."""

    name: str
    good: Callable[[Path], object]
    read: Callable[[Path], object]
    structured: bool = True
    packed: str = ""
    names_file: bool = True


# our own artifacts


def write_trace_file(path: Path) -> None:
    write_traces(path, TRACES, {"made_by": "import", "sources": ["a.jsonl"]})


def read_trace_file(path: Path) -> object:
    from turntree.stages.candidates import stream_candidates, survey

    traces = list(read_traces(path))
    assert all(isinstance(trace, Trace) for trace in traces)
    survey(str(path), "")
    return [json.dumps(trace.to_json()) for trace in traces], list(stream_candidates(str(path), ""))


def states() -> list[TurnState]:
    return [state for trace in TRACES for state in candidates(trace)]


def write_profile_file(path: Path) -> None:
    """Four rollouts a candidate: an action that is right, one that is wrong, a fault, and a cut one."""
    traces = path.parent / "traces.jsonl"
    write_trace_file(traces)
    rows: list[dict[str, Any]] = []
    found = ProfileSummary(4, None)
    profiling = ProfileConfig(rollouts=4)
    judge = Judge(StrictMatch(), profiling)
    for state, demonstrated in zip(states(), judge.demonstrated(states()), strict=True):
        draft = Draft(state, judge, demonstrated)
        wrong = replace(state.demonstration, content="no", tool_calls=())
        cut = Sample(replace(wrong, cut=True))
        draft.add([Sample(state.demonstration), Sample(wrong), Sample(None, fault="lost"), cut])
        rows.append(json.loads(json.dumps(draft.finish(4, NO_COST).to_json())))
        found.add(rows[-1])
    from turntree.core.config import Part, to_mapping
    from turntree.stages.profile import ProfileStageConfig

    config = ProfileStageConfig(traces=str(traces), verifier=Part("strict"), profile=profiling)
    header = {
        "config": to_mapping(config),
        "policy_hash": "0123",
        "tokenizer_hash": "4567",
        "template_hash": "89ab",
        "verifier": "strict/1",
        "traces_hash": file_hash(traces),
    }
    PROFILE.write(path, {**header, "summary": found.summary({}), "timing": {"engine_seconds": 0.0}}, rows)


def read_by_selecting(path: Path) -> object:
    from turntree.stages.select import run_select

    run_select(path, SelectConfig(threshold=1.0, anchor_share=0.2), path.with_name("out.jsonl"))
    return run_select(path, SelectConfig(rule="random"), path.with_name("out.jsonl"))


def read_as_store(path: Path) -> object:
    from turntree.core.completion import Sampling
    from turntree.core.errors import InputError
    from turntree.pivots.rows import StoredProfile

    stored = StoredProfile(path)
    try:
        stored.check_draws({"policy_hash": "0123"}, Sampling(max_tokens=256), 0)
    except InputError as error:
        assert "leave --reuse out" in str(error) or "field" in str(error), error
    return [(stored.samples(state), stored.judgements(state, "strict/1")) for state in states()]


def read_by_rescoring(path: Path) -> object:
    from turntree.core.config import Part
    from turntree.stages.rescore import RescoreConfig, run_rescore

    traces = str(path.parent / "traces.jsonl")
    out = path.with_name("rescored.jsonl")
    return run_rescore(RescoreConfig(profile=str(path), verifier=Part("strict"), traces=traces), out, overwrite=True)


def write_pivots_file(path: Path) -> None:
    from turntree.stages.select import run_select

    write_profile_file(path.with_name("profile.jsonl"))
    run_select(path.with_name("profile.jsonl"), SelectConfig(threshold=1.0), path)


def read_for_training(path: Path) -> object:
    """All that `train pivot` does with the file before the first step, without a model."""
    from turntree.stages import train_pivot
    from turntree.stages.candidates import read_selected
    from turntree.stages.verifier import chosen_verifier
    from turntree.train.sampler import PivotSampler

    config = train_pivot.TrainPivotConfig(pivots=str(path), traces=str(path.parent / "traces.jsonl"), allow_stale=True)
    header, selected = read_selected(str(path), config.traces)
    engine = SimpleNamespace(max_context=4096)
    policy: Any = SimpleNamespace(engine=engine, renderer=SimpleNamespace(prompt=lambda history, tools: (1, 2)))
    pivots, _ = train_pivot._pivots(selected, policy, config)
    chosen_verifier(config.verifier, header, str(path))
    PivotSampler([pivot.weight for pivot in pivots], 0).draw(2, 1)
    return sorted({pivot.kind for pivot in pivots}), sorted({pivot.role for pivot in pivots})


def write_wave_log(path: Path) -> None:
    from turntree.run.wave_log import open_log

    with open_log(path, {"a": {"b": 1}}) as log:
        log.append({"rows": [{"x": 1}], "skipped": {}, "timing": {}})
        log.append({"rows": [{"x": 2}], "skipped": {}, "timing": {}})


def read_wave_log(path: Path) -> object:
    from turntree.run.wave_log import open_log

    with open_log(path, {"a": {"b": 1}}) as log:
        return [dict(wave) for wave in log]


def write_run_config(path: Path) -> None:
    from turntree.run.files import write_json

    write_json(path, {"stage": "sft", "config": {"seed": 0, "sft": {"epochs": 2}}})


def read_run_config(path: Path) -> object:
    from turntree.run.files import read_json

    return read_json(path)


# what people bring


def chat_rows(path: Path) -> None:
    rows = [{"messages": [m.to_chat() for m in MESSAGES], "tools": [TOOL], "id": f"r{i}", "reward": 1.0, "split": None,
             "meta": {"x": [1]}} for i in range(3)]  # fmt: skip
    for row in rows:
        row["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def responses_rows(path: Path) -> None:
    output = [
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]},
    ]
    request = {"input": [{"role": "user", "content": "go"}], "tools": [{**TOOL["function"], "type": "function"}]}
    row = {"responses_create_params": request, "response": {"output": output}, "reward": 1.0, "_ng_task_index": 3}
    pivot = {"responses_create_params": request, "expected_action": {"type": "message", "content": "4"}, "uuid": "u"}
    path.write_text("".join(json.dumps(one) + "\n" for one in (row, pivot)), encoding="utf-8")


def tau_runs(path: Path) -> None:
    runs = [{"task_id": i, "trial": 0, "reward": 1.0, "traj": [m.to_chat() for m in MESSAGES]} for i in range(2)]
    path.write_text(json.dumps(runs), encoding="utf-8")


def tau2_document(path: Path) -> None:
    call = {"id": "c1", "name": "add", "arguments": {"a": 1}, "requestor": "assistant"}
    messages = [
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "id": "c1", "content": "1", "requestor": "assistant"},
        {"role": "assistant", "content": "1"},
    ]
    run = {"id": "s1", "task_id": "5", "messages": messages, "reward_info": {"reward": 1.0}, "trial": 0}
    info = {"environment_info": {"domain_name": "x", "policy": "Be kind.", "tool_defs": [TOOL]}}
    path.write_text(json.dumps({"info": info, "tasks": [], "simulations": [run]}), encoding="utf-8")


def importing(on_error: Any) -> Callable[[Path], object]:
    def read(path: Path) -> object:
        from turntree.traces.chat import ImportConfig, stream_chat
        from turntree.traces.splits import assign_splits

        traces: list[Trace] = []
        report = stream_chat([path], traces.append, ImportConfig(on_error=on_error))
        assert report.turns_read == report.turns_kept + report.dropped_turns.total()
        splits = assign_splits([(trace.id, trace.group, trace.split) for trace in traces], 0)
        done = [replace(trace, split=split) for trace, split in zip(traces, splits, strict=True)]
        write_traces(path.with_name("imported.jsonl"), done)
        json.dumps(report.to_json())
        return [candidates(trace) for trace in read_traces(path.with_name("imported.jsonl"))]

    return read


def question_rows(path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "Who?", "answer": "Ada", "id": "1", "hops": 2},
        {"problem": "1+1", "answer": "\\frac{4}{2}"},
        {"prompt": [{"role": "user", "content": "How many?"}], "reward_model": {"ground_truth": {"target": ["2"]}}},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_question_rows(path: Path) -> object:
    from turntree_worlds.qa.formats import read_questions

    return read_questions(path)


def document_rows(path: Path) -> None:
    rows = [{"id": f"d{i}", "title": f"Ada {i}", "text": f"Ada number {i} was born in 1815."} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_document_rows(path: Path) -> object:
    from turntree_worlds.documents import read_documents

    return list(read_documents(path))


def packed_games(path: Path) -> None:
    from household_players import generate_games
    from household_text import written

    rows: list[dict[str, Any]] = [
        {"game": game.id, "task_type": game.task_type, **written(game), "walkthrough": ["look"], "solvable": True}
        for game in generate_games(0, 2, task_types=["pick_and_place_simple"])
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_packed_games(path: Path) -> object:
    from turntree_worlds.household.games import playable_games

    return [record.game().reset() for record in playable_games(path)]


def chat_template(path: Path) -> None:
    from chat_templates import chatml

    path.write_text(chatml(), encoding="utf-8")


def read_chat_template(path: Path) -> object:
    from chat_templates import tokenizer_of
    from turntree.render.template import ChatRenderer

    try:
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None  # the loader of tokenizers reads the file
    if not source:
        return None  # and refuses a tokenizer without template
    renderer = ChatRenderer(tokenizer_of(source))
    return renderer.prompt(MESSAGES[:2]), renderer.prompt(MESSAGES[:4], [TOOL])


# settings


def settings(path: Path) -> None:
    """The values of a training configuration, as `--set` would give them."""
    from turntree.core.config import to_mapping
    from turntree.train.pivot import PivotConfig

    path.write_text(json.dumps(to_mapping(PivotConfig()), indent=1), encoding="utf-8")


def read_settings(path: Path) -> object:
    import torch

    from turntree.core.config import from_mapping, to_mapping
    from turntree.run.files import read_json
    from turntree.train.optimizer import Optimizer
    from turntree.train.pivot import PivotConfig

    config = from_mapping(PivotConfig, read_json(path), path=path)
    weight = torch.nn.Parameter(torch.ones(2))
    Optimizer([weight], config.optimizer, max(config.steps, 2) * config.updates)
    return json.dumps(to_mapping(config), allow_nan=False)


def overrides(path: Path) -> None:
    path.write_text("train.steps=3\ntrain.optimizer.betas=[0.9, 0.95]\ntrain.loss.kl_coefficient=0.1\nmodel=qa\n")


def read_overrides(path: Path) -> object:
    from turntree.cli.options import assignment
    from turntree.core import parts
    from turntree.core.config import from_mapping, nested, overlaid, to_mapping
    from turntree.stages.train_pivot import TrainPivotConfig

    lines = path.read_bytes().decode("utf-8", "surrogateescape").splitlines()  # as Python decodes a command line
    values = to_mapping(TrainPivotConfig(pivots="p"))
    for line in lines:
        values = overlaid(values, nested(*assignment(line, "--set")))
    return parts.resolved(from_mapping(TrainPivotConfig, values))


# rollout logs of anyone


def rollout_log(rows: Sequence[dict[str, Any]]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    return write


def read_log(path: Path) -> object:
    """The groups that an audit sees, with finite numbers and of the types that they say."""
    from turntree.core.config import from_mapping, to_mapping
    from turntree.logs.groups import LoggedGroup
    from turntree.logs.read import open_log

    groups = list(open_log([path]))
    for group in groups:
        assert from_mapping(LoggedGroup, to_mapping(group)) == group
        json.dumps(to_mapping(group), allow_nan=False)
    return groups


def _group(i: int) -> dict[str, Any]:
    rollouts = [
        {"actions": ["a", "b"], "reward": float(j), "completed": True, "turn_tokens": [3, 4],
         "observations": ["x", "y"], "stop": "completed", "forked": False, "refill": False} for j in range(2)
    ]  # fmt: skip
    return {"schema": "turntree.rollout/1", "id": f"{i}/t", "task": "t", "iteration": i, "rollouts": rollouts}


OWN_LOG = [_group(i) for i in range(3)]
VERL_LOG = [
    {"input": f"q{i // 2}", "output": "a\nuser\nb\nassistant\nc", "score": float(i % 2), "step": 1, "gts": "x",
     "uid": f"{i // 2}_{i}_0", "data_source": "d"} for i in range(4)
]  # fmt: skip
NEMO_LOG = [
    {"responses_create_params": {"input": "go"}, "reward": float(i % 2), "_ng_task_index": i // 2,
     "response": {"output": [{"type": "message", "role": "assistant", "content": "a"},
                             {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
                             {"type": "function_call_output", "call_id": "c", "output": "r"}],
                  "usage": {"output_tokens": 5}}} for i in range(4)
]  # fmt: skip
GENERIC_LOG = [
    {"group": f"g{i // 2}", "reward": float(i % 2), "task": "t", "iteration": 1, "actions": ["a", "b"],
     "turn_tokens": [1, 2], "observations": ["", "x"], "completed": True, "stop": "x"} for i in range(4)
]  # fmt: skip


def trl_table(path: Path) -> None:
    columns = ["step", "prompt", "completion", "accuracy", "advantage"]
    data = [[1, f"q{i // 2}", "a", float(i % 2), 1.0 if i % 2 else -1.0] for i in range(4)]
    path.write_text(json.dumps({"columns": columns, "data": data}), encoding="utf-8")


READERS: dict[str, Reader] = {
    reader_name: Reader(reader_name, good, read, **options)
    for reader_name, good, read, options in [
        ("traces.jsonl", write_trace_file, read_trace_file, {}),
        ("traces.jsonl.gz", write_trace_file, read_trace_file, {"packed": "gz"}),
        ("traces.jsonl.xz", write_trace_file, read_trace_file, {"packed": "xz"}),
        ("select.profile.jsonl", write_profile_file, read_by_selecting, {}),
        ("stored.profile.jsonl", write_profile_file, read_as_store, {}),
        ("rescored.profile.jsonl", write_profile_file, read_by_rescoring, {}),
        ("pivots.jsonl", write_pivots_file, read_for_training, {}),
        ("profile.jsonl.waves", write_wave_log, read_wave_log, {}),
        ("config.json", write_run_config, read_run_config, {}),
        ("chat.jsonl", chat_rows, importing("stop"), {}),
        ("dropping.chat.jsonl", chat_rows, importing("drop"), {}),
        ("chat.jsonl.gz", chat_rows, importing("drop"), {"packed": "gz"}),
        ("responses.jsonl", responses_rows, importing("stop"), {}),
        ("tau.json", tau_runs, importing("stop"), {}),
        ("tau2.json", tau2_document, importing("drop"), {}),
        ("questions.jsonl", question_rows, read_question_rows, {}),
        ("documents.jsonl", document_rows, read_document_rows, {}),
        ("games.jsonl", packed_games, read_packed_games, {}),
        ("chat_template.jinja", chat_template, read_chat_template, {"structured": False, "names_file": False}),
        ("settings.json", settings, read_settings, {"names_file": False}),
        ("overrides.txt", overrides, read_overrides, {"structured": False, "names_file": False}),
        ("rollouts.jsonl", rollout_log(OWN_LOG), read_log, {"names_file": False}),
        ("verl.jsonl", rollout_log(VERL_LOG), read_log, {"names_file": False}),
        ("nemo.jsonl.gz", rollout_log(NEMO_LOG), read_log, {"packed": "gz", "names_file": False}),
        ("generic.jsonl", rollout_log(GENERIC_LOG), read_log, {"names_file": False}),
        ("completions.table.json", trl_table, read_log, {"names_file": False}),
        *MORE,
    ]
}
