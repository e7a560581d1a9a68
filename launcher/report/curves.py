"""Pictures of what was measured: a number over the steps, and the step time of each rank over time."""

from __future__ import annotations

from datetime import tzinfo

import numpy
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from muster.launcher.report.picture import axes_of, colour, day, figure_of, show_times, svg_of, words
from muster.launcher.report.report_data import Curve, HeatMap
from muster.wording import duration


def curve(one: Curve, name: str) -> str:
    """The median over the steps, and the range of all ranks as a band, as SVG. `name`: of the picture."""
    axes = axes_of(2.1, left=0.1, above=0.36)
    has_range = bool(one.least) and (one.least, one.greatest) != (one.median, one.median)
    if has_range:
        axes.fill_between(one.steps, one.least, one.greatest, facecolor=colour("range"), linewidth=0, label="all ranks")
    marker = "o" if len(one.steps) < 40 else ""
    axes.plot(one.steps, one.median, color=colour("line"), linewidth=1.5, marker=marker, markersize=3, label="median")
    axes.set_xlabel("step")
    axes.set_title(words(f"{one.name}, {one.unit}" if one.unit else one.name, 70), loc="left", size=9.5)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.ticklabel_format(axis="y", useOffset=False, style="plain") if _is_moderate(one) else None
    axes.grid(axis="y", linewidth=0.6)
    axes.margins(x=0.01)
    if has_range:
        axes.legend(loc="best", frameon=False, ncols=2)
    said = f"From {one.median[0]:.4g} at step {one.steps[0]:,.0f} to {one.median[-1]:.4g} at step {one.steps[-1]:,.0f}."
    return svg_of(axes, name, f"{one.name} over the steps", said)


def _is_moderate(one: Curve) -> bool:
    most = max(map(abs, one.median))
    return 1e-3 <= most < 1e6


def heat_map(heat: HeatMap, zone: tzinfo) -> str:
    """The step time of each rank over time, as an image with axes, as SVG."""
    values = numpy.ma.masked_invalid(numpy.array(heat.rows, dtype=numpy.float32))
    axes = axes_of(3.4, left=0.09, right=0.12)
    usual, most = (float(value) for value in numpy.nanpercentile(values.filled(numpy.nan), [50, 99.9]))
    image = axes.imshow(
        values, aspect="auto", interpolation="none", cmap="cividis", vmin=0.9 * usual, vmax=max(most, 1.1 * usual),
        extent=(day(heat.begin_s), day(heat.end_s), heat.ranks - 0.5, -0.5),
    )  # fmt: skip
    axes.set_ylabel("rank")
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    show_times(axes, zone)
    beside = figure_of(axes).add_axes((0.9, axes.get_position().y0, 0.016, axes.get_position().height))
    bar = figure_of(axes).colorbar(image, cax=beside)
    bar.set_label("seconds of a step, without waiting" if heat.is_own else "seconds of a step")
    bar.outline.set_linewidth(0.4)
    for rank, _ in heat.slowest:
        axes.annotate("◀", (1.0, rank), xycoords=("axes fraction", "data"), va="center", color=colour("bad"))
    said = "; ".join(f"rank {rank}: {duration(seconds)}" for rank, seconds in heat.slowest)
    return svg_of(axes, "heat", "Step time of each rank over time", f"Ranks that stand out: {said or 'none'}.")
