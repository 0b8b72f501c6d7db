"""The `turntree` command: the composition root. Every sub-command is thin and calls one stage."""

from __future__ import annotations

import os
import sys

# One OpenMP thread for tiny models, before torch is loaded anywhere; a user's own setting wins.
os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("TURNTREE_THREADS", "1"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import click

from turntree import __version__
from turntree.cli import audit, experiment, gate, index, online, pipeline, results, traces
from turntree.core.errors import TurntreeError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """Agentic RL post-training that pays only for turns that teach.

    The path from traces to a better policy: traces, sft, profile, select, train, evaluate, report.
    """


cli.add_command(traces.traces)
cli.add_command(pipeline.sft)
cli.add_command(pipeline.profile)
cli.add_command(pipeline.rescore)
cli.add_command(pipeline.select)
cli.add_command(pipeline.train)
pipeline.train.add_command(online.online)
cli.add_command(experiment.experiment)
cli.add_command(results.evaluate)
cli.add_command(results.retention)
cli.add_command(gate.gate)
cli.add_command(audit.audit)
cli.add_command(index.index)
cli.add_command(results.report)
cli.add_command(results.quickstart)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; bad input ends in one line on standard error and exit code 2."""
    try:
        cli.main(args=arguments, prog_name="turntree", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as shown:
        print(shown.ctx.get_help())
    except click.ClickException as error:
        _fail(error.format_message())
    except (TurntreeError, OSError) as error:
        _fail(str(error))
    except (KeyboardInterrupt, click.Abort):
        print(
            "turntree: interrupted; finished artifacts are whole, the unfinished one was not written", file=sys.stderr
        )
        sys.exit(130)


def _fail(message: str) -> None:
    print("turntree: error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
