"""The manifests name commands and settings that exist."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml
from click.testing import CliRunner

from turntree.cli.main import cli

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def test_the_job_of_the_manifest_is_a_command_that_would_run() -> None:
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    name, *words = shlex.split(job["spec"]["entrypoint"])
    done = CliRunner().invoke(cli, [*words, "--dry-run"])
    assert (name, done.exit_code) == ("turntree", 0), done.output
    asked = words[words.index("--set") + 1]
    workers = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert asked == f"cluster.workers={sum(group['replicas'] for group in workers)}"
