"""Facts in words: one line for each fact, as the log and `muster events` show it. Pure.

A line says who did what to which node, job or generation, and why, in the words of Slurm and PyTorch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from muster.checkpoint.format.folder_names import parse_path
from muster.daemon.coordinator.core.losses.loss_rule import LossResponse
from muster.daemon.coordinator.core.losses.loss_watch import LossKind
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import Version
from muster.wording import counted

_VERBS: dict[facts.SlurmVerb, str] = {
    "drain": "drain {node}",
    "down": "drain {node} and set it DOWN",
    "resume": "resume {node}, if its drain still has this reason",
    "let_go": "remove {node} from job {job}",
    "requeue": "requeue job {job}",
    "admit": "allow job {job} to start on more nodes",
    "requeue_off": "clear the requeue flag of job {job}",
    "complete": "complete job {job} with exit code {exit_code}",
    "cancel": "cancel job {job}",
}

_DOMAINS = {
    "nvlink": ("NVLink domain", "NVLink domains"),
    "leaf": ("leaf", "leaves"),
    "pod": ("pod", "pods"),
    "any": ("larger domain", "larger domains"),
}


def describe(fact: facts.Fact) -> str:
    """One line: what the coordinator decided with `fact`, and why."""
    match fact:
        case (
            facts.NodeRegistered()
            | facts.NodeJudged()
            | facts.MemberJoined()
            | facts.MemberRemoved()
            | facts.NewcomerKnown()
            | facts.CorrelatedFaultSuspected()
            | facts.CorrelatedFaultResolved()
            | facts.NodeDrainRequested()
            | facts.NodeDrainEnded()
            | facts.PrecursorEnded()
            | facts.NodeChecked()
            | facts.CorruptCopyFound()
        ):
            return _of_node(fact)
        case (
            facts.GenerationFenced()
            | facts.StoreMoved()
            | facts.GenerationStarted()
            | facts.FirstStep()
            | facts.HangDetected()
            | facts.StragglerDetected()
            | facts.ReplicasDisagreed()
            | facts.NotFiniteReported()
            | facts.LossNoted()
            | facts.RolledBack()
            | facts.StateRestored()
        ):
            return _of_generation(fact)
        case facts.SlurmCallOwed() | facts.SlurmCallSettled() | facts.ActionWithheld():
            return _of_slurm(fact)
        case facts.FlushOrdered() | facts.FlushEnded():
            return _of_flush(fact)
        case _:
            return _of_gang(fact)


def version_words(version: Version | None) -> str:
    """ "step 40 (generation 2)"."""
    return f"step {version.step} (generation {version.generation})" if version else "no version"


def call_words(call: facts.SlurmCallOwed) -> str:
    """The call in words: "drain n3"."""
    return _VERBS[call.verb].format(node=call.node, job=call.job, exit_code=call.exit_code)


def loss_words(fact: facts.LossNoted) -> str:
    """ "the loss on n1 has a spike at step 1200: 8.1, usually 2.31"."""
    if fact.kind is LossKind.PLATEAU:
        return f"the loss on {fact.node} is on a plateau at step {fact.step}: {fact.value:.4g}, before {fact.usual:.4g}"
    return f"the loss on {fact.node} has a spike at step {fact.step}: {fact.value:.4g}, usually {fact.usual:.4g}"


def _what_follows(fact: facts.LossNoted | facts.NotFiniteReported) -> str:
    follows = {LossResponse.STOP: "; the job stops", LossResponse.ROLL_BACK: "; the gang goes back"}
    return follows.get(fact.response, "") + (f" ({fact.why})" if fact.why else "")


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _names(nodes: Iterable[str]) -> str:
    return " ".join(nodes) or "none"


def _of_node(
    fact: facts.NodeRegistered
    | facts.NodeJudged
    | facts.MemberJoined
    | facts.MemberRemoved
    | facts.NewcomerKnown
    | facts.CorrelatedFaultSuspected
    | facts.CorrelatedFaultResolved
    | facts.NodeDrainRequested
    | facts.NodeDrainEnded
    | facts.PrecursorEnded
    | facts.NodeChecked
    | facts.CorruptCopyFound,
) -> str:
    match fact:
        case facts.CorruptCopyFound():
            return _of_corrupt_copy(fact)
        case facts.PrecursorEnded():
            return f"a precursor of node {fact.node} has ended{_because(fact.reason)}"
        case facts.NodeDrainRequested():
            return f"{fact.requested_by} drains node {fact.node}{_because(fact.reason)}"
        case facts.NodeDrainEnded():
            return f"node {fact.node} is no longer to be drained{_because(fact.reason)}"
        case facts.NodeChecked():
            by = "musterd checks whether to resume the node: " if fact.request else ""
            return f"the node check of {fact.node}: {by}{fact.check.outcome}{_because(fact.check.reason)}"
        case facts.CorrelatedFaultSuspected():
            reason = _because(fact.reason)
            return f"the loss of a peer may explain a signal of node {fact.node}: waiting for that loss{reason}"
        case facts.CorrelatedFaultResolved():
            if fact.peer:
                return f"the loss of {fact.peer} explains the signal of node {fact.node}"
            return f"no peer was lost: the signal of node {fact.node} is a fault of the node"
        case facts.NodeRegistered():
            return f"musterd on node {fact.node} registered, at {fact.probe_address}"
        case facts.NodeJudged():
            lemon = f"; a lemon: failure {fact.failure} within 30 days" if fact.lemon else ""
            return f"node {fact.node} is {fact.health}{_because(fact.reason)}{lemon}"
        case facts.MemberJoined():
            leaf, host = (f", leaf {fact.leaf}" if fact.leaf else ""), (", batch host" if fact.batch_host else "")
            return f"the agent on {fact.node} joined from job {fact.job}, at {fact.peer_address}{leaf}{host}"
        case facts.NewcomerKnown():
            return f"the node that carries all ranks has heard of {fact.node}"
        case facts.MemberRemoved():
            if fact.left_job:
                return (
                    f"{fact.node} has left the job: the coordinator ends the stream of its agent{_because(fact.reason)}"
                )
            return f"{fact.node} is removed from the gang{_because(fact.reason)}"


def _of_generation(
    fact: facts.GenerationFenced
    | facts.StoreMoved
    | facts.GenerationStarted
    | facts.FirstStep
    | facts.HangDetected
    | facts.StragglerDetected
    | facts.ReplicasDisagreed
    | facts.NotFiniteReported
    | facts.LossNoted
    | facts.RolledBack
    | facts.StateRestored,
) -> str:
    match fact:
        case facts.StateRestored():
            return _of_restore(fact)
        case facts.ReplicasDisagreed():
            return f"{version_words(fact.version)} is void{_because(fact.reason)}"
        case facts.NotFiniteReported():
            where = f"rank {fact.rank} on {fact.node}"
            what = f"{where} reports {fact.words} at step {fact.step} of generation {fact.generation}"
            return what + _what_follows(fact)
        case facts.LossNoted():
            return f"generation {fact.generation}: {loss_words(fact)}{_what_follows(fact)}"
        case facts.RolledBack():
            then = "the batches that led there are skipped"
            return f"the gang goes back to {version_words(fact.version)}, {fact.path}; {then}{_because(fact.reason)}"
        case facts.HangDetected():
            reason = _because(fact.reason)
            return f"the agents write the stack traces of generation {fact.generation} beside its logs{reason}"
        case facts.StragglerDetected():
            lasts = "lasts" if fact.response is not None else "is detected"
            return f"a straggler of generation {fact.generation} {lasts}{_because(fact.reason)}"
        case facts.GenerationFenced(cause=facts.PREFLIGHT_CAUSE):
            return f"preflight: the agent on {fact.store_node} opens the rendezvous store{_because(fact.cause)}"
        case facts.GenerationFenced():
            where = f"at step {fact.step_before}" if fact.step_before else "before its ranks have reported a step"
            fenced = f"generation {fact.generation} is fenced {where}, and its ranks are ended"
            return f"{fenced}{_because(fact.cause)}"
        case facts.StoreMoved():
            return f"the agent on {fact.store_node} opens the rendezvous store instead"
        case facts.FirstStep():
            return f"generation {fact.generation} finished its first step, step {fact.step}"
        case facts.GenerationStarted():
            return _of_start(fact)


def _of_start(fact: facts.GenerationStarted) -> str:
    origin = "at step 0 unless its script names a checkpoint"
    if fact.version:
        origin = f"from memory at {version_words(fact.version)}"
    elif fact.durable_path:
        origin = f"from {fact.durable_path}"
    origin += f", after the batch of step {fact.skip_to_step}" if fact.skip_to_step else ""
    spares = _names(seat.node for seat in fact.spares)
    seats = _names(seat.node for seat in fact.seats)
    action = f", {fact.action}" if fact.action not in ("", "start") else ""
    warning = f"; WARNING: {fact.warning}" if fact.warning else ""
    wider = f"; wider than [placement] asks: {fact.wider_groups}" if fact.wider_groups else ""
    wider += f"; closer than [placement] requires: {fact.close_copies}" if fact.close_copies else ""
    return f"generation {fact.generation} starts {origin}{action}; ranks on {seats}; spares: {spares}{wider}{warning}"


def _of_corrupt_copy(fact: facts.CorruptCopyFound) -> str:
    copy = fact.copy
    which = "" if copy.primary else "the replica of "
    of = f" of {copy.of_pieces}" if copy.of_pieces else ""
    pieces = f"{copy.pieces}{of} pieces" if of else counted(copy.pieces, "piece")
    shard = f"{pieces} of {which}rank {copy.rank}'s shard of {version_words(copy.version)}"
    if copy.from_node:
        return f"corrupt data: {shard} came damaged to node {fact.node} from {copy.from_node}: they are not used"
    return f"corrupt data: {shard} have changed in the memory of node {fact.node}: this copy is used no more"


def _of_restore(fact: facts.StateRestored) -> str:
    if fact.folder:
        name = parse_path(fact.folder)
        whose = f", a checkpoint of gang {name.gang}" if name is not None and name.gang not in ("", fact.gang) else ""
        size = _size(fact.loaded_bytes)
        words = f"generation {fact.generation} has loaded {fact.folder}{whose}: {size} in {fact.seconds:.1f} s"
        return f"{words}; not the newest one, because {fact.damage}" if fact.damage else words
    whole = fact.own_bytes + fact.copied_bytes + fact.fetched_bytes
    parts = [
        f"{_size(size)} {where}"
        for size, where in (
            (fact.own_bytes, "were in the ranks' own memory"),
            (fact.copied_bytes, "in other memory of their nodes"),
            *((size, f"came from {node}") for node, size in fact.fetched),
            (fact.fetched_bytes - sum(size for _, size in fact.fetched), "from further nodes"),
        )
        if size
    ]
    what = f"generation {fact.generation} has its state of {version_words(fact.version)} from memory"
    return f"{what}: {_size(whole)} in {fact.seconds:.1f} s" + (f"; {', '.join(parts)}" if parts else "")


def _size(size: int) -> str:
    if size < 1 << 20:
        return f"{size / (1 << 10):.1f} KiB"
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"


def _of_fabric(fact: facts.FabricNoted) -> str:
    counts = Counter(domain.level for domain in fact.fabric.domains[1:])
    what = ", ".join(f"{count} {_DOMAINS[level][count > 1]}" for level, count in counts.items())
    words = f"the network of the gang's nodes: {what or 'flat'}"
    if fact.changes:
        words = f"the network of the gang's nodes has changed: {'; '.join(fact.changes)}"
    words += f"; wider than [placement] asks now: {fact.wider_groups}" if fact.wider_groups else ""
    return words + "".join(f"; WARNING: {warning}" for warning in fact.warnings)


def _of_slurm(fact: facts.SlurmCallOwed | facts.SlurmCallSettled | facts.ActionWithheld) -> str:
    if isinstance(fact, facts.ActionWithheld):
        what = _VERBS[fact.verb].format(node=fact.node, job="", exit_code="")
        return f"Slurm call withheld: {what}{_because(fact.reason)}"
    if isinstance(fact, facts.SlurmCallSettled):
        return f"Slurm call {fact.call} " + (f"failed: {fact.error}" if fact.error else "succeeded")
    exclude = f", excluding {_names(fact.exclude)}" if fact.exclude else ""
    admit = f", no longer excluding {_names(fact.admit)}" if fact.admit else ""
    return f"Slurm call {fact.call}: {call_words(fact)}{exclude}{admit}{_because(fact.text)}"


def _of_flush(fact: facts.FlushOrdered | facts.FlushEnded) -> str:
    if isinstance(fact, facts.FlushOrdered):
        version = version_words(fact.version)
        return f"flush {fact.serial}: the agents write {version} to durable storage{_because(fact.reason)}"
    if fact.error:
        return f"flush {fact.serial} failed: {fact.error}"
    return f"flush {fact.serial} is complete: {fact.path}"


def _of_gang(fact: facts.Fact) -> str:
    match fact:
        case facts.GangRegistered():
            spec = fact.spec
            size = f"nodes: {spec.nodes}, spares: {spec.spares}, ranks per node: {spec.ranks_per_node}"
            origin = f"; goes on from {spec.resume_from}" if spec.resume_from else ""
            return (
                f"gang {fact.name or fact.gang} is registered: job {fact.job} of uid {fact.owner_uid}; {size}{origin}"
            )
        case facts.PhaseChanged():
            return f"the gang is {fact.phase}{_because(fact.reason)}"
        case facts.GangEnded():
            return f"the gang is {fact.phase}, exit code {fact.exit_code}{_because(fact.reason)}"
        case facts.GangShrunk():
            return f"the gang shrinks to {counted(fact.nodes, 'node')}{_because(fact.reason)}"
        case facts.StopPlanned():
            then = f"the ranks finish a step and exit, then the gang is {fact.next_phase}"
            return f"planned stop{_because(fact.reason)}; {then}"
        case facts.SwapPlanned():
            then = f"the ranks finish a step and exit, then a spare takes the seat of {fact.node}"
            return f"planned swap{_because(fact.reason)}; {then}"
        case facts.GrowthPlanned():
            then = f"the ranks finish a step and exit, then ranks run on {counted(fact.nodes, 'node')}"
            return f"the gang {fact.reason}; {then}"
        case facts.JobRestarted():
            return f"Slurm has restarted job {fact.job} (restart {fact.restart_count})"
        case facts.JobChanged():
            return f"Slurm reports the nodes of the job: {_names(fact.nodes)}"
        case facts.JobEnded():
            return f"Slurm reports the job as {fact.state}"
        case facts.PoolNodeRequested():
            what = f"{fact.wanted_node}, which is repaired" if fact.wanted_node else "a node of the shared pool"
            return (
                f"request {fact.serial}: the agent on {fact.requesting_node} submits a job "
                f"for {what} ({' '.join(fact.options)})"
            )
        case facts.PoolJobQueued():
            return f"request {fact.serial} for a node is queued as job {fact.job}"
        case facts.PoolRequestClosed():
            return f"request {fact.serial} for a node has ended{_because(fact.reason)}"
        case facts.FabricNoted():
            return _of_fabric(fact)
        case facts.LaunchUnsupervised():
            return f"not supervised: {fact.words}"
        case facts.GangForgotten():
            return "the coordinator forgets the gang; the journal keeps its history"
        case _:
            return facts.encode(fact)[1]
