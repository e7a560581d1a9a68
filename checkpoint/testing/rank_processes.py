"""The ranks of a test as forks of one process: it imports torch once for all of them.

A test starts a script with `start_ranks`; the script calls `run_ranks`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from muster.daemon.host import process_tree


async def start_ranks(
    script: Path, world: int, sockets: Mapping[int, int], log: Path, job: Any, generation: int = 1, **environment: str
) -> Process:
    """Start the script with `world` ranks, and append what they print to `log`.

    Args:
        sockets: the descriptors of the ranks' connections to their agents, which are closed here; empty: no agents.
        job: what each rank is told, as JSON.
        environment: variables that this process does not have.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    own = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    call = json.dumps({"world": world, "sockets": sockets, "generation": generation, "job": job})
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, script, call),
            env=own | environment,
            pass_fds=list(sockets.values()),
            stdin=PIPE,
            stdout=out,
            stderr=out,
        )
    for descriptor in sockets.values():
        os.close(descriptor)
    return process


def rank_pids(process: Process) -> dict[int, int]:
    """The pid of each rank that `run_ranks` has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    names = {int(pid): Path(f"/proc/{pid}/comm").read_text().strip() for pid in children}
    return {int(name.removeprefix("rank")): pid for pid, name in names.items()}


def run_ranks(train: Callable[[int, Any], None]) -> NoReturn:
    """Call `train` with the rank and the job in a process for each rank. A rank that fails ends all others."""
    call = json.loads(sys.argv[1])
    sockets = {int(rank): descriptor for rank, descriptor in call["sockets"].items()}
    parent, ranks = os.getpid(), dict[int, int]()
    for rank in range(call["world"]):
        pid = os.fork()
        if pid == 0:
            process_tree.die_with_parent(parent)
            process_tree.set_process_name(f"rank{rank}")
            _set_environment(rank, sockets, call["generation"])
            train(rank, call["job"])
            os._exit(0)
        ranks[pid] = rank
    for descriptor in sockets.values():
        os.close(descriptor)
    while ranks:
        pid, status = os.wait()
        del ranks[pid]
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)
    sys.exit(0)


def _set_environment(rank: int, sockets: Mapping[int, int], generation: int) -> None:
    """Set what a launcher sets, and close the connections of all other ranks."""
    os.environ["RANK"] = str(rank)
    if rank in sockets:
        os.environ.update(MUSTER_AGENT_FD=str(sockets[rank]), MUSTER_GENERATION=str(generation))
    for other, descriptor in sockets.items():
        if other != rank:
            os.close(descriptor)
