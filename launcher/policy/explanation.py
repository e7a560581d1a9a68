"""Which row of the policy decides about a line of the kernel log, or about a signal of a sensor."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from muster.daemon.coordinator.policy.policy import OVER, Policy, Row
from muster.daemon.node.kernel.driver_lines import driver_in_trouble
from muster.daemon.node.kernel.kernel_record import KERNEL_FACILITY
from muster.daemon.node.kernel.xid import KernelErrorParser
from muster.launcher.policy.log_lines import read_line

_SIGNAL = re.compile(r"(?P<kind>[a-z0-9-]{1,40})(?:[ /:.]{1,3}(?P<code>0x[0-9a-f]{1,8}|[0-9]{1,9}))?", re.ASCII)
_TWO_WORDS = re.compile(r"(?P<kind>[a-z0-9-]{1,40})(?:[ /:.]{1,3}(?P<rest>\S{1,40}))?", re.ASCII)
_SHIPPED = "the shipped table"
_ACTIONS: Mapping[str, str] = {
    "unfit": "the node is taken out of service",
    "unfit_unless_explained": "unless the loss of a peer explains it, the node is taken out of service",
    "degraded": "the node stays in service, and the response follows",
    "rank": "it is the fault of a rank's program, not of the node",
    "ignore": "nothing follows",
}


class SignalNameError(ValueError):
    """A text is almost the name of a signal. The message says what is wrong."""


def explain(text: str, policy: Policy, site: str) -> Iterator[str]:
    """The answer in lines. `text`: a line of the kernel log, or "KIND", or "KIND CODE". `site`: the site's file.

    Raises:
        SignalNameError: `text` is almost the name of a signal.
    """
    words = text.strip()
    signal = words.lower()  # the reasons that Muster gives begin with "Xid 79"
    if (found := _SIGNAL.fullmatch(signal)) and found["kind"] in policy.kinds:
        yield from _of_signal(policy, found["kind"], found["code"], site)
    elif mistake := _mistake(signal, policy):
        raise SignalNameError(mistake)
    else:
        yield from _of_line(words, policy, site)


def _mistake(signal: str, policy: Policy) -> str:
    """What is wrong with the name of a signal; empty: the text is not meant as one."""
    if not (found := _TWO_WORDS.fullmatch(signal)):
        return ""
    kind, rest = found["kind"], found["rest"]
    if kind in policy.kinds:
        return f"{rest!r} is no code of {kind}: a code is a whole number"
    if kind.endswith(OVER) and kind.removesuffix(OVER) in policy.kinds:
        return f"{kind} ends a signal of the kind {kind.removesuffix(OVER)}, and has no row"
    near = difflib.get_close_matches(kind, policy.kinds, 1)
    return f"unknown kind of signal {kind!r}: did you mean {near[0]!r}?" if near else ""


def _of_line(line: str, policy: Policy, site: str) -> Iterator[str]:
    record = read_line(line.encode(errors="surrogateescape")).record
    error = KernelErrorParser().parse(record)
    if not error:
        yield "this means nothing to Muster: no signal, and nothing follows from it"
        yield f"  {_reason_for_silence(record.facility, record.fragment)}"
        if driver := driver_in_trouble(record):
            yield f"  {driver} speaks of trouble in words that Muster does not know: musterd counts such lines"
        yield f"  the kinds of signals are {', '.join(policy.kinds)}"
        return
    yield f"signal {error.kind} {error.code}{f' of {error.device}' if error.device else ''}"
    row = policy.row(error.kind, error.code)
    if row is None:
        yield "  no row: this policy does not know the kind, and ignores it"
    else:
        yield from _of_row(row, site)


def _reason_for_silence(facility: int, fragment: bool) -> str:
    if facility != KERNEL_FACILITY:
        return "a program wrote this record, not the kernel: its facility is not 0"
    if fragment:
        return "the record is a fragment of a line: its start may be a user's text"
    return "a message counts only if it begins with the kernel's own words for an error"


def _of_signal(policy: Policy, kind: str, code: str | None, site: str) -> Iterator[str]:
    if code is not None:
        codes: list[int | None] = [int(code, 0 if code.startswith("0x") else 10)]
    else:
        codes = [*sorted(policy.codes(kind)), None]
    for each in codes:
        row = policy.row(kind, policy.free_code(kind) if each is None else each)
        if row is not None:
            yield f"signal {kind} {'of any other code' if each is None else each}"
            yield from _of_row(row, site)


def _of_row(row: Row, site: str) -> Iterator[str]:
    decision = row.decision
    yield f"  row       {row.key}"
    yield f"  action    {decision.action}"
    yield f"  follows   {_ACTIONS[decision.action]}"
    if decision.action == "degraded":
        yield f"  response  {decision.response}"
    if decision.by_program:
        yield "  program   by_program: after such an error, a second node that only a boot repairs ends the job"
    yield f"  reason    {decision.reason}"
    yield f"  when      {window_words(row)}"
    yield f"  source    {row.source or 'none given'}"
    ours = f"{site}: {', '.join(row.site_keys)}; the rest: " if row.site_keys else ""
    yield f"  from      {ours}{_SHIPPED}"


def window_words(row: Row) -> str:
    """The row's window and rate in words."""
    when = row.when
    if when is None:
        return "at once, each time"
    if when.count:
        return f"{when.count} times within {when.window_s:g} s; again only after {when.clear_s:g} s without"
    begin = f"for {when.share:.0%} of {when.window_s:g} s" if when.share else "at once"
    return f"{begin}; over when it held for at most {when.clear_share:.0%} of {when.clear_s:g} s"
