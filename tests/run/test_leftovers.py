"""What a killed process was writing is gone after the next write; what a living one writes is left alone."""

import multiprocessing
import signal

from turntree.run.files import write_json
from turntree.run.jsonl import replacing, write_lines
from turntree_worlds.documents import Document
from turntree_worlds.search import SearchIndex, build_index


def _write_and_wait(path, ready):
    with replacing(path) as raw:
        raw.write(b"half")
        raw.flush()
        ready.set()
        signal.pause()


def writing(path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_write_and_wait, args=(path, ready))
    process.start()
    assert ready.wait(60)
    return process


def beside(path):
    return sorted(one.name for one in path.parent.iterdir() if one.name != path.name)


def test_a_write_that_was_killed_leaves_nothing_once_the_file_is_written_again(tmp_path):
    path = tmp_path / "traces[1].jsonl"
    process = writing(path)
    write_lines(path, [1])
    assert beside(path) == [f".{path.name}.{process.pid}.tmp"]  # it lives
    process.kill()
    process.join()
    write_json(tmp_path / "other.json", 1)
    write_lines(path, [1, 2])
    assert beside(path) == ["other.json"] and path.read_bytes() == b"1\n2\n"


def test_an_index_that_was_being_built_leaves_nothing_either(tmp_path):
    path = tmp_path / "index"

    (tmp_path / ".index.17.tmp").write_bytes(b"half")
    build_index([Document("a", "Ada", "Ada was born.")], path)
    assert beside(path) == []
    with SearchIndex(path) as index:
        assert index.page("ada")
