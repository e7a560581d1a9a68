"""Signs of life of ranks: who sends them, and what an agent makes of a rank that sends none."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from muster.checkpoint.store.rank_silences import RankSilences
from muster.checkpoint.training.agent_connection import AgentConnection
from muster.checkpoint.training.rank_signals.signs_of_life import SignsOfLife
from muster.v1.rank_pb2 import RankMessage


class Silences(RankSilences):
    """Counts its changes."""

    def __init__(self) -> None:
        super().__init__(self._changed)
        self.changes = 0

    def _changed(self) -> None:
        self.changes += 1

    def count(self, seconds: int, in_phase: tuple[int, ...] = ()) -> None:
        for _ in range(seconds):
            self.count_second(in_phase)


def test_a_rank_is_watched_from_its_first_sign_on() -> None:
    silences = Silences()
    silences.note_message(3)
    silences.count(100)
    assert silences.reported() == {}
    silences.note_sign(3)
    silences.count(3)
    assert silences.reported() == {3: 0}
    silences.count(1)
    assert silences.reported() == {3: 4}


def test_a_long_silence_changes_few_statuses() -> None:
    silences = Silences()
    silences.note_sign(0)
    seen = []
    for _ in range(1000):
        silences.count(1)
        seen.append(silences.reported()[0])
    assert list(dict.fromkeys(seen)) == [0, 4, 8, 16, 32, 64, 128, 256, 512]
    assert all(reported <= second for second, reported in enumerate(seen, 1))
    assert silences.changes == 1 + 8


def test_any_message_ends_a_silence_and_further_ones_change_nothing() -> None:
    silences = Silences()
    silences.note_sign(0)
    silences.count(9)
    before = silences.changes
    silences.note_message(0)
    assert silences.reported() == {0: 0}
    assert silences.changes == before + 1
    silences.note_message(0)
    silences.note_sign(0)
    assert silences.changes == before + 1


def test_a_rank_in_a_declared_phase_is_not_silent_and_counts_from_its_end() -> None:
    silences = Silences()
    silences.note_sign(0)
    silences.note_sign(1)
    silences.count(60, in_phase=(0,))
    assert silences.reported() == {0: 0, 1: 32}
    silences.count(5)
    assert silences.reported() == {0: 4, 1: 64}


def test_a_rank_that_sends_no_more_signs_is_forgotten() -> None:
    silences = Silences()
    silences.note_sign(0)
    silences.forget(0)
    silences.forget(1)
    silences.note_message(0)
    silences.count(60)
    assert (silences.reported(), silences.changes) == ({}, 2)


@pytest.fixture
def ends() -> Iterator[tuple[AgentConnection, socket.socket]]:
    agent_end, rank_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent_end.settimeout(60.0)
    connection = AgentConnection(rank_end.detach(), 0, 1)
    with agent_end:
        yield connection, agent_end
    connection.close()


def received(agent_end: socket.socket) -> RankMessage:
    return RankMessage.FromString(agent_end.recv(1 << 16))


def test_signs_of_life_come_by_themselves_until_the_connection_is_closed(
    ends: tuple[AgentConnection, socket.socket],
) -> None:
    connection, agent_end = ends
    connection.start_signs_of_life()
    for _ in range(2):
        message = received(agent_end)
        assert message.WhichOneof("body") == "alive"
        assert not message.alive.last
    connection.close()
    assert agent_end.recv(1 << 16) == b""
    assert not connection.send_sign_of_life()


def test_signs_leave_room_for_other_messages_while_the_agent_reads_nothing(
    ends: tuple[AgentConnection, socket.socket],
) -> None:
    connection, agent_end = ends
    for _ in range(5000):
        assert connection.send_sign_of_life()
    sent = threading.Thread(target=lambda: [connection.report_progress(step) for step in range(1, 51)], daemon=True)
    sent.start()
    sent.join(60.0)
    assert not sent.is_alive(), "the rank waits for room in its socket"
    kinds = [received(agent_end).WhichOneof("body") for _ in range(60)]
    assert 10 <= kinds.index("progress") < 60


def test_the_thread_ends_with_the_connection() -> None:
    calls: list[bool] = []

    def send(last: bool) -> bool:
        calls.append(last)
        return len(calls) < 3

    signs = SignsOfLife(send, interval_s=0.0)
    signs.start()
    signs._thread.join(60.0)
    assert calls == [False] * 3
    signs.stop()


_ENDS = """
import os, sys, threading
from muster.checkpoint.training.rank_signals.signs_of_life import SignsOfLife
sent = threading.Event()
def send(last):
    os.write(1, b"last " if last else b"sign ")
    sent.set()
    return True
SignsOfLife(send, interval_s=3600.0).start()
sent.wait()
if os.fork() == 0:
    sys.exit(0)  # a process that was forked from a rank says nothing in its name
os.wait()
os.write(1, b"end ")
"""


def test_a_rank_that_ends_well_says_so_and_its_children_do_not() -> None:
    ended = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, timeout=60, check=True, env=os.environ)
    assert ended.stdout.split() == [b"sign", b"end", b"last"]
