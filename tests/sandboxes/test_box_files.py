"""A program among files: they go in and come out as a value, and the box stays as it was."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.core.errors import InputError
from turntree_worlds.sandboxes.folder import MOST_FILES
from turntree_worlds.sandboxes.limits import EPOCH, File

FOLDER = File(kind="folder", mode=0o755)
names = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 200
)
contents = st.builds(
    File, st.binary(max_size=200), st.just("file"), st.sampled_from([0o644, 0o755, 0o600, 0o444, 0o000]), st.just(10**9)
)
links = st.builds(lambda name: File(name.encode(), "link", 0o777), names)
folders = st.builds(lambda mode: File(kind="folder", mode=mode), st.sampled_from([0o755, 0o700, 0o500]))
trees = st.dictionaries(names, contents | links | folders, max_size=6)


def run(sandbox, source, files, **options):
    return sandbox.run(source, language="shell", files=files, **options)


def test_files_that_no_program_touches_come_back_as_they_were(sandbox):
    @settings(max_examples=40, deadline=None)
    @given(trees, trees)
    def holds(top, inside):
        files = {**top, "deep": FOLDER, "deep/er": FOLDER, **{f"deep/er/{name}": file for name, file in inside.items()}}
        files = {path: file for path, file in files.items() if path not in top or path != "deep"}
        done = run(sandbox, "true", files)
        assert done.files == files
        assert {path: file.time for path, file in done.files.items()} == {p: f.time for p, f in files.items()}
        assert all(done.files[path] is file for path, file in files.items())

    holds()


def test_what_a_program_makes_changes_and_removes_is_told(sandbox):
    files = {"a/old": File(b"1\n"), "a/gone": File(b"2\n")}
    done = run(sandbox, "cd a && echo 3 > new && rm gone && chmod 750 old && ln -s new link && mkdir d", files)
    assert done.exit_code == 0 and done.files == {
        "a": FOLDER,
        "a/old": File(b"1\n", mode=0o750),
        "a/new": File(b"3\n"),
        "a/link": File(b"new", "link", 0o777),
        "a/d": FOLDER,
    }


def test_what_a_program_changed_gets_the_time_of_the_caller_and_nothing_else_does(sandbox):
    files = {"old": File(b"1", time=EPOCH - 5), "set": File(b"2", time=EPOCH - 5)}
    done = run(
        sandbox, "echo > new; touch -d 1999-09-09T00:00:00Z set; touch -d 2099-01-01 far", files, clock=EPOCH + 60
    )
    assert {path: file.time for path, file in done.files.items()} == {
        "old": EPOCH - 5, "new": EPOCH + 60, "set": 936835200, "far": EPOCH + 60
    }  # fmt: skip


def test_listings_name_the_user_and_not_the_number_of_the_box(sandbox):
    shown = [run(sandbox, "ls -l; whoami; stat -c %U:%G a", {"a": File(b"1")}).stdout for _ in range(2)]
    assert shown[0] == shown[1] and shown[0].endswith("user\nuser:user\n") and " user user 1 Jan  1  2020 a" in shown[0]


def test_nothing_of_the_files_is_there_for_the_next_program(sandbox):
    for source in ("echo 1 > a; mkdir -p b/c; chmod 0 b", "ln -s / root; mkfifo pipe", "truncate -s 1G big"):
        run(sandbox, source, {"x/y": File(b"1")})
        assert run(sandbox, "ls -A /tmp", {}).stdout == ""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("mkfifo a", "a is neither a file nor a folder nor a link"),
        ("truncate -s 3M a b", "the files are too large together"),
        ("seq 5000 | xargs touch", "there are more than 2048 files and folders"),
        (
            "d=$(printf 'x%.0s' $(seq 200)); for i in $(seq 30); do mkdir $d; cd $d; done",
            "the path of a file is too long",
        ),
        ("for i in $(seq 80); do mkdir d; cd d; done", "there are more than 64 folders inside each other"),
    ],
)
def test_what_cannot_be_a_value_is_told(sandbox, source, reason):
    done = run(sandbox, source + " 2>/dev/null; true", {})
    assert done.files is None and reason in done.not_kept
    assert run(sandbox, "ls -A", {}).stdout == ""


@pytest.mark.parametrize("path", ["", "/a", "../a", "a/../b", "a//b", "./a", "a/"])
def test_only_paths_below_the_scratch_folder_are_taken(sandbox, path):
    with pytest.raises(InputError, match="below the scratch folder"):
        run(sandbox, "true", {path: File()})


def test_files_that_leave_no_room_are_refused(sandbox):
    limits = sandbox.config.limits
    for files in ({"a": File(bytes(limits.disk_bytes))}, {str(n): File() for n in range(MOST_FILES + 1)}):
        with pytest.raises(InputError, match="leave too little room"):
            run(sandbox, "true", files)


def test_nothing_is_made_below_a_link_which_may_lead_out(sandbox, tmp_path):
    link = File(str(tmp_path).encode(), "link")
    with pytest.raises(InputError, match="which is no folder"):
        run(sandbox, "true", {"a": link, "a/b": File(b"x")})
    done = run(sandbox, f"ln -s {tmp_path} out; ln -s /etc/passwd file; rm a", {"a": link})
    assert {path: file.kind for path, file in done.files.items()} == {"out": "link", "file": "link"}
    assert run(sandbox, "echo x > out/b", done.files).failed and not list(tmp_path.iterdir())
