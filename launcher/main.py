"""The command `muster`. Its exit statuses are listed in docs/operations/something-is-down.md."""

from __future__ import annotations

import muster.daemon.host.process.own_packages  # noqa: F401  # before all others: it says where they come from

# isort: split
import argparse
import gc
import os
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NoReturn

from muster import __version__
from muster.launcher.command_line import CommandLine
from muster.launcher.command_table import COMMANDS
from muster.launcher.errors import EXIT_BUG, EXIT_INTERRUPTED, LauncherError

if TYPE_CHECKING:
    from muster.launcher.command import Command

_OBJECTS_BETWEEN_COLLECTIONS = 200_000
"""About 40 MB, if all of them were garbage. `muster submit` makes a third as many."""

_ADVICE = {
    "submit": "an argument of the script belongs into command of job.toml, an option of sbatch after --",
    "plan": "an argument of the script belongs into command of job.toml",
    "run": "the command of the ranks, with its arguments, comes after --",
}
"""What to do with a word that resembles no option of the command."""
# What not every call needs is imported where it is needed: the help must appear at once.


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"muster {__version__}")
        parser.exit(0)


def parser(called: Collection[str] | None = None) -> argparse.ArgumentParser:
    """Builds the command line. `called`: the commands whose own arguments are wanted; None: all."""
    whole = CommandLine(prog="muster", description="Trains on Slurm. Training continues when a node fails.")
    whole.add_argument("--version", action=_Version, nargs=0, help="print the version")
    rows = whole.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandLine)
    for entry in COMMANDS:
        advice = _ADVICE.get(entry.name, "")
        row = rows.add_parser(entry.name, help=entry.help, description=entry.help, advice=advice)
        if called is None or entry.name in called:
            _add_arguments(row, entry.load())
    return whole


def _add_arguments(row: CommandLine, command: Command) -> None:
    if command.remote:
        from muster.launcher.command import site_arguments

        site_arguments(row)
    command.arguments(row)
    row.split = command.split
    row.set_defaults(row=command)


def program() -> NoReturn:
    """Runs the command of this process, and ends the process."""
    # Imports make many objects and no garbage. To look for some of it costs 15 ms.
    gc.disable()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    try:
        status = main()
    except SystemExit as ended:  # argparse: the help, the version, a wrong option
        if not isinstance(ended.code, int):
            raise
        status = ended.code
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        status = EXIT_INTERRUPTED
    # The kernel frees the memory. Python would first take 30 ms to free each object and to unload gRPC.
    os._exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    options = parser(words[:1]).parse_args(words)
    if options.row.guarded(options):
        from muster.daemon.host.process.orphan_guard import run_guarded

        return run_guarded(lambda: _carry_out(options))
    return _carry_out(options)


def _carry_out(options: argparse.Namespace) -> int:
    import asyncio
    import signal

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see __main__; from now on something may be begun
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()  # for a command that follows a job for days; the others end before it looks for garbage
    try:
        return int(asyncio.run(options.row.run(options)))
    except LauncherError as error:
        from muster.launcher.command import print_error

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
