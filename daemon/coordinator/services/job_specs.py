"""The spec of a job: what the core needs of it, once it is checked; how it was registered, from the journal; what makes
two runs of a job comparable; and work on whole specs, beside the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from google.protobuf.json_format import MessageToDict, MessageToJson, Parse, ParseError

from muster.daemon.coordinator.core.losses.loss_rule import LossChoice, LossResponse
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.turn import communication
from muster.daemon.coordinator.journal.history import Record
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.services.conversion import InvalidMessage, check_count, check_length, check_name
from muster.daemon.coordinator.services.rpc_errors import invalid_argument
from muster.daemon.coordinator.slurm.fair_queue import FairQueue
from muster.daemon.host.plain_text import plain
from muster.daemon.transport import gang_ids, job_limits
from muster.daemon.transport.gang_ids import job_identity
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.level import Level
from muster.fabric.model.node import FailureDomain
from muster.fabric.placement.failure_domains import spread_over
from muster.fabric.placement.weights import Weight
from muster.slurm.client import names
from muster.v1 import common_pb2
from muster.v1.agent_pb2 import AgentHello
from muster.v1.api_pb2 import RegisterRequest
from muster.v1.common_pb2 import JobSpec

_Read = TypeVar("_Read")
_T = TypeVar("_T")

_ARRAY_TASK = re.compile(r"[0-9]{1,10}_[0-9]{1,10}")
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
    "flops_per_step": job_limits.MAX_ARITHMETIC,
    "tokens_per_step": job_limits.MAX_ARITHMETIC,
    "peak_flops": job_limits.MAX_ARITHMETIC,
}

_PARALLEL = (
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "context_parallel",
    "expert_parallel",
    "parallel_order",
)
_COMPARED = (
    "nodes",
    "ranks_per_node",
    "command",
    *_PARALLEL,
    "node_options",
    "estimate_tables",
)
"""What the time of a step follows from. The environment is left out: it names runs, hosts and folders."""
_SHOWN = (
    "name",
    "nodes",
    "spares",
    "ranks_per_node",
    *_PARALLEL,
    "traffic",
    "estimate_tables",
)
"""What a diagnosis needs. Environment and command may hold secrets, also to operators."""


class SpecWork:
    """Work on whole specs in threads: on the event loop, all heartbeats would wait for it. One work at a time, for the
    waiting users in turn: beyond that, threads take the event loop's time."""

    def __init__(self) -> None:
        self._turn = FairQueue(1)

    async def do(self, uid: int, work: Callable[[], _T]) -> _T:
        """What `work` returns. It runs in a thread, so it may use only what is its own. `uid`: who waits for it."""
        return await self.do_with(uid, lambda: None, lambda _: work())

    async def do_with(self, uid: int, read: Callable[[], _Read], work: Callable[[_Read], _T]) -> _T:
        """What `work` returns of what `read` has read. `read` is called here when the turn has come: callers who wait
        keep nothing large."""
        async with self._turn.place(uid):
            running = asyncio.ensure_future(asyncio.to_thread(work, read()))
            try:
                return await asyncio.shield(running)
            finally:  # a thread goes on when its caller has left, and keeps its place as long
                await asyncio.gather(running, return_exceptions=True)


def gang_submitted(gang: str, job: int, owner_uid: int, message: common_pb2.JobSpec) -> events.GangSubmitted:
    """The event that registers a gang.

    Raises:
        InvalidMessage: no id, no job, or an impossible spec.
    """
    if not gang or not job:
        raise InvalidMessage("a gang is registered with its gang_id and the id of its Slurm job")
    check_name(names.check_gang, gang)
    spec = gang_spec(message)
    text = MessageToJson(message, preserving_proto_field_name=True, indent=None)
    check_length("the job spec, its environment included,", text, job_limits.MAX_SPEC_CHARS)
    return events.GangSubmitted(gang, job, owner_uid, message.name, spec, text)


def gang_spec(message: common_pb2.JobSpec) -> events.GangSpec:
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
    check_count("readers", len(message.readers), names.MOST_READERS)
    for reader in message.readers:
        check_name(names.check_reader, reader)
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
        readers=tuple(message.readers),
        own_nodes=own_nodes(message),
        script_goes_on=message.script_goes_on,
        array_task=_array_task(message.array_task),
        awaits_launch=message.awaits_launch,
        unsupervised=_words("unsupervised", message.unsupervised),
        durable_keep=message.durable_keep,
        durable_keep_s=message.durable_keep_s,
        loss=_loss(message.loss),
    )
    if list(found.smaller) != sorted({count for count in found.smaller if 0 < count < found.nodes}):
        raise InvalidMessage(f"smaller must ascend from 1 or more to less than nodes = {found.nodes}")
    if message.HasField("spreading"):
        replicas, spares = map(_spreading, (message.spreading.replicas, message.spreading.spares))
        found = replace(found, spread_replicas=replicas, spread_spares=spares)
    try:
        for nodes in () if found.awaits_launch else (found.nodes, *found.smaller):
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


def own_nodes(message: common_pb2.JobSpec) -> tuple[str, ...]:
    """The nodes that the script knows as its own.

    Raises:
        InvalidMessage: they are not as many as the job has, or a name is none.
    """
    own = message.own_nodes
    if own and not len(own) == len(set(own)) == message.nodes:
        raise InvalidMessage(f"own_nodes must name as many nodes as nodes = {message.nodes}, each of them once")
    for node in own:
        check_name(names.check_node, node)
    return tuple(own)


def _array_task(name: str) -> str:
    if name and not _ARRAY_TASK.fullmatch(name):
        raise InvalidMessage('array_task must be the job id of an array and a task: "42_1"')
    return name


def _words(field: str, words: str) -> str:
    """Words of a user that views show.

    Raises:
        InvalidMessage: they are too long.
    """
    check_length(field, words, job_limits.MAX_TEXT_CHARS)
    return plain(" ".join(words.split()))


def _if_worse(word: str) -> events.IfWorse:
    try:
        return events.IfWorse(word)
    except ValueError:
        raise InvalidMessage(f"if_worse = {word[:80]!r} must be empty, wait or shrink") from None


def _loss(message: common_pb2.LossChoice) -> LossChoice:
    found: dict[str, float | LossResponse] = {}
    for field, value in message.ListFields():
        if isinstance(value, str):
            found[field.name] = _loss_response(field.name, value)
        else:
            least, most = job_limits.LOSS_BOUNDS[field.name]
            if not least <= value <= most:  # false for NaN, too
                raise InvalidMessage(f"loss.{field.name} = {value:.15g} must be {least} to {most}")
            found[field.name] = value
    return LossChoice(**found)  # type: ignore[arg-type]


def _loss_response(name: str, word: str) -> LossResponse:
    known = [one for one in LossResponse if name != "plateau" or one is not LossResponse.ROLL_BACK]
    if word not in known:
        raise InvalidMessage(f"loss.{name} = {word[:80]!r} must be {', '.join(known[:-1])} or {known[-1]}")
    return LossResponse(word)


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


async def submitted(specs: SpecWork, request: RegisterRequest | AgentHello, uid: int) -> events.GangSubmitted:
    """The event with which user `uid` registers a gang.

    Raises:
        CallRefused: the spec is not valid.
    """
    work = partial(gang_submitted, request.gang_id, request.slurm_job_id, uid, request.spec)
    try:
        return await specs.do(uid, work)
    except InvalidMessage as error:
        raise invalid_argument(str(error)) from None


def registered_spec(journal: Journal, gang: str) -> JobSpec | None:
    """The spec with which the gang was registered; None if the journal has none that this version can read.

    Raises:
        JournalError: the journal can't be read.
    """
    return read_spec(registration_of(journal, gang))


def registration_of(journal: Journal, gang: str) -> Record | None:
    """The newest registration of a gang.

    Raises:
        JournalError: the journal can't be read.
    """
    return journal.registration(gang)


def read_spec(record: Record | None) -> JobSpec | None:
    """The spec in a registration; None: there is none that this version can read. A large one takes 0.2 s."""
    if record is not None:
        with suppress(ValueError, KeyError, ParseError):
            fact = facts.decode(record.name, record.json)
            if isinstance(fact, facts.GangRegistered):
                return Parse(fact.spec_json or "{}", JobSpec(), ignore_unknown_fields=True)
    return None


def differences(like: JobSpec, registered: Record | None) -> list[str] | None:
    """What differs from a registered spec; None: there is none that this version can read."""
    spec = read_spec(registered)
    return None if spec is None else gang_ids.differences(spec, like)


def settings_digest(spec: JobSpec) -> str:
    """Equal for runs whose steps can be compared."""
    return hashlib.sha256(json.dumps(_fields(spec, _COMPARED), sort_keys=True).encode()).hexdigest()[:32]


def shown(spec: JobSpec) -> JobSpec:
    """The part that is shown to those who ask for a diagnosis."""
    return JobSpec(**{name: getattr(spec, name) for name in _SHOWN})


def _fields(spec: JobSpec, names: tuple[str, ...]) -> dict[str, object]:
    kept = MessageToDict(spec, preserving_proto_field_name=True)
    return {name: kept[name] for name in names if name in kept}
