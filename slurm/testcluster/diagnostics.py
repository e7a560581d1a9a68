"""What explains a failed test or a broken promise: the nodes, the queue, the logs, the newest jobs' output."""

import subprocess

from muster.slurm.image.engine import EngineError
from muster.slurm.testcluster.cluster import COORDINATOR, Cluster
from muster.slurm.testcluster.spec import CONTROLLER


def diagnostics(cluster: Cluster, *, lines: int, jobs: int) -> str:
    """What the cluster shows now. A container that is down is a line of its own and hides nothing else.

    Args:
        cluster: a cluster, whole or in parts.
        lines: how many of the last lines of each log and of each output are wanted.
        jobs: of how many jobs, the newest first, the output is wanted.
    """
    sections = [_ask(cluster, CONTROLLER, f"sinfo -N; squeue -a; tail -n {lines} /var/log/muster/slurmctld.log")]
    for host in cluster.spec.coordinators:
        sections.append(f"==> {host} <==\n{_ask(cluster, host, f'tail -n {lines} /var/log/muster/{COORDINATOR}.log')}")
    outputs = sorted(cluster.shared.glob("jobs/*/slurm-*.out"), key=lambda path: path.stat().st_mtime, reverse=True)
    for output in outputs[:jobs]:
        newest = output.read_text(errors="replace").splitlines()[-lines:]
        sections.append("\n".join((f"==> {output.relative_to(cluster.shared)} <==", *newest)))
    return "\n".join(sections)


def _ask(cluster: Cluster, host: str, script: str) -> str:
    try:
        said = cluster.exec(host, "sh", "-c", script, check=False)
    except (EngineError, OSError, subprocess.SubprocessError) as error:
        return f"{host} does not answer: {error}"
    return said.stdout + said.stderr
