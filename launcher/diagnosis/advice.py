"""What to change, the most useful first: each line follows from something that was found. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from muster.fabric.model.level import Level
from muster.launcher.diagnosis.diagnosis import Diagnosis
from muster.launcher.diagnosis.links import Side, SlowLink
from muster.launcher.diagnosis.steps import WAIT_OF_NOTE
from muster.launcher.output.job_lines import job_ids, recovery_phases, says_no_step
from muster.wording import duration, percent

SLOWER_THAN_BEFORE = 0.9
"""The share of an earlier speed below which a job has become slower."""


def advice(found: Diagnosis) -> list[str]:
    """The lines. Empty if nothing is wrong."""
    return [
        *_nodes(found),
        *_links(found),
        *_groups(found),
        *_ranks(found),
        *_data(found),
        *_library(found),
        *_otherwise(found),
    ]


def _job(found: Diagnosis) -> str:
    return job_ids(found.measured.gang).partition(" ")[0] or "0"


def _has_spare(found: Diagnosis) -> bool:
    return any(node.role == "spare" and node.agent_attached for node in found.measured.gang.nodes)


def _leave(found: Diagnosis, node: str) -> str:
    """How the job gets rid of a node."""
    if _has_spare(found):
        return f"let a spare take its place: muster swap {_job(found)} {node}"
    return f"the job has no spare for it: submit it again with --exclude={node}, or with spares"


def _nodes(found: Diagnosis) -> Iterator[str]:
    for node in found.reports:
        if node.verdict not in ("FIT", "SUSPECT"):
            yield f"{node.node} is {node.verdict}: {_leave(found, node.node)}"


def _links(found: Diagnosis) -> Iterator[str]:
    for slow in found.slow:
        yield _link(found, slow)
    for node in found.slow_uplinks:
        yield f"{node}: have its cable and its port looked at; until then {_leave(found, node)}"


def _link(found: Diagnosis, slow: SlowLink) -> str:
    if slow.side is not Side.BETWEEN:
        return f"{slow.nodes[0]}: have its adapter, cable and port looked at; until then {_leave(found, slow.nodes[0])}"
    sender, receiver = slow.nodes
    if not any(link.requested for link in found.links):
        return f"{sender} to {receiver}: find the end that is slow: muster diagnose {_job(found)} --measure"
    return f"{sender} to {receiver}: have the switches between them looked at; other links of these nodes are well"


def _groups(found: Diagnosis) -> Iterator[str]:
    torn = {(group.kind, group.asked) for group in found.torn}
    for kind, asked in sorted(torn):
        key = "data" if "data" in kind.value else kind.value
        word = asked.word
        yield (
            f'{kind} groups: submit with --placement.{key}="require {word}" to wait for such nodes; muster plan says '
            "what that saves"
        )


def _ranks(found: Diagnosis) -> Iterator[str]:
    slow = found.slowest
    if slow:
        words = f"rank {slow.rank} on {slow.node} computes {percent(slow.longer_by)} longer than the others, which wait"
        yield f"{words}: look at its data and its logs; if it is the node, {_leave(found, slow.node)}"


def _data(found: Diagnosis) -> Iterator[str]:
    if found.parts and found.parts.fetches >= WAIT_OF_NOTE:
        share = percent(found.parts.fetches)
        yield f"ranks wait for data in {share} of a step: more workers that load it, or faster storage"


def _library(found: Diagnosis) -> Iterator[str]:
    """What the library would have saved in the last recovery of a job without it, as far as that is known."""
    gang = found.measured.gang
    over = [one for one in gang.recoveries if one.running_s]
    if not over or not says_no_step(gang):
        return
    newest = over[-1]
    since = newest.suspected_s or newest.detected_s
    trained_s = since - (over[-2].running_s if over[1:] else gang.run_started_s or gang.goodput.since_s)
    stood = f"the last recovery took {duration(newest.running_s - since)} until its ranks ran again"
    words = [f"keep its state: {stood} ({recovery_phases(newest)})"]
    if trained_s > 0:
        had_run = f"Of the {duration(trained_s)} that they had run before"
        words.append(f"{had_run}, what the script had not saved is trained again; how much, it alone knows")
    words.append(
        "Three lines of the library (README.md) keep each step in memory, so that a step at most is trained again"
    )
    yield ". ".join(words)


def _otherwise(found: Diagnosis) -> Iterator[str]:
    """What is left to do if nothing was found, and the job is slower than it was or waits for long."""
    if found.slow or found.torn or found.slowest or found.reports:
        return
    slower = found.earlier is not None and found.earlier.share < SLOWER_THAN_BEFORE
    waits = found.parts is not None and found.parts.waits >= WAIT_OF_NOTE
    if (slower or waits) and not any(link.requested for link in found.links):
        yield f"measure its links: muster diagnose {_job(found)} --measure"
    elif slower:
        yield "its links are well: compare its data, its command and its environment with the earlier run"
    elif waits and found.prediction and found.prediction.tier in (Level.POD, Level.ANY):
        yield "gradients cross the widest tier: more micro-batches a step, or [parallelism] with fewer bytes to sum"
