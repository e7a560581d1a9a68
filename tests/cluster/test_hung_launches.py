"""Launches that hang on a node which is healthy otherwise."""

from __future__ import annotations

import json

import pytest
from tests.cluster.test_submit import lay_out, muster, slurm_state, submit

from muster.slurm.testcluster.cluster import LOGIN, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.long]

# srun gives the node up after 40 s.
HANGS = """#!/bin/sh
case $SLURMD_NODENAME-$SLURM_JOB_USER in n1-alice | n4-alice) exec sleep 60 ;; esac
"""
SHORT = ["sh", "-c", "sleep 2"]


@pytest.fixture
def hanging(other_settings: Cluster) -> Cluster:
    """The Prolog hangs on n1 and n4."""
    other_settings.set_program("Prolog", HANGS)
    return other_settings


def test_a_prolog_that_hangs_costs_no_generation_and_no_second_run_on_its_node(hanging: Cluster) -> None:
    """It hangs on a spare of one job, and on a node of another job, which has no spare."""
    away = "[slurm]\noptions = ['--exclude=n[0-2,6-9]']"
    second = submit(hanging, "--spares", "0", lay_out(hanging, "hung", SHORT, away))
    first = submit(hanging, lay_out(hanging, "spare", SHORT, "[slurm]\noptions = ['--nodelist=n[0-2]']"))
    for job in (first, second):
        assert slurm_state(hanging, job) == "COMPLETED"
    views = [json.loads(muster(hanging, "status", "--json", job).stdout) for job in (first, second)]
    assert [view["generation"] for view in views] == ["1", "1"]
    shown = [hanging.sh(LOGIN, f"scontrol show job -o {job}") for job in (first, second)]
    assert "Restarts=0 " in shown[0]
    assert "Restarts=1 " in shown[1]
    assert "NodeList=n[3,5] " in shown[1]
    assert "srun could start nothing on n4" in muster(hanging, "events", second).stdout
