"""The sandbox of users who are not root, asked by a test that is."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyseccomp
import pytest

import turntree


def said_without_root(code, given=""):
    """What a program prints that another user runs, who gets a user namespace for each box."""
    if os.geteuid() != 0 or shutil.which("bwrap") is None:
        pytest.skip("needs root, to become another user, and bubblewrap")
    packages = [Path(turntree.__file__).parents[1], Path(__file__).parent, Path(pyseccomp.__file__).parent]
    source = os.pathsep.join(map(str, packages))
    nobody = {"user": 65534, "group": 65534, "extra_groups": (), "cwd": "/", "env": {"PYTHONPATH": source}}
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            found = subprocess.run([python, "-c", "import turntree.core.errors"], capture_output=True, **nobody)
        except OSError:
            continue
        if found.returncode == 0:
            break
    else:
        pytest.skip("no interpreter here that another user may run")
    done = subprocess.run([python, "-c", code], input=given, capture_output=True, text=True, **nobody)
    if "offers no sandbox" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
