"""The commands `muster-agent run` (srun starts it once per node; with `-- WORDS`, a user's launcher says what runs) and
`muster-agent batch -- srun ...` (the last line of the batch script). In a user's own batch script:
`muster-agent shell` (before its first line) and `muster-agent srun` (where it calls srun).

Exit codes: the gang's own exit code; 64 for a wrong command line or spec; 69 if no port is free; 71 if memory has run
out; 78 if the site has to correct something; 143 after SIGTERM.
"""

from __future__ import annotations

import muster.daemon.host.process.own_packages  # noqa: F401  # before all others: it says where they come from

# isort: split
import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from muster.daemon.host import process_tree
from muster.daemon.host.kept_memory_client import SOCKET
from muster.daemon.host.process import orphan_guard, process_memory
from muster.daemon.transport.identity import IdentityError
from muster.daemon.transport.site_config import EXIT_CONFIG, CommandLine, SiteError, add_arguments

EXIT_USAGE = 64
EXIT_UNAVAILABLE = 69


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["srun"]:  # its words are srun's
        return _of_script(lambda: _srun(words[1:]))
    if words[:1] == ["unseen"]:  # its words are those of a step
        return _of_script(lambda: _unseen(words[1:]))
    options = _parser().parse_args(words)
    if options.what == "run":
        # The guard forks. Import nothing that starts threads (gRPC) before that.
        return orphan_guard.run_guarded(lambda: _exit_at_once(_run_command(options)))
    return _run_command(options)


def _srun(words: Sequence[str]) -> int:
    from muster.daemon.agent.user_script import srun_call

    return srun_call.run(words, process_tree.environment_at_start())


def _unseen(words: Sequence[str]) -> int:
    from muster.daemon.agent.user_script import srun_call

    srun_call.say_unseen(words, process_tree.environment_at_start())
    return 0


def _shell(options: argparse.Namespace) -> int:
    from muster.daemon.agent.user_script import script_shell

    print(script_shell.prepare(options.settings, os.environ, options.shell))
    return 0


def _of_script(command: Callable[[], int]) -> int:
    """Run a command that a user's batch script has called."""
    from muster.daemon.agent.user_script.script_job import NoScriptJob

    try:
        return command()
    except NoScriptJob as error:
        print(f"muster-agent: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (SiteError, IdentityError) as error:
        print(f"muster-agent: {error}", file=sys.stderr)
        return EXIT_CONFIG


def _run_command(options: argparse.Namespace) -> int:
    if options.what == "shell":
        return _of_script(lambda: _shell(options))
    from muster.daemon.agent import startup
    from muster.daemon.transport.channel import ListenError

    try:
        return startup.run(options) if options.what == "run" else startup.batch(options)
    except startup.BadOption as error:
        print(f"muster-agent: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (SiteError, IdentityError) as error:
        print(f"muster-agent: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except ListenError as error:
        print(f"muster-agent: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except MemoryError as error:
        print(f"muster-agent: {process_memory.describe_shortage(error)}", file=sys.stderr)
        return process_memory.EXIT_MEMORY


def _exit_at_once(code: int) -> NoReturn:
    """Exit without Python's cleanup: nothing needs it, and a thread of gRPC could delay the exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _CommandLine(CommandLine):
    wrong_word = EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = _CommandLine(allow_abbrev=False, prog="muster-agent", description="Runs the ranks of a job on a node.")
    commands = parser.add_subparsers(dest="what", required=True)
    run = commands.add_parser("run", help="serve one gang on this node")
    add_arguments(run, listen="0.0.0.0:0")
    run.add_argument("--gang", default=os.environ.get("MUSTER_GANG", ""), help="its id; default $MUSTER_GANG")
    run.add_argument(
        "--spec",
        default=os.environ.get("MUSTER_SPEC", ""),
        help="the JobSpec as JSON, or a file that holds it; default $MUSTER_SPEC",
    )
    run.add_argument("--node", help="default $SLURMD_NODENAME, else the short host name")
    run.add_argument("--advertise", metavar="HOST", help="default: this host's address on the route to the coordinator")
    run.add_argument(
        "--notice",
        type=float,
        metavar="S",
        default=8.0,  # Slurm's KillWait is 30 s
        help="seconds to wait for an order after SIGTERM; then the agent ends its ranks; default 8",
    )
    run.add_argument(
        "--memory",
        metavar="SOCKET",
        default=SOCKET,
        help=f"musterd's socket for memory of requeued jobs; empty: keep no memory; default {SOCKET}",
    )
    run.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="a launcher (torchrun, accelerate launch), or a command that starts one, after --: its launch becomes the "
        "gang; without it, the spec has the command",
    )
    batch = commands.add_parser("batch", help="start srun, and wait until the gang is final")
    add_arguments(batch, listen="")
    batch.add_argument("--gang", default=os.environ.get("MUSTER_GANG", ""), help="its id; default $MUSTER_GANG")
    batch.add_argument("command", nargs="+", help="srun and its arguments, after --")
    shell = commands.add_parser("shell", help="print what the shell of a user's batch script evaluates first")
    shell.add_argument("settings", help="the launch settings that `muster submit` has written")
    shell.add_argument("--shell", type=int, default=os.getppid(), metavar="PID", help="that shell; default: the parent")
    return parser


if __name__ == "__main__":
    sys.exit(main())
