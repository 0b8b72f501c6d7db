"""Small tasks in Harbor's format, generated with seeds, on an image that needs no registry.

    python recipes/container_tasks.py image                          # debootstrap, then `podman import` (as root)
    python recipes/container_tasks.py tasks --count 65 --out runs/harbor

Task n is drawn by its number alone; the families alternate. Each folder is a whole task of Harbor: task.toml,
instruction.md, environment/Dockerfile with files, tests/test.sh and solution/solve.sh. Beside these it has `mutants/`:
solutions with a fault each, which the tests must fail. The solution's commands, one a turn, are in task.toml
(`metadata.commands`), from which turntree makes demonstrations.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

IMAGE = "localhost/turntree-debian:latest"
WORDS = (
    "amber", "birch", "cedar", "delta", "ember", "flint", "grove", "heron", "iris", "juniper", "kelp", "lotus", "maple",
    "north", "onyx", "pine",
)  # fmt: skip


@dataclass
class Draft:
    """`files` lie in /app; `run` are lines of the Dockerfile after them. `checks` are lines of bash that each end in
    0 where their part of the task is done: all of them, or a share of the reward each with `partial`. A mutant is a
    list of commands in place of `commands`."""

    rng: random.Random
    say: str = ""
    files: dict[str, str] = field(default_factory=dict)
    run: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    mutants: list[list[str]] = field(default_factory=list)
    partial: bool = False
    variables: str = ""  # a line of the Dockerfile: commits of an episode have the same hash whenever it is played

    def words(self, count: int) -> list[str]:
        return self.rng.sample(WORDS, count)


def _python(text: str) -> str:
    return f"python3 -c {shlex.quote(text)}"


def _bug(draft: Draft) -> None:
    thing, other = draft.words(2)
    right, wrong, third = draft.rng.choice([("+", "-", "*"), ("*", "+", "-"), ("-", "+", "//")])
    low = draft.rng.randint(2, 9)
    draft.files["shop.py"] = (
        f"def total({thing}, {other}):\n    return {thing} {wrong} {other}\n\n\n"
        f"def enough({thing}):\n    return {thing} >= {low}\n"
    )
    expected = eval(f"12 {right} 5")
    draft.say = (
        f"In /app/shop.py the function total is wrong: total(12, 5) must be {expected}, and total(3, 2) must be "
        f"{eval(f'3 {right} 2')}. Fix it and leave the rest as it is."
    )
    edit = f"sed -i 's/return {thing} .* {other}/return {thing} {{}} {other}/' /app/shop.py"
    draft.commands = ["cd /app && cat shop.py", edit.format(right.replace("/", "\\/").replace("*", "\\*"))]
    ask = f"import sys; sys.path.insert(0, '/app'); import shop; sys.exit(shop.total(12, 5) != {expected} or "
    ask += f"shop.total(3, 2) != {eval(f'3 {right} 2')} or not shop.enough({low}) or shop.enough({low - 1}))"
    draft.checks = [_python(ask)]
    draft.mutants = [[edit.format(third.replace("/", "\\/").replace("*", "\\*"))],
                     [f"sed -i 's/return .* {other}/return {expected}/' /app/shop.py"]]  # fmt: skip


def _setting(draft: Draft) -> None:
    names, port = draft.words(4), draft.rng.randint(2000, 9000)
    for number, name in enumerate(names):
        draft.files[f"conf/{name[0]}/{name}.ini"] = f"service = {name}\nport = {1000 + number}\nlevel = info\n"
    name = names[0]
    path = f"/app/conf/{name[0]}/{name}.ini"
    draft.say = f"Somewhere below /app/conf is the file of the service {name}. Set its port to {port}, and no other."
    draft.commands = [f"cd /app/conf && grep -rl 'service = {name}' .", f"sed -i 's/^port = .*/port = {port}/' {path}"]
    draft.checks = [f"grep -qx 'port = {port}' {path}", f"test $(grep -rlx 'port = {port}' /app/conf | wc -l) = 1",
                    f"grep -qx 'level = info' {path}", "test $(grep -rl 'port = ' /app/conf | wc -l) = 4"]  # fmt: skip
    draft.mutants = [[f"sed -i 's/^port = .*/port = {port}/' $(find /app/conf -name '*.ini')"],
                     [f"echo 'port = {port}' > {path}"]]  # fmt: skip


def _convert(draft: Draft) -> None:
    rows = [(word, draft.rng.randint(1, 99)) for word in draft.words(6)]
    draft.files["data.csv"] = "name,amount\n" + "".join(f"{name},{amount}\n" for name, amount in rows)
    least = sorted(amount for _, amount in rows)[2]
    draft.say = (
        f"Convert /app/data.csv to /app/data.json: a list of objects with `name` and `amount` (a number), of the rows "
        f"with an amount of at least {least}, in the order of the file."
    )
    make = (
        "import csv, json; rows = list(csv.DictReader(open('/app/data.csv'))); "
        "json.dump([{'name': r['name'], 'amount': NUMBER(r['amount'])} for r in rows if int(r['amount']) OP LEAST], "
        "open('/app/data.json', 'w'))"
    ).replace("LEAST", str(least))
    draft.commands = ["head -n 3 /app/data.csv", _python(make.replace("NUMBER", "int").replace("OP", ">="))]
    due = [{"name": name, "amount": amount} for name, amount in rows if amount >= least]
    draft.checks = [_python(f"import json, sys; sys.exit(json.load(open('/app/data.json')) != {due!r})")]
    draft.mutants = [[_python(make.replace("NUMBER", "str").replace("OP", ">="))],
                     [_python(make.replace("NUMBER", "int").replace("OP", ">"))]]  # fmt: skip


def _service(draft: Draft) -> None:
    user, host = draft.words(2)
    port = draft.rng.randint(2000, 9000)
    draft.files["serve.sh"] = (
        "#!/bin/bash\nset -eu\n. /app/etc/service.env\n"
        'test -d "$SPOOL" && test "$(stat -c %a "$SPOOL")" = 700\n'
        'echo "$OWNER@$HOST:$PORT"\n'
    )
    draft.files["etc/service.env.example"] = "OWNER=\nHOST=\nPORT=\nSPOOL=\n"
    draft.say = (
        f"Configure the service in /app: copy etc/service.env.example to etc/service.env and set the owner {user}, the "
        f"host {host}, the port {port} and the spool folder /var/spool/{user}, which only its owner may enter. "
        "`bash /app/serve.sh` says whether it works."
    )
    text = f"OWNER={user}\\nHOST={host}\\nPORT={port}\\nSPOOL=/var/spool/{user}\\n"
    write = f"printf '{text}' > /app/etc/service.env"
    draft.commands = ["cd /app && cat serve.sh", write, f"mkdir -p /var/spool/{user} && chmod 700 /var/spool/{user}",
                      "bash serve.sh"]  # fmt: skip
    draft.checks = [
        f'test "$(bash /app/serve.sh)" = "{user}@{host}:{port}"',
        f"grep -qx SPOOL=/var/spool/{user} /app/etc/service.env",
    ]
    draft.mutants = [
        [write, f"mkdir -p /var/spool/{user}"],
        [write.replace(str(port), str(port + 1)), *draft.commands[2:3]],
    ]


_GIT = "git -c user.name=t -c user.email=t@t"
_DATED = "GIT_AUTHOR_DATE='2026-01-0{0}T00:00:00Z' GIT_COMMITTER_DATE='2026-01-0{0}T00:00:00Z'"


def _repository(draft: Draft, commits: Sequence[tuple[str, str]]) -> None:
    """A history in /app/repo: each commit runs a command and has a message."""
    lines = [
        "mkdir /app/repo",
        "cd /app/repo",
        "git init -q -b main",
        "git config user.name t",
        "git config user.email t@t",
    ]
    for number, (command, message) in enumerate(commits, start=1):
        lines += [command, "git add -A", f"{_DATED.format(number)} git commit -qm {shlex.quote(message)}"]
    draft.run.append(" && ".join(lines))
    draft.variables = "ENV GIT_AUTHOR_DATE=2026-01-09T00:00:00Z GIT_COMMITTER_DATE=2026-01-09T00:00:00Z"


def _revert(draft: Draft) -> None:
    one, two, three = draft.words(3)
    _repository(draft, [
        (f"printf '{one}=1\\n' > settings", f"add {one}"),
        (f"printf '{one}=1\\n{two}=broken\\n' > settings", f"try {two}"),
        (f"echo {three} > notes", f"note {three}"),
    ])  # fmt: skip
    draft.say = (
        f"In /app/repo the commit 'try {two}' was a mistake. Undo it with a new commit; the later commit, and the "
        "history, must stay."
    )
    draft.commands = ["cd /app/repo && git log --oneline", "git revert --no-edit HEAD~1", "cat settings"]
    draft.checks = ["cd /app/repo", f"grep -qx {one}=1 settings", f"! grep -q {two} settings",
                    f"grep -qx {three} notes", "test $(git rev-list --count HEAD) = 4",
                    "test -z \"$(git status --porcelain)\""]  # fmt: skip
    draft.mutants = [["cd /app/repo && git reset -q --hard HEAD~2"], [f"cd /app/repo && sed -i /{two}/d settings"]]


def _merge(draft: Draft) -> None:
    one, mine, theirs = draft.words(3)
    _repository(draft, [
        (f"echo {one} > file", "start"),
        (f"git checkout -q -b topic && echo {theirs} > file && echo more > other", "topic"),
        (f"git checkout -q main && echo {mine} > file", "main"),
    ])  # fmt: skip
    draft.say = (
        "In /app/repo, merge the branch topic into main. Where they conflict, keep both lines of `file`, that of main "
        "first."
    )
    draft.commands = ["cd /app/repo && git merge topic", f"printf '{mine}\\n{theirs}\\n' > file",
                      "git add file && git commit -qm merged"]  # fmt: skip
    draft.checks = ["cd /app/repo", f"test \"$(cat file)\" = $'{mine}\\n{theirs}'", "test -f other",
                    "test $(git rev-list --parents -n 1 HEAD | wc -w) = 3",
                    "test -z \"$(git status --porcelain)\""]  # fmt: skip
    draft.mutants = [["cd /app/repo && git merge -q -X ours topic"],
                     [f"cd /app/repo && printf '{mine}\\n{theirs}\\n' > file && git checkout -q topic -- other",
                      "git add -A && git commit -qm merged"]]  # fmt: skip


def _rights(draft: Draft) -> None:
    names, secret = draft.words(3), draft.words(1)[0]
    for name in names:
        draft.files[f"bin/{name}.sh"] = f"#!/bin/bash\necho {name}\n"
    draft.files[f"keys/{secret}.key"] = secret
    draft.run.append("chmod 644 /app/bin/* /app/keys/*")
    draft.say = (
        "Make every .sh file in /app/bin executable for everybody, and let only the owner read and write the files in "
        "/app/keys."
    )
    draft.commands = ["ls -l /app/bin /app/keys", "chmod a+x /app/bin/*.sh", "chmod 600 /app/keys/*"]
    draft.checks = [
        'test "$(stat -c %a /app/bin/*.sh | sort -u)" = 755',
        'test "$(stat -c %a /app/keys/* | sort -u)" = 600',
    ]
    draft.mutants = [["chmod a+x /app/bin/*.sh"], ["chmod 777 /app/bin/*.sh; chmod 600 /app/keys/*"]]


def _links(draft: Draft) -> None:
    names = draft.words(3)
    for name in names:
        draft.files[f"v2/{name}"] = f"{name} 2\n"
    draft.run.append(
        "mkdir /app/current && " + " && ".join(f"ln -s ../v1/{name} /app/current/{name}" for name in names)
    )
    draft.say = (
        "The links in /app/current point into a folder v1 that is gone. Let each point to the file of the same name in "
        "v2, by a relative path."
    )
    draft.commands = ["cd /app/current && ls -l", "for f in *; do ln -sfn ../v2/$f $f; done"]
    draft.checks = [f'test "$(readlink /app/current/{name})" = ../v2/{name}' for name in names]
    draft.mutants = [
        ["cd /app/current; for f in *; do ln -sfn /app/v2/$f $f; done"],
        ["cp --remove-destination /app/v2/* /app/current/"],
    ]


def _report(draft: Draft) -> None:
    modules = draft.words(4)
    lines = [
        f"{hour:02}:00 {draft.rng.choice(('ERROR', 'INFO', 'ERROR'))} {draft.rng.choice(modules)} step"
        for hour in range(20)
    ]
    lines += [f"20:00 ERROR {name} end" for name in modules[:2]]
    draft.files["app.log"] = "\n".join(lines) + "\n"
    draft.say = (
        "Write to /app/report.txt one line for each module (third word) with ERROR lines in /app/app.log: the number "
        "of them, a space and the module, the largest number first, equal ones by name."
    )
    count = "grep ERROR /app/app.log | cut -d' ' -f3 | sort | uniq -c | sed 's/^ *//'"
    draft.commands = ["head -n 3 /app/app.log", f"{count} | sort -k1,1nr -k2 > /app/report.txt"]
    errors = [line.split()[2] for line in lines if " ERROR " in line]
    due = sorted(set(errors), key=lambda name: (-errors.count(name), name))
    text = "".join(f"{errors.count(name)} {name}\n" for name in due)
    draft.checks = [f"printf {shlex.quote(text)} | cmp -s - /app/report.txt"]
    draft.mutants = [[f"{count.replace('grep ERROR', 'cat')} | sort -k1,1nr -k2 > /app/report.txt"],
                     [f"{count} | sort -k1,1n -k2r > /app/report.txt; echo >> /app/report.txt"]]  # fmt: skip


def _pack(draft: Draft) -> None:
    names = draft.words(5)
    for name in names:
        draft.files[f"tree/{name[0]}/{name}.txt"] = f"{name}\n"
        draft.files[f"tree/{name[0]}/{name}.tmp"] = "scratch\n"
    draft.say = "Pack /app/tree into /app/tree.tar.gz without its .tmp files; names in the archive begin with tree/."
    pack = "tar -czf /app/tree.tar.gz -C /app --exclude='*.tmp' tree"
    draft.commands = ["find /app/tree -type f | sort", pack, "tar -tzf /app/tree.tar.gz"]
    due = " ".join(sorted(f"tree/{name[0]}/{name}.txt" for name in names))
    draft.checks = [f"test \"$(tar -tzf /app/tree.tar.gz | grep -v '/$' | LC_ALL=C sort | xargs)\" = '{due}'"]
    draft.mutants = [
        [pack.replace(" --exclude='*.tmp'", "")],
        ["cd /app/tree && tar -czf /app/tree.tar.gz --exclude='*.tmp' *"],
    ]


def _script(draft: Draft) -> None:
    one, two = draft.words(2)
    draft.files["count.sh"] = (
        "#!/bin/bash\n# lines of every file in the folder $1\nfor f in $(ls $1); do\n  wc -l < $1/$f\ndone\n"
    )
    draft.say = (
        "/app/count.sh prints the number of lines of every file in a folder, but fails for names with spaces. Mend it."
    )
    fixed = '#!/bin/bash\\nfor f in "$1"/*; do\\n  wc -l < "$f"\\ndone\\n'
    draft.commands = [
        "cat /app/count.sh",
        f"printf '{fixed}' > /app/count.sh",
        "bash /app/count.sh /etc/apt | head -n 2",
    ]
    make = f'd=$(mktemp -d); printf \'a\\nb\\n\' > "$d/{one} {two}"; echo x > "$d/{two}"'
    draft.checks = [make, 'test "$(bash /app/count.sh "$d" | sort | xargs)" = \'1 2\'']
    draft.mutants = [
        ["sed -i 's/wc -l < $1.$f/wc -l < \"$1\\/$f\"/' /app/count.sh"],
        ["printf 'echo 1; echo 2\\necho 3\\n' > /app/count.sh"],
    ]


def _several(draft: Draft) -> None:
    names = draft.words(4)
    draft.files["list.txt"] = "".join(f"{name}\n" for name in [*names, *names[:2]])
    draft.say = (
        "For every name in /app/list.txt, make a folder /app/out/NAME with a file `name` that holds the name. Each of "
        "them counts."
    )
    draft.commands = [
        "sort -u /app/list.txt",
        "cd /app; for n in $(sort -u list.txt); do mkdir -p out/$n; echo $n > out/$n/name; done",
    ]
    draft.checks = [f"grep -qx {name} /app/out/{name}/name" for name in names]
    draft.mutants = [["cd /app; n=$(head -n 1 list.txt); mkdir -p out/$n; echo $n > out/$n/name"],
                     ["cd /app; for n in $(cat list.txt); do mkdir -p out/$n; echo x > out/$n/name; done"]]  # fmt: skip
    draft.partial = True


FAMILIES: dict[str, Callable[[Draft], None]] = {
    "bug": _bug, "setting": _setting, "convert": _convert, "service": _service, "revert": _revert, "merge": _merge,
    "rights": _rights, "links": _links, "report": _report, "pack": _pack, "script": _script, "several": _several,
}  # fmt: skip


def generated(number: int) -> tuple[str, Draft]:
    """The family and the draft of task `number`."""
    family = list(FAMILIES)[number % len(FAMILIES)]
    draft = Draft(random.Random(f"container task {number}"))
    FAMILIES[family](draft)
    draft.mutants.append([])  # who does nothing
    return family, draft


def _tests(draft: Draft) -> str:
    """A script that writes the reward, whatever becomes of a check."""
    head = "#!/bin/bash\nmkdir -p /logs/verifier\n"
    if draft.partial:
        each = "".join(f"if {check}; then good=$((good + 1)); fi\n" for check in draft.checks)
        count = len(draft.checks)
        last = f'printf \'{{"reward": %s}}\' $(python3 -c "print($good / {count})") > /logs/verifier/reward.json\n'
        return f"{head}good=0\n{each}{last}"
    body = "".join(f"{check} || exit 1\n" for check in draft.checks)
    return f"{head}if (\n{body}); then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"


def write(number: int, root: Path, image: str = IMAGE) -> Path:
    """Write the folder of task `number`."""
    family, draft = generated(number)
    folder = root / f"{family}-{number:03}"
    shutil.rmtree(folder, ignore_errors=True)
    texts = {f"environment/app/{path}": text for path, text in draft.files.items()}
    lines = [
        f"FROM {image}",
        *(["COPY app /app"] if draft.files else ["RUN mkdir /app"]),
        *(f"RUN {line}" for line in draft.run),
    ]
    texts["environment/Dockerfile"] = "\n".join([*lines, *filter(None, [draft.variables]), "WORKDIR /app", ""])
    texts["instruction.md"] = f"{draft.say}\n"
    texts["task.toml"] = (
        f'schema_version = "1.4"\n\n[metadata]\ncategory = "{family}"\n'
        f"commands = {json.dumps(draft.commands)}\n\n"
        "[agent]\ntimeout_sec = 120.0\n\n[verifier]\ntimeout_sec = 60.0\n\n"
        '[environment]\nmemory_mb = 512\nnetwork_mode = "none"\n'
    )
    texts["tests/test.sh"] = _tests(draft)
    texts["solution/solve.sh"] = "#!/bin/bash\n" + "".join(f"{line}\n" for line in draft.commands)
    for place, mutant in enumerate(draft.mutants):
        texts[f"mutants/{place}.sh"] = "#!/bin/bash\n" + "".join(f"{line}\n" for line in mutant)
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        (folder / path).chmod(0o755 if path.endswith(".sh") else 0o644)
    return folder


def make_image(name: str = IMAGE) -> None:
    """A Debian with Python and git, made without a registry of images, where there is none yet. Needs root, debootstrap
    and podman."""
    if subprocess.run(["podman", "image", "exists", name]).returncode == 0:
        return
    with tempfile.TemporaryDirectory(prefix="turntree-image-") as folder:
        include = "--include=python3,git"
        subprocess.run(["debootstrap", "--variant=minbase", include, "bookworm", folder], check=True)
        shutil.rmtree(Path(folder, "var/cache/apt/archives"), ignore_errors=True)
        with subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE) as packed:
            subprocess.run(["podman", "import", "-", name], stdin=packed.stdout, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["image", "tasks"])
    parser.add_argument("--image", default=IMAGE)
    parser.add_argument("--count", type=int, default=65)
    parser.add_argument("--out", type=Path, default=Path("runs/harbor"))
    given = parser.parse_args()
    if given.what == "image":
        make_image(given.image)
    else:
        folders = [write(number, given.out, given.image) for number in range(given.count)]
        print(f"{len(folders)} tasks of {len(FAMILIES)} families are in {given.out}")


if __name__ == "__main__":
    main()
