"""No file takes the machine with it: what is opened has an end, and what is held in memory has a bound."""

import gzip
import io
import lzma
import os
import tarfile
import threading
from collections import Counter

import pytest

from turntree.core.errors import InputError
from turntree.run import opening
from turntree.run.jsonl import read_bytes, read_chunks, read_lines, read_text
from turntree.run.opening import members_of
from turntree.traces.documents import document_rows
from turntree.traces.sources import source_files

READERS = {
    "lines": lambda path: list(read_lines(path)),
    "chunks": lambda path: list(read_chunks(path)),
    "text": read_text,
    "bytes": read_bytes,
    "members": lambda path: [b"".join(pieces()) for _, pieces in members_of(path)],
}


@pytest.fixture
def small(monkeypatch):
    """Bounds that a test reaches at once."""
    monkeypatch.setattr(opening, "_ALWAYS", 1000)
    for module in ("run.opening", "run.jsonl", "traces.documents"):
        monkeypatch.setattr(f"turntree.{module}.LONGEST", 5000)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "missing", "socket"])
def test_what_is_no_file_is_refused_at_once(name, kind, tmp_path):
    path = tmp_path / "x.jsonl"
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, 0o140600)
    with pytest.raises(InputError) as refused:
        READERS[name](path)
    assert refused.value.path == path and refused.value.hint


@pytest.mark.parametrize("name", ["lines", "chunks", "text", "bytes"])
def test_a_pipe_that_was_given_is_read_to_its_end_and_a_second_time_refused(name):
    out, into = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(into, b"1\n2\n"), os.close(into)))
    writer.start()
    found = READERS[name](f"/dev/fd/{out}")
    writer.join()
    assert found in ([(1, b"1\n"), (2, b"2\n")], [b"1\n2\n"], "1\n2\n", b"1\n2\n")
    with pytest.raises(InputError, match="more than once"):
        READERS[name](f"/dev/fd/{out}")
    os.close(out)


@pytest.mark.parametrize("pack", [gzip, lzma])
def test_a_small_archive_becomes_no_large_file(pack, small, tmp_path):
    path = tmp_path / ("x.jsonl.gz" if pack is gzip else "x.jsonl.xz")
    path.write_bytes(pack.compress(b"1\n" * 10**6))
    seen = 0
    with pytest.raises(InputError, match="times its size") as refused:
        for _ in read_lines(path):
            seen += 2
    most = max(opening._ALWAYS, opening.UNPACKED * path.stat().st_size)
    assert refused.value.line and seen <= most < 2 * 10**6
    with pytest.raises(InputError, match="times its size"):
        list(read_chunks(path))


def test_what_is_packed_as_logs_are_is_read_whole(small, tmp_path):
    rows = b"".join(b'{"reward": %d, "text": "%d"}\n' % (i % 2, i * 7919) for i in range(5000))
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(rows))
    assert b"".join(line for _, line in read_lines(tmp_path / "x.jsonl.gz")) == rows


def test_a_line_a_text_and_a_value_have_a_longest_length(small, tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(b'1\n"' + b"a" * 6000 + b'"\n')
    with pytest.raises(InputError, match="longer than") as refused:
        list(read_lines(path))
    assert refused.value.line == 2
    for read in (read_text, read_bytes):
        with pytest.raises(InputError, match="longer than"):
            read(path)
    path.write_bytes(b'[{"a": "' + b"a" * 10**7 + b'"}]')
    [((_, error), _)] = document_rows(path)
    assert isinstance(error, InputError) and "longer than" in str(error)


def sparse(size):
    """A tar archive whose one member has a hole of this size (GNU's old format)."""
    member = tarfile.TarInfo("a.jsonl")
    member.type, member.size = tarfile.GNUTYPE_SPARSE, 0
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[386:398], header[398:410] = b"%011o\0" % size, b"%011o\0" % 0
    header[483:495] = b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + b"\0" * 1024


def test_an_archive_of_holes_fills_neither_memory_nor_disk(small, tmp_path):
    (tmp_path / "a.tar").write_bytes(sparse(2**32))
    with pytest.raises(InputError, match="times its size"):
        READERS["members"](tmp_path / "a.tar")


def test_links_to_one_member_count_as_often_as_they_are_read(small, tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "UNPACKED", 2)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        first = tarfile.TarInfo("a")
        first.size = 50_000
        archive.addfile(first, io.BytesIO(b"x" * first.size))
        for number in range(9):
            link = tarfile.TarInfo(f"b{number}")
            link.type, link.linkname = tarfile.LNKTYPE, "a"
            archive.addfile(link)
    with pytest.raises(InputError, match="times its size"):
        READERS["members"](tmp_path / "a.tar")


def test_a_folder_with_a_pipe_in_it_is_read_without_it(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("{}\n")
    ignored = Counter()
    assert [file.path.name for file in source_files(tmp_path, ignored)] == ["b.jsonl"] and ignored.total() == 1
