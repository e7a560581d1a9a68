"""What a rank says of its steps: the page that it writes, what its agent reads there, `muster.log` outside a job."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

import muster
from muster.checkpoint.format import number_page
from muster.checkpoint.format.number_page import NumberPage, RankNumbers
from muster.checkpoint.training.rank_signals.reported_numbers import INTERVAL_S, ReportedNumbers


class Clock:
    """Monotonic seconds, as a test sets them."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Link:
    """Keeps the page that a rank sends."""

    page = -1

    def __call__(self, descriptor: int) -> bool:
        self.page = os.dup(descriptor)
        return True

    def read(self) -> RankNumbers:
        found = number_page.read(self.page, 0)
        assert found is not None
        return found[1]


@pytest.fixture
def link() -> Iterator[Link]:
    found = Link()
    yield found
    os.close(found.page)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def numbers(link: Link, clock: Clock) -> ReportedNumbers:
    return ReportedNumbers(link, clock)


def test_a_step_and_its_numbers_are_in_the_page(numbers: ReportedNumbers, link: Link) -> None:
    numbers.set_total(500)
    numbers.note(7, {"loss": 2.5, "tokens": 4096, "own": "no number", "absent": None})
    assert link.read() == RankNumbers(7, 100.0, 500, 0.0, {"loss": (7, 2.5), "tokens": (7, 4096.0)})


def test_names_are_written_twice_a_second_and_others_at_once(
    numbers: ReportedNumbers, link: Link, clock: Clock
) -> None:
    numbers.note(1, {"loss": 1.0})
    clock.now += INTERVAL_S / 2
    numbers.note(2, {"loss": 2.0})
    assert link.read().numbers == {"loss": (1, 1.0)}
    numbers.note(None, {"accuracy": 0.5})
    assert link.read().numbers == {"loss": (1, 1.0), "accuracy": (1, 0.5)}
    clock.now += INTERVAL_S
    numbers.note(3, {"loss": 3.0})
    assert (link.read().step, link.read().numbers["loss"]) == (3, (3, 3.0))


class Whole:
    """An integer of a library such as NumPy: JSON does not know it."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value

    def __float__(self) -> float:
        return float(self._value)


def test_steps_may_be_numbers_of_a_library_and_nonsense_hides_no_other_number(
    numbers: ReportedNumbers, link: Link, clock: Clock
) -> None:
    cases: list[tuple[Any, Any, int]] = [(Whole(7), Whole(500), 500), (8, 500.0, 500), (9, -1, 0), (10, math.nan, 0)]
    for step, total, shown in cases:
        clock.now += INTERVAL_S
        numbers.set_total(total)
        numbers.note(step, {"loss": 2.5, "own": 10**400})
        assert link.read() == RankNumbers(int(step), clock.now, shown, 0.0, {"loss": (int(step), 2.5)})


def test_a_value_that_is_not_finite_is_said_too(numbers: ReportedNumbers, link: Link) -> None:
    numbers.note(1, {"loss": math.nan, "gradient_norm": math.inf})
    said = link.read().numbers
    assert math.isnan(said["loss"][1])
    assert said["gradient_norm"] == (1, math.inf)


def test_a_page_holds_so_many_names_and_no_more(numbers: ReportedNumbers, link: Link) -> None:
    numbers.note(1, {f"{number:03d}" + "\N{SNOWMAN}" * 100: float(number) for number in range(100)})
    said = link.read().numbers
    assert 8 <= len(said) <= number_page.MOST_NUMBERS
    assert {len(name) for name in said} == {number_page.NAME_LETTERS}


def test_an_agent_that_is_gone_costs_nothing_but_its_pictures() -> None:
    numbers = ReportedNumbers(lambda _: False)
    numbers.note(1, {"loss": 1.0})


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"step": -1, "at_s": 0, "last_step": 0, "flops": 0, "numbers": {}}',
        b'{"step": 1, "at_s": 0, "last_step": 0, "flops": 0, "numbers": {"loss": 1}}',
        b'{"step": 1, "at_s": 0, "last_step": 0, "flops": 0, "numbers": {"loss": [1, "x"]}}',
        b'{"step": true, "at_s": 0, "last_step": 0, "flops": 0, "numbers": {}}',
        b'{"step": 1, "at_s": NaN, "last_step": 0, "flops": 0, "numbers": {}}',
        b'{"step": 1, "at_s": 1e308, "last_step": 0, "flops": 0, "numbers": {}}',
        b'{"step": 1, "at_s": 0, "last_step": 0, "flops": Infinity, "numbers": {}}',
        b"[" * 4000,
    ],
)
def test_nonsense_in_a_page_is_left(text: bytes) -> None:
    page = NumberPage()
    os.pwrite(page.descriptor, struct.pack("=QII", 2, len(text), zlib.crc32(text)) + text, 0)
    assert number_page.read(page.descriptor, 0) is None
    page.close_descriptor()


def test_a_name_that_is_no_text_gets_question_marks(numbers: ReportedNumbers, link: Link) -> None:
    numbers.note(1, {"\ud800loss": 1.0})
    found = number_page.read(link.page, 0)
    assert found is not None
    assert found[1].numbers == {"?loss": (1, 1.0)}


def test_the_page_says_whether_batches_can_be_skipped(numbers: ReportedNumbers, link: Link) -> None:
    numbers.note(1, {"loss": 2.0})
    assert not link.read().skips_batches
    dealt = 96
    numbers.set_sampler(lambda: dealt)
    numbers.note(2, {"loss": 2.0})
    assert link.read().skips_batches
    assert link.read().numbers == {"loss": (2, 2.0), "sampler_position": (2, 96.0)}
    numbers.set_sampler(lambda: None)  # a user's own, which does not say where it is
    numbers.note(3, {"loss": 2.0})
    assert link.read().numbers["sampler_position"] == (2, 96.0)


def test_a_page_that_is_being_written_or_was_made_smaller_is_left(numbers: ReportedNumbers, link: Link) -> None:
    numbers.note(1, {"loss": 1.0})
    sequence = number_page.read(link.page, 0)
    assert sequence is not None
    assert number_page.read(link.page, sequence[0]) is None  # nothing newer
    os.pwrite(link.page, struct.pack("=Q", sequence[0] + 1), 0)
    assert number_page.read(link.page, 0) is None
    os.pwrite(link.page, struct.pack("=Q", sequence[0]) + b"\0\0\0\0", 0)
    assert number_page.read(link.page, 0) is None
    os.ftruncate(link.page, 3)
    assert number_page.read(link.page, 0) is None


def test_outside_muster_a_script_logs_into_nothing_and_imports_nothing() -> None:
    code = """
import sys, muster
muster.log(3, loss=1.0, total_steps=9)
print([name for name in sys.modules if name.startswith(("muster.", "google", "numpy", "torch"))])
"""
    environ = {name: value for name, value in os.environ.items() if name != "MUSTER_AGENT_FD"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == []


def test_a_descriptor_that_is_no_connection_to_an_agent_is_not_used() -> None:
    """The script has closed its connection, and another file has the number."""
    code = """
import os, muster
reader, writer = os.pipe()
os.environ["MUSTER_AGENT_FD"] = str(writer)
muster.log(3, loss=1.0)
muster.log(4, loss=1.0)
os.set_blocking(reader, False)
try:
    print(os.read(reader, 1))
except BlockingIOError:
    print("nothing")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "nothing", done.stderr


def test_log_writes_new_names_and_a_new_total_at_once() -> None:
    code = """
import os, socket, muster
from muster.checkpoint.format import number_page
agent, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.environ["MUSTER_AGENT_FD"] = str(rank.fileno())
muster.log(1, loss=1.0)
muster.log(2, loss=2.0)
muster.log(2, accuracy=0.5)
_, (page,), _, _ = socket.recv_fds(agent, 1 << 12, 1)
print(number_page.read(page, 0)[1].numbers)
muster.log(3, total_steps=9, loss=3.0)
said = number_page.read(page, 0)[1]
print(said.step, said.last_step, said.numbers["loss"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    wanted = ["{'loss': (1, 1.0), 'accuracy': (2, 0.5)}", "3 9 (3, 3.0)"]
    assert done.stdout.splitlines() == wanted, done.stderr


def test_log_takes_what_a_step_takes() -> None:
    muster.log(1, loss=0.5, gradient_norm=1.0, tokens=10, lr=1e-4, own=3)
