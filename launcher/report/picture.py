"""From a figure of matplotlib to SVG in a page: coloured by the page's style, read aloud, without script.

Figures are drawn with colours that stand for a role (`colour`). In the SVG each of them becomes a variable of the
page's style, so one picture serves light and dark screens and paper.
"""

from __future__ import annotations

import io
import re
import warnings
from contextlib import AbstractContextManager
from datetime import tzinfo
from typing import Any, Final
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import matplotlib
from matplotlib import dates
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from muster.daemon.host.plain_text import plain

WIDTH_INCHES: Final = 10.0
"""720 points: the width of the viewBox of each picture."""

COLOURS: Final = {
    "ink": ("#1c2128", "#e8e6e3"),
    "muted": ("#59636e", "#a9b1ba"),
    "grid": ("#d5dae0", "#3c444d"),
    "paper": ("#ffffff", "#171a1f"),
    "good": ("#0b7a5c", "#4fc49f"),
    "bad": ("#c2410c", "#ff9a62"),
    "line": ("#0b62a4", "#6fb7f0"),
    "range": ("#b9d5ec", "#2b4d6b"),
    "queue": ("#c3c9d1", "#4d5660"),
    "start": ("#9cc9e8", "#2f6488"),
    "detect": ("#f3d36b", "#8a7012"),
    "fence": ("#e58a4e", "#a9521b"),
    "place": ("#c9a3d4", "#764f84"),
    "rendezvous": ("#7fb8dd", "#2c6a96"),
    "load": ("#7ac7ad", "#2b7a61"),
    "first_step": ("#a9b1ba", "#67717c"),
}
"""Each role's colour on a light screen and on a dark one. Text and lines have a contrast of 4.5:1 at least."""
_STANDS_FOR: Final = {name: f"#fe{number:02x}a1" for number, name in enumerate(COLOURS)}

HATCHES: Final = {
    "queue": "....",
    "start": "////",
    "training": "",
    "recovery": "xxxx",
    "end": "\\\\\\\\",
    "detect": "",
    "fence": "////",
    "place": "....",
    "rendezvous": "\\\\\\\\",
    "load": "----",
    "first_step": "xxxx",
}
"""Colour alone carries no meaning: neighbours in a picture have different hatches, too."""

_STYLE: Final[dict[Any, object]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "muster",
    "svg.image_inline": True,
    "text.parse_math": False,
    "axes.unicode_minus": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "hatch.linewidth": 0.6,
    "path.simplify": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_FONT = re.compile(r"font-family: [^;]*; ?")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_MISSING_GLYPH = r"Glyph \d+ .* missing from font"
ElementTree.register_namespace("", _SVG)


def colour(role: str) -> str:
    """The colour that stands for a role in a figure."""
    return _STANDS_FOR[role]


def styled() -> AbstractContextManager[None]:
    """The context in which figures are made and drawn."""
    of_ink: dict[Any, object] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "hatch.color"), colour("ink")
    )
    return matplotlib.rc_context({**_STYLE, **of_ink, "axes.edgecolor": colour("muted"), "grid.color": colour("grid")})


def axes_of(
    height_inches: float, left: float = 0.09, right: float = 0.02, below: float = 0.5, above: float = 0.12
) -> Axes:
    """The axes of a new figure. What is `left` and `right` of them are shares of the width, `below` and `above` are
    inches."""
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), facecolor="none")
    FigureCanvasSVG(figure)
    bottom, top = below / height_inches, 1 - above / height_inches
    axes = figure.add_axes((left, bottom, 1 - left - right, top - bottom))
    axes.set_facecolor("none")
    return axes


def figure_of(axes: Axes) -> Figure:
    """The figure that `axes_of` has made for them."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def day(at_s: float) -> float:
    """Where a time (seconds since the epoch) is on an axis of times: matplotlib counts days."""
    return at_s / 86400.0


def show_times(axes: Axes, zone: tzinfo) -> None:
    """Makes the axis from left to right one of times."""
    locator = dates.AutoDateLocator(tz=zone, maxticks=9)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    formatter = dates.ConciseDateFormatter(locator, tz=zone)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(formatter)


def words(text: str, most: int = 0) -> str:
    """Text of others, as one line that any SVG may hold; of `most` characters, if given."""
    line = "".join(char if char.isprintable() else "\ufffd" for char in plain(text))
    return line if not most or len(line) <= most else f"{line[: most - 1]}…"


def svg_of(axes: Axes, name: str, title: str, description: str) -> str:
    """The figure of these axes, for a page. `name` is the prefix of the ids in it, so no two pictures share one.

    A screen reader reads the title and the description, and nothing inside: the page has a table beside the picture.
    """
    root = _drawn(axes)
    for junk in [child for child in root if child.tag.endswith("metadata")]:
        root.remove(junk)
    for parent in root.iter(f"{{{_SVG}}}defs"):
        for style in parent.findall(f"{{{_SVG}}}style"):
            parent.remove(style)  # it would count for the whole page, which has the same rule for its pictures
    for element in root.iter():
        _fit_into_page(element, name)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title {name}-desc", "focusable": "false"}
    root.insert(0, _text_element("desc", f"{name}-desc", description))
    root.insert(0, _text_element("title", f"{name}-title", title))
    return ElementTree.tostring(root, encoding="unicode")


def _drawn(axes: Axes) -> Element:
    target = io.StringIO()
    with warnings.catch_warnings():
        # The browser has other fonts for a name that DejaVu can't write.
        warnings.filterwarnings("ignore", _MISSING_GLYPH, UserWarning)
        figure_of(axes).savefig(target, format="svg", transparent=True)
    return ElementTree.fromstring(target.getvalue())


def _fit_into_page(element: Element, name: str) -> None:
    """The style's variables in place of colours, and ids that are the picture's own."""
    if link := element.attrib.pop(f"{{{_XLINK}}}href", ""):
        element.set("href", f"#{name}-{link[1:]}" if link.startswith("#") else re.sub(r"\s", "", link))
    if "id" in element.attrib:
        element.set("id", f"{name}-{element.get('id')}")
    for key in ("clip-path", "style", "fill"):
        if value := element.get(key):
            element.set(key, _REFERENCE.sub(rf"url(#{name}-\1)", _with_variables(value)))
    if "fill" in element.attrib:  # a variable counts in a style alone
        element.set("style", f"fill: {element.attrib.pop('fill')}; {element.get('style', '')}")
    if element.tail:
        element.tail = None


def _with_variables(value: str) -> str:
    for role, stands in _STANDS_FOR.items():
        if stands in value:
            value = value.replace(stands, f"var(--{role})")
    return _FONT.sub("", value)


def _text_element(tag: str, id: str, text: str) -> Element:
    element = Element(f"{{{_SVG}}}{tag}", {"id": id})
    element.text = words(text)
    return element
