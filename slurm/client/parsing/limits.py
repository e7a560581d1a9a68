"""Slurm's words for the limits of a site that keep a job from starting, as regular expressions."""

from __future__ import annotations

import re

IN_ONE_JOB = r"(Assoc|QOS)Max\w*(PerJob|PerNode)\w*|MaxMemPerLimit"
"""More than one job may have, whatever other jobs have."""
OF_PARTITION = r"Partition(\w+Limit|Config)"
OF_JOBS = r"(Assoc|QOS)\w*(Jobs?|Wall)Limit|(Assoc|QOS)MaxJobs\w*|Max\w*JobsPerAccount"
"""A number of jobs, or their time."""
OF_ALL_JOBS = rf"{OF_JOBS}|(Assoc|QOS)(Max|Grp)\w*|(Association|QOS)(Resource|Time)Limit|Max\w+PerAccount"
"""What all jobs of an account, QOS or user may have together."""

ANY = re.compile(f"{IN_ONE_JOB}|{OF_PARTITION}|{OF_ALL_JOBS}")
LASTING = re.compile(f"{IN_ONE_JOB}|{OF_PARTITION}|{OF_JOBS}")
"""Limits that a job of one node does not outwait. A limit of nodes or GPUs of all jobs is none of them: Slurm may still
count the node that a job has just lost."""
