"""Conversion: an impossible spec is rejected before it reaches the journal."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from muster.checkpoint.store.rank_reports import NOT_FINITE_LETTERS
from muster.daemon.agent.ranks.hang_place import MAX_WORDS
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import GangSpec
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.services import conversion, job_specs
from muster.daemon.coordinator.services.hello import check_hello
from muster.daemon.transport import job_limits
from muster.daemon.transport.server_limits import COORDINATOR
from muster.v1 import agent_pb2, common_pb2, node_pb2


def spec(**more: object) -> common_pb2.JobSpec:
    wanted = {"nodes": 2, "ranks_per_node": 8, **more}
    return common_pb2.JobSpec(**wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("gather_timeout_s", math.inf, "gather_timeout_s = inf must be 0 to 604800"),
        ("gather_timeout_s", math.nan, "gather_timeout_s = nan must be 0 to 604800"),
        ("stop_before_s", math.inf, "stop_before_s = inf must be 0 to 86400"),
        ("hang_after_s", math.inf, "hang_after_s = inf must be 0 to 604800"),
        ("hang_after_s", -5.0, "hang_after_s = -5 must be 0 to 604800"),
        ("hang_after_idle_s", math.nan, "hang_after_idle_s = nan must be 0 to 604800"),
        ("flops_per_step", math.inf, "flops_per_step = inf must be 0 to 1e+30"),
        ("tokens_per_step", math.nan, "tokens_per_step = nan must be 0 to 1e+30"),
        ("peak_flops", -1.0, "peak_flops = -1 must be 0 to 1e+30"),
        ("ranks_per_node", 3_000_000, "ranks_per_node = 3000000 must be 0 to 1024"),
        ("nodes", 4_000_000_000, "nodes = 4000000000 must be 0 to 100000"),
        ("nodes", 50_000, "nodes * ranks_per_node = 400000: a job has 250000 ranks at most"),
        ("spares", 200_000, "spares = 200000 must be 0 to 100000"),
        ("pool_nodes", 200_000, "pool_nodes = 200000 must be 0 to 100000"),
        (
            "name",
            "-x",
            "'-x' is not the name of a job: 1 to 64 letters, digits, '.', '_' or '-', "
            "of which the first is a letter or digit",
        ),
        ("run_dir", "/a\nb", "run_dir = '/a\\nb' must have no control characters"),
        ("durable_dir", "/a\nb", "durable_dir = '/a\\nb' must have no control characters"),
        ("durable_dir", "/" * 4097, "durable_dir has 4097 characters: 4096 at most"),
        ("env", {f"V{n}": "" for n in range(10_001)}, "env has 10001 entries: 10000 at most"),
        ("own_nodes", ["n0"], "own_nodes must name as many nodes as nodes = 2, each of them once"),
        ("own_nodes", ["n0", "n0"], "own_nodes must name as many nodes as nodes = 2, each of them once"),
    ],
)
def test_an_impossible_spec_is_rejected_with_its_reason(field: str, value: object, words: str) -> None:
    with pytest.raises(conversion.InvalidMessage) as error:
        job_specs.gang_submitted("g", 1, 1000, spec(**{field: value}))
    assert str(error.value) == words


def test_an_overlong_spec_is_rejected() -> None:
    with pytest.raises(conversion.InvalidMessage, match="environment included"):
        job_specs.gang_submitted("g", 1, 1000, spec(env={"BIG": "x" * job_limits.MAX_SPEC_CHARS}))
    with pytest.raises(conversion.InvalidMessage, match="is not the id of a gang"):
        job_specs.gang_submitted("g" * 1000, 1, 1000, spec())


_NO_ADDRESSES = ("x", "unix:/run/munge/socket:1", "dns:///n1:1", "..:1", "-w:1", "n1:99999", "%41:1", ":1")


@pytest.mark.parametrize("address", ["n1:7072", "n1.cluster.example:1", "10.0.0.1:7072", "[fe80::1%eth0]:1", "[::1]:1"])
def test_an_address_of_a_process_is_accepted(address: str) -> None:
    check_hello(agent_pb2.AgentHello(node="n1", gang_id="g", peer_address=address))
    check_hello(node_pb2.NodeHello(node="n1", probe_address=address))


@pytest.mark.parametrize(
    "hello",
    [
        node_pb2.NodeHello(node="--json"),
        node_pb2.NodeHello(node="n[1-9]"),
        node_pb2.NodeHello(node="n1\nn2"),
        node_pb2.NodeHello(node="n1", boot_id="a b"),
        node_pb2.NodeHello(node="n1", addresses=["\x1b[2J"]),
        node_pb2.NodeHello(node="n1", addresses=["10.0.0.1"] * 257),
        agent_pb2.AgentHello(node="-w", gang_id="g"),
        agent_pb2.AgentHello(node="n1", gang_id="../g"),
        agent_pb2.AgentHello(node="n1", gang_id="g", incarnation="a\nb"),
        agent_pb2.AgentHello(node="n1", gang_id="g", peer_address="n1:1\n"),
        *(agent_pb2.AgentHello(node="n1", gang_id="g", peer_address=address) for address in _NO_ADDRESSES),
        *(node_pb2.NodeHello(node="n1", probe_address=address) for address in _NO_ADDRESSES),
    ],
)
def test_a_hello_with_what_is_no_name_is_rejected(hello: agent_pb2.AgentHello | node_pb2.NodeHello) -> None:
    with pytest.raises(conversion.InvalidMessage):
        check_hello(hello)


def test_the_largest_job_is_accepted() -> None:
    largest = spec(nodes=31_250, spares=100_000, gather_timeout_s=7 * 86400.0, stop_before_s=86400.0)
    assert job_specs.gang_submitted("g", 1, 1000, largest).spec.nodes == 31_250


def test_overlong_texts_of_an_agent_are_cut() -> None:
    rank = agent_pb2.RankStatus(rank=0, stderr_tail=f"{'x' * 10_000}\tthe end")
    status = conversion.status(agent_pb2.AgentStatus(failure="y" * 10_000, notice="short", ranks=[rank]), ())
    assert len(status.failure) == job_limits.MAX_TEXT_CHARS + 3
    assert status.sigterm_notice == "short"
    assert status.ranks[0].stderr_tail.endswith("x the end")
    assert len(status.ranks[0].stderr_tail) == job_limits.MAX_TEXT_CHARS


def test_nothing_is_kept_of_nodes_that_the_gang_never_had() -> None:
    """The attack: a status names as many nodes as fit into a message."""
    many = {f"n{number}": 1500 for number in range(job_limits.MAX_NODES)}
    for given in (many, {"n1": 1500, "-w": 1}, {"n1": 1500}):
        status = conversion.status(agent_pb2.AgentStatus(heard_ms=given, answered_ms=given), {"n1": 0, "gone": 0})
        assert status.heard_s == status.answered_s == {"n1": 1.5}


_HOSTILE = "a\x1b[31mred\x1b[0m\n\x1b]0;title\x07\r\x9b2J\u202e"
_PLAIN = "ared\\n\\x1b]0;title\\x07\\r\\x9b2J\\u202e"


def _texts(message: Any) -> list[str]:
    """All texts of a dataclass or a message, also of the entries of its lists."""
    fields = message.ListFields() if isinstance(message, Message) else [(f, getattr(message, f.name)) for f in
                                                                         dataclasses.fields(message)]  # fmt: skip
    found = []
    for _, value in fields:
        for part in value if isinstance(value, tuple) else (value,):
            found += [part] if isinstance(part, str) else _texts(part) if dataclasses.is_dataclass(part) else []
    return found


@pytest.mark.parametrize("text", [_HOSTILE, "x" * 100_000, "\x1b" * 100_000], ids=["escapes", "long", "long escapes"])
def test_every_text_that_the_journal_gets_is_cut_and_plain(text: str) -> None:
    """The attack: terminal escapes, forged lines and megabytes in what an agent or a node reports."""
    rank = agent_pb2.RankStatus(
        phase=agent_pb2.RANK_PHASE_EXITED, stderr_tail=text, declared_phase=text,
        hang_place=agent_pb2.HangPlace(where=text),
    )  # fmt: skip
    sent = agent_pb2.AgentStatus(
        failure=text, notice=text, flush_error=text, no_slots=text, copies_wait=text,
        ranks=[rank], shards=[agent_pb2.ShardStatus(digest=text)], pool=[agent_pb2.PoolAnswer(error=text)],
    )  # fmt: skip
    kept = [*_texts(conversion.status(sent, ())), *_texts(conversion.signal(node_pb2.Signal(kind=text, device=text,
                                                                                          text=text)))]  # fmt: skip
    assert len(kept) == 13
    assert max(map(len, kept)) <= job_limits.MAX_TEXT_CHARS + len("...")
    for value in kept:
        assert value.replace("\n", "").isprintable()
        assert text != _HOSTILE or value == _PLAIN or value == _PLAIN.replace("\\n", "\n")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (agent_pb2.AgentStatus(ranks=[agent_pb2.RankStatus()] * 2049), "ranks has 2049 entries: 2048 at most"),
        (agent_pb2.AgentStatus(shards=[agent_pb2.ShardStatus()] * 16_385), "shards has 16385 entries: 16384 at most"),
        (agent_pb2.AgentStatus(pool=[agent_pb2.PoolAnswer()] * 10_001), "pool has 10001 entries: 10000 at most"),
        (
            agent_pb2.AgentStatus(training=agent_pb2.NodeTraining(numbers=[common_pb2.RankNumber(name="x" * 20_000)])),
            "training has 20008 bytes: 16384 at most",
        ),
        (
            agent_pb2.AgentStatus(heard_ms={f"n{n}": 1 for n in range(100_001)}),
            "heard_ms has 100001 entries: 100000 at most",
        ),
        (
            agent_pb2.AgentStatus(answered_ms={f"n{n}": 1 for n in range(100_001)}),
            "answered_ms has 100001 entries: 100000 at most",
        ),
    ],
    ids=["ranks", "shards", "pool", "training", "heard", "answered"],
)
def test_an_impossible_status_is_rejected_before_it_is_converted(status: agent_pb2.AgentStatus, words: str) -> None:
    with pytest.raises(conversion.InvalidMessage) as error:
        conversion.status(status, ())
    assert str(error.value) == words


def test_what_agents_say_of_replicas_and_of_values_that_are_not_finite_is_bounded() -> None:
    message = agent_pb2.AgentStatus(
        ranks=[agent_pb2.RankStatus(rank=1, not_finite=agent_pb2.NotFinite(step=3, words="loss\n=" + "n" * 9999))],
        shards=[agent_pb2.ShardStatus(rank=1, replica_group=1 << 63, replica_digest=(1 << 64) - 1)],
        disagreement=agent_pb2.ReplicaDisagreement(ranks=range(9999), majority=True, replicas=10_000),
    )
    status = conversion.status(message, ())
    not_finite = status.ranks[0].not_finite
    assert not_finite is not None
    assert not_finite.step == 3
    assert len(not_finite.words) < 2 * job_limits.MAX_NAME_CHARS
    assert "\n" not in not_finite.words
    assert (status.shards[0].replica_group, status.shards[0].replica_digest) == (1 << 63, (1 << 64) - 1)
    assert status.disagreement is not None
    assert status.disagreement.ranks == tuple(range(64))
    assert (status.disagreement.majority, status.disagreement.replicas) == (True, 10_000)


def test_what_agents_say_of_restores_and_corrupt_copies_is_bounded() -> None:
    message = agent_pb2.AgentStatus(
        corrupt_copies=[
            agent_pb2.CorruptCopy(rank=1, tier=agent_pb2.TIER_BUDDY, pieces=1, of_pieces=9),
            agent_pb2.CorruptCopy(rank=2, tier=agent_pb2.TIER_OWN, pieces=1, from_node="n1"),
            agent_pb2.CorruptCopy(rank=3, from_node="of another gang"),
        ],
        restore=agent_pb2.RestoreProgress(
            generation=2, ranks=1, bytes=2**64 - 1, fetched_bytes={"n1": 2**64 - 1, "of another gang": 1}, ms=2**64 - 1
        ),
    )
    status = conversion.status(message, ("n0", "n1"))
    none = events.Version(0, 0)
    assert status.corrupt_copies == (
        events.CorruptCopy(1, none, False, 1, 9),
        events.CorruptCopy(2, none, True, 1, 0, "n1"),
    )
    most = job_limits.MAX_BYTES
    assert status.restore == events.RestoreProgress(2, 1, 0, most, 0, 0, {"n1": most}, job_limits.MAX_SECONDS)


def test_the_largest_status_of_an_agent_is_accepted_and_fits_into_a_message() -> None:
    version = common_pb2.Version(generation=2**40, step=2**40)
    not_finite = agent_pb2.NotFinite(step=2**40, words="n" * NOT_FINITE_LETTERS)
    place = agent_pb2.HangPlace(waits=True, where="w" * MAX_WORDS)
    ranks = [
        agent_pb2.RankStatus(
            rank=n,
            generation=2**40,
            step=2**40,
            declared_phase="evaluation",
            not_finite=not_finite,
            silent_s=2**20,
            idle_quarters=2**20,
            entered_collectives=2**40,
            hang_place=place,
        )
        for n in range(1024)
    ]
    for rank in ranks[: job_limits.MAX_STDERR_BYTES // job_limits.MAX_TEXT_CHARS]:
        rank.stderr_tail = "x" * job_limits.MAX_TEXT_CHARS
    shards = [
        agent_pb2.ShardStatus(
            rank=n, version=version, bytes=2**40, digest="d" * 32, replica_group=2**63, replica_digest=2**63
        )
        for n in range(4 * 1024)
    ]
    heard = {f"node-{n:06}": 10_000 for n in range(job_limits.MAX_NODES)}
    largest = agent_pb2.AgentStatus(ranks=ranks, shards=shards, heard_ms=heard, failure="y" * job_limits.MAX_TEXT_CHARS)
    assert len(conversion.status(largest, heard).ranks) == 1024
    assert agent_pb2.AgentMessage(status=largest).ByteSize() < COORDINATOR.message_bytes


def test_the_largest_spec_fits_into_a_message() -> None:
    """JSON takes at least as many characters as the wire takes bytes, whatever the text."""
    for text in ("x", "ü", "漢", "🙂", "\n"):
        largest = spec(env={"BIG": text * (job_limits.MAX_SPEC_CHARS // len(json.dumps(text)[1:-1]) - 1000)})
        job_specs.gang_submitted("g", 1, 1000, largest)
        assert agent_pb2.AgentMessage(hello=agent_pb2.AgentHello(spec=largest)).ByteSize() < COORDINATOR.message_bytes


def test_nan_in_a_stored_spec_can_be_replayed(tmp_path: Path) -> None:
    """No spec should hold NaN. If one does, the coordinator must still be able to start."""
    fact = facts.GangRegistered("g", 1, 1000, "", GangSpec(1, 0, gather_timeout_s=math.inf), "{}")
    state = DurableState()
    apply(state, fact, 1.0)
    assert DurableState.load(state.dump()) == state
    journal = Journal(tmp_path)
    journal.append([fact], 1.0, "")
    journal.close()
    journal = Journal(tmp_path)
    assert journal.load() == state
    journal.close()


def test_an_invented_node_check_is_cut_and_plain() -> None:
    """Operators see it in `muster nodes -v`, and the durable state keeps it."""
    outcome = common_pb2.CHECK_OUTCOME_WRONG
    found = conversion.node_check(
        common_pb2.NodeCheck(
            outcome=outcome,
            reason="\x1b]0;x\x07" * 1000,
            hardware="y" * 9000,
            gflops=math.nan,
            memory_gb_s=-1.0,
            counters="\x1b[31m" * 1000,
        )
    )
    assert found is not None
    assert len(found.reason) <= job_limits.MAX_CHECK_CHARS + 3
    assert found.reason.isprintable()
    assert len(found.counters) <= job_limits.MAX_CHECK_CHARS + 3
    assert found.counters.isprintable()
    assert (found.gflops, found.memory_gb_s) == (0.0, 0.0)
    assert conversion.node_check_message(found).outcome == outcome


@pytest.mark.parametrize("outcome", [common_pb2.CHECK_OUTCOME_UNSPECIFIED, 77])
def test_an_outcome_of_a_newer_version_counts_as_no_report(outcome: Any) -> None:
    assert conversion.node_check(common_pb2.NodeCheck(outcome=outcome)) is None
