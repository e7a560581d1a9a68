"""`muster run --local --nodes 4 --spares 1 -- python train.py`: see how a script takes a fault, before queueing it.

Ends with the gang's exit code. Whatever happens, no process is left: this process dies with its guard, everything
below dies with it, and the guard ends what is left.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from pydantic import ValidationError

from muster.launcher.command import Command, console, note
from muster.launcher.commands.status import exit_code
from muster.launcher.errors import EXIT_INTERRUPTED, WrongInput
from muster.launcher.local import faults
from muster.launcher.local.cluster import LocalCluster
from muster.launcher.local.run import LocalRun, check_faults, interruptible, must_be_dir
from muster.launcher.output.tables import recovery_table
from muster.launcher.spec.explain import explain
from muster.launcher.spec.spec import Job
from muster.v1.common_pb2 import JobSpec

_LEAVE_S = 10.0
_MOST_NODES = 64


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--local", action="store_true", help="on this workstation, without Slurm (the one way there is)"
    )
    parser.add_argument("--nodes", type=int, default=2, help="nodes that carry ranks; default 2")
    parser.add_argument("--spares", type=int, default=1, help="nodes that wait beside them; default 1")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="default 1")
    parser.add_argument(
        "--fault",
        type=faults.parse,
        action="append",
        default=[],
        metavar="KIND@step=N",
        help="kill-node@step=30[,node=n1], kill-rank@step=30[,rank=1], hang-rank@step=30[,rank=1],"
        " xid-node@step=30[,code=79]; or time=SECONDS in place of step; may be repeated",
    )
    parser.add_argument("--run-dir", type=Path, help="keep the logs here; default: a temporary folder, kept on failure")
    parser.add_argument("--hang-after", type=float, default=60.0, metavar="S", help="as in job.toml; default 60")
    parser.add_argument("--durable-dir", type=Path, help="write durable checkpoints here")
    parser.add_argument("words", nargs="+", metavar="command", help="what each rank runs; after --")


async def _run(options: argparse.Namespace) -> int:
    if not options.local:
        raise WrongInput("muster run needs --local", "to run on the cluster: muster submit job.toml")
    folder = Path(tempfile.mkdtemp(prefix="muster-local-"))
    status = None
    try:
        status = await _run_in(folder, options)
        return status
    except WrongInput as error:
        status = error.status
        raise
    finally:
        if status in (0, EXIT_INTERRUPTED, WrongInput.status):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            note(f"muster: the logs of ranks and daemons are kept in {folder}")


COMMAND = Command("run", "try a job on this workstation, with faults", _arguments, _run, remote=False, guarded=True)


async def _run_in(folder: Path, options: argparse.Namespace) -> int:
    if options.nodes + options.spares > _MOST_NODES:
        raise WrongInput(
            f"--nodes {options.nodes} and --spares {options.spares}: one workstation plays at most {_MOST_NODES} nodes"
        )
    spec = _spec(options, options.run_dir or folder / "run")
    must_be_dir(Path(spec.run_dir))
    check_faults(options.fault, spec.nodes + spec.spares, spec.nodes * spec.ranks_per_node)
    gang = f"local-{secrets.token_hex(4)}"
    cluster = LocalCluster(folder, spec, gang)
    leave_s = 0.0
    try:
        cluster.start()
        run = LocalRun(cluster, gang, spec.run_dir, list(options.fault))
        view = await interruptible(run.follow)
        if view is None:
            note("muster: interrupted")
            return EXIT_INTERRUPTED
        leave_s = _LEAVE_S
    finally:
        await asyncio.to_thread(cluster.stop, agents_leave_s=leave_s)
    if view.recoveries:
        console(stderr=True).print(recovery_table(view.recoveries))
    note(f"muster: {view.phase}: {view.reason}")
    return exit_code(view)


def _spec(options: argparse.Namespace, run_dir: Path) -> JobSpec:
    given = {
        "name": "local",
        "nodes": options.nodes,
        "spares": options.spares,
        "ranks_per_node": options.ranks_per_node,
        "command": options.words,
        "run_dir": str(run_dir.absolute()),
        "durable_dir": str(options.durable_dir.resolve()) if options.durable_dir else "",
        "requeue": False,
        "gather_timeout": 60,
        "hang_after": options.hang_after,
        # All ranks are on this machine; its name may resolve to nothing useful.
        "env": {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")},
    }
    try:
        return Job.model_validate(given).to_proto(work_dir=os.getcwd())
    except ValidationError as error:
        raise WrongInput(
            "the command line can't be right:\n" + "\n".join(f"  {line}" for line in explain(error, Job))
        ) from None
