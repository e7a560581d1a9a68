"""Text as HTML. Whatever is not made here is escaped, so no name of a job and no reason of a node becomes a tag."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from muster.launcher.report.picture import words


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *inside: str, **attributes: str) -> Html:
    """One element. `class_` is the attribute class; a name with an underscore gets a hyphen."""
    said = "".join(f' {key.strip("_").replace("_", "-")}="{escape(words(value))}"' for key, value in attributes.items())
    return Html(f"<{name}{said}>{joined(inside)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    """The parts side by side."""
    return Html("".join(part if isinstance(part, Html) else escape(words(part)) for part in parts))


def table(
    caption: str, titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: frozenset[int] = frozenset()
) -> Html:
    """A table, with a caption for readers who hear it. `numbers`: the columns that are set to the right."""

    def cell(at: int, text: str) -> Html:
        kind = {"class_": "number"} if at in numbers else {}
        return tag("th", text, scope="row", **kind) if at == 0 else tag("td", text, **kind)

    head = tag("tr", *(tag("th", title, scope="col", **({"class_": "number"} if at in numbers else {}))
                       for at, title in enumerate(titles)))  # fmt: skip
    body = (tag("tr", *(cell(at, text) for at, text in enumerate(row))) for row in rows)
    whole = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body))
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def figure(svg: str, caption: str = "") -> Html:
    """A picture with its caption. Wider than the screen, it can be moved with the keyboard."""
    words_below = tag("figcaption", caption) if caption else ""
    return tag("figure", tag("div", Html(svg), class_="picture", tabindex="0"), words_below)


def more(title: str, *inside: str) -> Html:
    """What opens on request. It is printed if it is open."""
    return tag("details", tag("summary", title), *inside)
