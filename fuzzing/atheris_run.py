"""Runs one target under atheris, in a process of its own: libFuzzer ends its process.

New inputs that reach new code are kept in BUILD/TARGET/corpus, inputs that fail in BUILD/TARGET/failures.
"""

from __future__ import annotations

import re
import subprocess
import sys
from enum import Enum
from pathlib import Path

from fuzzing import near_corpus
from fuzzing.target import CORPUS

SECONDS_AN_INPUT = 30
"""Seconds after which an input counts as hanging. Far more than any input takes on a busy machine."""
MOST_MEMORY_MIB = 2048
MOST_INPUT_BYTES = 64 * 1024


class Outcome(Enum):
    """What a run of a target has found."""

    NOTHING_FOUND = "nothing found"
    FOUND = "FOUND an input that fails"
    NOT_RUN = "NOT RUN"


def fuzz(name: str, seconds: int, build: Path, seed: int, *, planted: bool = False) -> Outcome:
    """Runs the target `name` for `seconds`, or until an input fails, and prints one line about it.

    `planted`: with the target's planted bug.
    """
    folder = build / name
    found, failures = folder / "corpus", folder / "failures"
    for path in (found, failures):
        path.mkdir(parents=True, exist_ok=True)
    before = set(failures.iterdir())
    command = [sys.executable, "-m", "fuzzing.atheris_process", name, *(["--planted"] if planted else []), "--"]
    limits = {
        "max_total_time": seconds,
        "timeout": SECONDS_AN_INPUT,
        "rss_limit_mb": MOST_MEMORY_MIB,
        "max_len": MOST_INPUT_BYTES,
        "seed": seed,
        "print_final_stats": 1,
        "dict": _write_tokens(build / "tokens.txt"),
        "artifact_prefix": f"{failures}/",
    }
    command += [f"-{key}={value}" for key, value in limits.items()]
    done = subprocess.run([*command, str(found), str(CORPUS / name)], capture_output=True, text=True, errors="replace")
    log = done.stdout + done.stderr
    (folder / "log.txt").write_text(log)
    outcome, failed = _outcome(log, done.returncode), sorted(set(failures.iterdir()) - before)
    print(f"{name}: {_figures(log)}; {len(list(found.iterdir()))} new inputs kept; {outcome.value}", flush=True)
    for path in failed:
        print(f"  {_error(log)}", flush=True)
        if planted:
            path.unlink()  # it fails with the planted bug only
        else:
            print(f"  again: make fuzz TARGET={name} INPUT={path}", flush=True)
    if outcome is Outcome.NOT_RUN:
        print(f"  see {folder / 'log.txt'}", flush=True)
    return outcome


def _outcome(log: str, status: int) -> Outcome:
    failed = "SUMMARY: libFuzzer" in log or "Uncaught Python exception" in log
    if not failed and (status or "stat::number_of_executed_units" not in log):
        return Outcome.NOT_RUN
    return Outcome.FOUND if failed else Outcome.NOTHING_FOUND


def _figures(log: str) -> str:
    executions = re.search(r"stat::number_of_executed_units: (\d+)", log)
    edges = re.findall(r"cov: (\d+)", log)
    return f"{executions[1] if executions else '?'} executions, {edges[-1] if edges else '?'} edges covered"


def _error(log: str) -> str:
    errors = re.findall(
        r"^(?:Exception|\w*Error|[\w.]+): .*$", log.partition("Uncaught Python exception")[2], re.MULTILINE
    )
    return str(errors[0])[:300] if errors else "libFuzzer: out of memory, or too slow"


def _write_tokens(path: Path) -> Path:
    """The tokens of `near_corpus`, as far as libFuzzer takes them."""
    lines = ["".join(f"\\x{byte:02x}" for byte in token) for token in near_corpus.TOKENS if len(token) < 64]
    path.write_text("".join(f'"{line}"\n' for line in lines))
    return path
