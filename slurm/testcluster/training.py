"""A training job on a test cluster, as its user sees it.

An ordinary user submits the job on the login container. The job is followed with `muster status`, and its output is
read from the shared folder. The demo, the benchmarks and the tests use this module. The class Cluster injects faults.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from muster.slurm.testcluster.cluster import Cluster
from muster.slurm.testcluster.spec import LOGIN
from muster.slurm.testcluster.waiting import allowed, wait_until

SMALL_MODEL = ("--width", "64", "--layers", "2")
"""Arguments of train.py for a small model: a step takes some hundredths of a second."""
SLOW_STEPS = (*SMALL_MODEL, "--pause", "0.1")
"""Arguments of train.py for a job that only has to be running: it leaves the processors to other programs."""
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny_transformer"
FATAL_XID_LINE = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
"""A kernel log line of a fatal GPU error."""
PRECURSOR_XID_LINE = "NVRM: Xid (PCI:0000:3b:00): 64, pid='<unknown>', name=<unknown>, Row Remapper Error: table full."
"""A kernel log line of a precursor that the policy answers with a planned swap."""
_WATCH_RETRY_S = 0.5
"""Seconds between two attempts to follow the job."""
_FINISH = "finish"
"""A job without a number of steps ends once this file is in its folder."""
View = dict[str, Any]
"""A GangView (api.proto) as JSON, with the field names of the proto file."""


@dataclass(frozen=True)
class TrainingSpec:
    """A job of `nodes` ranks, one on each node, and `spares`. `arguments` are for train.py; `settings` are lines of
    job.toml. `script`: the text of train.py; empty: that of the example.
    """

    name: str
    nodes: int = 8
    spares: int = 2
    steps: int | None = None
    arguments: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    user: str = "alice"
    script: str = ""


class Training:
    """One submitted job. A context manager: its exit cancels a job that still runs."""

    def __init__(self, cluster: Cluster, spec: TrainingSpec) -> None:
        self.cluster, self.spec = cluster, spec
        self.job = 0
        self.notes = ""
        """What `muster submit` said beside the job's number."""
        self.view: View = {}
        self.changed = threading.Condition()
        self._watch: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def folder(self) -> Path:
        """The job's run folder, as seen from this host."""
        return self.cluster.shared / "jobs" / self.spec.name

    def submit(self, *options: str) -> int:
        """Prepares the folder, submits the job and starts to follow it. Returns the Slurm job id.

        Raises:
            EngineError: `muster submit` failed; the message holds its output.
        """
        inside = self._lay_out()
        done = self.cluster.muster_answer(LOGIN, "submit", *options, f"{inside}/job.toml", user=self.spec.user)
        output, self.notes = done.stdout, done.stderr
        found = re.search(r"\d+", output.strip().splitlines()[-1])
        if found is None:
            raise ValueError(f"muster submit printed no job id: {output!r}")
        self.job = int(found[0])
        self._follow()
        return self.job

    def _follow(self) -> None:
        self.view = {}  # that of a job before is no answer
        self._watch = self._look()
        self._reader = threading.Thread(target=self._read, args=(self._watch,), daemon=True)
        self._reader.start()

    def _look(self) -> subprocess.Popen[str]:
        words = ("muster", "status", "--json", "--follow", str(self.job))
        return self.cluster.popen(LOGIN, *words, user=self.spec.user)

    def _end_watch(self) -> None:
        with self.changed:
            watch, self._watch = self._watch, None
        if watch and self._reader:
            if watch.poll() is None:
                self.cluster.kill(watch)
            self._reader.join(10)

    def _lay_out(self) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in EXAMPLE.iterdir():
            if file.is_file():
                shutil.copy(file, self.folder / file.name)
        if self.spec.script:
            (self.folder / "train.py").write_text(self.spec.script)
        (self.folder / _FINISH).unlink(missing_ok=True)
        inside = f"/shared/jobs/{self.spec.name}"
        (self.folder / "job.toml").write_text(self._job_toml(inside))
        self.cluster.sh(LOGIN, f"chown -R {self.spec.user}: {inside}; chmod -R a+rX {inside}")
        return inside

    def _job_toml(self, inside: str) -> str:
        steps = self.spec.steps
        length = ("--until", f"{inside}/{_FINISH}") if steps is None else ("--steps", str(steps))
        command = ["python3", f"{inside}/train.py", *length, *self.spec.arguments]
        lines = [
            f'name = "{self.spec.name}"',
            f"nodes = {self.spec.nodes}",
            f"spares = {self.spec.spares}",
            f"command = {json.dumps(command)}",
            f'run_dir = "{inside}"',
            *self.spec.settings,
        ]
        return "\n".join(lines) + "\n"

    def _read(self, watch: subprocess.Popen[str]) -> None:
        # `muster status --follow` survives restarts of the coordinator. It fails if its first call gets no answer.
        while True:
            with watch:
                for line in watch.stdout or ():
                    if line.startswith("{"):
                        self._see(json.loads(line))
            time.sleep(_WATCH_RETRY_S)
            with self.changed:
                if self._watch is None or self.view.get("final"):
                    return
                self._watch = watch = self._look()

    def _see(self, view: View) -> None:
        with self.changed:
            self.view = view
            self.changed.notify_all()

    # Waiting and faults

    def wait(self, condition: Callable[[View], bool], timeout: float, what: str) -> View:
        """Returns the first view for which `condition` holds.

        Raises:
            TimeoutError: there was no such view within `timeout` seconds, or the job is over; the message holds the
                newest view.
        """
        timeout = allowed(timeout)
        with self.changed:
            self.changed.wait_for(lambda: bool(self.view) and (condition(self.view) or self.view.get("final")), timeout)
            if self.view and condition(self.view):
                return self.view
            newest = json.dumps(self.view)[:3000]
            if self.view.get("final"):
                raise TimeoutError(f"{self.spec.name}: {what} does not come, the job is over: {newest}")
            raise TimeoutError(f"{self.spec.name}: {what} not within {timeout:.0f} s: {newest}")

    def wait_step(self, step: int, timeout: float = 120.0) -> View:
        """Waits until `step` optimizer steps are finished."""
        return self.wait(lambda v: _number(v, "step") >= step, timeout, f"step {step}")

    def wait_recovered(self, generation: int, timeout: float = 120.0) -> View:
        """Returns the RecoveryView of `generation` after its first finished step."""

        def done(view: View) -> bool:
            return any(
                _number(r, "generation") >= generation and r.get("first_step_s") for r in view.get("recoveries", ())
            )

        view = self.wait(done, timeout, f"first step of generation {generation}")
        return next(r for r in view["recoveries"] if _number(r, "generation") >= generation and r.get("first_step_s"))

    def wait_left(self, node: str) -> View:
        """Returns the RecoveryView of the generation that runs without `node`, after its first finished step.

        Another recovery may come before it: on a busy machine an agent hears nobody for seconds, and ends its ranks.
        """

        def left(view: View) -> list[View]:
            return [r for r in view.get("recoveries", ()) if node in r.get("nodes_out", ()) and r.get("first_step_s")]

        return left(self.wait(lambda view: bool(left(view)), 120.0, f"a first step without {node}"))[0]

    def wait_final(self, timeout: float = 300.0) -> View:
        """Returns the view of the final gang."""
        return self.wait(lambda v: bool(v.get("final")), timeout, "the end")

    @property
    def generation(self) -> int:
        """The running generation."""
        return _number(self.view, "generation")

    def node_of(self, rank: int) -> str:
        """The node that runs `rank`."""
        return next(str(r["node"]) for r in self.view["ranks"] if _number(r, "rank") == rank)

    def kill_rank(self, rank: int) -> float:
        """Sends SIGKILL to one rank's process. Returns the wall-clock time of the signal."""
        return self.tell_rank(rank, "KILL")

    def tell_rank(self, rank: int, signal: str) -> float:
        """Sends a signal (its name) to one rank's process. Returns the wall-clock time of the signal."""
        tell = f"pkill -{signal} -u {self.spec.user} -x rank{rank}"
        return float(self.cluster.sh(self.node_of(rank), f"date +%s.%N; {tell}"))

    # Files of the run

    def log(self, generation: int, rank: int) -> str:
        """The whole output of a rank in a generation."""
        return self._kept(generation, f"rank{rank}.log")

    def stacks(self, generation: int, rank: int) -> str:
        """The stacks of a rank, written when that generation hung."""
        return self._kept(generation, f"rank{rank}.stacks")

    def _kept(self, generation: int, name: str) -> str:
        path = self.folder / "logs" / str(self.view["gang_id"]) / f"g{generation}" / name
        return path.read_text(errors="replace") if path.exists() else ""

    def steps(self, generation: int, rank: int = 0) -> list[tuple[int, float]]:
        """The steps that a rank printed in a generation, in order: (step, seconds)."""
        found = re.findall(r"^step (\d+) loss \S+ (\S+) s$", self.log(generation, rank), re.M)
        return [(int(n), float(s)) for n, s in found]

    def repeated_steps(self, generation: int) -> int:
        """Finished steps of the generation before that `generation` repeated."""
        before, after = self.steps(generation - 1), self.steps(generation)
        return max(0, before[-1][0] - (after[0][0] - 1)) if before and after else 0

    def step_s(self) -> float:
        """The median seconds of a step over all generations."""
        times = [s for g in range(1, self.generation + 1) for _, s in self.steps(g)[3:]]
        return statistics.median(times) if times else float("nan")

    # The end

    def finish(self) -> None:
        """Let a job without a number of steps end with its next step."""
        (self.folder / _FINISH).touch()

    def cancel(self) -> None:
        """Cancels the job and waits until Slurm has ended it."""
        if not self.view.get("final"):
            self.cluster.exec(LOGIN, "muster", "cancel", str(self.job), user=self.spec.user)
        self.wait_job_ended()

    def wait_job_ended(self, timeout: float = 60.0) -> None:
        """Waits until Slurm shows the job as ended.

        The job may remain COMPLETING for up to a minute after a node of its step has died: slurmstepd waits for its
        child steps.
        """
        ended = f"squeue -h -t PENDING,RUNNING,SUSPENDED -j {self.job} 2>/dev/null"
        wait_until(lambda: not self.cluster.sh(LOGIN, f"{ended} || true"), timeout, f"the end of job {self.job}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops following the job, and cancels it if it still runs."""
        self._end_watch()
        if self.job and self.cluster.is_running(LOGIN):
            self.cluster.sh(LOGIN, f"scancel {self.job} 2>/dev/null || true")


def _number(view: View, key: str) -> int:
    """Reads a number from protobuf's JSON: 64-bit numbers are strings, and zeros are omitted."""
    return int(view.get(key, 0))
