"""Conversion of messages on the wire into the core's events. Pure. A message with impossible values is an error."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from google.protobuf.json_format import MessageToJson

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.turn import communication
from muster.daemon.coordinator.policy.policy import SignalRule, UnfitSignals
from muster.daemon.host.plain_text import cut, plain
from muster.daemon.transport import job_limits
from muster.daemon.transport.gang_ids import job_identity
from muster.daemon.transport.node_hardware import InvalidHardware, report_of
from muster.daemon.transport.site_config import split_address
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.level import Level
from muster.fabric.model.node import FailureDomain
from muster.fabric.placement.failure_domains import spread_over
from muster.fabric.placement.weights import Weight
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

_MAXIMA = {
    "nodes": job_limits.MAX_NODES,
    "spares": job_limits.MAX_NODES,
    "pool_nodes": job_limits.MAX_NODES,
    "retries": job_limits.MAX_PLACEMENT_RETRIES,
    "ranks_per_node": job_limits.MAX_RANKS_PER_NODE,
    "max_failures": job_limits.MAX_FAILURES,
    "gather_timeout_s": job_limits.MAX_GATHER_TIMEOUT_S,
    "stop_before_s": job_limits.MAX_STOP_BEFORE_S,
    "hang_after_s": job_limits.MAX_HANG_AFTER_S,
    "hang_after_idle_s": job_limits.MAX_HANG_AFTER_S,
    "node_mtbf_s": job_limits.MAX_SECONDS,
    "durable_every_s": job_limits.MAX_SECONDS,
    "durable_every_steps": job_limits.MAX_STEPS,
    "durable_keep": job_limits.MAX_STEPS,
    "more_copies": job_limits.MAX_COPIES - 2,
    "parity_nodes": job_limits.MAX_GROUP_NODES,
    "durable_keep_s": job_limits.MAX_SECONDS,
    "tensor_parallel": job_limits.MAX_RANKS,
    "context_parallel": job_limits.MAX_RANKS,
    "expert_parallel": job_limits.MAX_RANKS,
    "pipeline_parallel": job_limits.MAX_RANKS,
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
        flushed_version=_version(message.flushed_version) if message.HasField("flushed_version") else None,
        snapshot_cost=_snapshot_cost(message.snapshot_cost) if message.HasField("snapshot_cost") else None,
        corrupt_copies=tuple(
            _corrupt_copy(copy) for copy in message.corrupt_copies if not copy.from_node or copy.from_node in members
        ),
        restore=_restore(message.restore, members) if message.HasField("restore") else None,
        flush_progress=_flush_progress(message.flush_progress) if message.HasField("flush_progress") else None,
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


def spec(message: common_pb2.JobSpec) -> events.GangSpec:
    """The part of a job spec that the core needs.

    Raises:
        InvalidMessage: a count, a time or the name is impossible.
    """
    check_variables(message)
    if message.nodes < 1:
        raise InvalidMessage(f"nodes = {message.nodes}: a gang needs at least 1 node")
    if message.ranks_per_node < 1:
        raise InvalidMessage(f"ranks_per_node = {message.ranks_per_node}: a node carries at least 1 rank")
    if message.min_nodes > message.nodes:
        raise InvalidMessage(f"min_nodes = {message.min_nodes} is more than nodes = {message.nodes}")
    _check_size(message)
    check_count("traffic", len(message.traffic), len(GroupKind))
    check_count("smaller", len(message.smaller), message.nodes)
    found = events.GangSpec(
        nodes=message.nodes,
        spares=message.spares,
        ranks_per_node=message.ranks_per_node,
        min_nodes=message.min_nodes or message.nodes,
        gather_timeout_s=message.gather_timeout_s or 300.0,
        max_failures=message.max_failures or 3,
        requeue=message.requeue,
        durable_dir=message.durable_dir,
        stop_before_s=message.stop_before_s,
        requeue_at_limit=message.requeue_at_limit,
        pool_nodes=message.pool_nodes,
        hang_after_s=message.hang_after_s,
        hang_after_idle_s=message.hang_after_idle_s,
        preflight=message.preflight,
        tensor=message.tensor_parallel or 1,
        context=message.context_parallel or 1,
        expert=message.expert_parallel or 1,
        pipeline=message.pipeline_parallel or 1,
        axis_order=message.parallel_order,
        traffic=tuple(map(_traffic, message.traffic)),
        if_worse=_if_worse(message.if_worse),
        retries=message.retries,
        smaller=tuple(message.smaller),
        node_mtbf_s=message.node_mtbf_s,
        durable_every_steps=message.durable_every_steps,
        durable_every_s=message.durable_every_s,
        durable_auto=message.durable_auto,
        more_holders=message.more_copies,
        group_nodes=message.parity_nodes,
        identity=job_identity(message),
        resume_from=message.resume_from,
    )
    if list(found.smaller) != sorted({count for count in found.smaller if 0 < count < found.nodes}):
        raise InvalidMessage(f"smaller must ascend from 1 or more to less than nodes = {found.nodes}")
    if message.HasField("spreading"):
        replicas, spares = map(_spreading, (message.spreading.replicas, message.spreading.spares))
        found = replace(found, spread_replicas=replicas, spread_spares=spares)
    try:
        for nodes in (found.nodes, *found.smaller):
            communication.axes_of(replace(found, nodes=nodes))
    except ValueError as error:
        raise InvalidMessage(f"parallelism: {error}") from None
    return found


def check_variables(message: common_pb2.JobSpec) -> None:
    """Check that the environment is none that would take long.

    Raises:
        InvalidMessage: it has too many variables.
    """
    check_count("env", len(message.env), job_limits.MAX_VARIABLES)


def _if_worse(word: str) -> events.IfWorse:
    try:
        return events.IfWorse(word)
    except ValueError:
        raise InvalidMessage(f"if_worse = {word[:80]!r} must be empty, wait or shrink") from None


def _traffic(message: common_pb2.GroupTraffic) -> events.GroupTraffic:
    try:
        GroupKind(message.kind)
        Level.of(message.packed_in)
        Weight(message.messages, message.bytes)
    except ValueError as error:
        raise InvalidMessage(f"traffic: {error}") from None
    return events.GroupTraffic(message.kind, message.messages, message.bytes, message.packed_in, message.required)


def _spreading(words: Sequence[str]) -> tuple[str, ...]:
    check_count("spreading", len(words), len(FailureDomain))
    try:
        spread_over(words)
    except ValueError:
        raise InvalidMessage(f"spreading: {words[0]!r} ... must be leaf, rack or power, after require") from None
    return tuple(words)


def _check_size(message: common_pb2.JobSpec) -> None:
    for field, maximum in _MAXIMA.items():
        value = getattr(message, field)
        if not 0 <= value <= maximum:  # false for NaN, too
            raise InvalidMessage(f"{field} = {value:.15g} must be 0 to {maximum:.15g}")
    if (ranks := message.nodes * message.ranks_per_node) > job_limits.MAX_RANKS:
        raise InvalidMessage(f"nodes * ranks_per_node = {ranks}: a job has {job_limits.MAX_RANKS} ranks at most")
    if message.name:
        check_name(names.check_job, message.name)
    for field in ("run_dir", "durable_dir", "resume_from"):  # reasons quote them
        path: str = getattr(message, field)
        check_length(field, path, job_limits.MAX_PATH_CHARS)
        if plain(path) != path:
            raise InvalidMessage(f"{field} = {path!r} must have no control characters")


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


def check_hello(message: agent_pb2.AgentHello | node_pb2.NodeHello) -> None:
    """Check every name in the first message of an agent or of a node daemon.

    Raises:
        InvalidMessage: a name is none.
    """
    check_name(names.check_node, message.node)
    words = [("incarnation", message.incarnation)]
    if isinstance(message, agent_pb2.AgentHello):
        check_name(names.check_gang, message.gang_id)
        words += [("peer_address", message.peer_address), ("nvlink_domain", message.nvlink_domain)]
    else:
        check_count("addresses", len(message.addresses), job_limits.MAX_ADDRESSES)
        words += [("boot_id", message.boot_id), ("probe_address", message.probe_address)]
        words += [("addresses", address) for address in message.addresses]
    for field, word in words:
        check_length(field, word, job_limits.MAX_NAME_CHARS)
        check_name(names.check_word, word)
        if field in ("peer_address", "probe_address") and word:
            _check_address(field, word)


def _check_address(field: str, address: str) -> None:
    """Check that a process can listen at `address`. Others would ask gRPC and the resolver for whatever it says."""
    try:
        host, _ = split_address(address)
    except ValueError as error:
        raise InvalidMessage(f"{field}: {error}") from None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        check_name(names.check_node, host)


def submitted(gang: str, job: int, owner_uid: int, message: common_pb2.JobSpec) -> events.GangSubmitted:
    """The event that registers a gang.

    Raises:
        InvalidMessage: no id, no job, or an impossible spec.
    """
    if not gang or not job:
        raise InvalidMessage("a gang is registered with its gang_id and the id of its Slurm job")
    check_name(names.check_gang, gang)
    gang_spec = spec(message)
    text = MessageToJson(message, preserving_proto_field_name=True, indent=None)
    check_length("the job spec, its environment included,", text, job_limits.MAX_SPEC_CHARS)
    return events.GangSubmitted(gang, job, owner_uid, message.name, gang_spec, text)


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
    ranks, count = tuple(message.ranks), len(message.ranks)
    if not message.part < count == len(message.digests) == len(message.bytes) <= job_limits.MAX_GROUP_NODES + 1:
        raise InvalidMessage(f"parities: a part of {count} ranks must be one of them, with as many digests and sizes")
    digests = tuple(cut(digest, job_limits.MAX_NAME_CHARS) for digest in message.digests)
    sizes = tuple(map(_bytes, message.bytes))
    return events.CombinedShards(ranks, _version(message.version), message.part, digests, sizes)


def _shard(message: agent_pb2.ShardStatus) -> events.Shard:
    own = message.tier == agent_pb2.TIER_OWN
    digest = cut(message.digest, job_limits.MAX_NAME_CHARS)
    replica = message.replica_group, message.replica_digest
    return events.Shard(message.rank, _version(message.version), own, digest, *replica, message.bytes, message.sharded)
