"""The commands of `muster`, in the order of its help. Only the module of the command that is called is imported."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.launcher.command import Command


@dataclass(frozen=True, slots=True)
class Entry:
    """One command: `commands/NAME.py` defines it."""

    name: str
    help: str

    def load(self) -> Command:
        """Imports the command."""
        command: Command = importlib.import_module(f"muster.launcher.commands.{self.name}").COMMAND
        return command


COMMANDS = (
    Entry("submit", "queue a job that Muster supervises"),
    Entry("plan", "estimate time, memory and cost of a job; queue nothing"),
    Entry("status", "show the state of a job"),
    Entry("top", "show a job, or all jobs and nodes, live"),
    Entry("diagnose", "find slow links, misplaced groups and what else slows a job"),
    Entry("report", "write what a job did and what failed as one HTML file"),
    Entry("goodput", "show to what the time of the GPUs went, over all jobs"),
    Entry("events", "show the events of a job and their reasons"),
    Entry("logs", "show the output of a job's ranks"),
    Entry("runs", "show what was run, from which code, and how it went"),
    Entry("cancel", "end a job"),
    Entry("flush", "write the newest step in memory to durable storage"),
    Entry("swap", "let a spare take the place of a node of a job"),
    Entry("drain", "drain a node, and move the ranks on it to spares (operators)"),
    Entry("nodes", "list all nodes and their health"),
    Entry("topo", "draw the network with the state of its nodes"),
    Entry("run", "run a script as torchrun would: in a job of Slurm, or on this workstation"),
    Entry("pki", "make and show the certificates of coordinators"),
    Entry("policy", "check and explain what follows from a hardware signal"),
    Entry("check", "check nodes and their links in a short Slurm job"),
)
