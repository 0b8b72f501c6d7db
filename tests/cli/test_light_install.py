"""`pip install turntree` without extras: the commands that need no model run where only its own requirements are.

A subprocess hides every other package that is installed here, so no list of what to hide grows old.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from completions_server import serve

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HIDING = """
import sys
from importlib.machinery import PathFinder

class Light(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in LACKING else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Light
"""
RUN = """
import json
from turntree.cli.main import main

codes = []
for arguments in COMMANDS:
    try:
        main(arguments)
        codes.append(0)
    except SystemExit as ended:
        codes.append(ended.code)
print(json.dumps(codes))
"""
FORMATS = """
from turntree.core import parts
kinds = ("log_formats", "trace_formats", "pivot_formats", "gates", "filters", "branchers")
print(len([parts.load(kind, name) for kind in kinds for name in parts.names(kind)]))
"""


def required(name: str, found: set[str]) -> set[str]:
    """The distributions that pip installs for this one, without extras."""
    if canonicalize_name(name) not in found:
        found.add(canonicalize_name(name))
        for one in map(Requirement, requires(name) or ()):
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                required(one.name, found)
    return found


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """Starts a Python that has the light installation only."""
    kept = required("turntree", set())
    lacking = {
        module for module, names in packages_distributions().items() if not kept & set(map(canonicalize_name, names))
    }
    assert {"torch", "transformers", "tokenizers", "matplotlib", "pyarrow", "openai"} <= lacking
    assert not lacking & {"numpy", "jinja2", "click", "turntree_interop"}

    def start(code: str, folder: Path) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", f"LACKING = {lacking!r}{HIDING}{code}"]
        return subprocess.Popen(words, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    return start


@pytest.fixture(scope="module")
def folder(turntree, household, tmp_path_factory):
    """The examples, and traces, a profile, pivots and a run that somebody with a model has made."""
    folder = tmp_path_factory.mktemp("light")
    shutil.copytree(EXAMPLES, folder / "examples")
    for name in ("traces.jsonl", "profile.jsonl", "pivots.jsonl"):
        shutil.copy(household / name, folder / name)
    small = ("--steps", 1, "--max-tokens", 24, "--set", "train.groups=2", "--set", "train.group_size=4")
    turntree("train", "pivot", folder / "pivots.jsonl", *small, "--out", folder / "run")
    actions = [json.dumps({"role": "assistant", "content": text}) + "\n" for text in ("go north", "look")]
    (folder / "gold.jsonl").write_text("".join(actions))
    (folder / "tried.jsonl").write_text("".join(actions[::-1]))
    return folder


def test_every_command_that_needs_no_model_works(light, folder):
    commands = [
        "audit examples/rollouts.jsonl --out audit.html",
        "audit run --out of_trees.html",
        "traces import examples/traces.jsonl --out imported.jsonl",
        "select profile.jsonl --out selected.jsonl",
        "rescore profile.jsonl --verifier recommended --traces traces.jsonl --out rescored.jsonl",
        "verifier audit traces.jsonl --verifier recommended",
        "verifier score --verifier recommended --gold gold.jsonl --candidate tried.jsonl",
        "export pivots pivots.jsonl --to nemo-gym --traces traces.jsonl --out for-nemo-gym",
        "report run",
        "check environment examples.hide_and_seek:tasks --tries 2",
        "train pivot pivots.jsonl --out trained",
        "export pivots pivots.jsonl --to trl --traces traces.jsonl --out for-trl",
    ]
    out, err = light(f"COMMANDS = {[one.split() for one in commands]}{RUN}", folder).communicate(timeout=300)
    assert json.loads(out.splitlines()[-1]) == [0] * (len(commands) - 2) + [2, 2], out + err
    for name in ("audit.html", "of_trees.html", "run/report.html", "run/trees.html", "for-nemo-gym/pivots.jsonl"):
        assert (folder / name).stat().st_size > 1000, name
    missing = [line for line in err.splitlines() if line.startswith("turntree: error: ")]
    assert ["turntree[train]" in missing[0], "turntree[parquet]" in missing[1]] == [True, True], err


def test_every_format_and_rule_of_a_partner_loads(light, tmp_path):
    out, err = light(FORMATS, tmp_path).communicate(timeout=100)
    assert int(out) > 40, err


def test_a_gateway_in_front_of_a_server_writes_traces_and_says_what_it_passed(light, tmp_path):
    with serve(lambda body: {"choices": [{"message": {"role": "assistant", "content": "left"}}]}) as upstream:
        words = ["gateway", "--upstream", upstream.url, "--traces", "agent.jsonl", "--port", "0"]
        gateway = light(f"COMMANDS = {[words]}{RUN}", tmp_path)
        url = re.search(r"requests to (\S+) ", gateway.stderr.readline())[1]
        asked = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Which way?"}]}).encode()
        request = urllib.request.Request(f"{url}/chat/completions", asked, {"content-type": "application/json"})
        assert json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"] == "left"
        gateway.send_signal(signal.SIGINT)
        out, err = gateway.communicate(timeout=60)
    assert out.splitlines()[-1] == "[0]" and "traces: 1" in out, out + err
    (trace,) = map(json.loads, (tmp_path / "agent.jsonl").read_text().splitlines()[1:])
    assert [message["content"] for message in trace["messages"]] == ["Which way?", "left"]
