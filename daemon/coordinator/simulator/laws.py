"""The invariants of docs/design, checked against the truth of the world at every event.

1. One generation can run, commit and publish: when a generation starts, the ranks of all before are dead.
2. No committed step is lost while its shards stand, none is mixed.
3. No fit node is taken on one witness's word; nobody is LOST while its gang makes progress, HUNG within 3 s.
4. Every gang ends or settles (`end_of_run`); nothing is owed for ever.
5. While many nodes are silent at once nobody is evicted before a minute has passed.
   A hang is found where there is one, and only there: all agents live, no step was made for as long as the job gives,
   the ranks are in no declared phase; and it is found in good time.
6. No more nodes are taken out of service than the site allows; in observe mode nothing is done.
7. A node keeps memory for gangs that come back, or may do so, ten minutes at most, and never beside another job.

And of the coordinator: nothing is done that the journal does not hold, what the journal holds is the ledger.

A rank whose agent or node is stopped can do nothing that counts; it must be gone soon after they go on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from muster.daemon.coordinator.core import facts as f
from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.ends import EXIT_NEVER_GATHERED, EXIT_NO_REQUEUE, EXIT_STOPPED
from muster.daemon.coordinator.core.events import Status, Version
from muster.daemon.coordinator.core.gathering import BATCH_S, IN_VAIN, SPARE_WAIT_S
from muster.daemon.coordinator.core.ledger import Gang, Ledger
from muster.daemon.coordinator.core.requeues import most_silent
from muster.daemon.coordinator.core.states import OUT_OF_SERVICE, WATCHED, Phase, Verdict
from muster.daemon.coordinator.core.turn import GangTurn, Turn
from muster.daemon.coordinator.journal import Journal
from muster.daemon.coordinator.simulator.memory import digest
from muster.daemon.coordinator.simulator.network import COORDINATOR
from muster.daemon.node.custody import Kept
from muster.slurm.client.states import JobState

if TYPE_CHECKING:
    from muster.daemon.coordinator.simulator.agent import Agent, Rank
    from muster.daemon.coordinator.simulator.world import World
    from muster.v1 import agent_pb2 as pb

BLIND_S = 3.0
"""A witness that did not reach a node at some moment of this long may have said so."""
STEADY_S = 6.0
"""Who could be reached for this long is in touch."""
HOLD_S = 60.0
MANY_WINDOW_S = 10.0
AFTER_THAW_S = 0.75
LATE_S = 6.0
PROGRESS_S = 0.35
HUNG_S = 3.0
"""Four seconds of probes find a node hung; a moment of life in between may have escaped them."""
LATE_HANG_S = 8.0
"""A hang is found so long after the end of its allowance at most, where nothing else happens."""
LATE_PHASE_S = 1.5
"""A declared phase is known by then."""
LOOK_AT_SNAPSHOT = 16
"""One snapshot of so many is read back."""

_MUTE = ("its kernel answers, its processes don't", "does not answer")
"""Why a generation is ended for a node whose ranks may live."""

_RUNG_OF_CODE = {
    93: "fail: the software",
    94: "fail: no nodes",
    95: "fail: never gathered",
    96: "fail: an agent's error",
    97: "fail: the last checkpoint",
    98: "stop, then end",
    99: "observed",
}


class Violation(Exception):
    """A law was broken."""


class Laws:
    """What must hold, and the memory that it takes to say whether it does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.journal: list[tuple[float, f.Fact]] = []
        self._phases: dict[str, Phase] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._serials: dict[str, int] = {}
        self._calls = 0
        self._snapshots = 0
        self._committed: dict[str, Version] = {}
        self._durable: dict[str, Version] = {}
        self._blind_since: dict[tuple[str, str], float] = {}
        self._blind_until: dict[tuple[str, str], float] = {}
        self._judged: dict[str, float] = {}
        self._began: dict[str, int] = {}
        self._started: dict[str, int] = {}
        self._late: list[Rank] = []
        self._went_on: dict[str, float] = {}
        self._told: dict[str, tuple[tuple[int, int], float]] = {}
        self._crashes: dict[str, set[int]] = {}
        self._crashed_on: dict[str, int] = {}
        self._taken: list[str] = []
        self._fenced_at: dict[str, float] = {}
        self._out_before: set[tuple[str, str]] = set()
        self._jobs: dict[str, int] = {}
        self._requeued: set[tuple[str, int]] = set()
        self._since = world.schedule.now
        self._left: Ledger | None = None
        self._disturbed_at = world.schedule.now

    def _must(self, holds: object, law: str) -> None:
        if not holds:
            raise Violation(law)

    # -- the journal comes first --

    def written(self, core: Core, facts: Sequence[f.Fact], at: float) -> None:
        """The journal holds these facts from now on."""
        for fact in facts:
            self.journal.append((at, fact))
            self._world.note(fact)
            self._edges(fact)
            if isinstance(fact, f.MemberJoined):
                self._out_before.discard((fact.gang, fact.node))
            self._check(core, fact, at)
        for gang in core.ledger.gangs.values():
            self._serials[gang.id] = gang.serial
        self._calls = max(self._calls, core.ledger.calls)
        self._left = core.ledger

    def ordered(self, gang: Gang, order: pb.Order) -> None:
        """An order goes out."""
        self._must(
            order.serial <= self._serials.get(gang.id, 0), f"{gang.id}: an order goes out before it is journaled"
        )

    def called(self, call: f.SlurmOwed) -> None:
        """Slurm is called."""
        self._must(call.call <= self._calls, f"Slurm call {call.call} is made before it is journaled")

    def crashed(self, ledger: Ledger, written: bool) -> None:
        """The coordinator dies with this ledger; `written`: the journal holds all of it."""
        self._left = ledger if written else None

    def restarted(self, ledger: Ledger, journal: Journal) -> None:
        """A coordinator has taken up the journal."""
        self._since = self._world.schedule.now
        self._must(ledger == journal.load(use_snapshot=False), "the snapshot is not the fold of the journal")
        self._must(self._left is None or ledger == self._left, "the journal lacks what its coordinator knew")

    def snapshot_taken(self, ledger: Ledger, journal: Journal) -> None:
        """The journal holds a new snapshot; some are looked at."""
        self._snapshots += 1
        if self._snapshots % LOOK_AT_SNAPSHOT == 0:
            self._must(journal.load() == ledger, "the snapshot is not the ledger")

    # -- who could see whom --

    def changed(self) -> None:
        """Wires, kernels or processes have changed."""
        world, now = self._world, self._world.schedule.now
        self._disturbed_at = now
        for (gang, node), agent in world.agents.items():
            for src in (COORDINATOR, *world.machines):
                key = (src, gang + node)
                if world.door(src, node, gang) is None and agent.alive:
                    if key in self._blind_since:
                        del self._blind_since[key]
                        self._blind_until[key] = now
                else:
                    self._blind_since.setdefault(key, now)

    def _blind(self, src: str, gang: str, node: str, within_s: float = BLIND_S) -> bool:
        """`src` did not reach the gang's agent on `node` at some moment of late."""
        key = (src, gang + node)
        agent = self._world.agents.get((gang, node))
        if key in self._blind_since or agent is None or not agent.alive:
            return True
        return self._world.schedule.now - self._blind_until.get(key, 0.0) < within_s

    def _silent_since(self, gang: str, node: str) -> float:
        return self._blind_since.get((COORDINATOR, gang + node), self._world.schedule.now)

    # -- facts --

    def _edges(self, fact: f.Fact) -> None:
        match fact:
            case f.GangRegistered():
                self._phases.setdefault(fact.gang, Phase.SUBMITTED)
                self._world.entered(fact.gang, Phase.SUBMITTED)
            case f.PhaseChanged() | f.GangEnded():
                self._move(fact.gang, fact.phase)
            case f.GenerationFenced():
                gathering = self._phases[fact.gang] is Phase.GATHERING
                self._move(fact.gang, Phase.PREFLIGHT if gathering else Phase.RECOVERING)
            case f.GenerationStarted():
                self._move(fact.gang, Phase.STARTING)
                self._world.tally.count("rung", fact.action)
                if fact.version is not None and fact.action in ("start", "requeue"):
                    self._world.tally.count("rung", "resume from memory")
            case f.NodeJudged():
                before = self._verdicts.get(fact.node, Verdict.FIT)
                if fact.verdict in OUT_OF_SERVICE and before not in OUT_OF_SERVICE:
                    self._taken.append(fact.node)
                if before is not fact.verdict:
                    self._world.tally.count("node", f"{before} → {fact.verdict}")
                self._verdicts[fact.node] = fact.verdict
            case f.MemberJoined() if fact.job != self._jobs.setdefault(fact.gang, fact.job):
                self._world.tally.count("rung", "a node of the shared pool")
            case f.PoolClosed() if fact.refused:
                self._world.tally.count("rung", "no node of the shared pool")
            case f.StopPlanned():
                self._world.tally.count("rung", "stop")
            case f.HangFound():
                self._world.tally.count("rung", "end a hang")
            case f.MemberOut() if not fact.proven:
                self._world.tally.count("rung", "doubt a node")
            case f.MemberOut() if "go on elsewhere" in fact.reason:
                self._world.tally.count("rung", "blame a node that was doubted")
            case f.Withheld():
                self._world.tally.count("rung", "withheld")
            case f.SlurmOwed() if fact.verb == "requeue":
                if "batch script" in fact.text:
                    self._world.tally.count("rung", "requeue what nobody starts")
                flushed = self._phases.get(fact.gang) is Phase.DRAINING
                self._world.tally.count("rung", "flush, then requeue" if flushed else "requeue")

    def _move(self, gang: str, to: Phase) -> None:
        before = self._phases[gang]
        if before is not to:
            self._world.tally.count("gang", f"{before} → {to}")
            self._world.entered(gang, to)
        self._phases[gang] = to

    def _check(self, core: Core, fact: f.Fact, at: float) -> None:
        match fact:
            case f.GenerationStarted():
                self._generation_starts(core, fact)
            case f.NodeJudged():
                self._node_judged(core, fact, at)
            case f.HangFound():
                self._hang_found(core, fact, at)
            case f.GenerationFenced():
                self._fenced_at[fact.gang] = at
                self._fenced_for_one(fact, at)
            case f.MemberOut():
                self._out_before.add((fact.gang, fact.node))
                self._member_out(fact)
            case f.SlurmOwed() if fact.verb in ("drain", "down"):
                self._within_limits(fact)
            case f.SlurmOwed() if fact.verb == "requeue" and "batch script" in fact.text:
                self._launcher_given_up(core, fact, at)
            case f.Flushed() if fact.path:
                self._flushed(core.ledger.gangs[fact.gang], fact)
            case f.JobRestarted():
                self._committed.pop(fact.gang, None)
            case f.MemberJoined() if fact.job != core.ledger.gangs[fact.gang].job:
                self._from_the_pool(core.ledger.gangs[fact.gang], fact)
            case f.PhaseChanged() if fact.phase is Phase.REQUEUED:
                self._requeued.add((fact.gang, core.ledger.gangs[fact.gang].restart_count))
                self._saved(core.ledger.gangs[fact.gang])
            case f.GangEnded():
                if fact.exit_code == EXIT_STOPPED:
                    self._saved(core.ledger.gangs[fact.gang])
                if fact.exit_code == EXIT_NO_REQUEUE:
                    self._software_failed(core.ledger.gangs[fact.gang])
                if fact.exit_code == EXIT_NEVER_GATHERED:
                    self._somebody_launched(core.ledger.gangs[fact.gang])
                self._world.tally.count("rung", _RUNG_OF_CODE.get(fact.exit_code, fact.phase))
            case _:
                pass

    # -- 1: generations --

    def _able(self, gang: str) -> list[Rank]:
        agents = [agent for (id, _), agent in self._world.agents.items() if id == gang]
        ranks = [rank for agent in agents if not agent.stopped for rank in agent.ranks.values() if rank.able]
        return [rank for rank in ranks if rank not in self._late] if self._late else ranks

    def _generation_starts(self, core: Core, fact: f.GenerationStarted) -> None:
        observed = self._world.limits.observe and fact.action not in ("start", "requeue")
        self._must(not observed, f"law 6: generation {fact.generation} starts in observe mode")
        for rank in self._able(fact.gang):
            self._must(
                rank.generation >= fact.generation,
                f"law 1: generation {fact.generation} starts while rank {rank.rank} of generation {rank.generation} "
                f"lives on {rank.agent.node}",
            )
        for source in fact.sources:
            right = digest(source.rank, fact.version) if fact.version else ""
            self._must(source.digest == right, f"law 2: {fact.version} shall come from {source}")
        self._must(
            fact.master_node in {seat.node for seat in fact.seats},
            f"law 4: the store of generation {fact.generation} is on {fact.master_node}, which carries no ranks",
        )
        first = min(fact.seats, key=lambda seat: seat.group_rank).node
        self._must(
            not self._world.reserves or fact.master_node == first,
            f"law 4: rank 0 of generation {fact.generation} is on {first}, and its store on {fact.master_node}",
        )
        self._no_fewer_than_must_be(core.ledger.gangs[fact.gang], fact)
        self._state_kept(core, fact)

    def _from_the_pool(self, gang: Gang, fact: f.MemberJoined) -> None:
        """No more nodes than the job may have, and each asked for."""
        joined = [member for member in gang.present() if member.job != gang.job]
        self._must(
            len(joined) <= gang.spec.pool_nodes and any(request.job == fact.job for request in gang.pool.values()),
            f"law 6: {fact.node} joins from the pool as number {len(joined)} of {gang.spec.pool_nodes}",
        )

    def _no_fewer_than_must_be(self, gang: Gang, fact: f.GenerationStarted) -> None:
        """Nobody waits while a seat stays empty, and no fewer nodes train than the job asks for."""
        count = len(fact.seats)
        self._must(
            gang.spec.fewest <= count <= gang.spec.nodes and (count == gang.spec.nodes or not fact.spares),
            f"law 4: generation {fact.generation} starts on {count} nodes and leaves {len(fact.spares)} waiting",
        )

    def started(self, gang: str, rank: Rank) -> None:
        """A rank's process was started."""
        self._must(
            rank.generation > rank.agent.fenced,
            f"law 1: rank {rank.rank} of generation {rank.generation} starts on {rank.agent.node}, which has fenced it",
        )
        if rank.generation < self._started.get(gang, 0):
            # An order that waited in a stopped process or a cut wire. It joins nobody; others tell the agent.
            self._late.append(rank)
            self._world.schedule.later(LATE_S, self._gone, rank.agent.node)
            return
        self._started[gang] = rank.generation
        for other in self._able(gang):
            self._must(
                other.generation == rank.generation,
                f"law 1: ranks of generations {other.generation} (on {other.agent.node}) and {rank.generation} "
                f"(on {rank.agent.node}) run at once",
            )

    def joined(self, gang: str, generation: int, nodes: Collection[str]) -> None:
        """All ranks of a generation, which are on these nodes, have met."""
        began, went_on = self._began.get(gang, 0), max(self._went_on.get(node, -LATE_S) for node in nodes)
        if generation < began and len(nodes) == 1 and self._world.schedule.now - went_on < AFTER_THAW_S:
            return  # on a single node ranks need nobody; who was stopped is ended before long
        self._must(generation >= began, f"law 1: generation {generation} joins after a newer one")
        self._began[gang] = generation

    def goes_on(self, node: str) -> None:
        """What was stopped on `node` runs again: ranks of older generations must be gone soon."""
        self._went_on[node] = self._world.schedule.now
        self._world.schedule.later(AFTER_THAW_S, self._gone, node)

    def _gone(self, node: str) -> None:
        for (gang, name), agent in self._world.agents.items():
            if name == node and not agent.stopped:
                for rank in agent.ranks.values():
                    self._must(
                        not rank.able or rank.generation >= self._started.get(gang, 0),
                        f"law 1: rank {rank.rank} of generation {rank.generation} still runs on {node}",
                    )

    def committed(self, leader: Agent, order: pb.Order, version: Version) -> None:
        """The leader calls a version committed. What a node that is out tells itself binds nobody."""
        gang = leader.post.gang
        known = self._world.gang(gang)
        if known is not None and leader.node in known.members and known.members[leader.node].out:
            return
        agents = [agent for (id, _), agent in self._world.agents.items() if id == gang]
        if any(agent.post.restarts > leader.post.restarts for agent in agents):
            return  # its run of the job is over, whose memory is freed node by node
        self._must(
            version.generation >= self._began.get(gang, 0),
            f"law 1: generation {version.generation} commits too late",
        )
        for place in order.places:
            copies = [
                node
                for (id, node), agent in self._world.agents.items()
                if id == gang and agent.alive and version in agent.memory.versions(place.rank)
            ]
            wanted = min(2, len({p.node for p in order.places}))
            dead = sum(1 for (id, _), agent in self._world.agents.items() if id == gang and not agent.alive)
            self._must(
                len(copies) + dead >= wanted, f"law 2: {version} is committed, but rank {place.rank} stands on {copies}"
            )
        self._committed[gang] = max(version, self._committed.get(gang, version))

    def crashed_by_itself(self, gang: str, generation: int, node: str, of_reset: bool) -> None:
        """A rank has exited with an error, and nobody had killed it. `of_reset`: its peer had died."""
        self._crashes.setdefault(gang, set()).add(generation)
        self._crashed_on[node] = self._crashed_on.get(node, 0) + (not of_reset)

    def hung_by_itself(self, gang: str, generation: int) -> None:
        """A rank hangs: it may be no node's fault, for it may be slow only."""
        self._crashes.setdefault(gang, set()).add(generation)

    def _hang_found(self, core: Core, fact: f.HangFound, at: float) -> None:
        gang, training = core.ledger.gangs[fact.gang], self._world.newest_training(fact.gang)
        if training is None or training.generation != fact.generation:
            return  # no rank of it was ever started
        idle = at - max(training.last_step_at, training.rest_at, gang.started_at)
        self._must(
            idle >= gang.spec.hang_after_s and (not training.rests or at - training.rest_at < LATE_PHASE_S),
            f"law 3: generation {fact.generation} of {gang.id} is said to hang {idle:.1f} s after it went on",
        )
        for seat in gang.seats:
            silent_s = at - self._blind_since.get((seat.node, gang.id + seat.node), at)
            self._must(
                silent_s < BLIND_S,
                f"law 3: generation {fact.generation} of {gang.id} is said to hang, and the agent on {seat.node} has "
                f"not answered anybody for {silent_s:.1f} s",
            )
        self._found_in_time(core, gang, at - idle, at)

    def _found_in_time(self, core: Core, gang: Gang, since: float, at: float) -> None:
        pace = core.sight.gang(gang.id).pace
        allowed = max(10 * gang.spec.hang_after_s, 20 * pace.median_s, pace.longest_s, 2 * gang.first_step_s)
        late = at - max(since, self._since, self._disturbed_at) - 2**gang.failures * allowed
        self._must(late < LATE_HANG_S, f"law 4: {gang.id} hung for {late:.1f} s more than it was given")

    def _software_failed(self, gang: Gang) -> None:
        crashes = self._crashes.get(gang.id, set())
        self._must(
            len(crashes) >= gang.spec.max_failures,
            f"{gang.id} fails for its software, of which only generations {sorted(crashes)} crashed",
        )

    def _launcher_given_up(self, core: Core, fact: f.SlurmOwed, at: float) -> None:
        """Not too soon, and not only because the nodes' time is over."""
        gang, seen = core.ledger.gangs[fact.gang], core.sight.gang(fact.gang)
        silent_s = at - self._world.jobs.batch_heard_at.get(fact.job, 0.0)
        if "is heard no more" in fact.text:
            self._must(silent_s >= BATCH_S, f"law 3: a batch script is given up that was heard {silent_s:.1f} s ago")
            return
        _, granted_at = seen.granted or (0, 0.0)
        quiet_s = at - max(seen.attached_at, granted_at, core.sight.since)
        heard = seen.batch is not None and seen.batch[:2] == (fact.job, gang.restart_count)
        # While the agent beside it is there, the batch script can't have died with its host.
        there = gang.batch_host is not None and seen.attached(gang.batch_host.node)
        late = heard and not there and silent_s > BATCH_S + LATE_S and quiet_s > SPARE_WAIT_S + LATE_S
        late = late and not most_silent(GangTurn(Turn(core.ledger, core.sight, core.tallies, at), gang))
        self._must(not late, f"law 4: {gang.id} waits {silent_s:.1f} s for agents, and who starts them is not heard")

    def _somebody_launched(self, gang: Gang) -> None:
        job = self._world.jobs.running(gang.id)
        mends = gang.spec.requeue and not self._world.limits.observe and gang.in_vain < IN_VAIN
        self._must(
            not mends or job is None or job.restart_count != gang.restart_count or self._world.jobs.launches(job),
            f"law 4: {gang.id} fails because its nodes don't come, and who would have started them died with its host",
        )

    # -- 2: state --

    def _state_kept(self, core: Core, fact: f.GenerationStarted) -> None:
        gang = core.ledger.gangs[fact.gang]
        committed = self._committed.get(fact.gang)
        durable = self._durable.get(fact.gang)
        best = max((v for v in (durable,) if v), default=None)
        ranks = len(fact.seats) * gang.spec.ranks_per_node
        if committed is not None and self._stands(gang, committed, ranks):
            best = max(committed, best) if best else committed
        chosen = fact.version or (gang.durable_version if fact.durable_path else None)
        self._must(
            best is None or (chosen is not None and chosen >= best),
            f"law 2: generation {fact.generation} starts from {chosen}, though {best} stands",
        )

    def _saved(self, gang: Gang) -> None:
        """A gang that was stopped by plan leaves nothing behind that could have been written."""
        committed, durable = self._committed.get(gang.id), self._durable.get(gang.id)
        failed = gang.flush is not None and gang.flush.error
        if gang.stop is None or not gang.spec.durable_dir or committed is None or failed:
            return
        self._must(
            (durable is not None and durable >= committed)
            or not self._stands(gang, committed, gang.ranks_of(committed)),
            f"law 2: {gang.id} is stopped at {committed}, and only {durable} is durable",
        )

    def _stands(self, gang: Gang, version: Version, ranks: int) -> bool:
        """The shards of the first `ranks` ranks stand where the coordinator has been in touch for a while."""
        world = self._world
        if world.schedule.now - self._since < STEADY_S:
            return False
        held: set[int] = set()
        for node, member in gang.members.items():
            agent = world.agents.get((gang.id, node))
            if agent is None or not agent.awake() or not member.alive or agent.post.incarnation != member.incarnation:
                continue
            if not self._blind(COORDINATOR, gang.id, node, STEADY_S):
                held |= {rank for rank in range(ranks) if version in agent.memory.versions(rank)}
        return len(held) == ranks

    def _flushed(self, gang: Gang, fact: f.Flushed) -> None:
        ranks = gang.ranks_of(gang.flush.version) if gang.flush else 0
        wrong = self._world.flushes.published(gang.id, fact.serial, fact.path, ranks)
        self._must(not wrong, f"law 2: {gang.id}: {wrong}")
        if gang.durable_version is not None:
            self._durable[gang.id] = max(gang.durable_version, self._durable.get(gang.id, gang.durable_version))

    # -- 7: memory between two runs of a job --

    def left(self, agent: Agent) -> None:
        """An agent leaves its shards with its node's daemon."""
        gang = agent.post.gang
        self._must(
            (gang, agent.post.restarts) in self._requeued or agent.failure,
            f"law 7: {agent.node} keeps memory of {gang}, which does not come back",
        )

    def prolog_returned(self, node: str, job: int, kept: Kept[Any] | None) -> None:
        """A job's first process is about to start on a node that keeps this."""
        other = kept.gang if kept is not None and kept.owner.job != job else ""
        self._must(not other, f"law 7: job {job} starts on {node} beside the memory of {other}")

    def kept_at(self, node: str, now: float, kept: Kept[Any] | None) -> None:
        """A node keeps this at this time."""
        late = kept.gang if kept is not None and kept.until <= now else ""
        self._must(not late, f"law 7: {node} still keeps the memory of {late}")

    # -- 3 and 5: verdicts --

    def _node_judged(self, core: Core, fact: f.NodeJudged, at: float) -> None:
        machine = self._world.machines[fact.node]
        if fact.verdict is Verdict.UNFIT:
            stuck = at - 15.0 < machine.stuck_until
            crashes = self._crashed_on.get(fact.node, 0) > 1
            may_be = machine.faulty or stuck or crashes or self._unexplained(core, fact.node)
            self._must(may_be, f"law 3: {fact.node} is called UNFIT, and is not")
            self._not_many_stuck(core, fact, at)
        if fact.verdict not in (Verdict.LOST, Verdict.HUNG):
            return
        watching = (g for g in core.ledger.gangs.values() if fact.node in g.members and g.phase in WATCHED)
        gang = next(watching, None)
        if gang is not None:
            self._witnessed(gang, fact)
            self._no_progress(gang, fact)
            self._not_hasty(gang, fact, at)
            self._not_many(core, gang, fact, at)
        self._judged[fact.node] = at

    def _not_many_stuck(self, core: Core, fact: f.NodeJudged, at: float) -> None:
        """Where ranks on many nodes can't be killed, it is none of these nodes' fault."""
        if "could not be killed" not in fact.reason:
            return
        known, gangs = len(core.ledger.nodes), core.ledger.gangs
        held = max(at - self._fenced_at.get(g.id, at) for g in gangs.values() if fact.node in g.members)
        stuck = {fact.node}
        for (id, node), agent in self._world.agents.items():
            member = id in gangs and node in gangs[id].members and (id, node) not in self._out_before
            reached = agent.awake() and not self._blind(COORDINATOR, id, node)
            if member and reached:
                stuck |= {node for rank in agent.ranks.values() if rank.alive and rank.doomed}
        self._must(
            len(stuck) <= max(2, known // 10) or held >= HOLD_S,
            f"law 5: {fact.node} is called UNFIT after {held:.1f} s, and ranks on {sorted(stuck)} can't be killed",
        )

    def _unexplained(self, core: Core, node: str) -> bool:
        """It echoes a peer's loss that nobody looks for: the peer is out, or not missed, or its gang is not watched."""
        if node not in self._world.echoes:
            return False
        id, dead = self._world.echoes[node]
        gang = core.ledger.gangs[id]
        missed = dead in gang.members and not gang.members[dead].out and dead in core.sight.gang(id).suspected
        return gang.phase not in WATCHED or not missed

    def _witnessed(self, gang: Gang, fact: f.NodeJudged) -> None:
        world, node = self._world, fact.node
        self._must(
            self._blind(COORDINATOR, gang.id, node),
            f"law 3: {node} is called {fact.verdict}, and the coordinator could reach it",
        )
        # Who is out, or never joined, is nobody's witness: nodes go out because they are no longer trusted.
        members = {m.node for m in gang.present()} - {node}
        others = [n for (id, n), a in world.agents.items() if id == gang.id and n in members and a.awake()]
        blind = [n for n in others if self._blind(n, gang.id, node)]
        self._must(
            len(blind) >= min(2, len(others)),
            f"law 3: {node} is called {fact.verdict}; of {others} only {blind} may have found it silent",
        )

    def reported(self, gang: str, status: Status) -> None:
        """The coordinator hears an agent's status."""
        newest = max(((rank.generation, rank.step) for rank in status.ranks if rank.progressed), default=(0, 0))
        if newest > self._told.get(gang, ((0, 0), 0.0))[0]:
            self._told[gang] = (newest, self._world.schedule.now)

    def _no_progress(self, gang: Gang, fact: f.NodeJudged) -> None:
        """Whoever was told of a new step within the shortest round of probes must not call anybody lost who lives."""
        agent = self._world.agents.get((gang.id, fact.node))
        if self._phases[gang.id] is Phase.RECOVERING or agent is None or not agent.alive:
            return  # closed connections prove an end at once, right after a step too
        ago = self._world.schedule.now - self._told.get(gang.id, ((0, 0), 0.0))[1]
        self._must(
            ago > PROGRESS_S, f"law 3: {fact.node} is called {fact.verdict} {ago:.2f} s after a step of its gang"
        )

    def _missed(self, core: Core, gang: Gang, judged: Gang, at: float) -> set[str]:
        """Nodes of a gang that are silent, and that somebody is being asked after."""
        if gang.phase not in WATCHED:
            return set()
        seen = core.sight.gang(gang.id)
        missed = set()
        for node, since in seen.suspected.items():
            member, probe = gang.members.get(node), seen.probes.get(node)
            # Whom this very turn began to suspect, it did not know of when it judged.
            known = since < at and (gang is judged or (probe is not None and probe.asked_at < at))
            if known and member is not None and not member.out and (COORDINATOR, gang.id + node) in self._blind_since:
                missed.add(node)
        return missed

    def _fenced_for_one(self, fact: f.GenerationFenced, at: float) -> None:
        """No generation ends for a node that says nothing, while its ranks train on."""
        training = self._world.newest_training(fact.gang)
        if training is None or training.generation != fact.generation:
            return  # no rank of it was ever started
        told_s = at - self._told.get(fact.gang, ((0, 0), 0.0))[1]  # where one node carries all ranks, nobody else tells
        self._must(
            told_s > min(1.5 * self._world.timing.step(), HOLD_S) or not any(words in fact.cause for words in _MUTE),
            f"law 3: generation {fact.generation} of {fact.gang} is ended {told_s:.1f} s after a step: {fact.cause}",
        )
        idle = at - training.last_step_at
        if "has not reached it" in fact.cause and not training.over:
            self._must(
                idle > BLIND_S and (not training.rests or at - training.rest_at < LATE_PHASE_S),
                f"law 3: generation {fact.generation} of {fact.gang} is ended, and waits for nobody: {fact.cause}",
            )

    def _not_hasty(self, gang: Gang, fact: f.NodeJudged, at: float) -> None:
        mute = at - self._blind_since.get((COORDINATOR, gang.id + fact.node), 0.0)
        self._must(
            fact.verdict is not Verdict.HUNG or mute > HUNG_S,
            f"law 3: {fact.node} is called HUNG after {mute:.2f} s, and its kernel answers",
        )

    def _not_many(self, core: Core, gang: Gang, fact: f.NodeJudged, at: float) -> None:
        lately = {
            n
            for n, when in self._judged.items()
            if at - when < MANY_WINDOW_S and self._verdicts[n] in (Verdict.LOST, Verdict.HUNG)
        }
        suspected = {node for one in core.ledger.gangs.values() for node in self._missed(core, one, gang, at)}
        many = len(lately | suspected | {fact.node})
        held = at - self._silent_since(gang.id, fact.node)
        known = max(len(core.ledger.nodes), len(gang.members))
        self._must(
            many <= max(2, known // 10) or held >= HOLD_S,
            f"law 5: {fact.node} is called {fact.verdict} after {held:.1f} s, and {many} of {known} nodes are silent",
        )

    def _member_out(self, fact: f.MemberOut) -> None:
        agent = self._world.agents.get((fact.gang, fact.node))
        if fact.alive or agent is None:
            return
        ended = "has ended" in fact.reason
        self._must(
            "has not answered anybody" not in fact.reason or self._blind(COORDINATOR, fact.gang, fact.node),
            f"law 3: {fact.node} is out, for it answers nobody, and the coordinator could reach it",
        )
        self._must(
            not ended or not agent.alive or self._blind(COORDINATOR, fact.gang, fact.node),
            f"law 3: the agent on {fact.node} is said to have ended, and lives",
        )

    # -- 6: limits --

    def _within_limits(self, fact: f.SlurmOwed) -> None:
        limits = self._world.limits
        before = {*self._taken[: -self._taken[::-1].index(fact.node) - 1]} - {fact.node}
        self._must(not limits.observe, f"law 6: {fact.node} is taken out of service in observe mode")
        self._must(
            len(before) < limits.nodes_per_hour,
            f"law 6: {fact.node} is taken out of service after {sorted(before)}: {limits.nodes_per_hour} may be",
        )

    # -- 4: the end --

    def end_of_run(self) -> None:
        """Nothing is owed, and the journal is the ledger."""
        coordinator = self._world.coordinator
        self._must(
            coordinator.journal.load(use_snapshot=False) == coordinator.core.ledger, "the journal is not the ledger"
        )
        self._must(not coordinator.core.ledger.owed, f"law 4: Slurm is owed {coordinator.core.ledger.owed}")
        for gang in coordinator.core.ledger.gangs.values():
            self._may_start(gang, coordinator.core.ledger)

    def _may_start(self, gang: Gang, ledger: Ledger) -> None:
        """A job that waits is kept from no node that was put back into service meanwhile."""
        job = self._world.cluster.jobs().get(gang.job)
        if gang.phase is not Phase.REQUEUED or job is None or job.state is not JobState.PENDING:
            return
        nodes = [ledger.node(name) for name in job.excluded]
        back = [node.name for node in nodes if node.verdict is Verdict.FIT and node.judged_at > gang.phase_at]
        self._must(not back, f"law 4: {gang.id} waits, and its job may not start on {back}, which are in service")
