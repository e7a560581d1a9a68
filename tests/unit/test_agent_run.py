"""Whole agents as processes, ordered about by a scripted coordinator on loopback. Ranks are small scripts; no torch."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.daemon.testing.scripted_coordinator import ScriptedCoordinator
from muster.daemon.testing.scripted_gang import Gang, alive, gone, scripted_gang
from muster.daemon.transport.identity import SecretCredentials
from muster.v1.agent_pb2 import (
    DUTY_EXIT,
    DUTY_HOLD,
    RANK_PHASE_EXITED,
    RANK_PHASE_RUNNING,
    SILENCE_CLOSED,
    SILENCE_KERNEL_ONLY,
    SILENCE_NO_ANSWER,
    TIER_OWN,
    Order,
    ProbeOrder,
    RestoreSource,
)

PYTHON = sys.executable
WAIT = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"


@pytest.fixture
async def gang(tmp_path: Path) -> AsyncIterator[Gang]:
    async with scripted_gang(tmp_path) as found:
        yield found


async def test_a_generation_is_fenced_and_the_next_one_runs(gang: Gang) -> None:
    await gang.start(2, PYTHON, "-c", WAIT)
    first = await gang.run(1)
    ports = {gang.status("n0").store_port}
    gang.fence(1)
    await gang.until(lambda: gang.all(lambda n: gang.status(n).fenced_generation == 1))
    assert not [pid for pid in first if alive(pid)]
    assert gang.rank("n0", 1).exit_code == -9
    await gang.until(lambda: gang.status("n0").store_generation == 2)
    ports.add(gang.status("n0").store_port)
    second = await gang.run(2)
    assert len({*first, *second}) == 4
    assert len(ports) == 2
    assert gang.status("n1").order_serial > 0


async def test_the_event_loop_never_stands_still(gang: Gang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")  # asyncio then tells of every callback of 0.1 s and more
    ours = Stalls()
    watch = asyncio.create_task(ours.watch())
    await gang.start(2, PYTHON, gang.script(FAMILY))
    for generation in range(1, 4):
        await gang.run(generation)
        gang.fence(generation)
        await gang.until(lambda: gang.all(lambda n: gang.status(n).fenced_generation == generation))  # noqa: B023
    watch.cancel()
    told = "".join((gang.folder / f"{node}.err").read_text() for node in gang.nodes)
    assert "Loaded running loop" in told or "asyncio" in told
    # An agent suspects a watched peer after 0.75 s. On a busy machine every event loop stands still, this one too.
    most = 0.5 + 3 * ours.longest_s
    assert [float(seconds) for seconds in re.findall(r"took ([\d.]+) seconds", told) if float(seconds) > most] == []


class Stalls:
    """The longest time, in seconds, for which the event loop of the test did not get to its timers."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            before = clock()
            await asyncio.sleep(0.01)
            self.longest_s = max(self.longest_s, clock() - before - 0.01)


async def test_orders_that_come_twice_or_are_of_an_older_term_change_nothing(gang: Gang) -> None:
    await gang.start(1, PYTHON, "-c", WAIT)
    gang.coordinator.term = 5
    (pid,) = await gang.run(1)
    gang.coordinator.term = 4
    gang.coordinator.order(Order(duty=DUTY_EXIT))
    gang.coordinator.term = 5
    for _ in range(3):
        serial = gang.coordinator.order(gang.run_order(1))
    await gang.until(lambda: gang.status("n0").order_serial == serial)
    assert alive(pid)
    gang.fence(0)  # an older generation: nothing to end
    gang.coordinator.order(Order(duty=DUTY_HOLD))
    await gang.until(lambda: gang.rank("n0", 1).phase == RANK_PHASE_EXITED)
    serial = gang.coordinator.order(gang.run_order(1))
    await gang.until(lambda: gang.status("n0").order_serial == serial)
    assert gang.log(0, 1).read_text().split() == [str(pid)]


async def test_ranks_see_what_torchrun_sets(gang: Gang) -> None:
    show = """
        import os, socket, sys
        names = "RANK WORLD_SIZE LOCAL_RANK GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR TORCHELASTIC_USE_AGENT_STORE"
        print(*(os.environ[name] for name in names.split()), os.environ["EXTRA"], os.environ["OMP_NUM_THREADS"])
        link = socket.socket(fileno=int(os.environ["MUSTER_AGENT_FD"]))
        print(link.type == socket.SOCK_SEQPACKET, os.environ["MUSTER_GENERATION"], os.environ["MUSTER_JOB"])
        sys.exit(3 * int(os.environ["RANK"]))
    """
    await gang.start(2, PYTHON, gang.script(show), env={"EXTRA": "given"})
    gang.fence(0)
    await gang.until(lambda: gang.status("n0").store_generation == 1)
    gang.coordinator.order(gang.run_order(1))
    await gang.until(lambda: gang.all(lambda n: gang.rank(n, 1).phase == RANK_PHASE_EXITED))
    assert [gang.rank(n, 1).exit_code for n in gang.nodes] == [0, 3]
    # No torch here: rank 0 opens the store itself, on the port set aside.
    assert gang.log(1, 1).read_text() == "1 2 0 1 2 127.0.0.1 False given 1\nTrue 1 g\n"


async def test_ranks_have_the_environment_of_the_launch_and_not_that_of_their_agent(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = gang.folder / "g.environment"
    launch.write_bytes(b"PATH=/bin\0LINES=a\nb\0SLURM_NNODES=1\0SLURMD_NODENAME=first\0")
    monkeypatch.setenv("MUSTER_RANK_ENVIRONMENT", str(launch))
    for name, value in {"OF_AGENT": "1", "SLURM_STEP_ID": "7", "SLURMD_NODENAME": "n0", "SLURM_PROCID": "9"}.items():
        monkeypatch.setenv(name, value)
    show = """
        import os
        for name in "LINES OF_AGENT SLURMD_NODENAME SLURM_PROCID SLURM_NTASKS GRPC_VERBOSITY".split():
            print(name, repr(os.environ.get(name)))
        print([name for name in os.environ if name.startswith("MUSTER_RANK_")])
    """
    await gang.start(1, PYTHON, gang.script(show))
    gang.fence(0)
    await gang.until(lambda: gang.status("n0").store_generation == 1)
    gang.coordinator.order(gang.run_order(1))
    await gang.until(lambda: gang.rank("n0", 1).phase == RANK_PHASE_EXITED)
    assert gang.log(0, 1).read_text().splitlines() == [
        "LINES 'a\\nb'",
        "OF_AGENT None",
        "SLURMD_NODENAME 'n0'",
        "SLURM_PROCID '0'",
        "SLURM_NTASKS '1'",
        "GRPC_VERBOSITY None",
        "[]",
    ]


async def test_a_crash_is_told_with_the_last_lines(gang: Gang) -> None:
    await gang.start(1, PYTHON, gang.script("print('x' * 9000); print('before'); raise RuntimeError('boom')"))
    gang.fence(0)
    gang.coordinator.order(gang.run_order(1))
    await gang.until(lambda: gang.rank("n0", 1).phase == RANK_PHASE_EXITED)
    status = gang.rank("n0", 1)
    assert status.exit_code == 1
    assert status.stderr_tail.startswith("before\nTraceback")
    assert status.stderr_tail.endswith("RuntimeError: boom")


LAST_STEP = """
    import os, time
    from muster.checkpoint.training.agent_connection import AgentConnection
    from muster.checkpoint.testing.gang_in_one_process import TorchlessRank
    rank = TorchlessRank(AgentConnection.from_environment(), 0, 1)
    rank.join()
    rank.layout(256 << 20)
    rank.connection.slot_for_any_step(7, 30.0)
    print(os.getpid(), flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
    assert rank.step(7, b"the last", b"", wait_s=30.0)
"""


async def test_an_end_in_good_order_is_told_with_the_last_step_that_was_kept(gang: Gang) -> None:
    await gang.start(1, PYTHON, gang.script(LAST_STEP), memory_checkpoint=True)
    (rank,) = await gang.run(1)
    agent = gang.agent_pid("n0")
    # The agent hears of the snapshot and of the end at once, and has yet to digest the one.
    os.kill(agent, signal.SIGSTOP)
    (gang.folder / "go").touch()
    await gone(rank)
    os.kill(agent, signal.SIGCONT)
    await gang.until(lambda: gang.rank("n0", 1).phase == RANK_PHASE_EXITED)
    assert gang.rank("n0", 1).exit_code == 0, gang.rank("n0", 1).stderr_tail
    assert [shard.version.step for shard in gang.status("n0").shards] == [7]


KEPT = """
    import os, pickle, time
    from muster.checkpoint.format.layout import length_placeholder, offset_placeholder
    from muster.checkpoint.training.agent_connection import AgentConnection
    from muster.checkpoint.testing.gang_in_one_process import TorchlessRank
    items = pickle.dumps([(n, offset_placeholder(n), length_placeholder(n)) for n in (0, 100)], 4)
    rank = TorchlessRank(AgentConnection.from_environment(), 0, 1, items)
    rank.join()
    rank.layout(1 << 20)
    assert rank.step(7, b"kept", b"", wait_s=30.0)
    print(os.getpid(), flush=True)
    time.sleep(100)
"""


async def _flush_that_waits(gang: Gang, durable: Path) -> Order:
    """The order of a flush that has begun on n0, and of whose two writers one never speaks."""
    await gang.start(1, PYTHON, gang.script(KEPT), memory_checkpoint=True, durable_dir=str(durable))
    await gang.run(1)
    await gang.until(lambda: len(gang.status("n0").shards) == 1)
    order = gang.run_order(1)
    order.flush.serial = 1
    order.flush.version.CopyFrom(gang.status("n0").shards[0].version)
    order.flush.sources.extend(RestoreSource(rank=rank, tier=TIER_OWN, node=f"n{rank}") for rank in (0, 1))
    gang.coordinator.order(order)
    while not any(durable.glob(".flush-g-1/*")):  # noqa: ASYNC110 - a file tells nobody
        await asyncio.sleep(0.01)
    return order


async def test_a_flush_that_the_coordinator_has_ended_is_given_up(gang: Gang) -> None:
    durable = gang.folder / "durable"
    order = await _flush_that_waits(gang, durable)
    order.ClearField("flush")
    gang.coordinator.order(order)
    await gang.until(lambda: gang.status("n0").flushed_serial == 1)
    assert gang.status("n0").flush_error == "given up by the coordinator"
    assert gang.rank("n0", 1).phase == RANK_PHASE_RUNNING, "training goes on"
    gang.coordinator.order(Order(duty=DUTY_HOLD))
    await gang.until(lambda: gang.rank("n0", 1).phase == RANK_PHASE_EXITED)


async def test_the_newest_flush_is_the_one_that_is_told_of(gang: Gang) -> None:
    durable = gang.folder / "durable"
    order = await _flush_that_waits(gang, durable)
    order.flush.serial = 2
    del order.flush.sources[1]
    gang.coordinator.order(order)
    await gang.until(lambda: gang.status("n0").flushed_serial == 2)
    gang.coordinator.order(Order(duty=DUTY_HOLD))
    await gang.until(lambda: gang.rank("n0", 1).phase == RANK_PHASE_EXITED)
    assert (gang.status("n0").flushed_serial, gang.status("n0").flush_error) == (2, "")
    assert [path.name for path in durable.iterdir()] == ["step_00000007_g1_g"]


async def test_exit_ends_everything_with_the_gangs_code(gang: Gang) -> None:
    await gang.start(2, PYTHON, "-c", WAIT)
    pids = await gang.run(1)
    gang.coordinator.order(Order(duty=DUTY_EXIT, exit_code=5, reason="done"))
    assert [await gang.exit_code(n) for n in gang.nodes] == [5, 5]
    assert not [pid for pid in pids if alive(pid)]


FAMILY = """
    import os, subprocess, sys, time
    sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
    loader = os.fork()
    if loader == 0:
        time.sleep(100)
    stray = subprocess.Popen(sleep, start_new_session=True)
    print(os.getpid(), loader, stray.pid, flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("victim", ["agent", "guard"])
async def test_ranks_and_all_that_they_started_die_with_their_agent(gang: Gang, victim: str) -> None:
    await gang.start(1, PYTHON, gang.script(FAMILY))
    await gang.run(1)
    rank, loader, stray = (int(pid) for pid in await gang.words(0, 1, 3))
    os.kill(gang.agent_pid("n0") if victim == "agent" else gang.agents["n0"].pid, signal.SIGKILL)
    await gone(rank)
    if victim == "agent":
        await gone(loader, stray)
        assert await gang.exit_code("n0") == 128 + signal.SIGKILL
    else:  # nobody may be left to end what the rank had started
        for pid in (loader, stray):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def test_a_warm_process_that_dies_takes_its_rank_along_and_is_replaced(gang: Gang) -> None:
    await gang.start(1, PYTHON, gang.script(FAMILY))
    await gang.run(1)
    pids = [int(pid) for pid in await gang.words(0, 1, 3)]
    agent = gang.agent_pid("n0")
    warm = int(Path(f"/proc/{agent}/task/{agent}/children").read_text().split()[0])
    os.kill(warm, signal.SIGKILL)
    await gang.until(lambda: gang.rank("n0", 1).exit_code == -9)
    gang.fence(1)
    await gang.until(lambda: gang.status("n0").fenced_generation == 1 and gang.status("n0").warm == 1)
    assert not [pid for pid in pids if alive(pid)]
    await gang.run(2)


async def test_sigterm_ends_ranks_that_know_nothing_of_it(gang: Gang) -> None:
    await gang.start(1, PYTHON, "-c", WAIT)
    (pid,) = await gang.run(1)
    gang.agents["n0"].terminate()
    assert await gang.exit_code("n0") == 128 + signal.SIGTERM
    assert not alive(pid)


async def test_sigterm_becomes_the_signal_that_the_spec_names(gang: Gang) -> None:
    """The coordinator is told while the rank saves: an agent without ranks waits for nobody."""
    stops = """
        import os, signal, time
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        print(os.getpid(), flush=True)
        signal.sigwait({signal.SIGUSR1})
        while not os.path.exists("told"):
            time.sleep(0.01)
        print("saved", flush=True)
    """
    await gang.start(1, PYTHON, gang.script(stops), stop_signal=signal.SIGUSR1)
    await gang.run(1)
    gang.agents["n0"].terminate()
    await gang.until(lambda: "SIGTERM" in gang.status("n0").failure)
    (gang.folder / "told").touch()
    assert await gang.exit_code("n0") == 128 + signal.SIGTERM
    assert gang.log(0, 1).read_text().split()[1:] == ["saved"]


async def test_after_sigterm_an_agent_does_as_the_coordinator_says(gang: Gang) -> None:
    stops = """
        import os, signal, sys, time
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(print("saved", flush=True)))
        print(os.getpid(), flush=True)
        time.sleep(100)
    """
    gang.notice_s = 60
    await gang.start(1, PYTHON, gang.script(stops), stop_signal=signal.SIGUSR1)
    await gang.run(1)
    gang.agents["n0"].terminate()
    await gang.until(lambda: gang.status("n0").notice != "")
    assert gang.rank("n0", 1).phase == RANK_PHASE_RUNNING
    order = gang.run_order(1)
    order.stop = "the time limit is near"
    gang.coordinator.order(order)
    await gang.until(lambda: gang.rank("n0", 1).phase == RANK_PHASE_EXITED)
    assert gang.log(0, 1).read_text().split()[1:] == ["saved"]
    gang.coordinator.order(Order(duty=DUTY_EXIT, exit_code=98), "n0")
    assert await gang.exit_code("n0") == 98


async def test_training_does_not_stop_without_a_coordinator(gang: Gang) -> None:
    await gang.start(2, PYTHON, "-c", WAIT)
    pids = await gang.run(1)
    port = int(gang.address.rpartition(":")[2])
    await gang.coordinator.stop()
    other = ScriptedCoordinator(SecretCredentials(gang.folder / "secret"))
    await other.start(port)
    other.term = 2
    before, gang.coordinator = gang.coordinator, other
    await gang.until(lambda: len(other.agents) == 2 and gang.all(lambda n: gang.status(n).warm == 1))
    assert all(alive(pid) for pid in pids)
    for node in gang.nodes:
        assert gang.rank(node, 1).phase == RANK_PHASE_RUNNING
        assert other.agents[node].hello.incarnation == before.agents[node].hello.incarnation


async def test_a_dead_watched_peer_is_accused_at_once_and_to_a_coordinator_that_comes_later(gang: Gang) -> None:
    await gang.start(3, PYTHON, "-c", WAIT)
    await gang.run(1)
    await gang.until(lambda: gang.all(lambda n: len(gang.status(n).heard_ms) == 1))
    os.kill(gang.agent_pid("n1"), signal.SIGKILL)
    await gang.until(lambda: bool(gang.said("n0", "accusation")))
    accusation = gang.said("n0", "accusation")[0].accusation
    assert (accusation.node, accusation.silence, accusation.generation) == ("n1", SILENCE_CLOSED, 1)
    assert accusation.silent_ms < 1200
    port = int(gang.address.rpartition(":")[2])
    await gang.coordinator.stop()
    os.kill(gang.agent_pid("n0"), signal.SIGKILL)  # n2 watches it
    await gang.exit_code("n0")
    gang.coordinator = ScriptedCoordinator(SecretCredentials(gang.folder / "secret"))
    await gang.coordinator.start(port)
    await gang.until(lambda: "n2" in gang.coordinator.agents and bool(gang.said("n2", "accusation")))
    accusation = gang.said("n2", "accusation")[0].accusation
    assert (accusation.node, accusation.silence) == ("n0", SILENCE_CLOSED)


async def test_a_mute_watched_peer_is_accused_and_probes_tell_how_it_is_mute(gang: Gang) -> None:
    await gang.start(3, PYTHON, "-c", WAIT)
    await gang.run(1)
    mute = gang.agent_pid("n1")
    os.kill(mute, signal.SIGSTOP)
    try:
        await gang.until(lambda: bool(gang.said("n0", "accusation")))
        accusation = gang.said("n0", "accusation")[0].accusation
        assert (accusation.node, accusation.silence) == ("n1", SILENCE_NO_ANSWER)
        assert accusation.silent_ms >= 1200
        for number, node in enumerate(("n1", "n2")):
            address = gang.coordinator.agents[node].hello.peer_address
            gang.coordinator.probe("n0", ProbeOrder(probe_id=number, node=node, peer_address=address, deadline_ms=400))
        await gang.until(lambda: len(gang.said("n0", "probe_result")) == 2)
    finally:
        os.kill(mute, signal.SIGCONT)
    results = {m.probe_result.probe_id: m.probe_result for m in gang.said("n0", "probe_result")}
    assert (results[0].answered, results[0].silence) == (False, SILENCE_KERNEL_ONLY)
    assert results[1].answered


async def test_a_probe_of_a_closed_door(gang: Gang) -> None:
    await gang.start(1, PYTHON, "-c", WAIT)
    gang.coordinator.probe("n0", ProbeOrder(probe_id=7, node="x", peer_address="127.0.0.1:1", deadline_ms=2000))
    await gang.until(lambda: bool(gang.said("n0", "probe_result")))
    result = gang.said("n0", "probe_result")[0].probe_result
    assert (result.probe_id, result.answered, result.silence) == (7, False, SILENCE_CLOSED)


async def test_a_lonely_agent_keeps_its_ranks_until_the_coordinator_is_silent_too(gang: Gang) -> None:
    await gang.start(3, PYTHON, "-c", WAIT)
    pids = await gang.run(1)
    await gang.until(lambda: gang.all(lambda n: len(gang.status(n).heard_ms) == 1))
    others = [gang.agent_pid(node) for node in ("n1", "n2")]
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    try:
        await gang.until(lambda: len(gang.said("n0", "accusation")) > 1)
        assert gang.said("n0", "accusation")[-1].accusation.silent_ms > 2000
        assert alive(pids[0])
        gang.coordinator.ignore_pings = True
        await gone(pids[0])
        assert all(alive(pid) for pid in pids[1:])
        await gang.until(lambda: gang.status("n0").fenced_generation == 1)
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)


async def test_an_outcast_ends_its_ranks(gang: Gang) -> None:
    await gang.start(2, PYTHON, "-c", WAIT)
    pids = await gang.run(1)
    await gang.until(lambda: gang.all(lambda n: len(gang.status(n).heard_ms) == 1))
    # n1 is not told, but pings n0, whose order knows it no more.
    gang.fence(1, without=("n1",))
    await gone(pids[1])
    await gang.until(lambda: gang.status("n1").fenced_generation == 1)


async def test_what_a_node_lacks_is_told_before_any_order(gang: Gang) -> None:
    """With the node check that the job wants: the node has failed none."""
    gang.launch("n0", PYTHON, "-c", WAIT, run_dir="/nowhere/run", preflight=True)
    words = "run_dir = '/nowhere/run' does not exist: name a folder that all nodes share"
    await gang.until(lambda: words in gang.status("n0").failure)
    assert not gang.status("n0").HasField("node_check")


async def test_what_no_order_can_mend_is_told(gang: Gang) -> None:
    words = "no space is left for logs in /sys"
    gang.launch("n0", PYTHON, "-c", WAIT, run_dir="/sys")
    await gang.until(lambda: "n0" in gang.coordinator.agents)
    gang.fence(0)
    gang.coordinator.order(gang.run_order(1))
    await gang.until(lambda: words in gang.status("n0").failure)
    await gang.until(lambda: gang.rank("n0", 1).phase == RANK_PHASE_EXITED)
    assert words in gang.rank("n0", 1).stderr_tail


async def test_a_dismissed_agent_leaves(gang: Gang) -> None:
    await gang.start(1, PYTHON, "-c", WAIT)
    gang.coordinator.dismiss("n0", "this job was requeued since")
    assert await gang.exit_code("n0") == 0
    assert "requeued since" in (gang.folder / "n0.err").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--spec", '{"command":["x"],"runDir":"/","ranksPerNode":1}'], 64, "--gang (or MUSTER_GANG) must name"),
        (
            ["--gang", "../g", "--spec", '{"command":["x"],"runDir":"/","ranksPerNode":1}'],
            64,
            "'../g' is not the id of a gang",
        ),
        (
            ["--gang", "g", "--spec", '{"command":["x"],"runDir":"/","ranksPerNode":1}', "--auth", "secret:/no/file"],
            78,
            "the secret file can't be read",
        ),
    ],
)
def test_a_wrong_start_says_what_would_be_right(arguments: list[str], code: int, words: str) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    argv = [PYTHON, "-m", "muster.daemon.agent", "run", "--coordinator", "127.0.0.1:1", *arguments]
    found = subprocess.run(argv, capture_output=True, text=True, env=clean, timeout=60, check=False)
    assert (found.returncode, words in found.stderr) == (code, True), found.stderr


async def test_spares_of_a_script_import_once_ranks_start(gang: Gang) -> None:
    """Its own nodes import at once. They may read the same file system."""
    for node in ("n1", "n0"):
        gang.launch(node, PYTHON, "-c", WAIT, own_nodes=["n0"], ranks_of_srun=True)
        await gang.until(lambda: node in gang.coordinator.agents)  # noqa: B023 - it is awaited here
    await gang.until(lambda: gang.status("n0").warm == 1)
    assert gang.status("n1").warm == 0
    gang.coordinator.order(Order(duty=DUTY_HOLD, generation=1, members=gang.members()), "n1")
    await gang.until(lambda: gang.status("n1").warm == 1)
