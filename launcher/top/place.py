"""Where the user is on the screen, and what each key does there. Pure: a key makes a new place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from muster.launcher.top.cells import Line

OVERVIEW, RANKS, RECOVERIES, EVENTS, NODES, MAP, JOBS = (
    "overview",
    "ranks",
    "recoveries",
    "events",
    "nodes",
    "map",
    "jobs",
)
OF_JOB = {"o": OVERVIEW, "r": RANKS, "v": RECOVERIES, "e": EVENTS, "n": NODES, "m": MAP}
OF_FLEET = {"j": JOBS, "n": NODES, "m": MAP}
KEYS = (
    ("o r v e n m", "of a job: overview, ranks, recoveries, events, nodes, map of the nodes"),
    ("j n m", "of all jobs: jobs, nodes, map of the nodes"),
    ("a", "of the jobs: those, too, that ended more than a day ago; again: without them"),
    ("arrows, PgUp, PgDn, Home, End", "move the cursor"),
    ("Enter", "open the job, the node or the leaf under the cursor"),
    ("Esc, Backspace", "back: from a list, a node or a leaf to what was before, from a job to all jobs"),
    ("/", "show only what contains a text; Enter keeps the text, Esc drops it"),
    ("?", "these keys"),
    ("q, Ctrl+C", "end"),
)
"""The keys, as the screen and docs/operations/day-to-day.md show them."""
_STEPS = {
    "up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0), "pageup": (0, -15), "pagedown": (0, 15),
    "home": (0, -(1 << 20)), "end": (0, 1 << 20),
}  # fmt: skip
FILTER_CHARS = 40


class Body(Protocol):
    """What fills the screen below its heading: a list or a map."""

    def draw(self, cursor: str | None, width: int, height: int) -> list[Line]:
        """Its lines."""

    def move(self, cursor: str, across: int, down: int) -> str:
        """Where the cursor is after so many steps."""

    def words(self, cursor: str) -> str:
        """What is to be said of what is under the cursor."""


@dataclass(frozen=True, slots=True)
class Place:
    """`job`: the gang id of the job that is open; empty: the fleet. `leaf`, `node`: what is open of the nodes."""

    page: str = JOBS
    job: str = ""
    leaf: str = ""
    node: str = ""
    cursor: str = ""
    wanted: str = ""
    typing: bool = False
    keys_shown: bool = False
    ended_too: bool = False
    """Jobs that ended more than a day ago are listed, too."""
    only_job: bool = False
    """`muster top JOB`: there is no fleet to go back to."""


def press(place: Place, key: str, character: str, body: Body | None) -> Place | None:
    """The place after a key; None: the end. `body`: what the cursor moves on; None: nothing. A key without a sense here
    changes nothing."""
    if key in ("ctrl+c", "ctrl+q"):
        return None
    if place.typing:
        return _typed(place, key, character)
    if place.keys_shown:
        return replace(place, keys_shown=False)
    if body is not None and key in _STEPS:
        return replace(place, cursor=body.move(place.cursor, *_STEPS[key]))
    if body is not None and key == "enter":
        return _opened(place, body)
    if key in ("escape", "backspace"):
        return _back(place)
    pages = OF_JOB if place.job else OF_FLEET
    match character:
        case "q":
            return None
        case "?":
            return replace(place, keys_shown=True)
        case "a" if place.page == JOBS:
            return replace(place, ended_too=not place.ended_too)
        case "/" if body is not None:
            return replace(place, typing=True, wanted="")
        case _ if character in pages:
            return Place(pages[character], place.job, only_job=place.only_job)
        case _:
            return place


def _typed(place: Place, key: str, character: str) -> Place:
    if key == "enter":
        return replace(place, typing=False)
    if key == "escape":
        return replace(place, typing=False, wanted="")
    if key == "backspace":
        return replace(place, wanted=place.wanted[:-1])
    return (
        replace(place, wanted=(place.wanted + character)[:FILTER_CHARS], cursor="")
        if character.isprintable()
        else place
    )


def _opened(place: Place, body: Body) -> Place:
    under = body.move(place.cursor, 0, 0)
    if place.page == JOBS:
        return Place(OVERVIEW, under) if under else place
    if place.page == MAP and getattr(body, "by_leaf", False):
        return replace(place, leaf=under, cursor="")
    return replace(place, node=under, cursor=under) if place.page in (MAP, NODES) and under else place


def _back(place: Place) -> Place:
    if place.wanted:
        return replace(place, wanted="", cursor="")
    if place.node:
        return replace(place, node="")
    if place.leaf:
        return replace(place, leaf="", cursor=place.leaf)
    if place.job and place.page != OVERVIEW:
        return Place(OVERVIEW, place.job, only_job=place.only_job)
    return Place(JOBS, cursor=place.job) if place.job and not place.only_job else place
