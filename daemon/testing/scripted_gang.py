"""Real agents as processes of this machine, with a scripted coordinator: for tests and benchmarks."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from muster.daemon.host import rank_log_files
from muster.daemon.testing.scripted_coordinator import ScriptedCoordinator
from muster.daemon.transport.identity import SecretCredentials
from muster.v1.agent_pb2 import AgentMessage, AgentStatus, Duty, Order, RankPhase, RankPlace, RankStatus
from muster.v1.common_pb2 import Member

_WAIT_TIMEOUT_S = 120.0
# Importing torch takes long on a machine with few, busy cores.
_ZYGOTE_TIMEOUT_S = 300.0


@asynccontextmanager
async def scripted_gang(folder: Path, preload: tuple[str, ...] = ("random",)) -> AsyncIterator[Gang]:
    """Yield a gang without agents, working in `folder`; end all its agents afterwards."""
    coordinator = ScriptedCoordinator(SecretCredentials.create(folder / "secret"))
    gang = Gang(folder, coordinator, await coordinator.start(), preload)
    try:
        yield gang
    finally:
        for agent in gang.agents.values():
            agent.terminate()
        for agent in gang.agents.values():
            await asyncio.to_thread(agent.wait)
        await gang.coordinator.stop()


@dataclass
class Gang:
    """Agents on nodes n0, n1, ... of this machine, with rank i on node i."""

    folder: Path
    coordinator: ScriptedCoordinator
    address: str
    preload: tuple[str, ...] = ("random",)
    notice_s: float = 0.0
    """Seconds for which agents wait for an order after SIGTERM."""
    memory: str = ""
    """The socket of kept memory; empty: none."""
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    async def start(self, size: int, *command: str, **spec: object) -> None:
        """Start `size` agents and wait until their zygotes are ready."""
        for node in (f"n{i}" for i in range(size)):
            self.launch(node, *command, **spec)
        await self.coordinator.until(
            lambda: len(self.coordinator.agents) == size and self.all(lambda n: self.status(n).warm == 1),
            _ZYGOTE_TIMEOUT_S,
        )

    def launch(self, node: str, *command: str, **spec: object) -> None:
        """Start one agent; its messages go to FOLDER/NODE.err."""
        folder = str(self.folder)
        self._launch(node, (), {"command": command, "ranks_per_node": 1, "work_dir": folder, **spec})

    def launch_task(self, node: str, *words: str, **spec: object) -> None:
        """Start one agent with the command of a user's own launcher; it writes to FOLDER/NODE.out and NODE.err."""
        self._launch(node, ("--", *words), spec)

    def _launch(self, node: str, words: tuple[str, ...], spec: Mapping[str, object]) -> None:
        text = json.dumps({"run_dir": str(self.folder), "preload": self.preload, **spec})
        argv = [sys.executable, "-m", "muster.daemon.agent", "run", "--gang", "g", "--node", node, "--spec", text]
        argv += ["--coordinator", self.address, "--auth", f"secret:{self.folder}/secret", "--log-level", "debug"]
        argv += [f"--notice={self.notice_s}", f"--memory={self.memory}"]
        with (self.folder / f"{node}.err").open("ab") as errors, (self.folder / f"{node}.out").open("ab") as output:
            self.agents[node] = subprocess.Popen([*argv, *words], stdout=output, stderr=errors, cwd=self.folder)

    @property
    def nodes(self) -> list[str]:
        """The nodes whose agents were started."""
        return sorted(self.agents)

    def all(self, holds: Callable[[str], bool]) -> bool:
        """Whether `holds` is true for every node."""
        return all(holds(node) for node in self.nodes)

    def status(self, node: str) -> AgentStatus:
        """The newest status of `node`."""
        return self.coordinator.status(node)

    async def until(self, what: Callable[[], bool]) -> None:
        """Wait until `what` holds; TimeoutError, with the ends of the agents' messages, if it takes too long."""
        try:
            await self.coordinator.until(what)
        except TimeoutError as error:
            for node in self.nodes:
                error.add_note(f"the agent on {node}:\n{(self.folder / f'{node}.err').read_text()[-1000:]}")
            raise

    def members(self, *without: str) -> list[Member]:
        """The members except `without`. Each has the next one as its watched peer."""
        nodes = [node for node in self.nodes if node not in without]
        return [
            Member(
                node=node,
                peer_address=self.coordinator.agents[node].hello.peer_address,
                group_rank=i,
                neighbours=[nodes[(i + 1) % len(nodes)]] if len(nodes) > 1 else [],
            )
            for i, node in enumerate(nodes)
        ]

    def fence(self, generation: int, without: tuple[str, ...] = ()) -> None:
        """Order FENCE; the first member opens the store."""
        members = self.members(*without)
        order = Order(duty=Duty.DUTY_FENCE, generation=generation, members=members, store_node=members[0].node)
        self.coordinator.order(order, *(m.node for m in members))

    def run_order(self, generation: int, without: tuple[str, ...] = ()) -> Order:
        """The order RUN with the store that the first member has reported."""
        members = self.members(*without)
        return Order(
            duty=Duty.DUTY_RUN,
            generation=generation,
            members=members,
            world_size=len(members),
            places=[RankPlace(rank=i, node=m.node) for i, m in enumerate(members)],
            master_addr="127.0.0.1",
            master_port=self.status(members[0].node).store_port,
        )

    async def run(self, generation: int = 1) -> list[int]:
        """Fence, run, and wait until the ranks run. Return their pids, as the ranks print them."""
        self.fence(generation - 1)
        await self.until(lambda: self.status("n0").store_generation == generation)
        self.coordinator.order(self.run_order(generation))
        await self.until(lambda: self.all(lambda n: self.rank(n, generation).phase == RankPhase.RANK_PHASE_RUNNING))
        return [int((await self.words(i, generation))[0]) for i in range(len(self.nodes))]

    def rank(self, node: str, generation: int) -> RankStatus:
        """The rank of `node` in this generation; an empty status before it is reported."""
        found = [rank for rank in self.status(node).ranks if rank.generation == generation]
        return found[0] if found else RankStatus()

    def log(self, rank: int, generation: int) -> Path:
        """The rank's log file."""
        return rank_log_files.log_path(str(self.folder), "g", generation, rank)

    def output(self, rank: int, generation: int) -> str:
        """What a rank has printed; empty before it has started."""
        log = self.log(rank, generation)
        return log.read_text() if log.exists() else ""

    async def words(self, rank: int, generation: int, count: int = 1) -> list[str]:
        """The first `count` words of a rank's log, as soon as they are there."""
        async with asyncio.timeout(_WAIT_TIMEOUT_S):
            while len(found := self.output(rank, generation).split()) < count:  # noqa: ASYNC110 - a file tells nobody
                await asyncio.sleep(0.01)
        return found

    def said(self, node: str, kind: str) -> list[AgentMessage]:
        """The messages of one kind that an agent has sent beside its statuses: "accusation", "probe_result"."""
        return [m for m in self.coordinator.agents[node].messages if m.WhichOneof("body") == kind]

    async def exit_code(self, node: str) -> int:
        """The exit code of `muster-agent run` on `node`."""
        async with asyncio.timeout(_WAIT_TIMEOUT_S):
            return await asyncio.to_thread(self.agents[node].wait)

    def agent_pid(self, node: str) -> int:
        """The pid of the agent, which is the guard's only child."""
        guard = self.agents[node].pid
        return int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])

    def script(self, text: str) -> str:
        """Write the ranks' script; return its name."""
        (self.folder / "train.py").write_text(textwrap.dedent(text))
        return "train.py"


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(*pids: int) -> None:
    """Wait until all of these processes have ended.

    Raises:
        TimeoutError: they have not within two minutes.
    """
    async with asyncio.timeout(120):
        while any(alive(pid) for pid in pids):  # noqa: ASYNC110 - strangers' ends are told to nobody
            await asyncio.sleep(0.01)
