"""`make demo`: shows on one screen how a training job survives a dead node and a fatal GPU error.

The demo starts its own cluster (1 controller, 1 login container, 10 nodes) and submits the example as an ordinary user.
It cuts the power of one node, and sends a fatal Xid to another. The job finishes, the demo prints the timeline and
removes the cluster, also after Ctrl-C. The screen shows what the coordinator's API reports. Only the two faults are
scripted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from subprocess import TimeoutExpired

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from muster.node_health import OUT_OF_SERVICE, NodeHealth
from muster.slurm.image.engine import EngineError
from muster.slurm.image.recipe import SUITES
from muster.slurm.testcluster.cluster import Cluster
from muster.slurm.testcluster.spec import ClusterSpec
from muster.slurm.testcluster.training import FATAL_XID_LINE, Training, TrainingSpec, View
from muster.slurm.testcluster.waiting import WaitTimeout

FIRST_FAULT, SECOND_FAULT, STEPS = 20, 32, 44
LATE = (WaitTimeout, TimeoutError, TimeoutExpired)
IN_DOUBT = frozenset(NodeHealth) - OUT_OF_SERVICE | {NodeHealth.RETURNING}


@dataclass
class Stage:
    """The content of the screen: the newest view and the timeline."""

    began: float = field(default_factory=time.time)
    view: View = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    faults: list[tuple[str, float, int]] = field(default_factory=list)
    room: int = 1000  # how many of the newest timeline lines fit on the screen

    def say(self, words: str, at: float | None = None) -> None:
        """Adds a line to the timeline."""
        self.lines.append(f"{(at or time.time()) - self.began:7.2f} s  {words}")

    def __rich__(self) -> Group:
        """Renders the whole screen."""
        job = self.view.get("slurm_job_ids", ["-"])[-1]
        title = (
            f"job {job}  {self.view.get('phase', 'starting the cluster')}  generation {self.view.get('generation', 0)}"
        )
        facts = f"step {self.view.get('step', 0)} of {STEPS}, committed in memory twice: {_committed(self.view)}"
        waiting = self.view.get("waiting_for", "")
        head = Text(facts + (f"\nwaiting for {waiting}" if waiting else ""))
        return Group(
            Panel(head, title=title, title_align="left"),
            _nodes(self.view),
            Panel(Text("\n".join(self.lines[-self.room :])), title="timeline"),
        )


def _committed(view: View) -> str:
    return str(view.get("committed", {}).get("step", 0))


def _nodes(view: View) -> Table:
    """The nodes below their leaf switches."""
    table = Table.grid(padding=(0, 2))
    for leaf, nodes in _by_leaf(view).items():
        cells = []
        for node in nodes:
            verdict = node.get("verdict", "FIT")
            cells.append(Text(f"{node['node']:>2} {_role(view, node):<7} {verdict}", style=_colour(verdict)))
        table.add_row(Text(f"{leaf} ─"), *cells)
    return table


def _colour(verdict: str) -> str:
    if verdict == NodeHealth.FIT:
        return "green"
    return "yellow" if verdict in IN_DOUBT else "bold red"


def _by_leaf(view: View) -> dict[str, list[View]]:
    found: dict[str, list[View]] = {}
    for node in view.get("nodes", ()):
        found.setdefault(node.get("leaf", ""), []).append(node)
    return dict(sorted(found.items()))


def _role(view: View, node: View) -> str:
    """ "rank 3", "spare", and so on."""
    ranks = {rank["node"]: rank.get("rank", 0) for rank in view.get("ranks", ()) if "node" in rank}
    role = str(node.get("role", ""))
    return f"rank {ranks[node['node']]}" if role == "rank" and node["node"] in ranks else role


def _rank_map(view: View) -> str:
    """The ranks of each leaf switch in one line."""
    parts = []
    for leaf, nodes in _by_leaf(view).items():
        roles = (f"{node['node']} {_role(view, node).removeprefix('rank ') or 'out'}" for node in nodes)
        parts.append(f"{leaf or 'no switch'}: {', '.join(roles)}")
    return "; ".join(parts)


def _show_recovery(stage: Stage, training: Training, what: str, at: float) -> None:
    """Follows one recovery until its first step, and adds a line to the timeline for each phase."""
    generation = training.generation
    recovery = training.wait_recovered(generation + 1, 60)
    outs, ins = ", ".join(recovery.get("nodes_out", ())), ", ".join(recovery.get("nodes_in", ()))
    stage.say(
        f"   detected after {recovery['detected_s'] - at:.2f} s: {recovery.get('cause', '')}", recovery["detected_s"]
    )
    stage.say("   all old ranks have ended on all nodes (fenced)", recovery["fenced_s"])
    stage.say(f"   {recovery.get('action')}: {ins} replaces {outs}", recovery["started_s"])
    restored = recovery.get("step_restored", 0)
    stage.say(f"   first step, from the memory checkpoint of step {restored}", recovery["first_step_s"])
    total = recovery["first_step_s"] - at
    stage.faults.append((what, total, generation + 1))
    stage.say(f"   {what}: training again after {total:.2f} s")
    stage.say(f"   ranks by switch: {_rank_map(training.view)}")


def play(stage: Stage, cluster: Cluster) -> int:
    """The job and its two faults. Returns the job's exit code."""
    with Training(cluster, TrainingSpec("demo", steps=STEPS)) as training:
        job = training.submit()
        stage.say(f"muster submit job.toml: job {job}, 8 nodes and 2 spares")
        _mirror(stage, training)
        training.wait(lambda v: v.get("phase") == "RUNNING", 120, "RUNNING")
        stage.say("all nodes have reported, generation 1 runs")
        stage.say(f"ranks by switch: {_rank_map(training.view)}")
        training.wait_step(FIRST_FAULT, 180)
        node = training.node_of(3)
        stage.say(f"power of {node} is cut (first its link, so peers receive nothing), step {training.view['step']}")
        _show_recovery(stage, training, "power loss", cluster.power_off(node))
        training.wait_step(SECOND_FAULT, 120)
        node = training.node_of(5)
        stage.say(f"kernel log of {node}: Xid 79, GPU has fallen off the bus, step {training.view['step']}")
        _show_recovery(stage, training, "fatal Xid", cluster.kmsg(node, FATAL_XID_LINE))
        view = training.wait_final(180)
        stage.say(f"{view['phase']}: {view.get('reason', '')}")
        for what, _, generation in stage.faults:
            stage.say(f"{what}: {training.repeated_steps(generation)} finished steps were repeated")
        training.wait_job_ended()
        return int(view.get("exit_code", 0))


def _mirror(stage: Stage, training: Training) -> None:
    def follow() -> None:
        while not training.view.get("final"):
            with training.changed:
                training.changed.wait(1.0)
                stage.view = training.view

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def _shown(stage: Stage, console: Console) -> Iterator[None]:
    """Shows the stage. Where the output is no terminal, Live leaves out the end of the last line."""
    try:
        with Live(stage, console=console, refresh_per_second=4):
            yield
    finally:
        if not console.is_terminal:
            console.line()


def _words(error: Exception) -> str:
    """The error without the view as JSON, which the last screen shows; with the load, if something came too late."""
    what, _, _ = str(error).partition(": {")
    if not any(isinstance(one, LATE) for one in (error, error.__cause__)):
        return what
    return f"{what.rstrip()}. Load of this machine: {os.getloadavg()[0]:.0f}, CPUs: {os.cpu_count()}"


def main() -> int:
    """Exit status: the job's own; 1 if the demo failed; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Shows how a training job survives two faults.")
    parser.add_argument("--suite", default="forky", choices=SUITES, help="Debian: Slurm 26.05 or 24.11")
    suite: str = parser.parse_args().suite
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    stage = Stage(room=max(4, console.height - 12) if console.is_terminal else 1000)
    try:
        with (
            Cluster.up(ClusterSpec(nodes=10, suite=suite, tests_image=False)) as cluster,
            _shown(stage, console),
        ):
            stage.say("a Slurm cluster of 10 nodes, 1 controller and 1 login container is up")
            status = play(stage, cluster)
            stage.room = 1000
    except KeyboardInterrupt:
        console.print("interrupted: the cluster is gone")
        return 130
    except (EngineError, WaitTimeout, TimeoutError) as error:
        console.print(f"the demo failed: {_words(error)}", style="bold red", markup=False)
        return 1
    for what, seconds, _ in stage.faults:
        console.print(f"{what}: training again after {seconds:.2f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
