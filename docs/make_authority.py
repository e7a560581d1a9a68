"""Writes the authority matrix of docs/SECURITY.md from the table that decides: python docs/make_authority.py --write"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from muster.daemon.transport.authority_table import AUTHORITY, Answer, CallerKind

PAGE = Path(__file__).with_name("SECURITY.md")
BEGIN, END = "<!-- begin: python docs/make_authority.py --write -->\n", "<!-- end -->\n"
WORDS = {
    Answer.ALLOWED: "yes",
    Answer.OWN: "own",
    Answer.DENIED: "no",
    Answer.HIDDEN: "hidden",
    Answer.DISMISSED: "dismissed",
    Answer.UNPROVED: "unproved",
}


def matrix() -> str:
    """The table, and a line for each of its words."""
    return "\n".join([*_rows(), "", *_legend(), ""])


def _rows() -> Iterator[str]:
    yield f"| method | {' | '.join(CallerKind)} |"
    yield "| --- " * (1 + len(CallerKind)) + "|"
    for method, answers in AUTHORITY.items():
        name = method.removeprefix("/muster.v1.").removeprefix("/")
        yield f"| {name} | {' | '.join(WORDS[answers[kind]] for kind in CallerKind)} |"


def _legend() -> Iterator[str]:
    for answer, word in WORDS.items():
        yield f"- {word}: {answer} ({answer.code})"


def with_matrix(page: str) -> str:
    """The page with the matrix of now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{matrix()}\n{END}{after}"


def main() -> None:
    """Print the whole page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/SECURITY.md")
    page = with_matrix(PAGE.read_text())
    if parser.parse_args().write:
        PAGE.write_text(page)
    else:
        print(page, end="")


if __name__ == "__main__":
    main()
