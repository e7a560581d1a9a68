"""A job of a user's own batch script on the test cluster."""

from __future__ import annotations

import shlex

from muster.slurm.testcluster.cluster import CONTROLLER, Cluster
from muster.slurm.testcluster.spec import LOGIN
from muster.slurm.testcluster.training import Training, TrainingSpec, View


class ScriptTraining(Training):
    """A job of a user's own script."""

    def __init__(self, cluster: Cluster, spec: TrainingSpec, text: str, command: str = "") -> None:
        """`command`: what queues the script; empty: muster submit, with the spares of `spec`."""
        super().__init__(cluster, spec)
        self._text, self._command = text, command or f"muster submit --parsable --spares={spec.spares}"

    def submit(self, *options: str) -> int:
        """See Training.submit."""
        inside = self._lay_out()
        (self.folder / "train.sbatch").write_text(self._text)
        command = f"cd {inside} && {self._command} {shlex.join((*options, 'train.sbatch'))}"
        done = self.cluster.exec(LOGIN, "bash", "-c", command, user=self.spec.user)
        self.job, self.notes = int(done.stdout), done.stderr
        self._follow()
        return self.job

    def train_through_faults(self, rank: int) -> None:
        """The rank is killed, then node n1 is lost, and the gang ends with 0."""
        self.wait_step(5)
        self.kill_rank(rank)
        self.wait_recovered(2)
        self.cluster.crash("n1")
        self.wait_left("n1")
        self.finish_done()

    def finish_done(self) -> View:
        """The gang ends with 0, as this view of it says."""
        self.finish()
        view = self.wait_final()
        assert view["phase"] == "DONE", view.get("reason")
        return view

    @property
    def output(self) -> str:
        """What the job has printed."""
        path = self.folder / "output.txt"
        return path.read_text(errors="replace") if path.exists() else ""


def state(cluster: Cluster, job: int) -> str:
    return cluster.sh(CONTROLLER, f"scontrol show job {job} | grep -o 'JobState=[A-Z]*'").partition("=")[2]
