"""Runs the Slurm contract on the in-memory cluster. tests/cluster runs it on the real backends."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.parsing.sbatch_request import read_request
from muster.slurm.client.types import Slurm

CONTRACT = Path(__file__).parents[1] / "contract" / "slurm_contract.py"


def contract() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slurm_contract", CONTRACT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


CHECKS = contract().CHECKS


class FakeWorld:
    """Six nodes on two leaf switches. The test advances the time."""

    def __init__(self) -> None:
        self.time = 1_000_000.0
        names = [f"n{number}" for number in range(1, 7)]
        leaves = {name: "leaf1" if name < "n4" else "leaf2" for name in names}
        self.cluster = FakeCluster(names, now=lambda: self.time, leaves=leaves)
        self.fake = FakeSlurm(self.cluster)
        self.slurm: Slurm = self.fake

    async def start(self, options: Sequence[str] = (), *, ends_with: int | None = None) -> int:
        job = self.cluster.submit(read_request("#!/bin/sh\n", options, "/home/user"))
        if ends_with is not None:
            assert self.cluster.end_batch_script(job, ends_with)
        return job

    async def wait(self, seconds: float) -> None:
        self.time += seconds

    async def lose(self, node: str) -> None:
        self.cluster.fail_node(node)

    def silence(self, silent: bool) -> None:
        self.fake.unavailable_reason = "slurmctld does not answer" if silent else ""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_fake_keeps_the_contract(check: object) -> None:
    assert callable(check)
    await check(FakeWorld())
