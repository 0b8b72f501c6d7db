"""A real issue in SWE-bench's form, made of what PyPI has: python recipes/swebench_row.py FOLDER [--submissions FOLDER]

marshmallow-1867: a duration of 345 milliseconds is written as 344. The repository is the source distribution of 3.13.0
and the solution and its tests are those of 3.14.0; which tests must begin to pass, and which must go on passing, is
found by running them. Needs podman and the image of `container_tasks.py image`. FOLDER gets rows.jsonl for

    turntree traces gold --environment swebench:FOLDER/rows.jsonl --out gold.jsonl

Beside it, these are judged: nothing done, the solution, and with `--submissions` every patch that SWE-agent handed in
on this issue (its .traj files).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from turntree.env.container import ContainerHost, ContainerLimits, Snapshot
from turntree.env.container_shell import ContainerShell
from turntree_interop.swebench import SweBenchTasks, applying

IMAGE, BASE = "localhost/turntree-marshmallow:3.13.0", "localhost/turntree-debian:latest"
TESTS, COMMAND = "tests/test_serialization.py", "python3 -m pytest -rA"
ISSUE = """A duration loses a millisecond.

`TimeDelta(precision="milliseconds")` writes 345 milliseconds as 344:

    from datetime import timedelta
    from marshmallow.fields import TimeDelta

    field = TimeDelta(precision="milliseconds")
    print(field.serialize("value", {"value": timedelta(milliseconds=345)}))

The code is in /testbed/src/marshmallow/fields.py.
"""
DOCKERFILE = f"""FROM {BASE}
COPY site /usr/lib/python3/dist-packages
COPY testbed /testbed
ENV PYTHONPATH=/testbed/src PYTHONDONTWRITEBYTECODE=1
WORKDIR /testbed
RUN git init -q . && git add -A && git -c user.name=base -c user.email=base@localhost commit -qm base && git tag base
"""


def source(version: str, folder: Path) -> Path:
    """The source distribution of a version, unpacked."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--dest", folder]
    subprocess.run([*command, f"marshmallow=={version}"], check=True)
    with tarfile.open(folder / f"marshmallow-{version}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"marshmallow-{version}"


def difference(folder: Path, path: str) -> str:
    """What version 3.14.0 changed of a path, as a patch that `git apply` takes."""
    command = ["git", "diff", "--no-index", f"old/{path}", f"new/{path}"]
    told = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    return told.replace("a/old/", "a/").replace("b/new/", "b/")


def passed(host: ContainerHost, patch: str) -> set[str]:
    """The tests that pass in the image with a patch."""
    with contextlib.closing(ContainerShell(host, Snapshot(host.image(IMAGE)), folder="/testbed")) as shell:
        ran = shell.run(f"{applying(patch)}\n{COMMAND} {TESTS}")
    return {line.removeprefix("PASSED ") for line in ran.output.splitlines() if line.startswith("PASSED ")}


def row(host: ContainerHost, folder: Path) -> dict[str, object]:
    context = folder / "image"
    shutil.rmtree(context, ignore_errors=True)
    old, new = source("3.13.0", folder), source("3.14.0", folder)
    for name, path in (("old", old), ("new", new)):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(path.name)
    shutil.copytree(old, context / "testbed")
    packages = ["pytest", "packaging", "pytz", "simplejson"]
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(context / "site")]
    subprocess.run([*install, "--python-version", "3.11", "--only-binary", ":all:", *packages], check=True)
    (context / "Dockerfile").write_text(DOCKERFILE)
    host.build(context, IMAGE)
    patch = "".join(difference(folder, f"src/marshmallow/{name}.py") for name in ("fields", "utils"))
    tests = difference(folder, TESTS)
    before, after = passed(host, tests), passed(host, tests + patch)
    return {
        "instance_id": "marshmallow-code__marshmallow-1867", "repo": "marshmallow-code/marshmallow",
        "base_commit": "base", "problem_statement": ISSUE, "patch": patch, "test_patch": tests, "docker_image": IMAGE,
        "FAIL_TO_PASS": sorted(after - before), "PASS_TO_PASS": sorted(after & before), "test_cmd": COMMAND,
    }  # fmt: skip


def judged(host: ContainerHost, rows: Path, submissions: Path | None) -> None:
    nothing = rows.with_name("none.jsonl")
    nothing.touch()
    task = SweBenchTasks(argument=str(rows), held_out=str(nothing)).of_split("train", 1, 0)[0]
    patches = {"nothing": "", "the solution": json.loads(rows.read_text())["patch"]}
    for path in sorted(submissions.rglob("*1867*.traj")) if submissions is not None else []:
        patches[path.parent.name] = json.loads(path.read_text())["info"]["submission"].replace("\r\n", "\n")
    for name, patch in patches.items():
        with contextlib.closing(task.shell(host)) as shell:
            done = shell.run(applying(patch))
            print(f"{name}: {task.judge(shell).reward if done.code == 0 else f'does not apply, {done}'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--submissions", type=Path, help="a folder with SWE-agent's .traj files")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    rows = given.folder / "rows.jsonl"
    with ContainerHost(ContainerLimits(output_chars=1_000_000, seconds=300)) as host:
        if not rows.exists():
            rows.write_text(json.dumps(row(host, given.folder)) + "\n")
        made = json.loads(rows.read_text())
        print(f"{len(made['FAIL_TO_PASS'])} tests must begin to pass, {len(made['PASS_TO_PASS'])} must go on")
        judged(host, rows, given.submissions)


if __name__ == "__main__":
    main()
