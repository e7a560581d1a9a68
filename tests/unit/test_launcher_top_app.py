"""`muster top` on a terminal in memory and on a real one, and what it receives of a real coordinator."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC
from pathlib import Path

import pytest
from tests.unit.test_launcher_commands import muster
from tests.unit.test_launcher_top import CONTENTS, NOW, training
from textual.pilot import Pilot

from muster.daemon.coordinator.core.state.events import NodeSignalled
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.daemon.transport.identity import SecretCredentials
from muster.launcher.coordinator_client import CoordinatorClient, gang_ref
from muster.launcher.errors import EXIT_BUG, WrongInput
from muster.launcher.main import main
from muster.launcher.top.app import Lines, Top
from muster.launcher.top.cells import line
from muster.launcher.top.feed import LiveFeed, Replay
from muster.launcher.top.known import Known
from muster.launcher.top.messages import Message, read_recording, to_line
from muster.launcher.top.place import OVERVIEW, Place
from muster.v1.api_pb2 import EventRecord, GangView, ListReply, NodesReply

WAIT_S = 60.0
"""Seconds after which a wait has failed. A busy machine takes a few."""


def app_of(*messages: Message) -> Top:
    first = next(one.content for one in messages if isinstance(one.content, GangView))
    return Top(Replay(messages, 1000.0), Place(OVERVIEW, first.gang_id, only_job=True), UTC)


def screen_of(app: Top) -> str:
    """What the terminal shows."""
    widget = app.query_one(Lines)
    return "\n".join(widget.render_line(at).text.rstrip() for at in range(app.size.height))


async def shows(pilot: Pilot[None], words: str) -> str:
    """Wait until the terminal shows these words."""
    app = pilot.app
    assert isinstance(app, Top)
    async with asyncio.timeout(WAIT_S):
        while words not in screen_of(app):
            await pilot.pause(0.02)
    return screen_of(app)


async def test_a_job_and_its_lists_at_80_columns_and_24_lines() -> None:
    view = training()
    messages = [
        Message(NOW, view),
        Message(NOW + 1, EventRecord(position=1, gang_id=view.gang_id, at_s=NOW, text="it runs")),
    ]
    app = app_of(*messages)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "it runs")
        assert (await shows(pilot, "ranks (r)")).count("\n") == 23
        await pilot.press("r")
        assert "slower by" in await shows(pilot, "[r]ranks")
        await pilot.press("down", "slash", "n", "1", "enter")
        await shows(pilot, "only 'n1' (Esc: all)")
        await pilot.press("question_mark")
        await shows(pilot, "Ctrl+C")
        await pilot.press("q")  # takes the keys away
        await shows(pilot, "[r]ranks")
        await pilot.press("q")
    assert app.return_code == 0


async def test_another_size_is_drawn_for() -> None:
    app = app_of(Message(NOW, training()))
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "pretraining-7b")
        await pilot.resize_terminal(120, 40)
        async with asyncio.timeout(WAIT_S):
            while max(map(len, screen_of(app).split("\n"))) != 120:
                await pilot.pause(0.02)


async def test_only_lines_that_differ_are_written() -> None:
    app = app_of(Message(NOW, training()))
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "ranks (r)")
        widget = app.query_one(Lines)
        lines = [line(f"line {at}") for at in range(6)]
        widget.put(lines)
        assert widget.put([*lines]) == []
        assert widget.put([*lines[:3], lines[4], *lines[4:]]) == [3]


def client(world: ScriptedWorld) -> CoordinatorClient:
    return CoordinatorClient(world.address, _credentials(world))


def _credentials(world: ScriptedWorld) -> SecretCredentials:
    return SecretCredentials(world.folder.parent / "secret")


async def until(stream: AsyncIterator[Message], kind: type) -> Message:
    """The next message of a kind."""
    async with asyncio.timeout(WAIT_S):
        return await anext(message async for message in stream if isinstance(message.content, kind))


async def test_a_job_comes_by_its_streams_and_again_after_a_restart(world: ScriptedWorld) -> None:
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    recording = io.StringIO()
    port = world.address.rpartition(":")[2]
    async with client(world) as coordinator:
        gang = (await coordinator.describe(gang_ref("1"))).gang_id
        stream = LiveFeed(coordinator, recording).messages(gang)
        seen = [await until(stream, GangView), await until(stream, EventRecord)]
        await world.stop_coordinator()
        trouble = await until(stream, str)
        assert "training continues; waiting for the coordinator" in str(trouble.content)
        await world.start_coordinator(listen=f"127.0.0.1:{port}")
        seen.append(await until(stream, GangView))
        await stream.aclose()
    recorded = read_recording(io.StringIO(recording.getvalue()), "a file")
    assert [message for message in recorded if message in [*seen, trouble]] == [*seen[:2], trouble, seen[2]]
    events = [one.content for one in recorded if isinstance(one.content, EventRecord) and not one.content.sentinel]
    assert len(events) == len({event.position for event in events}) > 3


async def test_what_happens_to_a_node_is_an_event_of_the_job_that_is_open(world: ScriptedWorld) -> None:
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    known = Known()
    async with client(world) as coordinator:
        gang = (await coordinator.describe(gang_ref("1"))).gang_id
        stream = LiveFeed(coordinator).messages(gang)
        assert world.coordinator
        world.coordinator.engine.post(NodeSignalled("n1", "unfit", "a fault", "NVRM: Xid"))
        async with asyncio.timeout(WAIT_S):
            async for message in stream:
                known.receive(message)
                if any(event.name == "NodeJudged" for event in known.events_of(gang)):
                    break
        await stream.aclose()


async def test_all_jobs_and_nodes_are_asked_for(world: ScriptedWorld) -> None:
    async with client(world) as coordinator:
        stream = LiveFeed(coordinator).messages("")
        listed, nodes = await until(stream, ListReply), await until(stream, NodesReply)
        await stream.aclose()
    assert isinstance(listed.content, ListReply)
    assert isinstance(nodes.content, NodesReply)
    assert {node.node for node in nodes.content.nodes} >= set(NODES)


async def test_all_jobs_come_again_from_the_coordinator_that_took_over(world: ScriptedWorld) -> None:
    held = socket.socket()
    held.bind(("127.0.0.1", 0))  # nobody answers there yet
    standby = f"127.0.0.1:{held.getsockname()[1]}"
    async with CoordinatorClient(f"{world.address},{standby}", _credentials(world)) as coordinator:
        stream = LiveFeed(coordinator, list_pause_s=0.0).messages("")
        await until(stream, NodesReply)
        await world.stop_coordinator()
        trouble = await until(stream, str)
        assert "waiting for the coordinator" in str(trouble.content)
        held.close()
        await world.start_coordinator(listen=standby)
        await until(stream, NodesReply)
        await stream.aclose()


async def test_an_unknown_job_and_no_terminal_are_told_before_the_screen_opens(world: ScriptedWorld) -> None:
    with pytest.raises(WrongInput, match="muster top needs a terminal"):
        await muster(world, "top", "1")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("top --replay /nowhere", "muster: /nowhere can't be read: No such file or directory"),
        ("top --replay x 42", "--replay shows what its file holds: give neither JOB nor --record"),
        ("top --replay x --speed 0", "--speed 0 must be more than 0"),
    ],
)
def test_wrong_words_on_the_command_line(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == WrongInput.status
    assert said in " ".join(capsys.readouterr().err.split())


class PtyTerminal:
    """A real terminal, 80 by 24, with a program on it, whose output is kept."""

    def __init__(self, *argv: str) -> None:
        self._keyboard, self._device = os.openpty()
        fcntl.ioctl(self._device, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._before = termios.tcgetattr(self._device)
        environ = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1"}
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), self._device)
        self.program = subprocess.Popen(argv, env=environ, start_new_session=True, **ends)
        self.written = ""

    def shows(self, words: str) -> None:
        """Wait until the program has written these words."""
        self._read_until(lambda: words in self.written)

    def _read_until(self, holds: Callable[[], bool]) -> None:
        """A terminal that is not read makes the program wait."""
        deadline = time.monotonic() + WAIT_S
        while not holds():
            ready, _, _ = select.select([self._keyboard], [], [], 0.1)
            self.written += os.read(self._keyboard, 65536).decode(errors="replace") if ready else ""
            assert time.monotonic() < deadline, self.written[-2000:]

    def press(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def ends_with(self, status: int) -> None:
        """The program ends with this status, and the terminal is as it was before."""
        self.shows(_LEAVES)
        self._read_until(lambda: self.program.poll() is not None)
        assert self.program.returncode == status
        assert termios.tcgetattr(self._device) == self._before

    def close(self) -> None:
        self.program.kill()
        self.program.wait(WAIT_S)
        os.close(self._keyboard)
        os.close(self._device)


_LEAVES = "\x1b[?1049l"
"""Back to what the terminal had shown."""


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[PtyTerminal]:
    """`muster top` with a recording, on a terminal without colours."""
    file = tmp_path / "recording.jsonl"
    file.write_text("".join(f"{to_line(Message(NOW + at, content))}\n" for at, content in enumerate(CONTENTS)))
    made = PtyTerminal(sys.executable, "-Im", "muster.launcher", "top", "--utc", "--replay", str(file))
    yield made
    made.close()


def test_a_real_terminal_shows_it_and_is_given_back(terminal: PtyTerminal) -> None:
    terminal.shows("ranks (r)")
    terminal.press("r")
    terminal.shows("[r]ranks")
    terminal.press("q")
    terminal.ends_with(0)
    assert not re.search(r"\x1b\[(?:[0-9]+;)*(?:[34][0-7]|[34]8;[0-9;]+)m", terminal.written)  # no colour


BROKEN = """
import asyncio, sys
from datetime import UTC
from muster.launcher.commands.top import show
from muster.launcher.top.place import Place

class Broken:
    def now(self):
        return 0.0

    async def messages(self, gang_id):
        raise RuntimeError("it is broken")
        yield

sys.exit(asyncio.run(show(Broken(), Place(), UTC)))
"""


def test_an_exception_gives_the_terminal_back_and_is_shown() -> None:
    terminal = PtyTerminal(sys.executable, "-Ic", BROKEN)
    try:
        terminal.ends_with(EXIT_BUG)
        terminal.shows("it is broken")
    finally:
        terminal.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_gives_the_terminal_back(terminal: PtyTerminal, number: signal.Signals) -> None:
    terminal.shows("ranks (r)")
    terminal.program.send_signal(number)
    terminal.ends_with(128 + number)
