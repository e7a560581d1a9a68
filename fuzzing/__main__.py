"""Runs the fuzzers. `python -m fuzzing --help` lists the options; the package's docstring has examples."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from fuzzing import near_corpus
from fuzzing.atheris_run import Outcome, fuzz
from fuzzing.catalogue import TARGETS, load
from fuzzing.planted_bugs import PLANTED_BUGS
from fuzzing.target import TooMuchWork
from muster.simulator.planted_bugs.planting import planted


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 nothing was found, 1 an input fails. With planted bugs: 0 each was found."""
    options = _options(argv)
    names = [options.target] if options.target else list(TARGETS)
    in_process = options.input or options.near_corpus is not None
    if in_process:
        with planted(PLANTED_BUGS[options.target]) if options.planted else nullcontext():
            return _run_here(names, options)
    wanted = Outcome.FOUND if options.planted else Outcome.NOTHING_FOUND
    outcomes = [fuzz(name, options.seconds, options.build, options.seed, planted=options.planted) for name in names]
    return int(any(outcome is not wanted for outcome in outcomes))


def _run_here(names: list[str], options: argparse.Namespace) -> int:
    if options.input:
        load(options.target).check(options.input.read_bytes())
        print(f"{options.target}: {options.input} passes")
        return 0
    return _search_near_corpus(names, options.near_corpus, options.planted, options.seed)


def _search_near_corpus(names: list[str], count: int, planted: bool, seed: int) -> int:
    for name in names:
        target = load(name)
        corpus = target.corpus()
        try:
            near_corpus.run(target.check, corpus, count, seed)
        except (Exception, TooMuchWork) as error:  # whatever the parser raises is the result of the search
            if not planted:
                raise
            print(f"{name}: found: {type(error).__name__}: {str(error)[:200]}")
            return 0
        print(f"{name}: {len(corpus)} kept inputs and {count} near them pass", flush=True)
    return int(planted)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzzing", description="Fuzz the parsers and servers of Muster.")
    parser.add_argument("--target", choices=TARGETS, metavar="NAME", help=f"default: all of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=600, help="seconds for each target")
    parser.add_argument("--seed", type=int, default=1, help="chooses the inputs")
    parser.add_argument("--build", type=Path, default=Path("build/fuzz"), help="folder for new inputs and for failures")
    parser.add_argument("--input", type=Path, help="run this input only")
    parser.add_argument("--near-corpus", type=int, metavar="COUNT", help="run the corpus and COUNT inputs near it")
    parser.add_argument("--planted", action="store_true", help="plant each target's bug, which must be found")
    options = parser.parse_args(argv)
    if (options.input or (options.planted and options.near_corpus is not None)) and not options.target:
        parser.error("--input, and --planted with --near-corpus, need --target")
    return options


if __name__ == "__main__":
    sys.exit(main())
