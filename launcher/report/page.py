"""The report of one job as a page: one file of HTML that needs no network and no script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, tzinfo
from importlib import resources

from muster import __version__
from muster.launcher.output.screen import zone_words
from muster.launcher.report import bars, curves, fabric_map, time_line
from muster.launcher.report.html import Html, figure, joined, more, table, tag
from muster.launcher.report.picture import COLOURS, styled
from muster.launcher.report.report_data import Fault, Goodput, PlainRequeue, ReportData
from muster.wording import counted, duration, listed

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may load for this page: nothing from anywhere, and no script."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page. `key`: its anchor."""

    key: str
    title: str
    content: Html


def page_of(data: ReportData, zone: tzinfo) -> str:
    """The whole page. Times are those of `zone`."""
    with styled():
        sections = [section for section in _sections(data, zone) if section.content]
    title = f"{data.head.name or data.head.gang}, job {data.head.job}"
    head = tag("head", Html('<meta charset="utf-8">'),
               Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
               Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
               tag("title", f"Report: {title}"), tag("style", Html(_style())))  # fmt: skip
    links = (tag("li", tag("a", section.title, href=f"#{section.key}")) for section in sections)
    top = tag("header", tag("a", "Skip to the report", href="#report", class_="skip"), tag("h1", title),
              tag("nav", tag("ul", *links), aria_label="Contents"))  # fmt: skip
    parts = (tag("section", tag("h2", section.title, id=f"{section.key}-heading"), section.content, id=section.key,
                 tabindex="-1", aria_labelledby=f"{section.key}-heading") for section in sections)  # fmt: skip
    made = f"Made by muster {__version__} at {_time(data.made_s, zone)}. All times are {zone_words(zone)}."
    body = tag("body", top, tag("main", *parts, id="report", tabindex="-1"), tag("footer", made))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _style() -> str:
    css = resources.files("muster.launcher.report").joinpath("page.css").read_text()
    light, dark = (" ".join(f"--{role}: {pair[at]};" for role, pair in COLOURS.items()) for at in (0, 1))
    return css.replace("LIGHT", light).replace("DARK", dark)


def _sections(data: ReportData, zone: tzinfo) -> Iterator[Section]:
    yield Section("summary", "Summary", _summary(data, zone))
    yield Section("timeline", "Time line", _time_line(data, zone))
    yield Section("recoveries", "Recoveries", _recoveries(data, zone))
    yield Section("goodput", "Goodput", _goodput(data))
    yield Section("training", "Training", _training(data))
    yield Section("ranks", "Step time by rank", _heat(data, zone))
    yield Section("network", "Ranks on the network", _network(data))
    yield Section("notes", "What is not shown", joined(tag("p", note) for note in data.notes))


def _time(at_s: float, zone: tzinfo) -> str:
    return datetime.fromtimestamp(at_s, zone).strftime("%Y-%m-%d %H:%M:%S") if at_s else ""


def _summary(data: ReportData, zone: tzinfo) -> Html:
    head = data.head
    values = [
        ("user", head.user),
        ("submitted", _time(head.submitted_s, zone)),
        ("ended" if head.is_over else "seen until", _time(head.until_s, zone)),
        ("nodes", f"{head.nodes:,}"),
        ("ranks", f"{head.ranks:,}"),
        ("generations", str(head.generations)),
        ("steps", f"{head.step:,}"),
        ("goodput", data.goodput.words),
    ]
    listed_values = tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in values))
    rows = (_fault_row(fault, zone) for fault in data.faults)
    faults = (
        table(
            "Faults: what failed, what was done, what it cost",
            ("no.", "time", "what failed", "what was done", "cost"),
            rows,
        )
        if data.faults
        else tag("p", "No fault was seen.")
    )
    return joined([tag("p", head.result, class_="lead"), listed_values, faults])


def _fault_row(fault: Fault, zone: tzinfo) -> tuple[str, ...]:
    return (str(fault.number), _time(fault.at_s, zone), fault.cause, _done(fault), _cost(fault))


def _done(fault: Fault) -> str:
    left, came = listed(fault.nodes_out), listed(fault.nodes_in)
    words = [fault.action, f"{left} left" if left else "", f"{came} came in" if came else ""]
    return "; ".join(filter(None, words))


def _cost(fault: Fault) -> str:
    if not fault.lost_s and not fault.steps_again:
        return "nothing"
    again = f", {counted(fault.steps_again, 'step')} again" if fault.steps_again else ""
    took = f" ({duration(fault.steps_again_s)})" if fault.steps_again_s else ""
    return f"{duration(fault.lost_s)}{again}{took}"


def _time_line(data: ReportData, zone: tzinfo) -> Html:
    generations = (
        (
            str(one.number),
            _time(one.begin_s, zone),
            _time(one.end_s, zone),
            duration(one.end_s - one.begin_s),
            str(one.nodes),
        )
        for one in data.generations
    )
    bands = (
        (time_line.KINDS[band.kind], _time(band.begin_s, zone), duration(band.end_s - band.begin_s))
        for band in data.bands
    )
    return joined([
        figure(time_line.time_line(data, zone), "Phases as bands, generations as boxes, faults as numbered marks."),
        more("Generations as a table",
             table("Generations", ("no.", "start", "end", "lasted", "nodes"), generations, frozenset({3, 4})))
        if data.generations else "",
        more("Phases as a table", table("Phases", ("phase", "start", "lasted"), bands, frozenset({2}))),
    ])  # fmt: skip


def _recoveries(data: ReportData, zone: tzinfo) -> Html:
    if not data.recoveries:
        return tag("p", "There was no recovery.")
    names = tuple(bars.PHASES)
    rows = (
        (str(one.generation), _time(one.at_s, zone), one.action,
         *(duration(dict(one.parts)[name]) if name in dict(one.parts) else "" for name in names), duration(one.total_s))
        for one in data.recoveries
    )  # fmt: skip
    titles = ("generation", "fault", "what was done", *bars.PHASES.values(), "whole")
    note = (
        f" Of {len(data.recoveries)}, the longest {bars.MOST_BARS} are drawn."
        if len(data.recoveries) > bars.MOST_BARS
        else ""
    )
    return joined([
        figure(bars.recovery_bars(data.recoveries), f"From each fault to the first step of the next generation.{note}"),
        table("Recoveries by phase", titles, rows, frozenset(range(3, 4 + len(names)))),
    ])  # fmt: skip


def _goodput(data: ReportData) -> Html:
    goodput = data.goodput
    if not goodput.allocated:
        return tag("p", "Nothing was allocated yet.")
    rows = [_goodput_row(goodput, name, node_s) for name, node_s in (*_trained(goodput), *goodput.lost)]
    rows.append(_goodput_row(goodput, "whole", goodput.allocated))
    queue = f" Before that, the job waited {duration(goodput.queue_s)} for Slurm." if goodput.queue_s else ""
    titles = (
        "time",
        "share",
        "node hours",
        *(("GPU hours",) * bool(goodput.gpus_per_node)),
        *(("money",) * bool(goodput.price)),
    )
    caption = f"The part of the allocated time that trained something new: {goodput.words}.{queue}"
    return joined([
        figure(bars.goodput_bars(goodput), caption),
        table("Allocated time by category", titles, rows, frozenset(range(1, len(titles)))),
        _requeue(data.requeue) if data.requeue else "",
    ])  # fmt: skip


def _trained(goodput: Goodput) -> Iterator[tuple[str, float]]:
    """The parts that are not lost."""
    if (known := goodput.useful - goodput.steps_unknown) or not goodput.useful:
        yield "useful", known
    if goodput.steps_unknown:
        yield "steps_unknown", goodput.steps_unknown


def _goodput_row(goodput: Goodput, name: str, node_s: float) -> tuple[str, ...]:
    hours = goodput.gpu_hours(node_s)
    gpu = (_hours(hours),) if goodput.gpus_per_node else ()
    money = (f"{hours * goodput.price:,.2f}",) if goodput.price else ()
    share = bars.share_words(node_s / goodput.allocated)
    return (bars.CATEGORIES.get(name, name), share, _hours(node_s / 3600), *gpu, *money)


def _hours(hours: float) -> str:
    return f"{hours:,.2f}" if hours >= 1 else f"{hours:.3g}"


def _requeue(one: PlainRequeue) -> Html:
    """What a plain requeue would have cost, with the arithmetic."""
    restarts = counted(one.restarts, "restart")
    lines = [
        f"time in the queue            {duration(one.queue_s):>10}   measured: this job's own wait",
        f"+ start of the job           {duration(one.start_s):>10}   measured: from its allocation to its first step",
        f"+ steps done again           {duration(one.checkpoint_age_s):>10}   {one.checkpoint_words}",
        f"= one restart                {duration(one.each_s):>10}",
        f"x {restarts:<26} {duration(one.restarts * one.each_s):>10}",
        f"- what the faults did cost   {duration(one.actual_s):>10}   recoveries and steps done again",
        f"= difference                 {duration(abs(one.saved_s)):>10}   {'saved' if one.saved_s >= 0 else 'lost'}",
    ]
    held = one.restarts * (one.start_s + one.checkpoint_age_s) - one.actual_s
    node_s = held * one.nodes
    gpu = node_s * one.gpus_per_node / 3600
    of_gpus = f"{gpu:,.1f} GPU hours" if one.gpus_per_node else f"{node_s / 3600:,.1f} node hours"
    money = f", {gpu * one.price:,.2f} at {one.price:g} for a GPU hour" if one.price and one.gpus_per_node else ""
    return joined([
        tag("h3", "What a plain requeue would have cost"),
        tag("p", "Without Muster, each of these faults ends the job. It is queued again, starts anew, and goes on from "
                 "the newest durable checkpoint."),
        tag("pre", Html("\n".join(joined([line]) for line in lines)), tabindex="0"),
        tag("p", f"Time in the queue holds no nodes. Of the nodes that the job held, that is {of_gpus}{money}."),
    ])  # fmt: skip


def _training(data: ReportData) -> Html:
    parts = []
    for number, one in enumerate(data.curves):
        rows = list(_sampled(list(zip(one.steps, one.median, strict=True))))
        parts.append(figure(curves.curve(one, f"curve-{number}")))
        said = ((f"{step:,.0f}", f"{value:.5g}") for step, value in rows)
        parts.append(
            more(
                f"{one.name} as a table",
                table(one.name, ("step", f"median {one.unit}".strip()), said, frozenset({0, 1})),
            )
        )
    return joined(parts)


def _sampled(rows: list[tuple[float, float]], most: int = 32) -> Iterator[tuple[float, float]]:
    """Evenly spread rows, the first and the last one among them."""
    last = len(rows) - 1
    count = min(len(rows), most)
    for at in sorted({round(number * last / max(count - 1, 1)) for number in range(count)}):
        yield rows[at]


def _heat(data: ReportData, zone: tzinfo) -> Html:
    if data.heat is None:
        return Html()
    joint = f" Each row is the slowest of {data.heat.ranks_per_row} ranks." if data.heat.ranks_per_row > 1 else ""
    rows = ((str(rank), duration(seconds)) for rank, seconds in data.heat.slowest)
    slow = (
        more("Ranks that stand out, as a table", table("Ranks that stand out", ("rank", "median of a step"), rows))
        if data.heat.slowest
        else ""
    )
    caption = f"A bright row is a slow rank, a bright column is a slow moment, an empty place is no step.{joint}"
    return joined([figure(curves.heat_map(data.heat, zone), caption), slow])


def _network(data: ReportData) -> Html:
    if not data.leaves:
        return Html()
    return joined([
        figure(fabric_map.fabric_map(data.leaves), "A block is a leaf, a cell is a node with its ranks."),
        more("Nodes as a table",
             table("Nodes on the network", ("leaf", "node", "now", "ranks", "faults"), fabric_map.rows(data.leaves))),
    ])  # fmt: skip
