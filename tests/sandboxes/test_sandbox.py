"""What a sandbox answers, and that there is none without one."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hostile import CONFIG, INFLUENCE, PROBE
from rootless import said_without_root

from turntree.core.errors import ConfigError, InputError
from turntree_worlds.sandboxes import box, calls
from turntree_worlds.sandboxes.box import Box, Interpreter, SandboxLost, confinement
from turntree_worlds.sandboxes.limits import Limits, SandboxConfig
from turntree_worlds.sandboxes.sandbox import Sandbox, probe


def test_a_program_is_answered_with_its_output_and_the_value_of_its_last_line(sandbox):
    done = sandbox.run("import sys\nx = 20\nprint('out')\nprint('err', file=sys.stderr)\nx * 2 + 2")
    assert (done.stdout, done.stderr, done.value, done.exit_code) == ("out\n", "err\n", "42", 0)
    assert not done.failed and not done.truncated and not done.timed_out


@pytest.mark.parametrize("source", ["x = 1", "None", "", "def f(): return 3", "print('a')"])
def test_a_program_without_a_last_expression_has_no_value(sandbox, source):
    assert sandbox.run(source).value is None


def test_an_error_shows_the_line_of_the_program_and_nothing_of_ours(sandbox):
    done = sandbox.run("def f():\n    return 1 / 0\n\nf()")
    assert done.failed and done.exit_code == 1 and done.value is None
    assert "return 1 / 0" in done.stderr and "line 4" in done.stderr and "ZeroDivisionError" in done.stderr
    assert "turntree" not in done.stderr and "eval" not in done.stderr


@pytest.mark.parametrize(("source", "code"), [("raise SystemExit", 0), ("import sys; sys.exit(3)", 3), ("exit(2)", 2)])
def test_an_exit_code_is_the_programs(sandbox, source, code):
    assert sandbox.run(source).exit_code == code


def test_a_signal_is_an_exit_code_as_a_shell_says_it(sandbox):
    assert sandbox.run("import ctypes; ctypes.string_at(0)").exit_code == 128 + 11


def test_what_was_said_before_the_time_limit_is_kept(sandbox):
    done = sandbox.run("import time\nprint('early')\ntime.sleep(99)", seconds=0.4)
    assert done.timed_out and done.exit_code is None and done.failed
    assert done.stdout == "early\n" and 0.4 <= done.seconds < 5


def test_long_output_is_cut_at_its_head_and_said_to_be(sandbox):
    done = sandbox.run("print('ab' * 5000)")
    assert done.truncated and done.exit_code == 0
    assert done.stdout == "ab" * (sandbox.config.limits.output_bytes // 2)


def test_nothing_of_a_program_is_seen_by_the_next(sandbox):
    sandbox.run("import math, builtins\nmath.pi = 3\nbuiltins.secret = 1\nleft = 1")
    assert sandbox.run("import math\nmath.pi > 3, 'left' in globals(), 'secret' in dir(__builtins__)").value == (
        "(True, False, False)"
    )


def test_files_of_a_program_are_not_seen_by_the_next(sandbox):
    assert sandbox.run("open('kept', 'w').write('x')\nimport os; os.listdir('.')").value == "['kept']"
    assert sandbox.run("import os; os.listdir('.')").value == "[]"
    assert sandbox.run("echo a > b; cat b; ls", language="shell").stdout == "a\nb\n"


def test_the_same_program_is_answered_the_same_even_by_another_box(sandbox):
    source = "import random\nrandom.random(), list({'a', 'b', 'c', 'd'}), hash('x')"
    first = sandbox.run(source).value
    assert first == sandbox.run(source).value
    with Sandbox(CONFIG) as other:
        assert other.run(source).value == first


def test_a_large_program_arrives_whole(sandbox):
    assert sandbox.run("x = '" + "a" * 300_000 + "'\nlen(x)").value == "300000"


def test_text_survives_both_ways(sandbox):
    assert sandbox.run("print('größe ∑ 漢字 \\U0001f600')").stdout == "größe ∑ 漢字 \U0001f600\n"


def test_a_command_has_output_and_exit_code(sandbox):
    done = sandbox.run("echo out; echo err >&2; seq 3 | tail -1; exit 4", language="shell")
    assert (done.stdout, done.stderr, done.exit_code, done.value) == ("out\n3\n", "err\n", 4, None)


def test_programs_have_no_privileges_and_a_filter_on_system_calls(sandbox):
    status = sandbox.run("print(open('/proc/self/status').read().split('Mems')[0][-1500:])").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    for kind in ("CapPrm", "CapEff", "CapAmb"):
        assert int(fields[kind], 16) == 0, kind
    assert fields["NoNewPrivs"].strip() == "1" and fields["Seccomp"].strip() == "2"
    assert "0" not in fields["Uid"].split()


def test_processes_are_bounded_and_the_next_program_has_all_of_them_again(sandbox):
    source = (
        "import os, time\nn = 0\ntry:\n    while n < 100:\n        if os.fork() == 0: time.sleep(99)\n        n += 1\n"
    )
    source += "except OSError: pass\nn"
    limit = sandbox.config.limits.processes
    counts = [int(sandbox.run(source, seconds=30.0).value or -1) for _ in range(2)]
    assert counts[0] == counts[1] and limit - 2 <= counts[0] <= limit


def test_many_threads_share_the_boxes():
    config = replace(CONFIG, boxes=2)
    answers: dict[int, str | None] = {}
    with Sandbox(config) as sandbox:
        threads = [
            threading.Thread(target=lambda i=i: answers.update({i: sandbox.run(f"{i} * {i}").value})) for i in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {i: str(i * i) for i in range(12)}


def kill_idle(sandbox):
    sandbox._boxes.queue[-1].result()._process.kill()


def test_a_box_that_died_while_it_waited_is_replaced_and_the_program_run():
    with Sandbox(CONFIG) as sandbox:
        kill_idle(sandbox)
        assert sandbox.run("1 + 1").value == "2"
        assert sandbox.lost == 1


def test_a_box_that_dies_under_its_program_is_no_answer_and_the_program_is_run_again(sandbox, monkeypatch):
    watch, accidents = Box._watch, []

    def dies_once(box, *arguments):
        if not accidents:
            accidents.append(box._process.kill())
        return watch(box, *arguments)

    with Sandbox(CONFIG) as own:
        monkeypatch.setattr(Box, "_watch", dies_once)
        program = "import time; time.sleep(0.5); 20 + 22"  # a short one may end before its box is killed
        assert (own.run(program).value, own.lost) == ("42", 1)


@pytest.mark.parametrize("waited", [False, True])
def test_where_box_after_box_dies_there_is_no_answer(sandbox, monkeypatch, waited):
    watch = Box._watch

    def dying(box, *arguments):
        box._process.kill()
        if waited:
            box._process.wait()
        return watch(box, *arguments)

    with Sandbox(CONFIG) as own:
        monkeypatch.setattr(Box, "_watch", dying)
        with pytest.raises(SandboxLost):
            own.run("import time; time.sleep(600)")  # a short program may end before its box is killed
        monkeypatch.undo()
        assert own.run("1 + 1").value == "2"


def opened(config=CONFIG):
    return Box(Interpreter.candidates()[0], config)


def test_a_program_that_did_not_begin_is_a_lost_box_and_no_exit_code(sandbox):
    cramped = opened(replace(CONFIG, limits=replace(CONFIG.limits, memory_bytes=32 * 2**20)))
    try:
        with pytest.raises(SandboxLost, match=r"did not begin|the box died"):
            cramped.run("python", "#" * 32 * 2**20, 10.0, None, 0)
    finally:
        cramped.close()


def test_a_shell_that_does_not_start_is_a_lost_box_and_no_exit_code(sandbox, monkeypatch):
    options = confinement(CONFIG, Interpreter.candidates()[0])
    place = options.index("--proc")
    broken = [*options[:place], "--ro-bind", "/dev/null", "/usr/bin/dash", *options[place:]]
    monkeypatch.setattr(box, "confinement", lambda *given: broken)
    own = opened()
    try:
        with pytest.raises(SandboxLost, match="did not begin"):
            own.run("shell", "echo x", 10.0, None, 0)
    finally:
        own.close()


def test_every_program_sees_the_same_fresh_box(sandbox):
    seen = "import os; os.getpid(), os.getppid(), os.listdir('.'), [n for n in os.listdir('/proc') if n.isdigit()]"
    first = sandbox.run(seen).value
    for source in (*INFLUENCE.values(), "open('kept', 'w').write('x')"):
        sandbox.run(source.replace("{", "").replace("}", ""), seconds=20.0)
        assert sandbox.run(seen).value == first == "(2, 1, [], ['1', '2'])"


def test_without_root_programs_cannot_spoil_the_box_for_others_either():
    """Bubblewrap in a user namespace: programs have the user id of the guest and own the scratch folder."""
    code = "import sys, json; from turntree_worlds.sandboxes.sandbox import Sandbox\n"
    code += "from turntree_worlds.sandboxes.limits import *\n"
    code += "programs = json.load(sys.stdin)\nwith Sandbox(SandboxConfig(boxes=1)) as box, Sandbox() as fresh:\n"
    code += "    said = [box.run(program).stdout for program in programs[:-1] if [box.run(programs[-1])]]\n"
    code += "    print(json.dumps([box.lost, said, [s.run(programs[-1]).value for s in (box, fresh)]]))"
    programs = [p.format(host=1, memory=0, queue=0, semaphore=0) for p in INFLUENCE.values()]
    lost, said, (after, fresh) = said_without_root(code, json.dumps([*programs, PROBE]))
    assert lost == 0 and after == fresh and not [text for text in said if "ESCAPED" in text]


def test_without_root_a_box_outlives_the_thread_that_asked_for_it():
    """Tools run in threads of one call."""
    code = "import json, threading, time; from turntree_worlds.sandboxes.sandbox import Sandbox\n"
    code += "from turntree_worlds.sandboxes.limits import SandboxConfig\nanswers = []\n"
    code += "with Sandbox(SandboxConfig(boxes=1)) as sandbox:\n    for _ in range(3):\n"
    code += "        call = threading.Thread(target=lambda: answers.append(sandbox.run('20 + 22').value))\n"
    code += "        call.start(); call.join(); time.sleep(0.2)\n"
    code += "    print(json.dumps([answers, sandbox.lost]))"
    assert said_without_root(code) == [["42"] * 3, 0]


def guests() -> set[str]:
    return set(subprocess.run(["pgrep", "-f", "/run/runner.py"], capture_output=True, text=True).stdout.split())


def descends(process: str, ancestor: int) -> bool:
    """Whether a process (its id) was started by `ancestor` or by what that started."""
    while process not in ("0", "1", str(ancestor)):
        try:
            process = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:  # gone meanwhile
            return False
    return process == str(ancestor)


def gone(processes: set[str]) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and guests() & processes:
        time.sleep(0.05)
    return not guests() & processes


def test_boxes_end_with_the_process_that_made_them_even_in_the_middle_of_a_program(sandbox):
    code = "import os, threading, time\nfrom turntree_worlds.sandboxes import sandbox\ns = sandbox.Sandbox()\n"
    code += "threading.Thread(target=s.run, args=('import time; time.sleep(600)',), kwargs={'seconds': 600}).start()\n"
    code += "time.sleep(0.3)\nprint(flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        started = {guest for guest in guests() if descends(guest, process.pid)}  # other boxes are none of this test's
        process.kill()
    assert started and gone(started)


def test_a_closed_sandbox_leaves_no_process(sandbox):
    before = guests()
    other = Sandbox(CONFIG)
    other._boxes.queue[0].result()
    started = {guest for guest in guests() - before if descends(guest, os.getpid())}  # not those of other runs
    other.close()
    assert started and gone(started)


def leaky(config, interpreter):
    """A broken confinement: a folder of the host is in the box."""
    options = confinement(config, interpreter)
    place = options.index("--proc")
    shared = ["--perms", "0755", "--dir", "/var", "--bind", "/var/tmp", "/var/tmp"]
    return [*options[:place], *shared, *options[place:]]


def test_what_does_not_contain_the_probe_is_refused_in_one_line(sandbox, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/var/tmp")
    monkeypatch.setattr(box, "confinement", leaky)
    with pytest.raises(InputError) as refused:
        Sandbox(CONFIG)
    text = str(refused.value)
    assert "no sandbox for model-written programs" in text and "read a file outside" in text
    assert "install bubblewrap" in text and "\n" not in text


def test_a_machine_without_bubblewrap_is_refused_in_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    box.bubblewrap.cache_clear()
    with pytest.raises(InputError, match=r"bubblewrap is not installed.*install bubblewrap \(bwrap\) and libseccomp"):
        Sandbox(CONFIG)


def test_a_machine_without_libseccomp_is_refused_in_one_line_that_says_what_to_install(sandbox, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    calls.compiled.cache_clear()
    with pytest.raises(InputError, match=r"libseccomp is not installed.*install bubblewrap \(bwrap\) and libseccomp"):
        Sandbox(CONFIG)


def test_the_probe_finds_a_folder_of_the_host(sandbox, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/var/tmp")
    monkeypatch.setattr(box, "confinement", leaky)
    with pytest.raises(SandboxLost, match=r"not contained.*read a file outside"):
        probe(opened(), CONFIG)


def test_a_machine_on_which_no_box_starts_is_refused_in_one_line_that_says_why(sandbox, monkeypatch):
    monkeypatch.setattr(box, "confinement", lambda *given: ["--bind", "/none", "/none", *confinement(*given)])
    with pytest.raises(InputError, match=r"bwrap: .*none.*allow namespaces") as no:
        Sandbox(CONFIG)
    assert "\n" not in str(no.value)


@pytest.mark.parametrize("name", ["plain", "with, comma: colon \\ and space", "größe"])
def test_packages_are_read_from_any_folder_and_from_one_inside_another(sandbox, request, name):
    folder = tempfile.TemporaryDirectory(dir="/var/tmp")  # programs have a /tmp of their own
    request.addfinalizer(folder.cleanup)
    outer = Path(folder.name) / name
    (outer / "inner").mkdir(parents=True)
    (outer / "one_of_ours.py").write_text("value = 1")
    (outer / "inner" / "two_of_ours.py").write_text("value = 2")
    with Sandbox(replace(CONFIG, packages=(str(outer), str(outer / "inner")))) as own:
        done = own.run("import one_of_ours, two_of_ours, os\none_of_ours.value + two_of_ours.value")
        assert (done.value, done.stderr) == ("3", "")
        assert own.run(f"open({str(outer / 'inner' / 'x')!r}, 'w')").failed
    assert sorted(path.name for path in outer.rglob("*")) == ["inner", "one_of_ours.py", "two_of_ours.py"]


def test_impossible_limits_are_refused():
    for name in ("seconds", "processes"):
        with pytest.raises(ConfigError) as refused:
            Limits(**{name: 0})
        assert refused.value.field == name
    with pytest.raises(ConfigError) as refused:
        SandboxConfig(boxes=0)
    assert refused.value.field == "boxes"


@pytest.mark.parametrize(
    ("source", "out", "code"),
    [
        ("import unittest\nclass T(unittest.TestCase):\n    def test(self): self.fail()\nunittest.main()", "", 1),
        (
            'def f():\n    """\n    >>> 1\n    2\n    """\nimport doctest\nprint(doctest.testmod().failed > 0)',
            "True",
            0,
        ),
        ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()", "late", 0),
        ("import atexit\natexit.register(print, 'bye')", "bye", 0),
        ("import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)", "True", 0),
    ],
)
def test_a_program_is_the_main_module_and_ends_as_pythons_do(sandbox, source, out, code):
    done = sandbox.run(source)
    assert (done.exit_code, out in done.stdout) == (code, True), done.stderr
