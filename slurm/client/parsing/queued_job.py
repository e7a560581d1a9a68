"""Reads in `scontrol --oneliner show job` why a job waits, and whether Slurm may run other jobs on its nodes."""

from __future__ import annotations

import re


def reason(job: str) -> str:
    """Why the job has not started, in Slurm's word: "None" of one that has. Empty: nobody knows."""
    found = re.search(r"\bReason=(\S+)", job)
    return found[1] if found else ""


def how_shared(job: str) -> str:
    """The field that says so, as `OverSubscribe=OK`; empty: the job has its nodes alone, or nobody knows.

    From 26.05 on, OverSubscribe=NO says no more than that no processor is shared, and Exclusive says the rest.
    """
    fields = dict(re.findall(r"\b(Exclusive|OverSubscribe)=(\S+)", job))
    name, alone = ("Exclusive", ("NODE", "TOPO")) if "Exclusive" in fields else ("OverSubscribe", ("NO",))
    return f"{name}={fields[name]}" if fields.get(name, alone[0]) not in alone else ""
