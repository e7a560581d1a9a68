"""An alternative's job on the cluster, as its user sees it: a shared folder, `sbatch`, the log of the training."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from benchmarks.peers import steplog
from benchmarks.peers.peer import Peer
from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.testcluster.training import EXAMPLE
from muster.slurm.testcluster.waiting import WaitTimeout, wait_until

USER = "alice"
HERE = Path(__file__).resolve().parent
FILES = [
    *(EXAMPLE / name for name in ("model.py", "text.py", "keepers_log.txt")),
    *(HERE / name for name in ("train_plain.py", "no_libuv.py")),
]
ENDED_STATES = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}


def write_torchrun(folder: Path) -> None:
    """A program torchrun for the PyTorch of the image, which was built without libuv."""
    program = folder / "torchrun"
    program.write_text("#!/usr/bin/env python3\n" + (HERE / "no_libuv.py").read_text())
    program.chmod(0o755)


class Job:
    """One submission of `peer`'s script. A context manager: its exit cancels the job."""

    def __init__(self, cluster: Cluster, peer: Peer, name: str) -> None:
        self.cluster, self.peer, self.name, self.id = cluster, peer, name, ""

    @property
    def folder(self) -> Path:
        """The job's folder, as seen from this host."""
        return self.cluster.shared / "peers" / self.name

    @property
    def log(self) -> Path:
        """The training's log, which `steplog` reads."""
        return self.folder / "steps.log"

    def __enter__(self) -> Job:
        inside = f"/shared/peers/{self.name}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for file in FILES:
            shutil.copy(file, self.folder / file.name)
        write_torchrun(self.folder)
        (self.folder / "job.sh").write_text(self.peer.script)
        self.cluster.sh(LOGIN, f"chown -R {USER}: {inside}; chmod -R a+rX {inside}")
        submit = f"cd {inside} && {self.peer.submit} job.sh"
        self.id = self.cluster.sh(LOGIN, submit, user=USER)
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.sh(CONTROLLER, f"scancel {self.id} 2>/dev/null || true")

    def state(self) -> str:
        """Slurm's state of the job, for example RUNNING."""
        return self._ask("%T")

    def reason(self) -> str:
        """Slurm's reason for the state."""
        return self._ask("%r")

    def first_node(self) -> str:
        """The batch host, which runs srun and torchrun's store."""
        return self._ask("%B")

    def other_node(self) -> str:
        """A node that runs a rank and is not the first node: that of rank 3 or of rank 4."""
        text = self.log.read_text(errors="replace")
        return next(host for rank in (3, 4) if (host := steplog.host_of(text, rank)) != self.first_node())

    def kill_rank(self) -> float:
        """Sends SIGKILL to rank 3. Returns the wall-clock time of the signal."""
        host, pid = steplog.process_of(self.log.read_text(errors="replace"), 3)
        return float(self.cluster.sh(host, f"date +%s.%N; kill -KILL {pid}"))

    def wait_step(self, number: int, timeout: float) -> None:
        """Waits until the training has finished step `number`.

        Raises:
            WaitTimeout: not within `timeout` seconds, or the job ended before.
        """

        def there() -> bool:
            if self.state() in ENDED_STATES:
                raise WaitTimeout(f"{self.name} ended before step {number}")
            runs = steplog.read(self.log)
            return bool(runs and runs[-1][1] and runs[-1][1][-1].number >= number)

        try:
            wait_until(there, timeout, f"step {number} of {self.name}", every=0.3)
        except WaitTimeout as late:
            raise WaitTimeout(f"{late}; the job is {self.state()}, its output ends: {self.output()[-600:]}") from late

    def wait_recovery(self, fault: float, deadline_s: float) -> tuple[steplog.Recovery | None, str]:
        """Returns the recovery from the fault at time `fault`. If there is none within `deadline_s` seconds: None and
        the reason.
        """
        asked = time.monotonic()
        while time.time() < fault + deadline_s:
            found = steplog.recovery_after(steplog.read(self.log), fault)
            if found:
                return found, ""
            if time.monotonic() - asked > 1:
                asked = time.monotonic()
                state = self.state()
                if state in ENDED_STATES:
                    return None, f"Slurm ended the job {state} within {time.time() - fault:.0f} s of the fault"
            time.sleep(0.05)
        return None, f"no step within {deadline_s:.0f} s; the job is {self.state()} ({self.reason()})"

    def output(self) -> str:
        """The output of the batch script and its steps."""
        path = self.folder / "slurm.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def _ask(self, field: str) -> str:
        return self.cluster.sh(CONTROLLER, f"squeue -h -t all -j {self.id} -o '{field}'")
