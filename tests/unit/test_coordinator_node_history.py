"""The history of one node: what a reader sees of it, and how much of the journal one answer reads."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio
import pytest

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.journal.history import Record
from muster.daemon.coordinator.server import Coordinator, Settings
from muster.daemon.coordinator.view_parts.node_history import MOST_READS, NEWEST, PAGE_RECORDS, visible_page
from muster.daemon.testing.chosen_users import ChosenUser
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.channel import open_channel
from muster.v1 import api_pb2, api_pb2_grpc

SLURM, OPERATOR, OWNER, OTHER = 64030, 500, 1001, 1002


def record(position: int, gang: str = "", name: str = "NodeJudged") -> Record:
    return Record(position, 1.0, gang, "n1", name, "{}", "words", "")


class Stored:
    """So many records of a node. `reads`: what was asked for."""

    def __init__(self, records: list[Record]) -> None:
        self._newest_first = sorted(records, key=lambda one: -one.position)
        self.reads: list[int] = []

    def read(self, before: int, limit: int) -> list[Record]:
        self.reads.append(before)
        return [one for one in self._newest_first if one.position < before][:limit]


def test_pages_follow_each_other_without_a_gap() -> None:
    stored, before, seen = Stored([record(at) for at in range(1, 11)]), 0, list[int]()
    for _ in range(4):
        page, before = visible_page(stored.read, lambda _: True, before, 3)
        seen += [one.position for one in page]
    assert seen == list(range(10, 0, -1))
    assert before == 0
    assert stored.reads[0] == NEWEST


def test_what_is_not_for_the_reader_is_left_out() -> None:
    names = [("", "NodeJudged"), ("", "NodeRegistered"), ("", "NodeChecked"), ("mine", "NodeChecked"), ("theirs", "x")]
    stored = Stored([record(at, *what) for at, what in enumerate(names, 1)])
    page, _ = visible_page(stored.read, lambda gang: gang == "mine", 0, 0)
    assert [(one.gang, one.name) for one in page] == [("mine", "NodeChecked"), ("", "NodeJudged")]
    page, _ = visible_page(stored.read, lambda _: True, 0, 0)
    assert len(page) == 5


def test_one_answer_reads_a_bounded_part_of_the_journal() -> None:
    """The attack: the history of a node that has carried thousands of jobs of others is asked for again and again."""
    stored = Stored([record(at, "theirs") for at in range(1, 10 * MOST_READS * PAGE_RECORDS)])
    page, before = visible_page(stored.read, lambda _: False, 0, 0)
    assert (page, len(stored.reads)) == ([], MOST_READS)
    assert before > 1, "the reader may go on from there"
    assert len(visible_page(stored.read, lambda _: True, 0, 10**6)[0]) == PAGE_RECORDS


@pytest.mark.parametrize(
    ("uid", "private", "names"),
    [
        (OPERATOR, False, {"NodeRegistered", "NodeJudged", "MemberJoined"}),
        (OWNER, False, {"NodeJudged", "MemberJoined"}),
        (OTHER, False, {"NodeJudged"}),
        (OWNER, True, {"NodeJudged", "MemberJoined"}),
        (OTHER, True, None),
    ],
)
async def test_who_sees_what_of_a_node(tmp_path: Path, uid: int, private: bool, names: set[str] | None) -> None:
    world = ScriptedWorld.create(tmp_path, owner_uid=OWNER)
    user, rights = ChosenUser(SLURM), Rights(frozenset({OPERATOR}), own_uid=SLURM)
    world.slurm.private = frozenset()
    settings = Settings("127.0.0.1:0", world.folder, world.slurm, user, rights, private_jobs=private)
    coordinator = await Coordinator.open(settings)
    await coordinator.start()
    post = coordinator.engine.post
    post(events.GangSubmitted("g1", 1, OWNER, "train", events.GangSpec(2, 0), "{}"))
    post(events.SlurmJobChanged("g1", 1, NODES, 0, None))
    post(events.NodeAttached("n1", "boot", "i", "127.0.0.1:7071"))
    post(events.AgentAttached("g1", "n1", 1, 0, "i", "n1:1", True, "", events.AgentStatus()))
    post(events.NodeSignalled("n1", "unfit", "Xid 79", "Xid 79"))
    await coordinator.roster.refresh()
    await coordinator.roster.ask_what_is_private()
    async with open_channel(f"127.0.0.1:{coordinator.port}", user.as_uid(uid)) as channel:
        asked = api_pb2_grpc.MusterStub(channel).NodeHistory(api_pb2.NodeHistoryRequest(node="n1"))
        if names is None:
            with pytest.raises(grpc.aio.AioRpcError, match="'n1' is no node that you may see"):
                await asked
        else:
            reply = await asked
            told = {one.name for one in reply.records}
            assert told & {"NodeRegistered", "NodeJudged", "MemberJoined"} == names
            assert reply.node.verdict_since_s > 0
    await coordinator.stop()
