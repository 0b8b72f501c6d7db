"""An interrupted import goes on where it was, and ends as one that was not interrupted."""

import json
import tarfile

import pytest

from turntree.stages import import_traces as stage


def log(path, count):
    rows = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}], "id": f"t{i % 50}"}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["logs", "logs.tar"])
@pytest.mark.parametrize("after", [1, 17, 40, 55, 80])
def test_an_interrupted_import_ends_as_one_that_was_not(tmp_path, monkeypatch, after, name):
    (tmp_path / "logs").mkdir()
    log(tmp_path / "logs" / "a.jsonl", 40)
    log(tmp_path / "logs" / "b.jsonl", 40)  # its rows stand in the first file already
    with tarfile.open(tmp_path / "logs.tar", "w") as archive:
        for member in ("a.jsonl", "a.md", "b.jsonl", "c.md"):
            (tmp_path / "logs" / member).touch()
            archive.add(tmp_path / "logs" / member, member)
    source = tmp_path / name
    config = stage.ImportConfig(dev=0.5, on_error="drop")
    whole = stage.import_traces([source], tmp_path / "whole.jsonl", config)
    assert whole["ignored"] == {"files named *.md": 2}
    monkeypatch.setattr(stage, "SAVE_EVERY", 0.0)
    heard, read = [], stage.stream_chat

    def interrupted(*given, after_row, **options):
        def stop(rows, report):
            heard.append(rows)
            after_row(rows, report)
            if len(heard) == after:
                raise KeyboardInterrupt

        return read(*given, after_row=stop, **options)

    monkeypatch.setattr(stage, "stream_chat", interrupted)
    out = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        stage.import_traces([source], out, config)
    assert not out.exists()
    again = stage.import_traces([source], out, config)
    assert heard == [*range(1, 81)], "no row is read into traces twice"
    assert again == whole | {"path": str(out)}
    assert out.read_text().splitlines()[1:] == (tmp_path / "whole.jsonl").read_text().splitlines()[1:]
    assert not (tmp_path / ".out.jsonl.import").exists()


def test_an_import_by_another_version_or_with_other_tools_does_not_go_on(tmp_path, monkeypatch):
    files, tools = [log(tmp_path / "log.jsonl", 3)], tmp_path / "tools.json"
    tools.write_text("[]")
    config = stage.ImportConfig(tools=str(tools))
    seen = {stage._identity(files, config)}
    assert seen == {stage._identity(files, config)}
    tools.write_text('[{"type": "function", "function": {"name": "look"}}]')
    seen.add(stage._identity(files, config))
    monkeypatch.setattr(stage, "__version__", "later")
    seen.add(stage._identity(files, config))
    assert len(seen) == 3


def test_an_import_of_other_files_or_options_does_not_go_on(tmp_path, monkeypatch):
    source, out = log(tmp_path / "log.jsonl", 30), tmp_path / "out.jsonl"
    spool = stage._Spool(out, [source], stage.ImportConfig(dev=0))
    monkeypatch.setattr(stage, "SAVE_EVERY", 0.0)
    with pytest.raises(KeyboardInterrupt), spool:
        stage.stream_chat([source], spool.keep, after_row=spool.after_row)
        raise KeyboardInterrupt
    with stage._Spool(out, [source], stage.ImportConfig(dev=0)) as same:
        assert same.done.rows == 30 and len(same.keys) == 30
    with pytest.raises(KeyboardInterrupt), stage._Spool(out, [source], stage.ImportConfig(dev=0)) as spool:
        stage.stream_chat([source], spool.keep, after_row=spool.after_row)
        raise KeyboardInterrupt
    log(source, 31)
    with stage._Spool(out, [source], stage.ImportConfig(dev=0)) as other:
        assert other.done.rows == 0 and not other.keys
