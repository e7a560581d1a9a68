"""What the documents say of the code holds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from muster.launcher.__main__ import COMMANDS, parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def test_the_states_are_those_of_the_tables() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_states.py"], capture_output=True, text=True, timeout=60, check=True
    )
    assert made.stdout == (ROOT / "docs" / "STATES.md").read_text(), "run: python docs/make_states.py > docs/STATES.md"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, f"{page.name}: {named - targets}"


def test_commands_that_are_shown_are_understood() -> None:
    names = {command.name for command in COMMANDS}
    for page in PAGES:
        for line in re.findall(r"^(?:\$ )?muster ([^\n#]*)", page.read_text(), re.MULTILINE):
            words = line.split()
            assert words[0] in names, f"{page.name}: muster {line}"
            parser().parse_args(["42" if word == "JOB" else word for word in words])
