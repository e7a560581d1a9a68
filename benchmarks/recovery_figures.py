"""`make figures`: the recovery figures of the README, as a picture and as a table, from benchmarks/recovery.json.

`make bench-recovery` writes build/recovery.json, which git ignores. If that file is there, it replaces
benchmarks/recovery.json first. The picture is docs/recovery.svg; the table replaces what stands between the two
`figures:recovery` marks of README.md. Only drawing needs matplotlib. A test checks that both agree with the file.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "benchmarks" / "recovery.json"
NEWEST = ROOT / "build" / "recovery.json"
"""What `make bench-recovery` has measured here."""
PICTURE = ROOT / "docs" / "recovery.svg"
README = ROOT / "README.md"
BLOCK = re.compile(r"(?<=<!-- figures:recovery -->\n).*?(?=<!-- /figures:recovery -->)", re.DOTALL)

FAULTS = {
    "node_crash": "all processes of a node die",
    "power_loss": "a node loses power",
    "partition": "a node loses its network",
    "xid": "a GPU reports a fatal Xid",
    "rank_killed": "a rank is killed",
    "node0_crash": "all processes of the first node die",
    "node0_power_loss": "the first node loses power",
}
"""Names of bench_recovery's faults, in words."""
PEERS = {
    "muster_script": "Muster, a script of torchrun",
    "torchrun_tuned": "torchrun, tuned",
    "slurm_requeue_expedited": "Slurm requeue, expedited",
    "slurm_requeue_tuned": "Slurm requeue, tuned",
}
"""Names of the peers that the picture shows, in words."""
COLOURS = ("#0072b2", "#56b4e9", "#e69f00", "#cc79a7", "#999999")
"""Muster and the peers: colour-blind readers can tell them apart (Okabe and Ito)."""
GAP = 0.6
"""Space between two groups of bars, in bars."""


@dataclass(frozen=True)
class Bar:
    """One bar of the picture. `seconds` is None if the job did not train again."""

    fault: str
    system: str
    seconds: float | None

    @property
    def label(self) -> str:
        """What stands beside the bar."""
        return "never" if self.seconds is None else seconds_text(self.seconds)


def seconds_text(seconds: float) -> str:
    """ "1.7 s" or "43 s"."""
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def digest(measured: dict[str, Any]) -> str:
    """Tells one set of figures from another; the picture carries it."""
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()[:16]


def muster_bars(results: dict[str, Any]) -> list[Bar]:
    """Medians of Muster alone, one for each fault that was measured."""
    return [Bar(words, "Muster", results[name]["median_s"]) for name, words in FAULTS.items() if name in results]


def compared_bars(results: dict[str, Any]) -> list[list[Bar]]:
    """Medians of Muster and of its peers: one group for each fault that any peer was struck with."""
    peers, groups = results.get("peers", {}), []
    for name, words in FAULTS.items():
        measured = [Bar(words, PEERS[p], peers[p][name]["median_s"]) for p in PEERS if name in peers.get(p, {})]
        if measured and name in results:
            groups.append([Bar(words, "Muster", results[name]["median_s"]), *measured])
    return groups


def table(measured: dict[str, Any]) -> str:
    """The table of the README: Markdown."""
    results = measured["results"]
    peers = {name: words for name, words in PEERS.items() if name in results.get("peers", {})}
    head = ["what breaks", f"Muster: median (worst of {measured['runs']})", "steps done again", *peers.values()]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for name, words in FAULTS.items():
        if name not in results:
            continue
        found, redone = results[name], results[name]["steps_redone"]
        cells = [
            f"{found['median_s']:.1f} s ({found['worst_s']:.1f} s)",
            f"at most {redone}" if redone else "none",
            *(_peer_cell(results["peers"][peer].get(name)) for peer in peers),
        ]
        lines.append(f"| {words} | {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def _peer_cell(cell: dict[str, Any] | None) -> str:
    return "" if cell is None else Bar("", "", cell["median_s"]).label


def draw(measured: dict[str, Any], path: Path) -> None:
    """Write the picture to `path`, as SVG whose labels are text."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "muster", "font.size": 10})
    from matplotlib import pyplot

    results = measured["results"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), facecolor="white")
    _bars(left, [[bar] for bar in muster_bars(results)])
    left.set_title("Muster")
    _bars(right, compared_bars(results))
    right.set_title("Muster and what there is without it")
    figure.suptitle("Seconds from a fault to the next finished training step")
    figure.tight_layout()
    metadata = {"Date": None, "Creator": None, "Description": f"figures {digest(measured)}"}
    figure.savefig(path, format="svg", metadata=metadata)
    path.write_text("".join(line.rstrip() + "\n" for line in path.read_text().splitlines()))


def _bars(axes: Any, groups: list[list[Bar]]) -> None:
    """Horizontal bars, with a gap between groups. The first bar of a group names the fault."""
    systems = ["Muster", *PEERS.values()]
    bars = [bar for group in groups for bar in group]
    places = [place + number * GAP for number, group in enumerate(groups) for place in _rows(groups, number)]
    names = [tick for group in groups for tick in _ticks(group)]
    longest = max((bar.seconds or 0 for bar in bars), default=1)
    axes.barh(places, [bar.seconds or 0 for bar in bars], color=[COLOURS[systems.index(bar.system)] for bar in bars])
    for place, bar in zip(places, bars, strict=True):
        axes.text((bar.seconds or 0) + longest / 100, place, bar.label, va="center")
    axes.set_yticks(places, names)
    axes.set_xlim(0, longest * 1.15)
    axes.set_xlabel("seconds")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _rows(groups: list[list[Bar]], number: int) -> range:
    first = sum(len(group) for group in groups[:number])
    return range(first, first + len(groups[number]))


def _ticks(group: list[Bar]) -> list[str]:
    if len(group) == 1:
        return [group[0].fault]
    return [f"{bar.fault}: {bar.system}" if bar is group[0] else bar.system for bar in group]


def main() -> int:
    """Take the newest figures over, draw the picture, and write the table into the README."""
    if NEWEST.exists():
        FILE.write_text(NEWEST.read_text())
    measured = json.loads(FILE.read_text())
    draw(measured, PICTURE)
    text = README.read_text()
    README.write_text(BLOCK.sub(lambda _: table(measured), text))
    print(f"{PICTURE.relative_to(ROOT)} and the table in {README.name} show {FILE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
