"""Reads in `scontrol --oneliner show` why a job waits, and whether Slurm may run other jobs on its nodes."""

from __future__ import annotations

import re


def reason(job: str) -> str:
    """Why the job has not started, in Slurm's word: "None" of one that has. Empty: nobody knows."""
    return _field("Reason", r"\S+", job)


def partition(job: str) -> str:
    """The partition of a job, or several, as `a,b`. Empty: nobody knows."""
    return _field("Partition", r"\S+", job)


def how_forced(partition: str) -> str:
    """The field of a partition whose jobs share their nodes once they run, whatever they have asked for; empty: they
    do not, or nobody knows. A queued job does not say it. With FORCE:1 no second job gets a processor of the first."""
    found = _field("OverSubscribe", r"FORCE:(?!1\b)\d+", partition)
    return found and f"OverSubscribe={found}"


def _field(name: str, value: str, shown: str) -> str:
    found = re.search(rf"\b{name}=({value})", shown)
    return found[1] if found else ""


def how_shared(job: str) -> str:
    """The field that says so, as `OverSubscribe=OK`; empty: the job has its nodes alone, or nobody knows.

    From 26.05 on, OverSubscribe=NO says no more than that no processor is shared, and Exclusive says the rest.
    """
    fields = dict(re.findall(r"\b(Exclusive|OverSubscribe)=(\S+)", job))
    name, alone = ("Exclusive", ("NODE", "TOPO")) if "Exclusive" in fields else ("OverSubscribe", ("NO",))
    return f"{name}={fields[name]}" if fields.get(name, alone[0]) not in alone else ""
