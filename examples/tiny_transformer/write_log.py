"""Writes keepers_log.txt, the text that the example learns: the invented log of a lighthouse keeper.

The text is drawn from the tables below with a fixed seed, so that this command writes the same bytes again:

    python write_log.py > keepers_log.txt

The entries follow a few rules that a model can learn: the wind decides the sea, the sea decides the traffic, and the
season decides the hours of light.
"""

from __future__ import annotations

import datetime
import random
import sys

DAYS = 420

WINDS = {
    "calm": ("flat as a plate", "smooth", "like oiled glass"),
    "a light air from the south": ("smooth", "barely rippled", "easy"),
    "a fair breeze from the west": ("slight", "lively but kind", "easy"),
    "a fresh wind from the north": ("choppy", "short and steep", "grey and busy"),
    "a gale from the northwest": ("high and breaking", "white to the horizon", "heavy on the rocks"),
    "a storm from the southwest": ("running over the lower steps", "wild", "not to be looked at for long"),
}
KIND_WINDS = tuple(WINDS)[:3]

SHIPS = (
    ("the brig", "Patience", "with timber for the yards"),
    ("the ketch", "Two Sisters", "with salt and rope"),
    ("the schooner", "Marigold", "with oranges, or so the flag said"),
    ("the collier", "Ebenezer", "deep laden with coal"),
    ("the cutter", "Swift", "on the revenue's business"),
    ("the steamer", "Northern Light", "with the mails"),
    ("the smack", "Hannah", "with a full hold of herring"),
    ("the barque", "Constant", "homeward from the south"),
)

VISITORS = (
    "The boat came over with flour, lamp oil and a letter from my sister.",
    "The inspector climbed all the stairs, counted the panes and found no fault.",
    "The doctor rowed out to look at the boy's hand, which is mending well.",
    "A painter asked leave to sit on the north rocks, and stayed until the tide told her to go.",
    "The relief keeper brought onions, a new wick and the news of the harbour.",
    "Three children from the village came to see the lens and asked forty questions.",
)

CHORES = (
    "Trimmed the wick twice and polished the lens.",
    "Wound the clockwork at dusk, at midnight and again at four.",
    "Painted the landward side of the tower.",
    "Mended the gutter above the oil store.",
    "Washed the salt from every pane of the lantern.",
    "Greased the bearings and drained the old oil.",
    "Stacked the coal and counted the casks: {casks} full, {empty} empty.",
    "Cut back the grass along the path to the well.",
)

BEASTS = (
    "A seal lay on the slip all morning and would not be hurried.",
    "The gulls have taken the west ledge for themselves again.",
    "Saw two whales blowing, about a mile off, going north.",
    "A tired thrush came in at the door and slept on the barometer.",
    "The hens laid {eggs} eggs, which is more than the weather deserved.",
    "The cat brought a fish up the stairs, and nobody knows how.",
)

SEASONS = {12: "winter", 1: "winter", 2: "winter", 3: "spring", 4: "spring", 5: "spring"} | {
    6: "summer",
    7: "summer",
    8: "summer",
    9: "autumn",
    10: "autumn",
    11: "autumn",
}
LIT = {"winter": ("four", "eight"), "spring": ("seven", "five"), "summer": ("nine", "four"), "autumn": ("six", "six")}


def entry(day: datetime.date, draw: random.Random) -> str:
    """The entry of one day: date, weather, traffic, work and the hours of light."""
    wind = draw.choices(tuple(WINDS), weights=(2, 3, 5, 4, 3, 1))[0]
    season = SEASONS[day.month]
    lines = [
        f"{day:%A}, {day.day} {day:%B}. Wind: {wind}. The sea was {draw.choice(WINDS[wind])}.",
        _traffic(wind, draw),
        draw.choice(CHORES).format(casks=draw.randint(8, 30), empty=draw.randint(1, 7)),
    ]
    if wind in KIND_WINDS and draw.random() < 0.4:
        lines.append(draw.choice(VISITORS))
    if draw.random() < 0.5:
        lines.append(draw.choice(BEASTS).format(eggs=draw.choice(("four", "five", "six", "seven"))))
    lit, out = LIT[season]
    lines.append(
        f"Lit the lamp at {lit} in the evening and put it out at {out} in the morning, as is right in {season}."
    )
    return " ".join(lines)


def _traffic(wind: str, draw: random.Random) -> str:
    if wind == "a storm from the southwest":
        return "No sail in sight, and I was glad of it. Rang the bell every quarter of an hour."
    kind, name, cargo = draw.choice(SHIPS)
    if wind == "a gale from the northwest":
        return f"Saw {kind} {name} running for shelter under bare poles; she made the harbour before dark."
    if wind == "calm":
        return f"All day {kind} {name} lay becalmed off the point, {cargo}, and her crew could be heard singing."
    hour = draw.choice(("six", "nine", "noon", "three"))
    return f"At {hour} passed {kind} {name}, {cargo}. She dipped her flag and I answered."


def main() -> None:
    """Write the log to standard output."""
    draw = random.Random(1867)
    first = datetime.date(1867, 1, 1)
    for number in range(DAYS):
        sys.stdout.write(entry(first + datetime.timedelta(days=number), draw) + "\n\n")


if __name__ == "__main__":
    main()
