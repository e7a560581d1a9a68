"""The picture of a job's life: its phases as bands, its generations, and its faults as marks with words."""

from __future__ import annotations

from datetime import tzinfo

from matplotlib.axes import Axes

from muster.launcher.report.picture import HATCHES, axes_of, colour, day, show_times, svg_of, words
from muster.launcher.report.report_data import Fault, Generation, ReportData
from muster.wording import counted

_ROLES = {"queue": "queue", "start": "start", "training": "good", "recovery": "fence", "end": "queue"}
KINDS = {
    "queue": "waits for Slurm",
    "start": "starts",
    "training": "trains",
    "recovery": "recovers",
    "end": "saves and ends",
}
"""What each band means, for the legend and the table."""
_MOST_WORDS = 8
"""Faults whose words stand in the picture. Of more, all words stand in the table alone."""
_LINE_INCHES = 0.23
_NEAR = 0.018
"""Two numbers that are nearer than this share of the width would overlap."""


def time_line(data: ReportData, zone: tzinfo) -> str:
    """The picture as SVG."""
    named = data.faults if len(data.faults) <= _MOST_WORDS else ()
    axes = axes_of(2.0 + _LINE_INCHES * len(named), left=0.1, below=0.42, above=0.32)
    begin, end = data.head.submitted_s, max(data.head.until_s, data.head.submitted_s + 1.0)
    axes.set_xlim(day(begin), day(end))
    axes.set_ylim(-0.35 - 0.5 * len(named), 2.75)
    _bands(axes, data)
    _generations(axes, data.generations, end - begin)
    _marks(axes, data.faults, (begin, end))
    for row, fault in enumerate(named):
        _words_of(axes, fault, -0.5 - 0.5 * row, (begin, end))
    axes.set_yticks([2.3, 1.3, 0.3], ["phase", "generation", "faults"])
    axes.tick_params(axis="y", length=0)
    show_times(axes, zone)
    axes.spines["left"].set_visible(False)
    said = f"{counted(len(data.generations), 'generation')} and {counted(len(data.faults), 'fault')}"
    return svg_of(axes, "timeline", "Time line of the job", f"{said}. The tables below the picture have all of it.")


def _bands(axes: Axes, data: ReportData) -> None:
    for kind in KINDS:
        spans = [(day(band.begin_s), day(band.end_s) - day(band.begin_s)) for band in data.bands if band.kind == kind]
        if spans:
            axes.broken_barh(
                spans,
                (1.99, 0.62),
                facecolor=colour(_ROLES[kind]),
                edgecolor=colour("ink"),
                linewidth=_outline(len(spans)) / 2,
                hatch=HATCHES[kind] or None,
                label=KINDS[kind],
            )
    if data.bands:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(KINDS), frameon=False, borderaxespad=0)


def _outline(count: int) -> float:
    """How wide the outline of so many boxes is. Those of very many would hide what is in them."""
    return 0.9 if count <= 60 else 0.2


def _generations(axes: Axes, generations: tuple[Generation, ...], whole_s: float) -> None:
    spans = [(day(one.begin_s), day(one.end_s) - day(one.begin_s)) for one in generations]
    axes.broken_barh(spans, (1.05, 0.5), facecolor="none", edgecolor=colour("ink"), linewidth=_outline(len(spans)))
    for one in generations:
        if one.end_s - one.begin_s > whole_s * _NEAR * len(str(one.number)):
            middle = day((one.begin_s + one.end_s) / 2)
            axes.text(middle, 1.28, str(one.number), ha="center", va="center")


def _marks(axes: Axes, faults: tuple[Fault, ...], span: tuple[float, float]) -> None:
    if not faults:
        axes.text(day(span[0]), 0.28, "none", va="center", color=colour("muted"))
        return
    at = [day(fault.at_s) for fault in faults]
    axes.plot(at, [0.15] * len(at), linestyle="none", marker="v", markersize=7, color=colour("bad"), clip_on=False)
    last = float("-inf")
    for fault in faults:
        share = (fault.at_s - span[0]) / (span[1] - span[0])
        if share - last >= _NEAR * len(str(fault.number)):
            axes.text(day(fault.at_s), 0.55, str(fault.number), ha="center", va="center", weight="bold")
            last = share


def _words_of(axes: Axes, fault: Fault, height: float, span: tuple[float, float]) -> None:
    """The words of a fault on a line of its own, tied to its mark."""
    at, is_late = day(fault.at_s), (fault.at_s - span[0]) / (span[1] - span[0]) > 0.5
    axes.plot([at, at], [0.0, height], color=colour("muted"), linewidth=0.6, zorder=0.5)
    said = words(f"{fault.number}: {fault.action}: {fault.cause}", 78)
    text = f"{said}\u00a0" if is_late else f"\u00a0{said}"
    axes.text(at, height, text, ha="right" if is_late else "left", va="center", size=8.5,
              bbox={"facecolor": colour("paper"), "edgecolor": "none", "pad": 0.6})  # fmt: skip
