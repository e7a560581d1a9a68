"""Pictures of bars: each recovery in its phases, and where the allocated time went."""

from __future__ import annotations

from matplotlib.axes import Axes

from muster.launcher.report.picture import HATCHES, axes_of, colour, figure_of, svg_of, words
from muster.launcher.report.report_data import Goodput, RecoveryParts
from muster.recovery_phases import RecoveryPhase
from muster.wording import counted, duration, percent

MOST_BARS = 24
"""Recoveries in the picture: the longest ones. The table has all."""
CATEGORIES = {
    "useful": "useful",
    "steps_unknown": "training, steps not known",
    "queue": "queue",
    "start": "start",
    **{phase.value: phase.words for phase in RecoveryPhase},
    "steps_again": "steps done again",
    "checkpoint": "checkpoint stalls",
    "straggler": "stragglers",
    "data": "waiting for data",
    "spare": "spares that stood by",
}
"""Where time goes, with its words."""
PHASES = {phase.value: phase.words for phase in RecoveryPhase}
"""The phases of a recovery, in their order, with their words."""
_ROW_INCHES = 0.29


def recovery_bars(recoveries: tuple[RecoveryParts, ...]) -> str:
    """Each recovery as a bar of its phases, as SVG."""
    longest = sorted(recoveries, key=lambda one: one.total_s)[-MOST_BARS:]
    shown = [one for one in recoveries if one in longest]
    axes = axes_of(0.95 + _ROW_INCHES * len(shown), left=0.19, right=0.08, above=0.32)
    for row, one in enumerate(shown):
        _recovery(axes, len(shown) - 1 - row, one)
    axes.set_yticks(range(len(shown)), [words(f"{one.generation}: {one.action}", 22) for one in reversed(shown)])
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlim(0, 1.02 * max((one.total_s for one in shown), default=1.0) or 1.0)
    axes.set_xlabel("seconds since the fault")
    axes.tick_params(axis="y", length=0)
    handles = [
        axes.barh(0, 0, facecolor=colour(name), edgecolor=colour("ink"), linewidth=0.4, hatch=HATCHES[name] or None)
        for name in PHASES
    ]
    axes.legend(handles, PHASES.values(), loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(PHASES), frameon=False)
    title = "Recoveries by phase"
    return svg_of(axes, "recoveries", title, f"{counted(len(shown), 'recovery', 'recoveries')}, a bar for each.")


def _recovery(axes: Axes, row: int, one: RecoveryParts) -> None:
    left = 0.0
    for name, seconds in one.parts:
        axes.barh(row, seconds, 0.66, left=left, facecolor=colour(name), edgecolor=colour("ink"), linewidth=0.4,
                  hatch=HATCHES[name] or None)  # fmt: skip
        left += seconds
    axes.text(left, row, f"\u00a0{duration(left)}", va="center", clip_on=False)


def goodput_bars(goodput: Goodput) -> str:
    """How much of the allocated time was useful, and where the rest went on a scale of its own, as SVG."""
    lost = [(name, node_s) for name, node_s in goodput.lost if node_s > 0]
    height = 1.75 + _ROW_INCHES * len(lost)
    axes = axes_of(height, left=0.19, right=0.22, above=0.85)
    _whole(axes, goodput, height)
    for row, (_, node_s) in enumerate(reversed(lost)):
        share = 100 * node_s / goodput.allocated
        axes.barh(row, share, 0.66, facecolor=colour("bad"), edgecolor=colour("ink"), linewidth=0.4, hatch="////")
        axes.text(
            share, row, f"\u00a0{share_words(share / 100)}, {_amount(goodput, node_s)}", va="center", clip_on=False
        )
    axes.set_yticks(range(len(lost)), [CATEGORIES.get(name, words(name, 22)) for name, _ in reversed(lost)])
    axes.set_ylim(-0.6, max(len(lost), 1) - 0.4)
    axes.set_xlim(left=0)
    axes.set_xlabel("where the rest went, in percent of the allocated time")
    axes.tick_params(axis="y", length=0)
    return svg_of(axes, "goodput", "Goodput", f"Useful part of the allocated time: {goodput.words}.")


def _whole(axes: Axes, goodput: Goodput, height: float) -> None:
    """The allocated time as one bar."""
    whole = figure_of(axes).add_axes((0.19, 1 - 0.62 / height, 0.59, 0.32 / height))
    whole.set_axis_off()
    whole.set_xlim(0, 1)
    whole.barh(0, goodput.share, facecolor=colour("good"), edgecolor=colour("ink"), linewidth=0.4)
    whole.barh(0, 1 - goodput.share, left=goodput.share, facecolor=colour("bad"), edgecolor=colour("ink"),
               linewidth=0.4, hatch="////")  # fmt: skip
    whole.text(-0.008, 0, "allocated", ha="right", va="center")
    useful = f"{percent(goodput.share)} useful, {_amount(goodput, goodput.useful)}"
    said = f"\u00a0{useful if goodput.words == percent(goodput.share) else 'no step is known'}"
    whole.text(1, 0, said, va="center", clip_on=False)


def share_words(share: float) -> str:
    """A share of the time. A small one is not nothing."""
    return percent(share) if share >= 0.001 or not share else f"{100 * share:.2g} %"


def _amount(goodput: Goodput, node_s: float) -> str:
    hours = goodput.gpu_hours(node_s) if goodput.gpus_per_node else node_s / 3600.0
    return (
        f"{hours:,.0f}" * (hours >= 100)
        + f"{hours:.3g}" * (hours < 100)
        + (" GPU h" if goodput.gpus_per_node else " node h")
    )
