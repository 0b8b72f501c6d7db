"""An import holds one trace at a time, however many there are."""

import json
import weakref

from turntree.stages import import_traces as stage
from turntree.traces.schema import Trace, read_header, read_traces


def test_an_import_holds_one_trace_at_a_time_and_writes_what_it_counted(tmp_path, monkeypatch):
    alive = most = made = 0

    class Counted(Trace):
        def __post_init__(self):
            nonlocal alive, most, made
            super().__post_init__()
            made, alive = made + 1, alive + 1
            most = max(most, alive)
            weakref.finalize(self, ended)

    def ended():
        nonlocal alive
        alive -= 1

    source = tmp_path / "log.jsonl"
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": [*talk, {"role": "user", "content": f"{i}"}, talk[1]], "id": f"t{i}"} for i in range(60)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("turntree.traces.assemble.Trace", Counted)
    monkeypatch.setattr(stage, "Trace", Counted)
    report = stage.import_traces([source], tmp_path / "out.jsonl", stage.ImportConfig(dev=0.5))
    assert made >= 60 and most <= 4
    written = list(read_traces(tmp_path / "out.jsonl"))
    assert [trace.id for trace in written] == [f"t{i}" for i in range(60)]
    assert report["traces_kept"] == 60 == sum(report["splits"].values())
    assert read_header(tmp_path / "out.jsonl")["report"]["splits"] == report["splits"]
