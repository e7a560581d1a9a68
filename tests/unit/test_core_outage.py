"""Many nodes silent at once: no node is evicted before the cause is known, in whichever gangs the nodes are."""

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import AgentStatus, Silence
from muster.daemon.coordinator.core.state.observed_state import MUSTERD
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.turn import ProbeRequest
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario
from muster.simulator.world.slurm_jobs import JobSubmission

NODES = 5


class Fleet:
    """A site of many gangs of five nodes each. Agents and daemons send only what a test has them send."""

    def __init__(self, gangs: int) -> None:
        self.core = Core(DurableState(), 0.0)
        self.now = 0.0
        self.dead: set[str] = set()
        self.mute: set[str] = set()
        """Nodes whose agent does not answer, while their daemon does."""
        self.facts: list[tuple[float, facts.Fact]] = []
        self._asked: list[tuple[float, ProbeRequest, str]] = []
        for number in range(gangs):
            self._train(f"g{number}", number + 1)

    def _train(self, gang: str, job: int) -> None:
        self.say(events.GangSubmitted(gang, job, 1, "", events.GangSpec(NODES, 0), "{}"))
        for node in nodes(gang):
            self.say(events.NodeAttached(node, "boot", "d", f"{node}:7071"))
        for number, node in enumerate(nodes(gang)):
            self.say(events.AgentAttached(gang, node, job, 0, "a", f"{node}:9", number == 0, "", AgentStatus()))
        known = self.core.state.gangs[gang]
        for node in nodes(gang):
            listens = 4000 if known.recovery.next_store_node == node else 0
            self._reports(
                gang, node, AgentStatus(store_port=listens, store_generation=1, order_serial=known.order_serial)
            )
        for seat in known.roster.seats:
            ranks = (events.RankState(seat.group_rank, 1, True, step=1, progressed=True),)
            self._reports(gang, seat.node, AgentStatus(order_serial=known.order_serial, ranks=ranks))
        assert known.phase is Phase.RUNNING

    def _reports(self, gang: str, node: str, status: AgentStatus) -> None:
        self.say(events.AgentReported(gang, node, "a", status))

    def say(self, event: events.Event) -> None:
        outcome = self.core.decide(event, self.now)
        self.facts += [(self.now, fact) for fact in outcome.facts]
        self._asked += [
            (self.now + ask.deadline_s, ask, witness) for ask in outcome.probe_requests for witness in ask.witnesses
        ]

    def run_for(self, seconds: float) -> None:
        """Answer probes: live nodes at once, others after the timeout. The core gets the ticks that it asks for."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            self.say(events.Tick())
            due = [one for one in self._asked if one[0] <= self.now or self._silence(*one[1:]) is None]
            self._asked = [one for one in self._asked if one not in due]
            for _, ask, witness in due:
                self.say(events.ProbeAnswered(ask.gang, ask.probe, witness, ask.node, self._silence(ask, witness)))

    def _silence(self, ask: ProbeRequest, witness: str) -> Silence | None:
        if ask.node in self.dead:
            return Silence.NO_ANSWER
        return Silence.KERNEL_ONLY if ask.node in self.mute and witness != MUSTERD else None

    def fall_silent(self, gang: str, *numbers: int) -> None:
        for number in numbers:
            self.dead.add(nodes(gang)[number])
            self.say(events.PeerAccused(gang, nodes(gang)[0], nodes(gang)[number], Silence.NO_ANSWER))

    def stop_agents(self, gang: str, *numbers: int) -> None:
        """The owner stops the agents on these nodes (SIGSTOP). The nodes and their daemons live."""
        for number in numbers:
            self.mute.add(nodes(gang)[number])
            self.say(events.PeerAccused(gang, nodes(gang)[0], nodes(gang)[number], Silence.NO_ANSWER))

    def lost(self) -> list[str]:
        return [x.node for _, x in self.facts if isinstance(x, facts.NodeJudged) and x.health is NodeHealth.LOST]


def nodes(gang: str) -> list[str]:
    return [f"{gang}n{number}" for number in range(NODES)]


def test_two_silent_nodes_in_each_of_many_gangs_are_not_evicted_for_a_minute() -> None:
    fleet = Fleet(12)
    fleet.now = 3.0
    for number in range(12):
        fleet.fall_silent(f"g{number}", 3, 4)
    fleet.run_for(10.0)
    assert fleet.lost() == []
    fleet.dead.clear()  # the switch is back
    fleet.run_for(5.0)
    assert fleet.lost() == []
    assert all(not fleet.core.observed.gang(f"g{number}").suspected_since for number in range(12))


def test_as_many_nodes_as_fail_by_chance_are_evicted_at_once() -> None:
    fleet = Fleet(8)  # forty nodes: four may
    fleet.now = 3.0
    for number in range(4):
        fleet.fall_silent(f"g{number}", 3)
    fleet.run_for(1.5)
    assert len(fleet.lost()) == 4


def test_after_a_minute_silent_nodes_are_evicted_whatever_the_cause() -> None:
    fleet = Fleet(4)
    fleet.now = 3.0
    for number in range(4):
        fleet.fall_silent(f"g{number}", 4)
    fleet.run_for(59.0)
    assert fleet.lost() == []
    fleet.run_for(4.0)
    assert len(fleet.lost()) == 4


def test_silent_nodes_of_a_requeued_gang_do_not_count() -> None:
    fleet = Fleet(3)
    fleet.now = 3.0
    fleet.fall_silent("g1", 3, 4)
    fleet.say(events.CancelRequested("g1", "a user"))
    fleet.fall_silent("g0", 4)
    fleet.run_for(1.5)
    assert fleet.lost() == ["g0n4"]


def test_agents_that_their_owner_stops_hide_no_loss_in_the_job_of_somebody_else() -> None:
    fleet = Fleet(2)  # ten nodes: two may fall silent by chance
    fleet.now = 3.0
    fleet.stop_agents("g1", 1, 2, 3, 4)
    fleet.run_for(1.0)
    fleet.fall_silent("g0", 4)
    fleet.run_for(3.0)
    assert fleet.lost() == ["g0n4"]


def test_agents_that_are_stopped_again_and_again_hide_no_loss() -> None:
    """Stopped for 4 s and on for 1 s, an agent never loses its place in the gang."""
    fleet = Fleet(2)
    fleet.now = 3.0
    for _ in range(3):
        fleet.stop_agents("g1", 1, 2, 3, 4)
        fleet.run_for(4.0)
        fleet.mute.clear()
        fleet.run_for(1.0)
    assert not any(member.removed for member in fleet.core.state.gangs["g1"].roster.members.values())
    fleet.stop_agents("g1", 1, 2, 3, 4)
    fleet.fall_silent("g0", 4)
    fleet.run_for(3.0)
    assert fleet.lost() == ["g0n4"]


def test_nodes_whose_daemons_were_heard_before_they_fell_silent_count() -> None:
    fleet = Fleet(2)
    fleet.now = 3.0
    fleet.stop_agents("g1", 1, 2, 3, 4)
    fleet.run_for(1.0)  # suspected, and their daemons answer
    fleet.dead.update(nodes("g1")[1:])
    fleet.run_for(2.0)  # no daemon answers the next probe
    fleet.fall_silent("g0", 4)
    fleet.run_for(2.0)
    assert fleet.lost() == []


# -- ranks that can't be killed --


def standing_still(seconds: float, *nodes: str) -> Scenario:
    """Ranks on these nodes, or on all, can't be killed for some seconds, and one of them crashes."""
    world = Scenario(8, 2)
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 6)
    for name in nodes or world.machines:
        world.machines[name].ranks_unkillable_until = world.now + seconds
    world.kill_rank("n2")
    return world


def out_of_service(world: Scenario) -> list[str]:
    return [name for name, node in sorted(world.core.state.nodes.items()) if node.health is not NodeHealth.FIT]


def test_no_node_is_blamed_while_ranks_can_be_killed_nowhere() -> None:
    world = standing_still(30.0)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2, 60.0)
    assert out_of_service(world) == []
    assert world.slurm == []


def test_a_few_nodes_whose_ranks_outlive_the_kill_are_unfit_at_once() -> None:
    world = standing_still(40.0, "n0", "n1")
    world.run_for(13.0)
    assert out_of_service(world) == ["n0", "n1"]


def test_ranks_that_outlive_the_kill_for_a_minute_on_many_nodes_cost_no_node_its_service() -> None:
    world = standing_still(80.0)
    world.run_for(58.0)
    assert world.facts(facts.MemberRemoved) == []
    world.run_for(5.0)
    assert len(world.facts(facts.MemberRemoved)) > 2
    blames_none(world)


def test_a_storage_that_hangs_for_all_nodes_of_a_small_job_costs_none_its_service() -> None:
    world = Scenario(3, 1, idle_nodes=40)
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 6)
    seats = [seat.node for seat in world.gang.roster.seats]
    for name in seats:
        world.machines[name].ranks_unkillable_until = world.now + 80.0
    world.kill_rank(seats[0])
    world.run_for(70.0)
    assert {fact.node for fact in world.facts(facts.MemberRemoved)} == set(seats[1:])
    blames_none(world)


def test_a_job_whose_storage_hangs_keeps_no_bad_node_of_another_job_in_service() -> None:
    world = Scenario(3, 1, idle_nodes=40)
    world.world.submit(JobSubmission("h", events.GangSpec(3, 1)))
    world.run_until(lambda: min(world.core.observed.gang(gang).step_number for gang in ("g", "h")) >= 6)
    stuck = [seat.node for seat in world.gang.roster.seats]
    bad, crashed = [seat.node for seat in world.core.state.gangs["h"].roster.seats][1:]
    for name in (*stuck, bad):
        world.machines[name].ranks_unkillable_until = world.now + 80.0
    world.kill_rank(stuck[0])
    agent = world.world.agents["h", crashed]
    for rank in agent.ranks.values():
        agent.rank_exited(rank, 1, "")
    world.run_for(13.0)
    assert out_of_service(world) == [bad]
    world.run_for(60.0)
    assert out_of_service(world) == [bad]
    withheld = world.facts(facts.ActionWithheld)
    assert {fact.node for fact in withheld} == set(stuck[1:])
    assert all("those on most nodes of this job could not" in fact.reason for fact in withheld)


def blames_none(world: Scenario) -> None:
    """The job has left nodes, none of which is out of service or drained."""
    left = [fact.node for fact in world.facts(facts.MemberRemoved)]
    withheld = world.facts(facts.ActionWithheld)
    assert [fact.node for fact in withheld] == left
    assert all("the nodes share the cause" in fact.reason for fact in withheld)
    assert out_of_service(world) == []
    assert not [call for call in world.slurm if call.verb in ("drain", "down")]
