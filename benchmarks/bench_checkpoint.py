"""`make bench-checkpoint`: what memory checkpoints cost at real sizes, beside what they are measured against.

    python -m benchmarks.bench_checkpoint [--gib 0.25 0.5 1 2] [--rounds 5] [--no-peers]

Each node's agent is a process, and so is the training. Each figure takes turns with what it is compared with: a plain
memcpy, torch.save, DCP, DLRover's Flash Checkpoint, NVRx's local checkpoints, a bare TCP socket, cp. A table comes
first: medians and worst values. The last line is one JSON object, of the largest size.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.checkpoint import figures
from benchmarks.checkpoint.figures import Rows
from benchmarks.peers.checkpoints import environments
from muster.checkpoint.store.memory.sealed_memory import available_bytes

COPIES_OF_STATE = 6
"""The most memory at one moment, in sizes of the state: the state, two slots, two copies, a copy to compare with."""
COPIES_WITH_PEERS = 9
SPARE_BYTES = 1 << 30


def main() -> None:
    """Measure, and print the table and the JSON object."""
    options = _options()
    if importlib.util.find_spec("torch") is None:
        try:
            python = environments.with_muster()
        except environments.NotInstalled as error:
            raise SystemExit(f"bench-checkpoint: torch can't be installed in {environments.FOLDER}: {error}") from None
        os.execv(python, [str(python), "-m", "benchmarks.bench_checkpoint", *sys.argv[1:]])
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.checkpoint.training_rank"])
    from benchmarks.checkpoint import measurements

    sizes = sorted(options.gib)
    options.folder.mkdir(parents=True, exist_ok=True)
    measured: dict[float, Rows] = {}
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.folder) as folder:
        for gib in sizes:
            is_largest = gib == sizes[-1]
            if refused := _too_large(gib, Path(folder), options.peers and is_largest):
                raise SystemExit(f"bench-checkpoint: --gib {gib:g}: {refused}")
            settings = measurements.Settings(
                gib,
                options.rounds,
                options.threads,
                options.every,
                options.step_s,
                3600 * options.mtbf_hours,
                Path(folder),
            )
            began, rows = time.monotonic(), Rows()
            if is_largest:
                measurements.measure(rows, settings, peers=options.peers)
            else:
                measurements.measure_small(rows, replace(settings, rounds=min(2, options.rounds)))
            measured[gib] = rows
            taken_s = time.monotonic() - began
            print(figures.table(f"\n{gib:g} GiB of state, {taken_s:.0f} s", rows.all()), flush=True)
    print(figures.linearity(measured))
    print(figures.last_line(measurements.summary(measured[sizes[-1]])))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0], help="GiB of state of a rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="without DLRover and NVRx")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of a training process")
    parser.add_argument("--every", type=int, default=20, help="steps between snapshots, for the slow-down of a step")
    parser.add_argument("--step-s", type=float, default=0.3, help="seconds of such a step")
    parser.add_argument("--mtbf-hours", type=float, default=8.0, help='between failures, for the interval of "auto"')
    parser.add_argument("--folder", type=Path, default=environments.ROOT / "build", help="for flushes and saves")
    options = parser.parse_args()
    if options.rounds < 1 or min(options.gib) <= 0:
        parser.error("--rounds and --gib are above 0")
    return options


def _too_large(gib: float, folder: Path, peers: bool) -> str:
    """Why so much state can't be measured here; empty if it can."""
    size = int(gib * 2**30)
    needed, left = size * (COPIES_WITH_PEERS if peers else COPIES_OF_STATE) + SPARE_BYTES, available_bytes()
    if needed > left:
        return f"needs {needed >> 30} GiB of memory, and {left >> 30} GiB are left"
    needed, left = 2 * size + SPARE_BYTES, shutil.disk_usage(folder).free
    return f"needs {needed >> 30} GiB in {folder}, and {left >> 30} GiB are left" if needed > left else ""


if __name__ == "__main__":
    main()
