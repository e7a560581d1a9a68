"""A training job on a test cluster, from its user's point of view: submitted by an ordinary user on the login
container, watched through `muster status`, its output read from the shared folder.

The demo, the benchmarks and the tests drive jobs with this; faults are the cluster's own verbs.
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
from typing import Any

from muster.slurm.cluster.cluster import Cluster
from muster.slurm.cluster.spec import LOGIN
from muster.slurm.cluster.waiting import allowed, wait_until

SMALL = ("--width", "64", "--layers", "2")
"""train.py's arguments for a small model: its steps take hundredths of a second."""
PACED = (*SMALL, "--pause", "0.1")
"""For a job that only has to be training meanwhile: it leaves the processors to what runs beside it."""
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny_transformer"
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
"""A kernel log line of a fatal GPU error."""
_LOOK_AGAIN_S = 0.5
_FINISH = "finish"
"""A job without a number of steps ends once this file is in its folder."""
View = dict[str, Any]
"""A GangView (api.proto) as JSON, with the field names of the proto."""


@dataclass(frozen=True)
class TrainingSpec:
    """A job of `nodes` ranks, one a node, and `spares`; `arguments` go to train.py, `settings` into job.toml.

    A job without `steps` trains until `Training.finish` is called.
    """

    name: str
    nodes: int = 8
    spares: int = 2
    steps: int | None = None
    arguments: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    user: str = "alice"


class Training:
    """One submitted job. A context manager: leaving it cancels the job if it still runs."""

    def __init__(self, cluster: Cluster, spec: TrainingSpec) -> None:
        self.cluster, self.spec = cluster, spec
        self.job = 0
        self.view: View = {}
        self.changed = threading.Condition()
        self._watch: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def folder(self) -> Path:
        """The job's run folder, seen from this host."""
        return self.cluster.shared / "jobs" / self.spec.name

    def submit(self, *options: str) -> int:
        """Lay out the folder, submit, begin to watch. Returns the Slurm job's number.

        Raises:
            EngineError: `muster submit` failed; its words are in it.
        """
        inside = self._lay_out()
        words = ("muster", "submit", *options, f"{inside}/job.toml")
        said = self.cluster.exec(LOGIN, *words, user=self.spec.user).stdout
        found = re.search(r"\d+", said.strip().splitlines()[-1])
        if found is None:
            raise ValueError(f"muster submit printed no job id: {said!r}")
        self.job = int(found[0])
        self._follow()
        return self.job

    def _follow(self) -> None:
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
        # A watch outlives restarts of the coordinator, but one that is away at its first word ends it.
        while True:
            with watch:
                for line in watch.stdout or ():
                    if line.startswith("{"):
                        self._see(json.loads(line))
            time.sleep(_LOOK_AGAIN_S)
            with self.changed:
                if self._watch is None or self.view.get("final"):
                    return
                self._watch = watch = self._look()

    def _see(self, view: View) -> None:
        with self.changed:
            self.view = view
            self.changed.notify_all()

    # What happens

    def wait(self, condition: Callable[[View], bool], timeout: float, what: str) -> View:
        """The first view for which `condition` holds.

        Raises:
            TimeoutError: none within `allowed(timeout)` seconds; the newest view is in the message.
        """
        timeout = allowed(timeout)
        with self.changed:
            if not self.changed.wait_for(lambda: bool(self.view) and condition(self.view), timeout):
                raise TimeoutError(
                    f"{self.spec.name}: {what} not within {timeout:.0f} s: {json.dumps(self.view)[:3000]}"
                )
            return self.view

    def wait_step(self, step: int, timeout: float = 120.0) -> View:
        """Until `step` optimizer steps are finished."""
        return self.wait(lambda v: _number(v, "step") >= step, timeout, f"step {step}")

    def wait_recovered(self, generation: int, timeout: float = 120.0) -> View:
        """The RecoveryView of `generation` once its first step is finished."""

        def done(view: View) -> bool:
            return any(
                _number(r, "generation") >= generation and r.get("first_step_s") for r in view.get("recoveries", ())
            )

        view = self.wait(done, timeout, f"first step of generation {generation}")
        return next(r for r in view["recoveries"] if _number(r, "generation") >= generation and r.get("first_step_s"))

    def wait_final(self, timeout: float = 300.0) -> View:
        """The view once the gang is final."""
        return self.wait(lambda v: bool(v.get("final")), timeout, "the end")

    @property
    def generation(self) -> int:
        """The running generation."""
        return _number(self.view, "generation")

    def node_of(self, rank: int) -> str:
        """The node that carries `rank`."""
        return next(str(r["node"]) for r in self.view["ranks"] if _number(r, "rank") == rank)

    def kill_rank(self, rank: int) -> float:
        """SIGKILL to one rank's process alone; the wall-clock time at which it was sent."""
        return self._tell_rank(rank, "KILL")

    def hang_rank(self, rank: int) -> float:
        """SIGSTOP to one rank's process alone; the wall-clock time at which it was sent."""
        return self._tell_rank(rank, "STOP")

    def _tell_rank(self, rank: int, signal: str) -> float:
        tell = f"pkill -{signal} -u {self.spec.user} -x rank{rank}"
        return float(self.cluster.sh(self.node_of(rank), f"date +%s.%N; {tell}"))

    # What is left behind

    def log(self, generation: int, rank: int) -> str:
        """All that the rank printed in that generation."""
        return self._kept(generation, f"rank{rank}.log")

    def stacks(self, generation: int, rank: int) -> str:
        """What was kept of the rank when that generation hung."""
        return self._kept(generation, f"rank{rank}.stacks")

    def _kept(self, generation: int, name: str) -> str:
        path = self.folder / "logs" / str(self.view["gang_id"]) / f"g{generation}" / name
        return path.read_text(errors="replace") if path.exists() else ""

    def steps(self, generation: int, rank: int = 0) -> list[tuple[int, float]]:
        """(step, seconds) that the rank printed in that generation, in order."""
        found = re.findall(r"^step (\d+) loss \S+ (\S+) s$", self.log(generation, rank), re.M)
        return [(int(n), float(s)) for n, s in found]

    def redone(self, generation: int) -> int:
        """Finished steps of the generation before that `generation` did again."""
        before, after = self.steps(generation - 1), self.steps(generation)
        return max(0, before[-1][0] - (after[0][0] - 1)) if before and after else 0

    def step_s(self) -> float:
        """Median seconds of a step over all generations."""
        times = [s for g in range(1, self.generation + 1) for _, s in self.steps(g)[3:]]
        return statistics.median(times) if times else float("nan")

    # The end

    def finish(self) -> None:
        """Let a job without a number of steps end with its next step."""
        (self.folder / _FINISH).touch()

    def cancel(self) -> None:
        """Cancel and wait until Slurm has ended the job."""
        if not self.view.get("final"):
            self.cluster.exec(LOGIN, "muster", "cancel", str(self.job), user=self.spec.user)
        self.wait_gone()

    def wait_gone(self, timeout: float = 60.0) -> None:
        """Until Slurm calls the job ended. (It stays COMPLETING for up to a minute when a node of its step has died:
        slurmstepd waits for the children of its tree.)"""
        ended = f"squeue -h -t PENDING,RUNNING,SUSPENDED -j {self.job} 2>/dev/null"
        wait_until(lambda: not self.cluster.sh(LOGIN, f"{ended} || true"), timeout, f"the end of job {self.job}")

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the watch, and the job if it still runs."""
        self._end_watch()
        if self.job and self.cluster.is_running(LOGIN):
            self.cluster.sh(LOGIN, f"scancel {self.job} 2>/dev/null || true")


def _number(view: View, key: str) -> int:
    """64-bit numbers are strings in protobuf's JSON, zeros are left out."""
    return int(view.get(key, 0))
