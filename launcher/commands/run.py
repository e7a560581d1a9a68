"""`muster run --local --nodes 4 --spares 1 -- python train.py`: tests how a script survives a fault, before submission.

Exits with the gang's exit code. No process remains, even after a crash: this process dies with its guard process, all
its children die with this process, and the guard ends the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from pydantic import ValidationError

from muster.daemon.agent.start_checks.job_paths import find_missing
from muster.launcher.command import Command, print_note
from muster.launcher.commands.status import exit_code
from muster.launcher.errors import EXIT_INTERRUPTED, WrongInput
from muster.launcher.local import faults
from muster.launcher.local.cluster import JOB, LocalCluster
from muster.launcher.local.run import LocalRun, check_faults, make_run_dir, run_until_signal
from muster.launcher.output.screen import open_screen
from muster.launcher.output.tables import recovery_table
from muster.launcher.spec.explain import explain_errors
from muster.launcher.spec.spec import Job
from muster.launcher.submission.origin import Asked, add_origin_options, choose_origin, names_checkpoint
from muster.v1.common_pb2 import JobSpec

_AGENT_EXIT_TIMEOUT_S = 10.0
"""Seconds in which agents may exit after the gang has ended. Then they are killed."""
_MAX_LOCAL_NODES = 64
"""Each simulated node runs two processes on this workstation."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--local", action="store_true", help="run on this workstation, without Slurm (required)")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="simulated nodes that run ranks; default 2")
    words = "simulated nodes that wait to take the place of one that fails; default 1"
    parser.add_argument("--spares", type=int, default=1, metavar="N", help=words)
    words = "processes that run the command on each node; default 1"
    parser.add_argument("--ranks-per-node", type=int, default=1, metavar="N", help=words)
    parser.add_argument(
        "--fault",
        type=faults.parse_fault,
        action="append",
        default=[],
        metavar="KIND@step=N",
        help="a fault to inject: kill-node@step=30[,node=n1], kill-rank@step=30[,rank=1], hang-rank@step=30[,rank=1],"
        " xid-node@step=30[,code=79]; or time=SECONDS instead of step; may be repeated",
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="PATH", help="folder for the logs; default: a temporary folder, kept on failure"
    )
    parser.add_argument(
        "--hang-after",
        type=float,
        default=60.0,
        metavar="S",
        help="as in job.toml: seconds without a finished step; default 60",
    )
    parser.add_argument("--durable-dir", default="", metavar="PATH", help="folder or URL for durable checkpoints")
    parser.add_argument(
        "--trust-durable-store",
        action="store_true",
        help="--durable-dir is a URL, and all who may write there are trusted: to load a checkpoint runs what it says",
    )
    add_origin_options(parser)
    parser.add_argument("words", nargs="+", metavar="command", help="the command of each rank; after --")


async def _run(options: argparse.Namespace) -> int:
    if not options.local:
        raise WrongInput("muster run needs --local", "to run a job on the cluster: muster submit job.toml")
    folder = Path(tempfile.mkdtemp(prefix="muster-local-"))
    status = None
    try:
        status = await _run_in(folder, options)
        return status
    except WrongInput as error:
        status = error.status
        raise
    except (asyncio.CancelledError, KeyboardInterrupt):  # before the ranks were started
        status = EXIT_INTERRUPTED
        raise
    finally:
        if status in (0, EXIT_INTERRUPTED, WrongInput.status):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print_note(f"muster: the logs of ranks and daemons are kept in {folder}")


COMMAND = Command(_arguments, _run, remote=False, guarded=True)


async def _run_in(folder: Path, options: argparse.Namespace) -> int:
    if options.nodes + options.spares > _MAX_LOCAL_NODES:
        raise WrongInput(
            f"--nodes {options.nodes} and --spares {options.spares}: one workstation can run at most "
            f"{_MAX_LOCAL_NODES} nodes"
        )
    if options.resume and not names_checkpoint(options.resume):
        raise WrongInput(
            f"--resume {options.resume}: a run on this workstation knows no other jobs",
            "name the path of the checkpoint, a folder step_...",
        )
    spec = _spec(options, options.run_dir or folder / "run")
    _check_command(spec)
    make_run_dir(Path(spec.run_dir))
    spec.resume_from = await choose_origin(spec, Asked(options.resume, options.fresh), None)
    check_faults(options.fault, spec.nodes + spec.spares, spec.nodes * spec.ranks_per_node)
    gang = f"local-{secrets.token_hex(4)}"
    cluster = LocalCluster(folder, spec, gang)
    leave_s = 0.0
    try:
        cluster.start()
        print_note(f"muster: in another terminal: muster status --config {cluster.settings} {JOB}")
        run = LocalRun(cluster, gang, spec.run_dir, list(options.fault))
        view = await run_until_signal(run.follow)
        if view is None:
            print_note("muster: interrupted")
            return EXIT_INTERRUPTED
        leave_s = _AGENT_EXIT_TIMEOUT_S
    finally:
        await asyncio.to_thread(cluster.stop, agents_leave_s=leave_s)
    if view.recoveries:
        print(*recovery_table(view.recoveries, open_screen(sys.stderr)), sep="\n", file=sys.stderr)
    print_note(f"muster: {view.phase}: {view.reason}")
    return exit_code(view)


def _check_command(spec: JobSpec) -> None:
    """All nodes are this host: what it does not have, no rank can run."""
    search_path = spec.env.get("PATH", os.environ.get("PATH", os.defpath))
    if wrong := [missing.full for missing in find_missing(spec.work_dir, spec.command, search_path)]:
        raise WrongInput("; ".join(wrong))


def _durable_dir(given: str) -> str:
    return str(Path(given).resolve()) if given and "://" not in given else given


def _spec(options: argparse.Namespace, run_dir: Path) -> JobSpec:
    given = {
        "name": "local",
        "nodes": options.nodes,
        "spares": options.spares,
        "ranks_per_node": options.ranks_per_node,
        "command": options.words,
        "run_dir": str(run_dir.absolute()),
        "durable_dir": _durable_dir(options.durable_dir),
        "checkpoint": {"trust_durable_store": options.trust_durable_store},
        "requeue": False,
        "gather_timeout": 60,
        "hang_after": options.hang_after,
        # All ranks are on this host. The host's name may resolve to an address that does not work.
        "env": {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")},
    }
    try:
        return Job.model_validate(given).to_proto(work_dir=os.getcwd())
    except ValidationError as error:
        words = "\n".join(f"  {line}" for line in explain_errors(error, Job))
        # Where job.toml has a key, this command has an option.
        words = words.replace("checkpoint.trust_durable_store = true", "--trust-durable-store")
        raise WrongInput(f"the command line is not valid:\n{words}") from None
