"""What a tree of processes costs: processor time and memory."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from benchmarks.load.site_processes import cpu_s

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)")


def tree(pid: int) -> list[int]:
    """The process and all below it."""
    children = [int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in _words(task / "children")]
    return [pid, *(below for child in children for below in tree(child))]


def _words(path: Path) -> list[str]:
    return path.read_text().split()


def tree_cpu_s(pid: int) -> float:
    """Seconds of processor time that the processes of the tree have used. One that has ended is left out."""
    return sum(cpu_s(each) for each in tree(pid))


def tree_pss_mib(pid: int) -> float:
    """The proportional memory (PSS) of the tree: a page that n processes of this machine share counts 1/n."""
    return sum(_field_kib(Path(f"/proc/{each}/smaps_rollup").read_text(), "Pss") for each in tree(pid)) / 1024


def tree_alone_mib(pid: int) -> float:
    """The memory of the tree on a machine where nobody else has its files mapped, at most: each file counts as much as
    the process that maps most of it."""
    files: dict[str, int] = defaultdict(int)
    private_kib = 0
    for each in tree(pid):
        for file, (rss_kib, pss_kib) in _mappings(each).items():
            if file.startswith("/"):
                files[file] = max(files[file], rss_kib)
            else:
                private_kib += pss_kib
    return (sum(files.values()) + private_kib) / 1024


def _mappings(pid: int) -> dict[str, tuple[int, int]]:
    """KiB of each file (RSS, PSS); memory of no file has the name "" or one in brackets."""
    found: dict[str, tuple[int, int]] = {}
    file = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if mapping := _MAPPING.match(line):
            file = mapping[1]
        elif line.startswith(("Rss:", "Pss:")):
            rss, pss = found.get(file, (0, 0))
            kib = int(line.split()[1])
            found[file] = (rss + kib, pss) if line.startswith("Rss:") else (rss, pss + kib)
    return found


def _field_kib(text: str, field: str) -> int:
    return int(next(line for line in text.splitlines() if line.startswith(f"{field}:")).split()[1])
