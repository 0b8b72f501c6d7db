"""The system calls of programs are a part of those that containers have."""

import json
import os
from pathlib import Path

import pytest

from turntree_worlds.sandboxes import calls

PROFILES = ("/usr/share/containers/seccomp.json", "/etc/containers/seccomp.json")
YOUNGER = {"fchmodat2"}  # than the profile of Debian 12; it does what `fchmodat` does


def test_every_call_that_programs_may_make_is_in_the_default_profile_of_containers():
    found = next((Path(path) for path in PROFILES if os.path.exists(path)), None)
    if found is None:
        pytest.skip("no containers here (containers-common has their profile)")
    told = json.loads(found.read_text())["syscalls"]
    always = {
        name
        for rule in told
        if rule["action"] == "SCMP_ACT_ALLOW" and not rule.get("includes", {}).get("caps")
        for name in rule["names"]
    }
    mine = {*calls._ALLOWED, *(name for name, *_ in calls._BY_ARGUMENT)}
    assert mine - always <= YOUNGER


def test_no_call_is_listed_twice():
    listed = [*calls._ALLOWED, *{name for name, *_ in calls._BY_ARGUMENT}]
    assert len(listed) == len(set(listed))
