"""The ranks of a test as forks of a process that has imported torch: once for all ranks of all tests of a run.

A test starts a script with `start_ranks`; the script calls `run_ranks`.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

from muster.daemon.host import process_tree

_PRELOADED = "muster.checkpoint.testing.preloaded_torch"


class RankScript:
    """A script that runs, with its ranks, which die with it. A script that nobody refers to any more is ended."""

    def __init__(self, process: ForkServerProcess, stdin: Connection) -> None:
        self._process, self._stdin = process, stdin
        # At the exit of this process, too: multiprocessing's own handler, which runs later, would wait for the script.
        atexit.register(weakref.finalize(self, process.kill))

    @property
    def pid(self) -> int:
        """The script's process. The ranks are its children."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None: the script runs."""
        return self._process.exitcode

    def write(self, text: bytes) -> None:
        """Write to the standard input that all ranks have."""
        with suppress(BrokenPipeError):
            os.write(self._stdin.fileno(), text)

    def kill(self) -> None:
        """End the script and its ranks."""
        self._process.kill()

    async def wait(self) -> int:
        """The exit code, once the script has ended."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


async def start_ranks(
    script: Path, world: int, sockets: Mapping[int, int], log: Path, job: Any, generation: int = 1, **environment: str
) -> RankScript:
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
    call = {"world": world, "generation": generation, "job": job}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])  # only the first call starts the server
    reader, writer = context.Pipe(duplex=False)
    connections = {rank: socket.socket(fileno=descriptor) for rank, descriptor in sockets.items()}
    process = context.Process(target=_run_script, args=(script, call, own | environment, log, reader, connections))
    process.start()
    reader.close()
    for connection in connections.values():
        connection.close()
    return RankScript(process, writer)


async def run_to_end(
    script: Path, out: Path, world: int, job: Mapping[str, Any], sockets: Mapping[int, int], generation: int
) -> tuple[int, str]:
    """Run the script to its end, as `start_ranks` does: its exit code, and what its ranks have printed.

    Args:
        out: the folder of what it prints, which `job` names to the ranks as `out`.
        generation: of the agents; without `sockets` there are none.

    Raises:
        TimeoutError: it has not ended within 120 s, and is killed.
    """
    out.mkdir(exist_ok=True)
    process = await start_ranks(
        script, world, sockets, out / "log", {**job, "out": str(out)}, generation if sockets else 0
    )
    try:
        async with asyncio.timeout(120):
            return await process.wait(), (out / "log").read_text()
    finally:
        process.kill()


def _run_script(
    script: Path,
    call: dict[str, Any],
    environment: Mapping[str, str],
    log: Path,
    stdin: Connection,
    connections: Mapping[int, socket.socket],
) -> None:
    """What the new process does: it becomes the script."""
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(stdin.fileno(), 0)
    sys.stdin = os.fdopen(0, closefd=False)
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sockets = {rank: connection.detach() for rank, connection in connections.items()}
    sys.argv = [str(script), json.dumps({**call, "sockets": sockets})]
    runpy.run_path(str(script), run_name="__main__")


def rank_pids(process: RankScript) -> dict[int, int]:
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
