"""A simulated cluster for scripts: one gang, a healthy network, and faults exactly when the script injects them.

Nothing is random, so the same script gives the same transcript. Tests of the core use it in Python; a method that takes
only words is also a command of `script`.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.losses.loss_rule import LossChoice, LossResponse
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.state_tables import Response
from muster.simulator.environment.machine import Machine
from muster.simulator.environment.schedule import Durations
from muster.simulator.invariants.invariants import Invariants
from muster.simulator.world.agent import Agent
from muster.simulator.world.slurm_jobs import JobSubmission
from muster.simulator.world.world import NO_LIMITS, Site, World, make_folder
from muster.slurm.client.states import NodeState

_Fact = TypeVar("_Fact", bound=facts.Fact)
_DURATIONS = Durations(
    step_s=0.2, boot_s=1.0, kill_s=0.02, store_s=0.1, copy_s=0.02, launch_s=0.02, stop_s=2.0, constant=True
)


class Scenario:
    """Gang "g" on nodes n0, n1, ... on two leaves, with one rank for each node. n0 is the batch host.

    Args:
        nodes: nodes that carry ranks.
        spares: further nodes of the job.
        absent: nodes on which no agent starts.
        flush_s: seconds that writing a checkpoint takes.
        time_limit_s: the job's time limit in seconds. None: no limit.
        idle_nodes: further nodes without a job: the site's shared pool.
        limits: what the coordinator may do.
        step_s: seconds that a step takes.
        launch_s: seconds from the job's start until its processes start.
        stop_s: seconds that a rank's process lives on after its last step, if it was asked to stop.
        copy_s: seconds until another node has a shard.
        fabric: what Slurm and the site say of the network. None: the leaf of each node, when its agent attaches.
        packed: where tensor groups shall be: "leaf", "require leaf". Empty: nothing is asked.
        if_worse: what the job does if they are not: "wait", "shrink".
        if_loss_jumps: what the job asks for after a spike: "stop", "roll_back". Empty: nothing.
        sharded: the ranks hold different parts of one state, and not replicas.
        spec: further fields of the GangSpec.
    """

    def __init__(
        self, nodes: int, spares: int, absent: Collection[str] = (), flush_s: float = 0.1,
        time_limit_s: int | None = None, idle_nodes: int = 0, limits: Limits = NO_LIMITS,
        step_s: float = _DURATIONS.step_s, launch_s: float = _DURATIONS.launch_s / 2,
        stop_s: float = _DURATIONS.stop_s / 2, copy_s: float = _DURATIONS.copy_s / 2,
        fabric: events.FabricSeen | None = None, packed: str = "", if_worse: str = "",
        sharded: bool = False, if_loss_jumps: str = "", **spec: object,
    ) -> None:  # fmt: skip
        if packed:
            *required, level = packed.split()
            spec["traffic"] = (events.GroupTraffic("tensor", 10, 1e9, level, bool(required)),)
        if if_loss_jumps:
            spec["loss"] = LossChoice(spike=LossResponse(if_loss_jumps), window=16, margin_steps=5)
        spec["if_worse"] = events.IfWorse(if_worse)
        folder = make_folder("muster-scenario-")
        leaves = [(f"n{i}", f"s{i % 2}") for i in range(nodes + spares + idle_nodes)]
        durations = replace(
            _DURATIONS, flush_s=2 * flush_s, step_s=step_s, launch_s=2 * launch_s, stop_s=2 * stop_s, copy_s=2 * copy_s
        )
        self.world = World(Site(leaves, durations=durations, limits=limits, fabric=fabric), 0, folder, Invariants)
        weakref.finalize(self, _clean, self.world, folder)
        self.world.jobs.unstartable_nodes.update(absent)
        self.world.coordinator_restart_s = 0.0
        self.world.sharded_gangs.update({"g"} if sharded else ())
        self.world.submit(JobSubmission("g", events.GangSpec(nodes, spares, **spec), time_limit_s))  # type: ignore[arg-type]

    # -- what stands --

    @property
    def now(self) -> float:
        """Virtual time in seconds."""
        return self.world.schedule.now

    @property
    def core(self) -> Core:
        """The core of the current coordinator."""
        return self.world.coordinator.core

    @property
    def gang(self) -> Gang:
        """The gang in the durable state."""
        return self.core.state.gangs["g"]

    @property
    def machines(self) -> dict[str, Machine]:
        """The nodes by name."""
        return self.world.machines

    @property
    def journal(self) -> list[tuple[float, facts.Fact]]:
        """Every journaled fact with its time, oldest first."""
        return self.world.observer.journal

    @property
    def slurm(self) -> list[facts.SlurmCallOwed]:
        """Every call that was owed to Slurm, oldest first."""
        return [fact for _, fact in self.journal if isinstance(fact, facts.SlurmCallOwed)]

    def facts(self, kind: type[_Fact]) -> list[_Fact]:
        """Every journaled fact of one kind, oldest first."""
        return [fact for _, fact in self.journal if isinstance(fact, kind)]

    def agent(self, node: str) -> Agent:
        """The newest agent on a node."""
        return self.world.agents["g", node]

    def is_running(self, generation: int) -> bool:
        """Every rank of `generation` was started and is alive."""
        ranks = [rank for seat in self.gang.roster.seats for rank in self.agent(seat.node).ranks.values()]
        return len(ranks) >= self.gang.spec.nodes and all(r.alive and r.generation == generation for r in ranks)

    def replayed_state(self) -> DurableState:
        """The durable state that a replay of the journal gives."""
        return self.world.coordinator.journal.load(use_snapshot=False)

    def transcript(self) -> list[str]:
        """Everything that happened, one line each."""
        return self.world.transcript()

    # -- time --

    def run_until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Let time pass until `condition` holds.

        Raises:
            TimeoutError: `condition` does not hold within `limit_s` seconds of virtual time. The message is the
                transcript.
        """
        schedule = self.world.schedule
        end = schedule.now + limit_s
        while not condition():
            at = schedule.next_time()
            if at is None or at >= end:
                raise TimeoutError("\n".join(self.transcript()))
            schedule.step()

    def run_for(self, seconds: float) -> None:
        """Let this much time pass."""
        end = self.now + seconds
        self.world.run_until(end)

    def post_event(self, event: events.Event) -> None:
        """Give the core an event now."""
        self.world.coordinator.post_event(event)

    def see_fabric(self, fabric: events.FabricSeen) -> None:
        """Slurm and the site say this of the network from now on."""
        self.world.describe_network(fabric)

    # -- faults --

    def restart_coordinator(self) -> None:
        """The coordinator crashes and restarts from its journal. All agents attach again."""
        before = self.world.coordinator
        self.world.crash_coordinator("as the script says")
        self.run_until(lambda: self.world.coordinator is not before)

    def crash(self, node: str) -> None:
        """The node crashes; its kernel closes every connection first."""
        self.world.power_off(node, closes=True)

    def power_off(self, node: str) -> None:
        """The node loses power and closes no connection."""
        self.world.power_off(node, closes=False)

    def pause(self, node: str) -> None:
        """The node's processes stop; its kernel still answers."""
        self.world.set_frozen(node, True)

    def resume(self, node: str) -> None:
        """A paused node resumes."""
        self.world.set_frozen(node, False)

    def repair(self, node: str) -> None:
        """A dead or faulty node is repaired, and an operator resumes it in Slurm."""
        self.machines[node].has_hardware_fault = self.machines[node].has_precursor = False
        if not self.machines[node].powered:
            self.world.boot(node)
        self.world.cluster.resume(node)

    def reboot(self, node: str) -> None:
        """The node boots again, and is repaired. Nobody resumes it in Slurm."""
        machine = self.machines[node]
        machine.has_hardware_fault, machine.check_outcome = False, "passed"
        self.world.power_off(node, closes=True)
        self.world.boot(node)

    def drain_by_hand(self, node: str, reason: str, state: NodeState = NodeState.DRAIN) -> None:
        """An operator sets the node to DRAIN, or to FAIL, in Slurm (scontrol update)."""
        self.world.note(f"an operator sets {node} to {state} in Slurm: {reason}")
        if state is NodeState.FAIL:
            self.world.requested_drains.add(node)
        self.world.cluster.drain(node, reason, state)

    def cut(self, *pairs: tuple[str, str]) -> None:
        """Block messages from the first host to the second host of each pair. "coordinator" is a host, too."""
        for src, dst in pairs:
            self.world.network.cut(src, dst)
        self.world.topology_changed()

    def heal(self, *pairs: tuple[str, str]) -> None:
        """Undo `cut`."""
        for src, dst in pairs:
            self.world.network.heal(src, dst)
        self.world.topology_changed()

    def cut_from_coordinator(self, node: str, seconds: float) -> None:
        """Cut the node off from the coordinator for this time. The node's slurmd still reaches slurmctld."""
        pairs = ((node, "coordinator"), ("coordinator", node))
        self.world.slurmd_connected.add(node)
        self.cut(*pairs)
        self.run_for(seconds)
        self.heal(*pairs)
        self.world.slurmd_connected.discard(node)

    def kill_rank(self, node: str, exit_code: int = 1, delay_s: float = 0.0) -> None:
        """The ranks of a node exit by themselves. Their agent learns of it this many seconds later."""
        agent = self.agent(node)
        for rank in agent.ranks.values():
            if delay_s:
                agent.crash_rank(rank, exit_code, "", delay_s)
            else:
                agent.rank_exited(rank, exit_code, "")

    def hang_rank(self, node: str, how: str = "") -> None:
        """A rank of a node hangs. With "behind" it stays one step behind all other ranks. With "silent" no Python
        thread of it runs."""
        training = self.world.newest_training("g")
        assert training is not None
        rank = next(rank for rank in training.ranks.values() if rank.agent.node == node)
        if how == "silent":
            training.silence_rank(rank)
        else:
            training.hang_rank(rank, how == "behind")

    def show_elsewhere(self, *nodes: str) -> None:
        """The stacks will show the ranks on these nodes in a data loader, and all others in a collective."""
        training = self.world.newest_training("g")
        assert training is not None
        for rank in training.ranks.values():
            waits = rank.agent.node not in nodes
            where = "wait (distributed_c10d.py:720)" if waits else "read (loader.py:33)"
            rank.hang_place = events.HangPlace(waits, where)

    def count_collectives(self, *numbers: int | None) -> None:
        """So many collectives the ranks will have entered, by their numbers."""
        training = self.world.newest_training("g")
        assert training is not None
        for rank, number in enumerate(numbers):
            training.ranks[rank].entered_collectives = number

    def end_silence(self, node: str) -> None:
        """All ranks of a node run Python again."""
        training = self.world.newest_training("g")
        assert training is not None
        for rank in training.ranks.values():
            if rank.agent.node == node:
                training.end_silence(rank)

    def report_idle(self, quarters: int | None, *nodes: str) -> None:
        """From now on, the agents on these nodes report this idleness, and measure none."""
        for node in nodes:
            agent = self.agent(node)
            agent.measures_idleness = False
            for rank in agent.ranks.values():
                rank.idle_quarters = quarters
            agent.status_changed()

    def report_phase(self, node: str, phase: str) -> None:
        """A rank of a node declares a phase. An empty text ends the phase."""
        agent = self.agent(node)
        next(iter(agent.ranks.values())).declared_phase = phase
        agent.status_changed()

    def declared_phase(self, seconds: str) -> None:
        """All ranks are in a declared phase for this many seconds."""
        training = self.world.newest_training("g")
        assert training is not None
        training.declare_phase(float(seconds))

    def kill_agent(self, node: str) -> None:
        """The agent's process ends, and its ranks with it."""
        self.world.end_agent(self.agent(node))

    def relaunch_agents(self, *nodes: str) -> None:
        """srun gives up, which ends its agents. Another srun starts agents on these nodes."""
        before = [self.agent(node) for node in nodes]
        for agent in before:
            self.world.end_agent(agent)
        for agent in before:
            identity = replace(agent.identity, incarnation=f"{agent.identity.incarnation}-again")
            self.world.add_agent(Agent(self.world, agent.machine, identity))

    def spoil_batches(self, first: str, last: str) -> None:
        """From now on, the ranks report their losses, which are high for the batches of these steps."""
        self.world.bad_batches["g"] = range(int(first), int(last) + 1)

    def use_sampler(self) -> None:
        """The script gives its Checkpoint a sampler that can skip batches."""
        self.world.skipping_gangs.add("g")

    def flip_bit(self, node: str) -> None:
        """A bit of the parameters of the newest rank on the node flips."""
        self.world.flip_bit(max(self.agent(node).ranks.values(), key=lambda rank: rank.generation))

    def signal(self, node: str, action: str = "unfit", reason: str = "Xid 79", error: str = "") -> None:
        """The node daemon reports a hardware signal. `error`: of a program, to which it is due."""
        self.machines[node].has_hardware_fault = True
        self.world.daemons[node].report_signal(events.NodeSignalled(node, action, reason, reason, program_error=error))

    def fail_check(self, node: str, outcome: str = "wrong") -> None:
        """A node check that begins later on the node finds this."""
        self.machines[node].check_outcome = outcome

    def precursor(self, node: str, response: str = "swap", reason: str = "Xid 64") -> None:
        """The node daemon reports a precursor, and the policy has this response to it."""
        self.machines[node].has_precursor |= response == Response.SWAP
        signal_event = events.NodeSignalled(node, "degraded", reason, reason, Response(response), signal=reason)
        self.world.daemons[node].report_signal(signal_event)

    def precursor_over(self, node: str, reason: str = "Xid 64") -> None:
        """The node daemon reports that a precursor is over."""
        signal_event = events.NodeSignalled(node, "over", f"{reason}: over", reason, signal=reason)
        self.world.daemons[node].report_signal(signal_event)

    def drain(self, node: str, reason: str = "") -> None:
        """Operator alice requests that the node is drained."""
        self.world.requested_drains.add(node)
        self.post_event(events.DrainRequested(node, "alice", reason))

    def swap(self, node: str, reason: str = "") -> None:
        """User alice requests that a spare takes the place of the node."""
        self.world.requested_swaps.add(("g", node))
        self.post_event(events.SwapRequested("g", node, "alice", reason))

    def sigterm(self, *nodes: str) -> None:
        """Slurm sends SIGTERM to the agents on these nodes. Without nodes: to all agents."""
        for node in nodes or self.machines:
            self.agent(node).receive_sigterm(f"{node} was sent SIGTERM")

    def give_back(self, node: str) -> None:
        """The job's owner gives a node back (scontrol update NodeList=)."""
        self.world.cluster.remove_node(self.gang.slurm.job, node)

    def requeue(self) -> None:
        """An operator requeues the job in Slurm."""
        self.world.cluster.requeue(self.gang.slurm.job, (), None)

    def start_other_job(self, *nodes: str) -> None:
        """Another job starts on these nodes: its prolog has finished."""
        for node in nodes:
            self.world.note(f"another job starts on {node}")
            self.world.kept_memory.job_starts(node, 1 + self.gang.slurm.job)

    def cancel(self) -> None:
        """A user runs `muster cancel`."""
        self.post_event(events.CancelRequested("g", "uid 1000"))

    def scancel(self) -> None:
        """A user runs `scancel`."""
        self.world.cluster.cancel(self.gang.slurm.job)

    def full_storage(self, seconds: str) -> None:
        """Durable storage is full for this many seconds."""
        self.world.durable_storage.fails_until = self.now + float(seconds)

    def finish(self) -> None:
        """Every rank exits with 0: the script has come to its end."""
        self.world.final_steps["g"] = 0
        for seat in self.gang.roster.seats:
            self.kill_rank(seat.node, 0)


def _clean(world: World, folder: Path) -> None:
    world.close()
    shutil.rmtree(folder, ignore_errors=True)
