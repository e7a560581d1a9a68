"""The command `muster`.

Exit status: 0 success; 64 the caller must fix something (command line, job.toml, unknown job); 69 the coordinator or
Slurm does not answer; 70 a bug in Muster; 75 the job's state does not allow it now; 77 not permitted; 78 the site must
fix its settings; 130 interrupted. `muster status -f` and `muster run` exit with the job's own exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from muster.daemon.host.orphan_guard import run_guarded
from muster.launcher.command import Command, print_error, site_arguments
from muster.launcher.commands import (
    cancel,
    check,
    drain,
    events,
    logs,
    nodes,
    pki,
    plan,
    policy,
    run,
    status,
    submit,
    swap,
    topo,
)
from muster.launcher.errors import EXIT_BUG, EXIT_INTERRUPTED, LauncherError, WrongInput

COMMANDS: tuple[Command, ...] = (
    submit.COMMAND,
    plan.COMMAND,
    status.COMMAND,
    events.COMMAND,
    logs.COMMAND,
    cancel.COMMAND,
    swap.COMMAND,
    drain.COMMAND,
    nodes.COMMAND,
    topo.COMMAND,
    run.COMMAND,
    pki.COMMAND,
    policy.COMMAND,
    check.COMMAND,
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        hint = "; put options for sbatch after --" if "unrecognized" in message and "submit" in sys.argv else ""
        self.exit(WrongInput.status, f"{self.prog}: {message}{hint}\n")


def parser() -> argparse.ArgumentParser:
    """Builds the command line from the table of commands."""
    whole = _Parser(prog="muster", description="Trains on Slurm. Training continues when a node fails.")
    rows = whole.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for command in COMMANDS:
        row = rows.add_parser(command.name, help=command.help, description=command.help)
        if command.remote:
            site_arguments(row)
        command.arguments(row)
        row.set_defaults(row=command)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    options = parser().parse_args(arguments)
    if options.row.guarded:
        return run_guarded(lambda: _carry_out(options))
    return _carry_out(options)


def _carry_out(options: argparse.Namespace) -> int:
    try:
        return int(asyncio.run(options.row.run(options)))
    except LauncherError as error:
        print_error(error)
        return error.status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has exited. Redirect stdout, or Python reports the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001  # top level
        import traceback

        traceback.print_exc()
        print(f"muster: a bug: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_BUG


if __name__ == "__main__":
    sys.exit(main())
