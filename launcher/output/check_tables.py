"""What `muster check` and `muster nodes -v` show of node checks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from muster.daemon.preflight.check_result import CheckResult, Outcome
from muster.daemon.preflight.pairing import PairRate, localise
from muster.launcher.output.screen import Screen
from muster.launcher.output.table import Coloured, table
from muster.v1.api_pb2 import NodeView
from muster.v1.common_pb2 import CheckOutcome, NodeCheck

_COLOURS = {Outcome.PASSED: "green", Outcome.SLOW: "yellow"}


def check_table(results: Mapping[str, CheckResult], screen: Screen) -> Iterator[str]:
    """One record for each node."""
    rows = [
        (
            node,
            Coloured(result.outcome, _COLOURS.get(result.outcome, "red")),
            rates(result),
            result.hardware,
            result.reason,
        )
        for node, result in results.items()
    ]
    return table(screen, ("node", "check", "rates", "hardware", "why"), rows)


def counter_lines(results: Mapping[str, CheckResult]) -> Iterator[str]:
    """For each node with GPUs, their error counters before and after the check."""
    for node, result in results.items():
        if result.counters:
            yield f"{node}: {result.counters}"


def rates(check: CheckResult | NodeCheck) -> str:
    """The measured rates in words; empty if none was measured."""
    words = [
        f"{value:,.0f} {unit}"
        for value, unit in (
            (check.gflops, "GFLOP/s"),
            (check.memory_gb_s, "GB/s memory"),
            (check.host_to_device_gb_s, "GB/s to the GPU"),
        )
        if value
    ]
    return ", ".join(words) + (", shared cores" if words and check.cores_shared else "")


CHECK_TITLES = ("check", "checked", "checked by", "rates", "hardware", "GPU errors")


def check_cells(node: NodeView, screen: Screen) -> tuple[str, str, str, str, str, str]:
    """What the newest check of the node has found, in which job or by its daemon: the cells below CHECK_TITLES."""
    if not node.HasField("node_check"):
        return "never", "", "", "", "", ""
    check = node.node_check
    outcome = CheckOutcome.Name(check.outcome).removeprefix("CHECK_OUTCOME_").lower()
    by = f"job {node.checked_in_job}" if node.checked_in_job else "musterd"
    return outcome, screen.time(node.checked_s), by, rates(check), check.hardware, check.counters


def pair_lines(pairs: Sequence[PairRate]) -> Iterator[str]:
    """What the pairs have shown."""
    if not pairs:
        return
    reached = sorted(pair.gb_s for pair in pairs)
    yield f"{len(pairs)} pairs of nodes: {reached[0]:.2f} to {reached[-1]:.2f} GB/s"
    slow = localise(pairs)
    for node in slow.nodes:
        yield f"slow node: {node}, in all of its pairs"
    for pair in slow.links:
        what = pair.error or f"{pair.gb_s:.3f} GB/s"
        yield f"slow link: {pair.first} and {pair.second}: {what}"
