"""The rank supervisor before its zygotes are ready, and with a rank that can't be killed."""

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.daemon.agent.ranks import rank_supervisor
from muster.daemon.agent.ranks.rank_supervisor import NodeJob, RankSupervisor
from muster.daemon.agent.ranks.reconcile import LocalRank, StartRanks
from muster.daemon.agent.ranks.zygote_handle import ZygoteSpec
from muster.daemon.host import process_tree
from muster.v1 import agent_pb2


async def test_a_rank_that_waits_for_its_imports_is_ended_at_once_and_never_starts(tmp_path: Path) -> None:
    """Imports may last longer than a kill may take. No process of the rank exists, so nothing has to be waited for."""
    changed = asyncio.Event()
    zygote_spec = ZygoteSpec(("true",), (), dict(os.environ), str(tmp_path))
    supervisor = RankSupervisor(
        NodeJob("g", "n0", zygote_spec, str(tmp_path), 1),
        lambda *_: pytest.fail("it was started all the same"),
        changed.set,
    )
    order = agent_pb2.Order(duty=agent_pb2.DUTY_RUN, generation=1, world_size=1)
    order.places.add(rank=0, node="n0")
    supervisor.start_ranks(StartRanks(1, ((0, 0),)), order)
    assert supervisor.ranks() == (LocalRank(0, 1, alive=True),)
    supervisor.kill_ranks(1)
    assert supervisor.ranks() == (LocalRank(0, 1, alive=False),)
    assert changed.is_set()
    (status,) = supervisor.statuses({})
    assert (status.exit_code, status.stderr_tail) == (-9, "ended before it was started")
    changed.clear()
    supervisor.start_zygotes()
    async with asyncio.timeout(120):
        await changed.wait()
    assert supervisor.ready_zygotes() == 1
    await supervisor.stop()


async def test_a_rank_that_outlives_its_kill_is_reported_with_where_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = asyncio.Event()
    os.mkfifo(tmp_path / "started")
    spec = ZygoteSpec(("sh", "-c", "echo > started; exec sleep 600"), (), dict(os.environ), str(tmp_path))
    supervisor = RankSupervisor(NodeJob("g", "n0", spec, str(tmp_path), 1), lambda *_: socket.socket(), changed.set)

    async def status(holds: Callable[[agent_pb2.RankStatus], object]) -> agent_pb2.RankStatus:
        async with asyncio.timeout(120):
            while not holds(one := next(iter(supervisor.statuses({})))):
                changed.clear()
                await changed.wait()
        return one

    order = agent_pb2.Order(duty=agent_pb2.DUTY_RUN, generation=1, world_size=1)
    order.places.add(rank=0, node="n0")
    supervisor.start_zygotes()
    supervisor.start_ranks(StartRanks(1, ((0, 0),)), order)
    await status(lambda one: one.phase == agent_pb2.RANK_PHASE_RUNNING)
    await asyncio.to_thread((tmp_path / "started").read_text)  # it leads its process group by now
    with monkeypatch.context() as of_kernel:  # in which the rank waits for a dead file server
        of_kernel.setattr(process_tree, "kill", lambda _: None)
        of_kernel.setattr(rank_supervisor, "_NAMED_AFTER_S", 0.0)
        supervisor.kill_ranks(1)
        words = (await status(lambda one: one.stderr_tail)).stderr_tail
    assert re.match(rf"process {supervisor.pids(1)[0]} \(.+\) is in state \w", words)
    supervisor.kill_ranks(1)
    assert (await status(lambda one: one.phase == agent_pb2.RANK_PHASE_EXITED)).exit_code == -signal.SIGKILL
    await supervisor.stop()


async def test_a_child_that_no_rank_has_left_behind_outlives_a_zygote(tmp_path: Path) -> None:
    """For example the node check, whose end would be held against the node."""
    before = set(process_tree.child_pids())
    check = await asyncio.create_subprocess_exec("sleep", "600")
    changed = asyncio.Event()
    spec = ZygoteSpec(("true",), (), dict(os.environ), str(tmp_path))
    job = NodeJob("g", "n0", spec, str(tmp_path), 1)
    supervisor = RankSupervisor(job, lambda *_: pytest.fail("no rank"), changed.set, lambda: before | {check.pid})

    async def next_zygote() -> int:
        """The pid of the zygote that becomes ready next."""
        changed.clear()
        async with asyncio.timeout(120):
            await changed.wait()
        (pid,) = set(process_tree.child_pids()) - before - {check.pid}
        return pid

    supervisor.start_zygotes()
    first = await next_zygote()
    os.kill(first, signal.SIGKILL)
    assert await next_zygote() != first
    assert check.pid in process_tree.child_pids()
    check.kill()
    assert await check.wait() == -signal.SIGKILL
    await supervisor.stop()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("raise ImportError('a.so: file too short')", "library can't be imported: ImportError: a.so: file too short"),
        ("import os; os._exit(1)", "2 processes have ended during the import of `preload`"),
        ("", ""),
    ],
)
async def test_the_imports_show_which_library_is_broken_here(tmp_path: Path, module: str, words: str) -> None:
    (tmp_path / "library.py").write_text(module)
    (tmp_path / "train.py").touch()
    spec = ZygoteSpec((sys.executable, str(tmp_path / "train.py")), ("library",), dict(os.environ), str(tmp_path))
    job = NodeJob("g", "n0", spec, str(tmp_path), 1)
    supervisor = RankSupervisor(job, lambda *_: pytest.fail("no rank"), lambda: None, lambda: before)
    before = set(process_tree.child_pids())
    supervisor.start_zygotes()
    async with asyncio.timeout(120):
        assert await supervisor.broken_import() == words
    await supervisor.stop()


@pytest.mark.parametrize(
    ("of_srun", "words", "opens"),
    [
        (False, ("python", "train.py", "--lr", "1"), False),
        (False, ("python", "train.py", "--dist-url", "tcp://n0:1234"), True),
        (False, ("sh", "-c", "exec python train.py --init=tcp://n0:1234"), True),
        (False, ("sh", "-c", "exec python train.py tcp://$MASTER_ADDR:1234"), True),
        (False, ("python", "train.py", "tcp://n1:1234"), True),
        (False, ("python", "train.py", "--master_addr", "n0"), False),
        (False, ("python", "train.py", "--tracking-uri", "tcp://mlflow:5000"), False),
        (True, ("python", "train.py"), True),
    ],
)
def test_rank_0_opens_the_store_of_a_script_that_chooses_its_address(
    of_srun: bool, words: tuple[str, ...], opens: bool
) -> None:
    assert (
        NodeJob("g", "n0", ZygoteSpec(words, (), {}, "/"), "/", 1, of_srun=of_srun, hosts=("n1",)).opens_store is opens
    )


@pytest.mark.parametrize("of_srun", [True, False])
def test_only_a_store_of_torch_waits_for_imports(tmp_path: Path, of_srun: bool) -> None:
    job = NodeJob("g", "n0", ZygoteSpec(("true",), (), {}, "/"), str(tmp_path), 1, of_srun=of_srun)
    supervisor = RankSupervisor(job, lambda *_: pytest.fail("no rank"), lambda: None)
    supervisor.open_store(1)
    assert supervisor.store is not None
    assert bool(supervisor.store.port) is of_srun
    supervisor.close_store()
