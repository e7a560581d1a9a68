"""The journal comes first: the coordinator does nothing that the journal does not hold.

A replay of the journal gives the durable state. So what users see of a gang is the same before and after a restart of
the coordinator, or a takeover. What only open streams tell is left out there: it comes again with them. Of a gang
without ranks nobody tells the progress again, so that is compared as well.
"""

from __future__ import annotations

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.services.views import gang_view
from muster.simulator.world.observer import require
from muster.v1 import agent_pb2 as pb
from muster.v1 import api_pb2

SNAPSHOT_SAMPLE_INTERVAL = 16
"""One of this many snapshots is read back."""


class JournalInvariant:
    """What was journaled before the coordinator acts, and what a crashed coordinator leaves to the next one."""

    def __init__(self) -> None:
        self._journaled_serials: dict[str, int] = {}
        self._journaled_calls = 0
        self._snapshots = 0
        self._state_at_crash: DurableState | None = None

    def journaled(self, state: DurableState) -> None:
        """The journal holds every fact behind this durable state."""
        for gang in state.gangs.values():
            self._journaled_serials[gang.id] = gang.order_serial
        self._journaled_calls = max(self._journaled_calls, state.last_call)
        self._state_at_crash = state

    def order_sent(self, gang: Gang, order: pb.Order) -> None:
        """The coordinator sends an order."""
        require(
            order.serial <= self._journaled_serials.get(gang.id, 0),
            f"{gang.id}: an order goes out before it is journaled",
        )

    def slurm_call_started(self, call: facts.SlurmCallOwed) -> None:
        """The coordinator starts a call to Slurm."""
        require(call.call <= self._journaled_calls, f"Slurm call {call.call} is made before it is journaled")

    def coordinator_crashed(self, state: DurableState, written: bool) -> None:
        """The coordinator ends with this durable state. `written`: the journal holds all of it."""
        self._state_at_crash = state if written else None

    def coordinator_restarted(self, state: DurableState, journal: Journal) -> None:
        """A new coordinator has replayed the journal."""
        require(state == journal.load(use_snapshot=False), "the snapshot differs from a replay of the journal")
        require(
            self._state_at_crash is None or state == self._state_at_crash,
            "the journal lacks facts of the crashed coordinator",
        )

    def snapshot_taken(self, state: DurableState, journal: Journal) -> None:
        """The journal holds a new snapshot. Some snapshots are read back."""
        self._snapshots += 1
        if self._snapshots % SNAPSHOT_SAMPLE_INTERVAL == 0:
            require(journal.load() == state, "the snapshot differs from the durable state")

    def run_settled(self, state: DurableState, journal: Journal) -> None:
        """The durable state of the last coordinator is what the next one would start with."""
        require(journal.load(use_snapshot=False) == state, "a replay of the journal differs from the durable state")


class ViewInvariant:
    """The views of all gangs at the crash of a coordinator, and at the start of the next one."""

    def __init__(self) -> None:
        self._before: dict[str, api_pb2.GangView] = {}

    def gang_ended(self, core: Core, id: str) -> None:
        """A gang is over. Its view shows the newest step that was reported of its last generation."""
        gang, (generation, step) = core.state.gangs[id], core.observed.gang(id).last_step
        shown = gang_view(core.state, core.observed, gang, gang.phase_at).step
        require(
            generation != gang.newest.generation or shown >= step,
            f"{id}: step {step} is shown as {shown} after the end",
        )

    def coordinator_crashed(self, core: Core, written: bool) -> None:
        """The coordinator ends. `written`: the journal holds all that it knows."""
        self._before = {gang: _lasting_view(core, gang) for gang in core.state.gangs} if written else {}

    def coordinator_restarted(self, core: Core) -> None:
        """A new coordinator has replayed the journal, and has heard nobody yet."""
        for gang, before in self._before.items():
            after = _lasting_view(core, gang)
            for field, now in ((field, getattr(after, field.name)) for field in before.DESCRIPTOR.fields):
                then = getattr(before, field.name)
                require(then == now, f"{gang}: a restart changes {field.name} from {then!r} to {now!r}")


def _lasting_view(core: Core, id: str) -> api_pb2.GangView:
    """The view without what the streams of nodes, or of a living gang, tell again. Slurm tells its part again, too."""
    gang = core.state.gangs[id]
    view = gang_view(core.state, core.observed, gang, gang.phase_at)
    for node in view.nodes:
        node.CopyFrom(api_pb2.NodeView(node=node.node, role=node.role, leaf=node.leaf, failures=node.failures))
    if not gang.final:
        view.ClearField("waiting_for")
        view.ClearField("ranks")
        view.ClearField("checkpoint")
        view.ClearField("run_started_s")
        view.ClearField("run_ends_s")
        view.ClearField("expected_start_s")
        view.ClearField("stop_s")
        view.ClearField("after_stop")
    if gang.phase in (Phase.STARTING, Phase.RUNNING):
        view.ClearField("step")
        view.ClearField("committed")
        view.ClearField("training")
    return view
