"""Conditions that count only when they last: from samples to signals, by the policy's rules.

A rule says: the signal is raised when its condition held for a share of a window of time, and it is over when the
condition held for less than a smaller share of another, usually longer, window (hysteresis). Each signal is reported
once when it is raised and once when it is over. The kind of the second report ends in "-over".

A rule may give a count instead of a share: then the signal is raised when so many observations, lines of the kernel log
for example, have come within the window (`repetitions`). An observation without such a rule is passed on at once.

The rules are rows of the coordinator's policy table; it sends them in its answer to hello. Until then, and without a
rule, a sample has no effect, and observations wait for the rules. Time is that of the samples. Time without a sample
counts as neither: it does not help to raise a signal, and not to end one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from muster.daemon.host import clock
from muster.daemon.node.repetitions import Repetitions
from muster.daemon.node.sensors.sensor import OVER, Observation, Sample
from muster.v1 import node_pb2

MAX_WAITING = 1000
"""Observations that wait for the first rules, at most; the oldest are dropped. The outbox has the same limit."""
MAX_GAP_S = 5.0
"""Seconds between two samples, at most. After a longer pause the time between them counts as without a sample."""
MAX_COUNT = 10_000
"""The largest count of a rule: the time of each line is kept."""
ConditionKey = tuple[str, int, str]
"""Kind, code and device of a condition."""


@dataclass(frozen=True, slots=True)
class SignalRule:
    """When the signal `kind` with `code` is raised and when it is over. Shares are 0 to 1, times are seconds.

    `count`: raised by so many observations within the window; the shares are of no account. 0: by samples.
    """

    kind: str
    code: int
    share: float
    window_s: float
    clear_share: float
    clear_s: float
    count: int = 0

    @classmethod
    def from_message(cls, message: node_pb2.SignalRule) -> SignalRule:
        """The rule of a message."""
        return cls(
            message.kind,
            message.code,
            message.share,
            message.window_s,
            message.clear_share,
            message.clear_s,
            message.count,
        )

    @property
    def is_usable(self) -> bool:
        """Whether all numbers make sense."""
        numbers = (self.share, self.window_s, self.clear_share, self.clear_s)
        return all(math.isfinite(number) and number >= 0 for number in numbers) and self.count <= MAX_COUNT


@dataclass(slots=True)
class _Span:
    """A time in which every sample had the same `held`."""

    begin: float
    end: float
    held: float

    def overlap_s(self, since: float) -> float:
        return max(0.0, self.end - max(self.begin, since))


@dataclass(slots=True)
class _History:
    """The samples of one condition of one device."""

    last_at: float = float("-inf")
    spans: deque[_Span] = field(default_factory=deque)
    raised: bool = False

    def add(self, held: float, at: float, keep_s: float) -> None:
        begin, self.last_at = self.last_at, at
        if 0 < at - begin <= MAX_GAP_S:
            if self.spans and self.spans[-1].held == held and self.spans[-1].end == begin:
                self.spans[-1].end = at
            else:
                self.spans.append(_Span(begin, at, held))
        while self.spans and self.spans[0].end <= at - keep_s:
            self.spans.popleft()

    def held_s(self, window_s: float) -> float:
        since = self.last_at - window_s
        return sum(span.overlap_s(since) * span.held for span in self.spans)

    def clear_s(self, window_s: float) -> float:
        since = self.last_at - window_s
        return sum(span.overlap_s(since) * (1 - span.held) for span in self.spans)


class SignalWindows:
    """Turns samples into observations. `report` gets the observations, also those that need no rule."""

    def __init__(self, report: Callable[[Observation], None], wall: Callable[[], float] = clock.wall) -> None:
        self._report = report
        self._wall = wall
        self._rules: dict[tuple[str, int], SignalRule] = {}
        self._histories: dict[ConditionKey, _History] = {}
        self._repetitions = Repetitions()
        self._waiting: deque[Observation] | None = deque()
        self.lasting: frozenset[ConditionKey] = frozenset()
        """The conditions that were raised and are not over. Any thread may read it."""

    def use(self, rules: Iterable[SignalRule]) -> None:
        """Replace the rules. What was raised stays raised until its new rule says that it is over."""
        self._rules = {(rule.kind, rule.code): rule for rule in rules if rule.is_usable}
        self._histories = {key: kept for key, kept in self._histories.items() if key[:2] in self._rules}
        self.lasting &= self._histories.keys()
        self._repetitions.forget_all_but({key for key, rule in self._rules.items() if rule.count})
        waiting, self._waiting = self._waiting, None
        for observation in waiting or ():
            self.report(observation)

    def report(self, reported: Observation | Sample) -> None:
        """Pass an observation on, or take in a sample or an observation that counts only when it repeats."""
        rule = self._rules.get((reported.kind, reported.code))
        if isinstance(reported, Sample):
            if rule and not rule.count:
                self._take_in(reported, rule)
        elif self._waiting is not None:
            if len(self._waiting) == MAX_WAITING:
                self._waiting.popleft().handled()
            self._waiting.append(reported)
        elif rule and rule.count:
            self._count(reported, rule)
        else:
            self._report(reported)

    def _count(self, observation: Observation, rule: SignalRule) -> None:
        if self._repetitions.is_reached(observation, rule.count, rule.window_s, rule.clear_s):
            words = f"{observation.text}; {rule.count} times within {rule.window_s:g} s"
            self._report(replace(observation, text=words))
        else:
            observation.handled()

    def _take_in(self, sample: Sample, rule: SignalRule) -> None:
        key = (sample.kind, sample.code, sample.device)
        history = self._histories.setdefault(key, _History())
        if sample.at < history.last_at:
            return
        held = min(max(sample.held, 0.0), 1.0)
        history.add(held, sample.at, max(rule.window_s, rule.clear_s))
        if not history.raised and held and history.held_s(rule.window_s) >= rule.share * rule.window_s:
            history.raised, self.lasting = True, self.lasting | {key}
            self._report(self._observation(sample, "", _raised_words(history, rule)))
        elif history.raised and not held and history.clear_s(rule.clear_s) >= (1 - rule.clear_share) * rule.clear_s:
            history.raised, self.lasting = False, self.lasting - {key}
            self._report(self._observation(sample, OVER, f"over: clear for {rule.clear_s:g} s"))

    def _observation(self, sample: Sample, suffix: str, words: str) -> Observation:
        text = f"{sample.text}; {words}" if words else sample.text
        return Observation(f"{sample.kind}{suffix}", sample.code, sample.device, text, self._wall())


def _raised_words(history: _History, rule: SignalRule) -> str:
    if not rule.share:
        return ""
    return f"for {history.held_s(rule.window_s):.0f} s of the last {rule.window_s:g} s"
