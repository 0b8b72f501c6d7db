"""SWE-bench and its like (`--environment swebench:FILE`): a repository in its image, an issue, tests that must pass.

A row (JSON lines; SWE-bench, SWE-Gym, SWE-rebench and others) has

| key | meaning |
|---|---|
| `instance_id`, `repo`, `base_commit` | its name, its type, and the commit that the repository in the image stands at |
| `problem_statement` | the task |
| `patch`, `test_patch` | the solution, and the changes of tests with which the episode is judged |
| `FAIL_TO_PASS`, `PASS_TO_PASS` | tests that must pass in the end, as pytest names them (lists, or their JSON) |
| `docker_image`, `image_name` or `image` | the image (default: the option `image`) |
| `test_cmd`, or that of `install_config` | the command that runs test files (default: `python -m pytest`) |
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from turntree.core.errors import InputError
from turntree.env.adapted import named, rows_of
from turntree.env.container_tasks import ContainerTask, InContainers
from turntree_interop.harbor import Tests

_COMMAND = "python -m pytest"
_CHANGED = re.compile(r"^diff --git a/(\S+) b/(\S+)$", re.MULTILINE)
# The files of the tests are those of the base, with the patch of the tests on them, whatever the episode made of them.
# No reward is written where that cannot be made, or the command does not start, or fails itself (pytest's code 3), or
# cannot be used so (4), unless a conftest or the settings in the repository are why: those are the episode's.
_SCRIPT = r"""#!/bin/bash
git() {{ command git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false "$@"; }}
export PY_COLORS=0 LC_ALL=C
cd -- {folder} || exit
for path in {paths}; do
    rm -rf -- "$path"
    if git cat-file -e {commit}:"$path" 2> /dev/null; then git checkout -q {commit} -- "$path" || exit; fi
done
git apply --whitespace=nowarn /tests/test.patch || exit
for path in {files}; do [ -e "$path" ] || git checkout -q {commit} -- "$path" || exit; done
{command} --version > /dev/null || exit
{command} {files} 2>&1 | tee /logs/verifier/log
case ${{PIPESTATUS[0]}} in
    3 | 126 | 127) exit ;;
    4) grep -qE '^(ImportError while loading conftest|ERROR: [^ ]+\.(toml|ini|cfg):)' /logs/verifier/log || exit ;;
esac
sed -nE 's/^(PASSED|XFAIL) ([^ ]+).*$/\2/p' /logs/verifier/log | sort -u > /logs/verifier/passed
sed -nE 's/^(FAILED|ERROR) ([^ ]+).*$/\2/p' /logs/verifier/log | sort -u > /logs/verifier/failed
missing=$(comm -23 /logs/verifier/passed /logs/verifier/failed | comm -23 /tests/due -) || exit
if [ -z "$missing" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@dataclass(frozen=True, kw_only=True)
class SweBenchTasks(InContainers):
    """Issues of repositories, as SWE-bench has them, each scored by its own tests. Where the patch of the tests does
    not apply, or pytest cannot start, there is no reward.

    The rows of FILE are assigned to splits by a hash of their content; with `held_out` that file is "dev" and "test".
    """

    argument: str | None = None
    image: str = ""
    """The image of rows that name none. `{instance}` stands for the row's instance_id, as the images of SWE-bench spell
    it (`__` becomes `_1776_`)."""
    folder: str = "/testbed"
    """Where the repository is."""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables. The images of SWE-bench need BASH_ENV=/root/.bashrc, which activates their Python."""
    seconds: float = 1800.0
    """Tests that take longer give no reward."""
    system_changes: Literal["refuse", "allow"] = "refuse"
    """Whether an episode is paid that changed programs, libraries or settings with which the tests run."""

    def source(self) -> str:
        return named(self.argument, "swebench:FILE")

    def of_split(self, split: str, count: int, seed: int) -> list[ContainerTask]:
        return [self._task(row) for _, row in rows_of(self.source(), self.held_out, split, count, seed)]

    def _task(self, row: Mapping[str, Any]) -> ContainerTask:
        texts = {key: self._text(row, key) for key in ("instance_id", "base_commit", "problem_statement", "test_patch")}
        name = texts["instance_id"]
        image = next((str(row[key]) for key in ("docker_image", "image_name", "image") if row.get(key)), None)
        image = image or self.image.replace("{instance}", name.replace("__", "_1776_").lower())
        if not image:
            hint = "name one in the row, or for all with --set environment.image=NAME"
            raise InputError("is missing", path=f"{self.source()}: {name}", field="docker_image", hint=hint)
        tests = (*self._tests(row, "FAIL_TO_PASS"), *self._tests(row, "PASS_TO_PASS"))
        due = sorted({test.split()[0] for test in tests})  # SWE-bench cuts names at the first space: its log parser
        changed = {path for pair in _CHANGED.findall(texts["test_patch"]) for path in pair}
        install = row.get("install_config")
        command = row.get("test_cmd") or (install.get("test_cmd") if isinstance(install, dict) else None) or _COMMAND
        command = command if "-rA" in command else f"{command} -rA"
        script = _SCRIPT.format(
            folder=shlex.quote(self.folder),
            commit=shlex.quote(texts["base_commit"]),
            paths=shlex.join(sorted(changed)),
            files=shlex.join(sorted({test.partition("::")[0] for test in due})),
            command=command,
        )
        files = {"test.sh": script, "test.patch": texts["test_patch"], "due": "".join(f"{test}\n" for test in due)}
        made = {path: text.encode() for path, text in files.items()}
        judged = Tests(
            files=lambda: made, script="test.sh", seconds=self.seconds, environment=self.variables,
            strict=self.system_changes == "refuse",
        )  # fmt: skip
        patch = str(row.get("patch") or "")
        return ContainerTask(
            id=name,
            kind=str(row["repo"]) if row.get("repo") else None,
            instruction=texts["problem_statement"],
            image=lambda host: host.image(image),
            judge=judged.judge,
            folder=self.folder,
            environment=self.variables,
            gold=(f"cd -- {shlex.quote(self.folder)} && {applying(patch)}",) if patch else (),
        )

    def _text(self, row: Mapping[str, Any], key: str) -> str:
        value = row.get(key)
        if not isinstance(value, str) or not value.strip():
            where = f"{self.source()}: {row.get('instance_id', '')}".removesuffix(": ")
            raise InputError("is missing, or no text", path=where, field=key)
        return value

    def _tests(self, row: Mapping[str, Any], key: str) -> list[str]:
        """Names of pytest's; those of other runners are refused."""
        value, where = row.get(key), f"{self.source()}: {row['instance_id']}"
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError as error:
            raise InputError(f"is no JSON: {error}", path=where, field=key) from error
        if not isinstance(value, list) or not all(isinstance(test, str) for test in cast("list[Any]", value)):
            raise InputError("is not a list of tests", path=where, field=key)
        found = cast("list[str]", value)
        if key == "FAIL_TO_PASS" and not found:
            raise InputError("is empty: nothing would have to change", path=where, field=key)
        if odd := [test for test in found if "::" not in test]:
            hint = "only pytest's names are read (file::test)"
            raise InputError(f"holds {odd[0]!r}, a test of another runner", path=where, field=key, hint=hint)
        return found


def applying(patch: str) -> str:
    """The command that applies a patch where the shell stands."""
    return f"git apply --allow-empty - <<'END OF PATCH'\n{patch.rstrip()}\n\nEND OF PATCH"
