"""The metrics of one node: what musterd counts, what agents report to it, and the text file."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from muster.daemon.agent import rank_metrics
from muster.daemon.metrics import textfile
from muster.daemon.node.kept_memory.kept_memory_store import KeptMemoryStore
from muster.daemon.node.kept_memory.memory_service import NO_METRICS, MemoryService
from muster.daemon.node.kept_memory.systemd_fd_store import FdStore
from muster.daemon.node.kernel.kernel_record import KERNEL_FACILITY, KernelRecord
from muster.daemon.node.kernel.xid import KernelErrorParser
from muster.daemon.node.node_metrics import (
    MOST_JOBS_OF_USER,
    MOST_NEW,
    MOST_RANKS,
    MOST_SIGNALS,
    NEW_S,
    REPORTED_S,
    NodeMetrics,
    NodeValues,
    RankReports,
)
from muster.daemon.node.sensors.sensor import OVER, Observation
from muster.v1.agent_pb2 import BlockTimes, RankStatus, ShardStatus, Tier
from muster.v1.memory_pb2 import RankReport, ReportRanks

PAGE = (Path(__file__).resolve().parents[2] / "docs/operations/metrics.md").read_text()
GPUS = {"0000:1b:00": 0, "0000:3b:00": 1}
VALUES = NodeValues(
    answered_at=1.0,
    waiting=2,
    kept_bytes=3,
    lines_not_understood=4,
    driver_lines={"mlx5_core": 5},
    gpus=GPUS,
    lasting={("gpu-throttle", 64, "0000:3b:00"), ("rdma-port", 1, "mlx5_0/1"), ("rdma-port", 1, "mlx5_1/1")},
)


def samples(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


async def exists(path: Path) -> None:
    while not path.exists():  # noqa: ASYNC110  # another task of this loop makes it
        await asyncio.sleep(0)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> NodeMetrics:
    return NodeMetrics(registry, lambda: VALUES)


def test_signals_are_counted_and_a_storm_of_codes_has_few_series(
    registry: CollectorRegistry, metrics: NodeMetrics
) -> None:
    for code in (79, 79, *range(10_000, 11_000)):
        metrics.note(Observation("xid", code, "", "words", 0.0), GPUS)
    metrics.note(Observation("xid" + OVER, 79, "", "words", 0.0), GPUS)
    found = {key[1:]: value for key, value in samples(registry).items() if key[0] == "muster_node_signals_total"}
    assert found["79", "", "xid"] == 2
    assert sum(found.values()) == 1002
    assert len(found) == MOST_SIGNALS + 1


def test_signals_and_conditions_of_a_gpu_name_it(registry: CollectorRegistry, metrics: NodeMetrics) -> None:
    metrics.note(Observation("xid", 79, "0000:3b:00", "words", 0.0), GPUS)
    metrics.note(Observation("xid", 79, "0000:ff:00", "words", 0.0), GPUS)
    found = samples(registry)
    assert found["muster_node_signals_total", "79", "1", "xid"] == 1
    assert found["muster_node_signals_total", "79", "", "xid"] == 1
    conditions = {key[1:]: value for key, value in found.items() if key[0] == "muster_node_conditions"}
    assert conditions == {("64", "1", "gpu-throttle"): 1, ("1", "", "rdma-port"): 2}


def test_a_user_brings_few_new_series_in_an_hour() -> None:
    now = 0.0
    reports = RankReports(lambda: now)
    ranks = [RankReport(rank=rank, gpu=rank) for rank in range(8)]
    taken = [reports.take(7, ReportRanks(slurm_job_id=1, ranks=ranks)) for _ in range(1000)]
    assert set(taken) == {""}
    taken = [reports.take(7, ReportRanks(slurm_job_id=1, ranks=[RankReport(rank=100 + at)])) for at in range(1000)]
    assert taken.count("") == MOST_NEW - 1 - len(ranks)
    assert (
        reports.take(7, ReportRanks(slurm_job_id=2))
        == "a user brings 256 new jobs and ranks to a node within an hour at most"
    )
    assert reports.take(8, ReportRanks(slurm_job_id=2)) == ""
    now = NEW_S + 1
    assert reports.take(7, ReportRanks(slurm_job_id=2)) == ""


def test_reports_are_bounded_by_user_and_are_forgotten(registry: CollectorRegistry) -> None:
    now = 0.0
    reports = RankReports(lambda: now)
    many = ReportRanks(ranks=[RankReport(rank=rank) for rank in range(MOST_RANKS + 1)])
    assert reports.take(7, many) == f"a report has {MOST_RANKS} ranks at most"
    for job in range(MOST_JOBS_OF_USER):
        assert reports.take(7, ReportRanks(slurm_job_id=job)) == ""
    assert reports.take(7, ReportRanks(slurm_job_id=99)) != ""
    assert reports.take(7, ReportRanks(slurm_job_id=0, own_bytes=5)) == ""
    assert reports.take(8, ReportRanks(slurm_job_id=99)) == ""
    assert reports.shown()[7, 0].own_bytes == 5
    now = REPORTED_S + 1
    assert reports.shown() == {}
    assert reports.take(7, ReportRanks(slurm_job_id=99)) == ""


async def test_an_agents_ranks_are_shown_with_the_uid_that_the_kernel_proves(
    registry: CollectorRegistry, metrics: NodeMetrics, tmp_path: Path
) -> None:
    socket = tmp_path / "memory.sock"
    service = MemoryService(socket, KeptMemoryStore(FdStore("")), report_ranks=metrics.ranks.take)
    serving = asyncio.create_task(service.run())
    await exists(socket)
    shards = [ShardStatus(rank=0, bytes=10, tier=Tier.TIER_OWN), ShardStatus(rank=1, bytes=7, tier=Tier.TIER_BUDDY)]
    times = BlockTimes(compute_us=[10_000, 30_000, 20_000])
    ranks = [RankStatus(rank=0, step=8, gpu=1, block_times=times), RankStatus(rank=1, step=7, gpu=900)]
    report = rank_metrics.report_of(42, ranks, shards)
    assert await asyncio.to_thread(rank_metrics.send, str(socket), report) == ""
    serving.cancel()
    uid, found = str(os.getuid()), samples(registry)
    assert found["muster_rank_step", "1", "42", "0", uid] == 8
    assert found["muster_rank_step", "", "42", "1", uid] == 7  # the node has no GPU 900
    works = {key[1:]: value for key, value in found.items() if key[0] == "muster_rank_compute_seconds"}
    assert works == {("1", "42", "0", uid): 0.02}
    assert found["muster_node_checkpoint_bytes", "42", "own", uid] == 10
    assert found["muster_node_checkpoint_bytes", "42", "replica", uid] == 7


def test_ranks_that_only_log_have_the_step_that_they_have_said() -> None:
    ranks = [RankStatus(rank=0), RankStatus(rank=1, step=8)]
    assert [rank.step for rank in rank_metrics.report_of(42, ranks, [], logged=7).ranks] == [7, 8]


async def test_a_node_without_metrics_takes_no_report(tmp_path: Path) -> None:
    socket = tmp_path / "memory.sock"
    serving = asyncio.create_task(MemoryService(socket, KeptMemoryStore(FdStore(""))).run())
    await exists(socket)
    assert await asyncio.to_thread(rank_metrics.send, str(socket), ReportRanks()) == NO_METRICS
    serving.cancel()
    assert "No such file" in rank_metrics.send(str(tmp_path / "none.sock"), ReportRanks())


async def test_the_text_file_is_replaced_as_a_whole(
    registry: CollectorRegistry, metrics: NodeMetrics, tmp_path: Path
) -> None:
    path = tmp_path / "musterd.prom"
    writing = asyncio.create_task(textfile.keep_written(path, registry, interval_s=0.0))
    await exists(path)
    before = path.stat().st_ino
    while path.exists() and path.stat().st_ino == before:
        assert path.read_text().endswith("\n")
        await asyncio.sleep(0)
    writing.cancel()


@pytest.mark.parametrize(("folder_mode", "mode"), [(0o755, 0o644), (0o750, 0o640), (0o700, 0o600)])
def test_who_may_list_the_folder_may_read_the_text_file(
    registry: CollectorRegistry, metrics: NodeMetrics, tmp_path: Path, folder_mode: int, mode: int
) -> None:
    tmp_path.chmod(folder_mode)
    before = os.umask(0o077)
    try:
        textfile.write(tmp_path / "musterd.prom", registry)
    finally:
        os.umask(before)
    assert [path.name for path in tmp_path.iterdir()] == ["musterd.prom"]
    assert (tmp_path / "musterd.prom").stat().st_mode & 0o777 == mode


def test_messages_of_the_driver_that_cannot_be_read_are_counted() -> None:
    parser = KernelErrorParser()
    for message in (
        "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module",
        "NVRM: Xid <0000:3b:00> = 79",
        "usb 1-1: Xid (PCI:0000:3b:00): none of the driver's",
    ):
        parser.parse(KernelRecord(KERNEL_FACILITY, 3, 1, fragment=False, message=message, at=1.0))
    assert parser.not_understood == 1


def test_the_page_lists_each_metric_of_a_node(registry: CollectorRegistry, metrics: NodeMetrics) -> None:
    metrics.ranks.take(0, ReportRanks(slurm_job_id=1, ranks=[RankReport(rank=0, compute_s=1.0)]))
    metrics.note(Observation("xid", 79, "", "words", 0.0), GPUS)
    _, _, section = PAGE.partition("## Of a node")
    listed = {
        name
        for row in re.findall(r"^\| (`muster_[^|]*)\|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert listed == {name for name, *_ in samples(registry) if name.startswith("muster_")}
