"""`muster run [torchrun's options] train.py`: runs a script where torchrun would, and restarts its ranks.

On a workstation, a small cluster of processes runs it. With `--local`, each rank runs a command: `muster run --local
--nodes 4 --spares 1 -- python train.py` tests how a script survives a fault, before submission. In an allocation of
Slurm, it runs on the allocation's nodes (launcher/scripts/in_allocation.py).

Exits with the gang's exit code, or with 1 where torchrun would. On a workstation, no process remains, even after a
crash: this process dies with its guard process, all its children die with this process, and the guard ends the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from muster import exit_codes
from muster.daemon.agent.start_checks.job_paths import find_missing
from muster.daemon.host import process_tree
from muster.launcher.command import Command, print_note
from muster.launcher.errors import EXIT_INTERRUPTED, WrongInput
from muster.launcher.local import faults
from muster.launcher.local.cluster import JOB, LocalCluster
from muster.launcher.local.run import (
    Interruption,
    LocalRun,
    NothingLaunched,
    check_faults,
    make_run_dir,
    run_until_signal,
)
from muster.launcher.output.screen import open_screen
from muster.launcher.output.tables import recovery_table
from muster.launcher.scripts import in_allocation
from muster.launcher.scripts.template import RUN_FOLDER, job_name
from muster.launcher.scripts.torchrun_call import TorchrunCall, divide
from muster.launcher.spec.explain import explain_errors
from muster.launcher.spec.spec import Job
from muster.launcher.submission.origin import Asked, add_origin_options, choose_origin, names_checkpoint
from muster.v1.common_pb2 import JobSpec

_AGENT_EXIT_TIMEOUT_S = 10.0
"""Seconds in which agents may exit after the gang has ended. Then they are killed."""
_MAX_LOCAL_NODES = 64
"""Each simulated node runs two processes on this workstation."""
_EPILOG = """All other options are those of the installed torchrun (torchrun --help), and mean what they mean there, but
for those that docs/SCRIPTS.md lists. They stand before the script, beside these. In a job of Slurm, the ranks run on
the nodes of the job; elsewhere on this workstation."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.set_defaults(call=None)
    words = "each rank runs the command after --, on simulated nodes of this workstation"
    parser.add_argument("--local", action="store_true", help=words)
    words = "simulated nodes that run ranks; default 1, with --local 2"
    parser.add_argument("--nodes", type=int, metavar="N", help=words)
    words = "nodes that wait to take the place of one that fails; default 0, with --local 1"
    parser.add_argument("--spares", type=int, metavar="N", help=words)
    words = "with --local: processes that run the command on each node; default 1"
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help=words)
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
        *("--run-dir", "--log-dir", "--log_dir"), type=Path, metavar="PATH",
        help="folder for the logs; default: a temporary folder, kept on failure; in an allocation muster-runs",
    )  # fmt: skip
    parser.add_argument(
        "--hang-after",
        type=float,
        metavar="S",
        help="as in job.toml: seconds without a finished step; default 60, in an allocation as in job.toml",
    )
    words = "as in job.toml: failures in a row without progress after which the run fails; default 3"
    parser.add_argument("--max-failures", type=int, metavar="N", help=words)
    parser.add_argument("--durable-dir", default="", metavar="PATH", help="folder or URL for durable checkpoints")
    parser.add_argument(
        "--trust-durable-store",
        action="store_true",
        help="--durable-dir is a URL, and all who may write there are trusted: to load a checkpoint runs what it says",
    )
    add_origin_options(parser)
    words = "torchrun's options, the script and its arguments; with --local the command of each rank, after --"
    parser.add_argument("words", nargs="+", metavar="command", help=words)


def _split(words: Sequence[str], own: Mapping[str, argparse.Action]) -> tuple[list[str], dict[str, Any]]:
    mine, call = divide(words, own)
    if "--local" in mine:
        return [*words], {"call": None}
    return [*mine, "--", *call.options, *call.script], {"call": call}


async def _run(options: argparse.Namespace) -> int:
    call: TorchrunCall | None = options.call
    if call is not None:
        _check_call(call, options)
        if in_allocation.is_here(os.environ):
            return await _run_here(call, options)
    options.nodes = (2 if options.local else 1) if options.nodes is None else options.nodes
    options.spares = int(options.local) if options.spares is None else options.spares
    launcher = call.command(options.nodes, os.environ) if call else []
    if call is not None and call.names_meeting_place:
        print_note("muster: --rdzv-endpoint is not used: this host trains alone, and meets no other muster run")
    folder = Path(tempfile.mkdtemp(prefix="muster-local-"))
    status = None
    try:
        status = await _run_in(folder, options, launcher)
        return exit_codes.OF_TORCHRUN if launcher and status == EXIT_INTERRUPTED else status
    except WrongInput as error:
        status = error.status
        raise
    except NothingLaunched as ended:  # the launcher has said why
        status = 0
        return ended.status
    except (asyncio.CancelledError, KeyboardInterrupt):  # before the ranks were started
        status = EXIT_INTERRUPTED
        raise
    finally:
        if status in (0, EXIT_INTERRUPTED, WrongInput.status):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print_note(f"muster: the logs of ranks and daemons are kept in {folder}")


async def _run_here(call: TorchrunCall, options: argparse.Namespace) -> int:
    """In a job of Slurm."""
    if options.fault or options.nodes is not None:
        raise WrongInput("--fault and --nodes are for a workstation, and this is a job of Slurm")
    environ = process_tree.environment_at_start()
    if in_allocation.is_known(environ):
        if any(
            (
                options.spares,
                options.run_dir,
                options.durable_dir,
                options.resume,
                options.hang_after,
                options.max_failures,
            )
        ):
            raise WrongInput("muster submit has queued this job", "give the options of Muster to muster submit")
        in_allocation.launch_of_script(call, environ)
    options.spares = options.spares or 0
    options.nodes = in_allocation.own_nodes(environ, options.spares)
    spec = _spec(options, options.run_dir or Path(RUN_FOLDER))
    if options.resume:
        spec.resume_from = await choose_origin(spec, Asked(options.resume, options.fresh), None)
    return await in_allocation.launch(call, spec, environ)


def _check_call(call: TorchrunCall, options: argparse.Namespace) -> None:
    if call.script[:1] == ("--",) and Path("".join(call.script[1:2])).name.startswith("python"):
        raise WrongInput(
            "behind -- stands the command of ranks with --local, and without it the script: leave python out"
        )
    if options.ranks_per_node is not None:
        raise WrongInput("--ranks-per-node is for --local", "write --nproc-per-node")


def _is_local(options: argparse.Namespace) -> bool:
    return options.call is None or not in_allocation.is_here(os.environ)


COMMAND = Command(_arguments, _run, remote=False, guarded=_is_local, split=_split)


async def _run_in(folder: Path, options: argparse.Namespace, launcher: list[str]) -> int:
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
    if launcher:
        spec.ClearField("command")
        spec.ClearField("ranks_per_node")
    else:
        _check_command(spec)
    make_run_dir(Path(spec.run_dir))
    spec.resume_from = await choose_origin(spec, Asked(options.resume, options.fresh), None)
    if not launcher:  # else it is known later how many ranks there are
        check_faults(options.fault, spec.nodes + spec.spares, spec.nodes * spec.ranks_per_node)
    gang = f"local-{secrets.token_hex(4)}"
    cluster = LocalCluster(folder, spec, gang, launcher)
    leave_s = 0.0
    try:
        cluster.start()
        print_note(f"muster: in another terminal: muster status --config {cluster.settings} {JOB}")
        if launcher:
            print_note("muster: torchrun imports PyTorch and reads its options")
        run = LocalRun(cluster, gang, spec.run_dir, list(options.fault))
        view = await run_until_signal(run.follow)
        if isinstance(view, Interruption):
            print_note("muster: interrupted")
            if launcher:
                await asyncio.to_thread(cluster.interrupt, view.number, view.again.is_set)
            return EXIT_INTERRUPTED
        leave_s = _AGENT_EXIT_TIMEOUT_S
    finally:
        await asyncio.to_thread(cluster.stop, agents_leave_s=leave_s)
    if view.recoveries:
        print(*recovery_table(view.recoveries, open_screen(sys.stderr)), sep="\n", file=sys.stderr)
    print_note(f"muster: {view.phase}: {view.reason}")
    code = exit_codes.of_shell(view.exit_code)
    return exit_codes.of_launcher(code) if launcher else code


def _check_command(spec: JobSpec) -> None:
    """All nodes are this host: what it does not have, no rank can run."""
    search_path = spec.env.get("PATH", os.environ.get("PATH", os.defpath))
    if wrong := [missing.full for missing in find_missing(spec.work_dir, spec.command, search_path)]:
        raise WrongInput("; ".join(wrong))


def _durable_dir(given: str) -> str:
    return str(Path(given).resolve()) if given and "://" not in given else given


def _spec(options: argparse.Namespace, run_dir: Path) -> JobSpec:
    is_local = _is_local(options)
    of_local = {
        "gather_timeout": 60,
        "hang_after": 60.0,
        # All ranks are on this host. The host's name may resolve to an address that does not work.
        "env": {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")},
    }
    given = {
        **(of_local if is_local else {}),
        "name": "local" if is_local else job_name(os.environ.get("SLURM_JOB_NAME", "")),
        "nodes": options.nodes,
        "spares": options.spares,
        "ranks_per_node": options.ranks_per_node if options.ranks_per_node is not None else 1,
        "command": options.words,
        "run_dir": str(run_dir.absolute()),
        "durable_dir": _durable_dir(options.durable_dir),
        "checkpoint": {"trust_durable_store": options.trust_durable_store},
        "requeue": False,
        **{name: value for name in ("hang_after", "max_failures") if (value := getattr(options, name)) is not None},
    }
    try:
        return Job.model_validate(given).to_proto(work_dir=os.getcwd())
    except ValidationError as error:
        words = "\n".join(f"  {line}" for line in explain_errors(error, Job))
        # Where job.toml has a key, this command has an option.
        words = words.replace("checkpoint.trust_durable_store = true", "--trust-durable-store")
        raise WrongInput(f"the command line is not valid:\n{words}") from None
