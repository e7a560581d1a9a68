"""A diagnosis as one screen of text. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import tzinfo

from muster.daemon.host.plain_text import plain
from muster.launcher.diagnosis.advice import SLOWER_THAN_BEFORE, advice
from muster.launcher.diagnosis.diagnosis import Diagnosis
from muster.launcher.diagnosis.groups import PlacedKind, TornGroup
from muster.launcher.diagnosis.links import MeasuredLink, Side, SlowLink
from muster.launcher.diagnosis.steps import Earlier, speaks_of_link, wait_of
from muster.launcher.output.job_lines import job_ids, says_no_step
from muster.launcher.output.screen import Screen, time_with_zone
from muster.launcher.output.table import labelled
from muster.launcher.plan.screen import WHERE
from muster.slurm.client.parsing.hostlist import collapse
from muster.wording import counted, duration, percent, scaled

MOST_SHOWN = 5
"""Torn groups, slow links and reports that are shown, the worst first."""
_LABEL = len("predicted")


def lines(found: Diagnosis, screen: Screen) -> Iterator[str]:
    """The screen."""
    yield from screen.sentence(plain(_title(found)))
    yield from labelled(screen, _findings(found, screen), _LABEL)


def _findings(found: Diagnosis, screen: Screen) -> Iterator[tuple[str, str]]:
    gang = found.measured.gang
    for label, texts in (
        ("ended", [gang.reason] if gang.final and gang.reason else []),
        ("last words", found.last_words),
        ("network", [found.network.source]),
        ("groups", _groups(found)),
        ("links", _links(found)),
        ("nodes", _nodes(found)),
        ("step", _step(found)),
        ("predicted", _predicted(found)),
        ("before", _before(found, screen.zone)),
        ("speaks of", _tier(found)),
        ("loss", _loss(found)),
        ("not known", found.unknown),
        ("change", advice(found) or ["nothing: nothing that was measured is slow or misplaced"]),
    ):
        yield from ((label, text) for text in texts)


def _title(found: Diagnosis) -> str:
    gang, spec = found.measured.gang, found.measured.spec
    jobs = job_ids(gang)
    size = counted(len(gang.ranks), "rank")
    step = "no step is known" if says_no_step(gang) else f"step {gang.step}"
    if spec.nodes:
        size = f"{counted(spec.nodes, 'node')} of {counted(spec.ranks_per_node, 'rank')}"
    return f"{gang.name} (job {jobs}): {gang.phase}, generation {gang.generation}, {step}; {size}"


def _groups(found: Diagnosis) -> Iterator[str]:
    for kind in found.kinds:
        yield _kind(kind)
    for group in found.torn[:MOST_SHOWN]:
        yield from _torn(group)
    if len(found.torn) > MOST_SHOWN:
        yield f"and {len(found.torn) - MOST_SHOWN} more that are wider than asked (--json has all)"


def _kind(kind: PlacedKind) -> str:
    what = counted(kind.count, f"{kind.kind} pair")
    if kind.kind.value != "pipeline":
        what = f"{counted(kind.count, f'{kind.kind} group')} of {kind.size} ranks"
    where = f"{WHERE[kind.loosest]}{' at most' if kind.count > 1 else ''}"
    if not kind.torn:
        return f"{what}: {where}, as asked"
    verb = "requires" if kind.required else "prefers"
    return f"{what}: {kind.torn} WIDER THAN ASKED, {where}; the job {verb}: {WHERE[kind.asked]}"


def _torn(group: TornGroup) -> Iterator[str]:
    ranks = _numbers(group.ranks)
    cost = (
        f"{duration(group.extra_s)} a step more, {group.factor:.2f} times as long" if group.extra_s > 0 else "no cost"
    )
    way = f"{collapse(group.nodes)}, over {', '.join(group.switches)}"
    yield f"{group.name} (ranks {ranks}) on {way}; predicted: {cost}"


def _numbers(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    shown = " ".join(map(str, ranks[:8]))
    return f"{shown} …" if len(ranks) > 8 else shown


def _links(found: Diagnosis) -> Iterator[str]:
    for slow, kinds in list(zip(found.slow, found.passing, strict=True))[:MOST_SHOWN]:
        waiting = f"; {' and '.join(kinds)} groups wait for it in each step" if kinds else ""
        yield _slow(slow) + waiting
    if len(found.slow) > MOST_SHOWN:
        yield f"and {len(found.slow) - MOST_SHOWN} more (--json has all)"
    if found.links:
        yield from _summary(found.links, none_slow=not found.slow)
    for node, speed in found.slow_uplinks.items():
        yield f"{node}: its link to its switch has {scaled(speed, 'B/s')}, less than its tier"


def _slow(slow: SlowLink) -> str:
    rate = f"{scaled(slow.rate, 'B/s')}; such transfers usually reach {scaled(slow.usual, 'B/s')}"
    if slow.side is Side.BETWEEN:
        return f"SLOW: {slow.nodes[0]} to {slow.nodes[1]} ({WHERE[slow.level]}), {rate}"
    side = {Side.SENDS: "sends slowly", Side.RECEIVES: "receives slowly", Side.BOTH: "is slow both ways"}[slow.side]
    return f"SLOW: {slow.nodes[0]} {side}, {rate} ({counted(slow.transfers, 'transfer shows', 'transfers show')} it)"


def _summary(links: list[MeasuredLink], *, none_slow: bool) -> Iterator[str]:
    for requested, what in ((True, "measured on request"), (False, "copies of shards between buddies")):
        rates = [link.rate for link in links if link.requested is requested]
        if rates:
            slowest, fastest = scaled(min(rates), "B/s"), scaled(max(rates), "B/s")
            verdict = ", none of them slow" if none_slow else ""
            ratings = sorted({link.rated for link in links if link.requested is requested and link.rated})
            if ratings:
                upto = f" to {scaled(ratings[-1], 'B/s')}" if len(ratings) > 1 else ""
                verdict += f"; rated {scaled(ratings[0], 'B/s')}{upto}"
            yield f"{len(rates)} {what}: {slowest} to {fastest}{verdict}"


def _nodes(found: Diagnosis) -> Iterator[str]:
    for node in found.reports[:MOST_SHOWN]:
        yield f"{node.node} {node.verdict}: {node.reason}"
    if len(found.reports) > MOST_SHOWN:
        yield f"and {len(found.reports) - MOST_SHOWN} more (--json has all)"


def _step(found: Diagnosis) -> Iterator[str]:
    if not found.measured.step_s:
        return
    step, parts = duration(found.measured.step_s), found.parts
    if parts is None:
        yield f"{step} (median)"
        return
    wait = f"{duration(parts.wait)} wait for gradients ({percent(parts.waits)})"
    medians = f"medians of {counted(len(found.measured.ranks), 'rank')}"
    yield f"{step} = {duration(parts.compute)} compute + {wait}; {medians}"
    if parts.fetch is None:
        yield "the wait for data is a part of compute: the script does not declare it (checkpoint.fetching())"
    else:
        fetch = f"{duration(parts.fetch)} wait for data ({percent(parts.fetches)})"
        yield f"of compute, {fetch}, on the rank that waits longest"
    if slow := found.slowest:
        yield f"rank {slow.rank} on {slow.node} computes {percent(slow.longer_by)} longer than the median rank"


def _predicted(found: Diagnosis) -> Iterator[str]:
    if (prediction := found.prediction) is None:
        return
    here, planned = prediction.here, prediction.planned
    yield (
        f"{duration(here.total)} = {duration(here.compute + here.bubble + here.optimizer)} compute and bubble + "
        f"{duration(here.exposed)} exposed communication, of which {duration(wait_of(here))} for gradients"
    )
    if here.exposed:
        most = max(here.traffic, key=lambda one: one.exposed)
        level = next((kind.loosest for kind in found.kinds if kind.kind is most.traffic.group), None)
        where = f" {WHERE[level]}" if level is not None else ""
        yield f"its bottleneck: {most.traffic.group} {most.traffic.kind}{where}, {duration(most.exposed)} exposed"
    if here.total > 1.001 * planned.total:
        factor = here.total / planned.total
        yield f"in the places that muster plan shows: {duration(planned.total)}, {factor:.3g} times faster"
    if found.measured.step_s:
        share = found.measured.step_s / here.total
        yield f"the measured step takes {share:.3g} times the prediction"


def _loss(found: Diagnosis) -> Iterator[str]:
    """What its loss shows, as in `muster status`, unless the job has ended for it."""
    gang = found.measured.gang
    yield from (
        words for words in (gang.not_finite, gang.last_loss) if words and not (gang.final and words in gang.reason)
    )


def _before(found: Diagnosis, zone: tzinfo) -> Iterator[str]:
    others = sum(not one.same_settings for one in found.measured.past)
    if found.earlier:
        yield _earlier(found.earlier, zone)
    elif found.measured.gang.final and (own := _own(found, zone)):
        yield own
    else:
        yield "no earlier run of this job, with these settings, was measured"
    if others:
        yield f"{others} earlier generations had other settings, and are not compared"


def _own(found: Diagnosis, zone: tzinfo) -> str:
    """What was measured last of a job that has ended."""
    own = [one for one in found.measured.past if one.gang_id == found.measured.gang.gang_id]
    if not own:
        return ""
    last = own[0]
    parts = f" ({duration(last.compute_s)} compute, {duration(last.wait_s)} wait)" if last.compute_s else ""
    until = time_with_zone(last.ended_s, zone)
    return f"its last generation, {last.generation}, took {duration(last.step_s)} a step{parts}, until {until}"


def _earlier(earlier: Earlier, zone: tzinfo) -> str:
    where = "this generation" if earlier.same_run else f"job {earlier.job}, generation {earlier.generation}"
    when = f"{duration(earlier.step)} a step in {where}, {time_with_zone(earlier.at, zone)}"
    if earlier.share < SLOWER_THAN_BEFORE:
        return f"it reaches {percent(earlier.share)} of the speed that it had: {when}"
    return f"as fast as ever, {percent(earlier.share)} of its best: {when}"


def _tier(found: Diagnosis) -> Iterator[str]:
    """Which tier the measured time speaks of."""
    parts, prediction = found.parts, found.prediction
    if parts is None:
        return
    if found.slowest and parts.waits:
        yield f"a node, not the network: the others wait for rank {found.slowest.rank} on {found.slowest.node}"
        return
    data = next((kind for kind in found.kinds if kind.kind.value == "data"), None)
    if prediction is None or not prediction.by_tier:
        if data is None:
            yield "no tier: its groups sum no gradients, so the script waits for other traffic then"
        else:
            yield f"gradients are summed {WHERE[data.loosest]}: that tier has the wait of {duration(parts.wait)}"
        return
    if prediction.tier is None and speaks_of_link(parts.wait, prediction.over_slow, prediction.by_tier):
        wait = duration(prediction.over_slow)
        yield f"the slow link, not a tier: gradients at its speed take {wait}, and the wait is {duration(parts.wait)}"
        return
    by_tier = ", ".join(f"{duration(wait)} {WHERE[level]}" for level, wait in prediction.by_tier.items())
    if prediction.tier is None:
        yield f"no tier: a wait of {duration(parts.wait)} is longer than gradients take in any ({by_tier})"
    else:
        words = f"the wait of {duration(parts.wait)} is nearest to what gradients take there"
        yield f"{WHERE[prediction.tier]}: {words} ({by_tier})"
