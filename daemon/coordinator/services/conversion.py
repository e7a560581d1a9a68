"""Conversion of messages of agents and node daemons into the core's events. Pure. A message with impossible values is
an error. `job_specs` converts the specs of jobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.policy.policy import SignalRule, UnfitSignals
from muster.daemon.host.metric_series import can_be_kept
from muster.daemon.host.plain_text import cut, plain
from muster.daemon.transport import job_limits
from muster.daemon.transport.node_hardware import InvalidHardware, report_of
from muster.fabric.sources.node_reports import NodeReport
from muster.slurm.client import names
from muster.v1 import agent_pb2, common_pb2, node_pb2

_SILENCES = {
    agent_pb2.SILENCE_NO_ANSWER: events.Silence.NO_ANSWER,
    agent_pb2.SILENCE_KERNEL_ONLY: events.Silence.KERNEL_ONLY,
    agent_pb2.SILENCE_CLOSED: events.Silence.CLOSED,
}

_CHECK_OUTCOMES = {
    common_pb2.CHECK_OUTCOME_RUNNING: events.CheckOutcome.RUNNING,
    common_pb2.CHECK_OUTCOME_PASSED: events.CheckOutcome.PASSED,
    common_pb2.CHECK_OUTCOME_SLOW: events.CheckOutcome.SLOW,
    common_pb2.CHECK_OUTCOME_WRONG: events.CheckOutcome.WRONG,
    common_pb2.CHECK_OUTCOME_FAILED: events.CheckOutcome.FAILED,
    common_pb2.CHECK_OUTCOME_SILENT: events.CheckOutcome.SILENT,
}


_MAX_ENTRIES = {
    "ranks": job_limits.MAX_RANK_STATUSES,
    "shards": job_limits.MAX_SHARDS_PER_NODE,
    "parities": job_limits.MAX_SHARDS_PER_NODE,
    # During a suspicion, an agent pings all nodes of its gang.
    "heard_ms": job_limits.MAX_NODES,
    "answered_ms": job_limits.MAX_NODES,
    "pool": job_limits.MAX_POOL_ANSWERS,
    "transfers": job_limits.MAX_TRANSFERS,
    "corrupt_copies": job_limits.MAX_CORRUPT_COPIES,
}

_MOST_KEPT_BYTES = 1024
"""Of what a node says of its training, to be kept: some 15 numbers. More would let a user fill the memory."""
_SHORTEST_STEP_S = 1e-9
"""Of a step. A shorter one is none."""


class InvalidMessage(ValueError):
    """The sender's fault: a field has an impossible value. Says which field, and what would be right."""


def silence(value: agent_pb2.Silence.ValueType) -> events.Silence:
    """How a node was silent. A value that this version lacks becomes NO_ANSWER, the one that proves least."""
    return _SILENCES.get(value, events.Silence.NO_ANSWER)


def status(message: agent_pb2.AgentStatus, members: Collection[str]) -> events.AgentStatus:
    """The whole status of an agent. `members`: all nodes that the gang has or had; nothing is kept of other nodes, and
    they cost nothing.

    Raises:
        InvalidMessage: a list has more entries than an agent can have.
    """
    for field, most in _MAX_ENTRIES.items():
        check_count(field, len(getattr(message, field)), most)
    return events.AgentStatus(
        fenced_generation=message.fenced_generation,
        ranks=tuple(map(_rank, message.ranks)),
        shards=tuple(map(_shard, message.shards)),
        combined=tuple(map(_combined, message.parities)),
        committed=_version(message.committed) if message.HasField("committed") else None,
        store_port=message.store_port,
        store_generation=message.store_generation,
        store_reserved=message.store_reserved,
        warm=message.warm,
        heard_s=_seconds(message.heard_ms, members),
        answered_s=_seconds(message.answered_ms, members),
        order_serial=message.order_serial,
        flushed_serial=message.flushed_serial,
        flush_error=_free_text(message.flush_error),
        failure=_free_text(message.failure),
        sigterm_notice=_free_text(message.notice),
        stacks_generation=message.stacks_generation,
        disagreement=_disagreement(message.disagreement) if message.HasField("disagreement") else None,
        node_check=node_check(message.node_check) if message.HasField("node_check") else None,
        no_slots=_free_text(message.no_slots),
        copies_wait=_free_text(message.copies_wait),
        flushed_version=_version(message.flushed_version) if message.HasField("flushed_version") else None,
        snapshot_cost=_snapshot_cost(message.snapshot_cost) if message.HasField("snapshot_cost") else None,
        corrupt_copies=tuple(
            _corrupt_copy(copy) for copy in message.corrupt_copies if not copy.from_node or copy.from_node in members
        ),
        restore=_restore(message.restore, members) if message.HasField("restore") else None,
        flush_progress=_flush_progress(message.flush_progress) if message.HasField("flush_progress") else None,
        training=_training(message.training) if message.HasField("training") else None,
        use=_use(message.use) if message.HasField("use") else None,
        pool=tuple(
            events.PoolAnswer(answer.serial, answer.slurm_job_id, _free_text(answer.error)) for answer in message.pool
        ),
    )


def node_check(message: common_pb2.NodeCheck) -> events.NodeCheck | None:
    """What a node check has found; None if this version lacks the outcome. An impossible rate becomes 0."""
    outcome = _CHECK_OUTCOMES.get(message.outcome)
    if outcome is None:
        return None
    return events.NodeCheck(
        outcome,
        cut(message.reason, job_limits.MAX_CHECK_CHARS),
        cut(message.hardware, job_limits.MAX_CHECK_CHARS),
        _rate(message.gflops),
        _rate(message.memory_gb_s),
        _rate(message.host_to_device_gb_s),
        message.cores_shared,
        cut(message.counters, job_limits.MAX_CHECK_CHARS),
    )


def _rate(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def node_check_message(check: events.NodeCheck) -> common_pb2.NodeCheck:
    """The inverse of `node_check`."""
    outcome = next(number for number, known in _CHECK_OUTCOMES.items() if known is check.outcome)
    return common_pb2.NodeCheck(
        outcome=outcome,
        reason=check.reason,
        hardware=check.hardware,
        gflops=check.gflops,
        memory_gb_s=check.memory_gb_s,
        host_to_device_gb_s=check.host_to_device_gb_s,
        cores_shared=check.cores_shared,
        counters=check.counters,
    )


def check_count(field: str, count: int, most: int) -> None:
    """Check that a list has at most `most` entries.

    Raises:
        InvalidMessage: it has more.
    """
    if count > most:
        raise InvalidMessage(f"{field} has {count} entries: {most} at most")


def check_length(field: str, text: str, maximum: int) -> None:
    """Check that `text` has at most `maximum` characters.

    Raises:
        InvalidMessage: the text is longer.
    """
    if len(text) > maximum:
        raise InvalidMessage(f"{field} has {len(text)} characters: {maximum} at most")


def check_name(check: Callable[[str], str], name: str) -> str:
    """`name`, after `check`: one of the functions of slurm/client/names.py.

    Raises:
        InvalidMessage: it is no such name.
    """
    try:
        return check(name)
    except names.InvalidName as error:
        raise InvalidMessage(str(error)) from None


def signal(message: node_pb2.Signal) -> node_pb2.Signal:
    """The signal with its texts cut and plain. The kernel quotes texts of users in its lines."""
    return node_pb2.Signal(
        kind=cut(message.kind, job_limits.MAX_NAME_CHARS),
        code=message.code,
        device=cut(message.device, job_limits.MAX_NAME_CHARS),
        text=cut(message.text, job_limits.MAX_SIGNAL_CHARS),
        observed_s=message.observed_s,
    )


def node_report(message: common_pb2.Hardware) -> NodeReport:
    """What a node has, as its daemon reports it.

    Raises:
        InvalidMessage: no node has that.
    """
    try:
        return _shared(report_of(message))
    except InvalidHardware as error:
        raise InvalidMessage(f"hardware: {error}") from None


@lru_cache(maxsize=1024)
def _shared(report: NodeReport) -> NodeReport:
    """One object for equal reports: a site has thousands of nodes, and few kinds of them."""
    return report


def signal_rule(rule: SignalRule) -> node_pb2.SignalRule:
    """The message of a rule of the policy."""
    return node_pb2.SignalRule(
        kind=rule.kind,
        code=rule.code,
        share=rule.share,
        window_s=rule.window_s,
        clear_share=rule.clear_share,
        clear_s=rule.clear_s,
        count=rule.count,
    )


def unfit_signals(signals: UnfitSignals) -> node_pb2.UnfitSignals:
    """The message of signals that the policy calls unfit."""
    return node_pb2.UnfitSignals(kind=signals.kind, codes=signals.codes, all_but=signals.all_but)


def _free_text(text: str) -> str:
    """A text of an agent as the journal keeps it with each decision."""
    return cut(text, job_limits.MAX_TEXT_CHARS)


def _tail(text: str) -> str:
    """The end of a rank's stderr, with its lines."""
    shown = text[-job_limits.MAX_TEXT_CHARS :].replace("\t", " ")  # PyTorch writes some
    return plain(shown, keep="\n")[-job_limits.MAX_TEXT_CHARS :]


def _seconds(milliseconds: Mapping[str, int], members: Collection[str]) -> dict[str, float]:
    # At most one pass over the members, however many entries the message has.
    nodes, others = (milliseconds, members) if len(milliseconds) <= len(members) else (members, milliseconds)
    return {node: milliseconds[node] / 1000 for node in nodes if node in others}


def _version(message: common_pb2.Version) -> events.Version:
    return events.Version(message.generation, message.step)


def _rank(message: agent_pb2.RankStatus) -> events.RankState:
    exited = message.phase == agent_pb2.RANK_PHASE_EXITED
    return events.RankState(
        rank=message.rank,
        generation=message.generation,
        running=message.phase == agent_pb2.RANK_PHASE_RUNNING,
        exit_code=message.exit_code if exited else None,
        stderr_tail=_tail(message.stderr_tail),
        step=message.step,
        progressed=message.progressed,
        declared=cut(message.declared_phase, job_limits.MAX_NAME_CHARS),
        stopped_step=message.stopped_step,
        block_times=_block_times(message.block_times) if message.HasField("block_times") else None,
        not_finite=_not_finite(message.not_finite) if message.HasField("not_finite") else None,
        silent_s=message.silent_s if message.HasField("silent_s") else None,
        hang_place=_hang_place(message.hang_place) if message.HasField("hang_place") else None,
        idle_quarters=message.idle_quarters if message.HasField("idle_quarters") else None,
        entered_collectives=message.entered_collectives if message.HasField("entered_collectives") else None,
        gpu=message.gpu if message.HasField("gpu") else None,
        ended_s_ago=message.ended_ms_ago / 1000 if message.HasField("ended_ms_ago") else None,
    )


def _not_finite(message: agent_pb2.NotFinite) -> events.NotFinite:
    return events.NotFinite(message.step, cut(message.words, job_limits.MAX_NAME_CHARS))


def _disagreement(message: agent_pb2.ReplicaDisagreement) -> events.ReplicaDisagreement:
    ranks = tuple(message.ranks[: job_limits.MAX_NAMED_RANKS])
    return events.ReplicaDisagreement(_version(message.version), ranks, message.majority, message.replicas)


def _block_times(message: agent_pb2.BlockTimes) -> events.BlockTimes | None:
    """The times as far as they are of use; None if their two lists don't fit together, or are too long."""
    count = len(message.compute_us)
    if not 0 < count == len(message.wait_us) <= job_limits.MAX_BLOCKS_PER_RANK:
        return None
    fetch_us = tuple(message.fetch_us) if len(message.fetch_us) == count else ()
    return events.BlockTimes(message.first_block, tuple(message.compute_us), tuple(message.wait_us), fetch_us)


def _flush_progress(message: agent_pb2.FlushProgress) -> events.FlushProgress:
    version = _version(message.version) if message.HasField("version") else None
    return events.FlushProgress(message.serial, message.written, message.total, version, message.holds_slots)


def _use(message: agent_pb2.NodeUse) -> events.NodeUse:
    return events.NodeUse(
        message.memory_bytes,
        message.memory_limit_bytes,
        message.gpu_memory_bytes,
        message.gpu_memory_limit_bytes,
        min(message.gpu_busy_percent, 100) / 100,
    )


def _training(message: agent_pb2.NodeTraining) -> events.NodeTraining:
    """How the training goes on a node. It changes each second at most, and comes with each status, several a second.

    Raises:
        InvalidMessage: it is larger than an agent can have it.
    """
    if (size := message.ByteSize()) > job_limits.MAX_TRAINING_BYTES:
        raise InvalidMessage(f"training has {size} bytes: {job_limits.MAX_TRAINING_BYTES} at most")
    return (_kept_training if size <= _MOST_KEPT_BYTES else _read_training)(message.SerializeToString())


def _read_training(message: bytes) -> events.NodeTraining:
    found = agent_pb2.NodeTraining.FromString(message)
    numbers = [_number(number) for number in found.numbers[: job_limits.MAX_NUMBERS]]
    return events.NodeTraining(
        found.generation,
        tuple(number for number in numbers if number is not None),
        min(found.last_step, job_limits.MAX_STEPS),
        found.step_s if _SHORTEST_STEP_S <= found.step_s <= job_limits.MAX_SECONDS else 0.0,
        min(_rate(found.flops), job_limits.MAX_ARITHMETIC),
        min(found.step, job_limits.MAX_STEPS),
        min(found.first_step, job_limits.MAX_STEPS),
        min(_rate(found.first_at_s), job_limits.MAX_SECONDS),
        found.skips_batches,
    )


_kept_training = lru_cache(maxsize=16384)(_read_training)


def _number(message: common_pb2.RankNumber) -> events.NodeNumber | None:
    """None: a value is not finite or too large, or no rank has reported it."""
    values = message.least, message.median, message.greatest
    if not all(map(can_be_kept, values)) or not 0 < message.ranks <= job_limits.MAX_RANKS_PER_NODE:
        return None
    name = cut(message.name, job_limits.MAX_NUMBER_NAME_CHARS)
    return events.NodeNumber(name, message.step, message.ranks, *values, message.least_rank, message.greatest_rank)


def _snapshot_cost(message: agent_pb2.SnapshotCost) -> events.SnapshotCost:
    times_us = message.stall_us, message.step_us, message.slots_us, message.delay_us
    return events.SnapshotCost(message.every, message.auto_interval, *(time_us / 1e6 for time_us in times_us))


def _corrupt_copy(message: agent_pb2.CorruptCopy) -> events.CorruptCopy:
    primary = message.tier == agent_pb2.TIER_OWN
    return events.CorruptCopy(
        message.rank, _version(message.version), primary, message.pieces, message.of_pieces, message.from_node
    )


def _restore(message: agent_pb2.RestoreProgress, members: Collection[str]) -> events.RestoreProgress:
    fetched = message.fetched_bytes
    nodes, others = (fetched, members) if len(fetched) <= len(members) else (members, fetched)
    return events.RestoreProgress(
        message.generation,
        message.ranks,
        message.ranks_done,
        _bytes(message.bytes),
        _bytes(message.own_bytes),
        _bytes(message.copied_bytes),
        {node: _bytes(fetched[node]) for node in nodes if node in others},
        min(message.ms / 1000, job_limits.MAX_SECONDS),
        _free_text(message.folder),
        _version(message.version) if message.HasField("version") else None,
        _bytes(message.loaded_bytes),
        _free_text(message.damage),
    )


def _bytes(size: int) -> int:
    return min(size, job_limits.MAX_BYTES)


def _hang_place(message: agent_pb2.HangPlace) -> events.HangPlace:
    return events.HangPlace(message.waits, cut(message.where, job_limits.MAX_NAME_CHARS))


def _combined(message: agent_pb2.ParityStatus) -> events.CombinedShards:
    """A part that combines shards.

    Raises:
        InvalidMessage: it contradicts itself.
    """
    ranks, count = tuple(message.ranks), len(set(message.ranks))
    fits = len(ranks) == len(message.digests) == len(message.bytes) == count and message.part < count
    if not fits or not 2 <= count <= job_limits.MAX_GROUP_NODES + 1:
        raise InvalidMessage(
            f"parities: part {message.part} of {len(ranks)} ranks: a part belongs to one of 2 to "
            f"{job_limits.MAX_GROUP_NODES + 1} different ranks, and has a digest and a size for each of them"
        )
    digests = tuple(cut(digest, job_limits.MAX_NAME_CHARS) for digest in message.digests)
    sizes = tuple(map(_bytes, message.bytes))
    return events.CombinedShards(ranks, _version(message.version), message.part, digests, sizes)


def _shard(message: agent_pb2.ShardStatus) -> events.Shard:
    own = message.tier == agent_pb2.TIER_OWN
    digest = cut(message.digest, job_limits.MAX_NAME_CHARS)
    replica = message.replica_group, message.replica_digest
    return events.Shard(message.rank, _version(message.version), own, digest, *replica, message.bytes, message.sharded)
