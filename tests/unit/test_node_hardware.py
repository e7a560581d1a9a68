"""What a node reports of itself: from files in the place of /sys and from the stand-in for NVIDIA's library."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.daemon.node.hardware_inventory import PERIOD_S, HardwareInventory, HostHardware, describe, read_host
from muster.daemon.node.nvml.gpu_identities import GpuIdentities, GpuIdentity
from muster.daemon.node.nvml.nvml_process import GpuReading
from muster.daemon.node.sysfs.network_adapters import read_adapters, read_numa_nodes
from muster.daemon.node.sysfs.pci_devices import Nearness, PciPlace, distance, place_of
from muster.daemon.transport.node_hardware import InvalidHardware, node_of, nvlink_domain_of, report_of
from muster.fabric.model.node import Nic, gpu_order
from muster.slurm.testcluster.hardware.pretended_host import CROSSED, EIGHT_GPUS, PretendedHost, gpu_address, tar_of
from muster.v1.common_pb2 import NEARNESS_NODE, NEARNESS_SWITCH, Adapter, Gpu, Hardware

CLUSTER = "4a1c000000000000000000000000000f"


def made(root: Path, host: PretendedHost) -> tuple[GpuIdentity, ...]:
    """Make the files of the host below `root`. Returns its GPUs as the sensor would know them."""
    with tarfile.open(fileobj=io.BytesIO(tar_of(host.files()))) as archive:
        archive.extractall(root, filter="tar")
    count = len(host.gpu_sockets)
    devices = [gpu_address(index).removesuffix(".0") for index in range(count)]
    return tuple(GpuIdentity(index, device, f"GPU-{index}") for index, device in enumerate(devices))


def hardware(root: Path, host: PretendedHost) -> Hardware:
    gpus = made(root, host)
    return describe(gpus, read_host(root, gpus))


def test_sockets_gpus_adapters_and_which_is_nearest_to_which(tmp_path: Path) -> None:
    found = hardware(tmp_path, EIGHT_GPUS)
    assert list(found.numa_nodes) == [0, 1]
    assert [gpu.numa_node for gpu in found.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [gpu.pci_address for gpu in found.gpus][:2] == ["0000:1b:00.0", "0000:2b:00.0"]
    assert [list(gpu.nearest_adapters) for gpu in found.gpus] == [[f"mlx5_{index // 2}"] for index in range(8)]
    assert {gpu.nearness for gpu in found.gpus} == {NEARNESS_SWITCH}
    assert [(one.name, one.infiniband_device, one.gbit_per_s, one.link_layer) for one in found.adapters] == [
        *((f"ib{index}", f"mlx5_{index}", 400, "InfiniBand") for index in range(5)),
        ("eno1", "", 10, ""),
    ]
    report = report_of(found)
    assert (report.gpus, report.sockets) == (8, (0, 0, 0, 0, 1, 1, 1, 1))
    assert report.nics == (*(Nic(f"mlx5_{at}", (2 * at, 2 * at + 1)) for at in range(4)), Nic("mlx5_4"))
    assert (report.nvlink_domain, report.adapter_bandwidth) == ("", 50e9)


def test_gpus_are_ordered_by_socket_and_adapter(tmp_path: Path) -> None:
    assert gpu_order(node_of("n0", hardware(tmp_path, CROSSED))) == (0, 2, 1, 3)


def test_where_no_adapter_shares_a_switch_all_that_are_equally_near_are_named(tmp_path: Path) -> None:
    host = PretendedHost((0, 1), (0, 1), (0, 0), (-1, -1))
    found = hardware(tmp_path, host)
    assert [sorted(gpu.nearest_adapters) for gpu in found.gpus] == [["mlx5_0", "mlx5_1"]] * 2
    assert [Nearness(gpu.nearness) for gpu in found.gpus] == [Nearness.ROOT, Nearness.NODE]


@pytest.mark.parametrize(
    ("one", "other", "nearness"),
    [
        (("pci0000:00", "a", "b", "x"), ("pci0000:00", "a", "b", "y"), Nearness.SWITCH),
        (("pci0000:00", "a", "x"), ("pci0000:00", "c", "y"), Nearness.ROOT),
        (("pci0000:00", "a", "x"), ("pci0000:40", "c", "y"), Nearness.NUMA_NODE),
    ],
)
def test_how_near_two_devices_are(one: tuple[str, ...], other: tuple[str, ...], nearness: Nearness) -> None:
    assert distance(PciPlace("x", one, 1), PciPlace("y", other, 1))[0] is nearness


def test_devices_of_unknown_numa_nodes_are_far_apart() -> None:
    assert distance(PciPlace("x", ("pci0000:00", "x")), PciPlace("y", ("pci0000:40", "y")))[0] is Nearness.NODE


def test_more_common_bridges_are_nearer() -> None:
    gpu, near = PciPlace("g", ("r", "a", "b", "c", "g")), PciPlace("n", ("r", "a", "b", "c", "n"))
    assert distance(gpu, near) < distance(gpu, PciPlace("f", ("r", "a", "b", "d", "f")))


def test_a_host_without_adapters_and_gpus_reports_nothing(tmp_path: Path) -> None:
    assert read_adapters(tmp_path) == read_numa_nodes(tmp_path) == []
    assert describe((), HostHardware()) == Hardware()
    assert report_of(Hardware()).nvlink_domain == ""


def test_adapters_of_a_transport_of_their_own_and_virtual_interfaces_are_left_out(tmp_path: Path) -> None:
    made(tmp_path, replace(EIGHT_GPUS, link_layer="Unspecified"))
    (tmp_path / "sys/class/net/lo").mkdir()
    assert [one.name for one in read_adapters(tmp_path)] == ["eno1"]


def test_a_gpu_of_unknown_place_has_no_nearest_adapter(tmp_path: Path) -> None:
    made(tmp_path, EIGHT_GPUS)
    stranger = (GpuIdentity(0, "0000:ee:00"),)
    (gpu,) = describe(stranger, read_host(tmp_path, stranger)).gpus
    assert (gpu.pci_address, list(gpu.nearest_adapters), gpu.HasField("numa_node")) == ("0000:ee:00.0", [], False)


@pytest.mark.parametrize("target", ["", "sys/devices/virtual/net/x", "sys/devices/pci0000:00/nonsense"])
def test_what_is_no_pci_device_has_no_place(tmp_path: Path, target: str) -> None:
    if target:
        (tmp_path / target).mkdir(parents=True)
        (tmp_path / "device").symlink_to(tmp_path / target)
    assert place_of(tmp_path / "device") is None


async def test_the_inventory_is_told_of_changes_only(tmp_path: Path) -> None:
    gpus, changes, now = list[GpuIdentity](), list[int](), [0.0]
    inventory = HardwareInventory(
        tmp_path, lambda: gpus, lambda: changes.append(len(inventory.current.gpus)), lambda: now[0], deadline_s=60
    )
    await inventory.look()
    assert changes == []
    gpus += made(tmp_path, EIGHT_GPUS)
    await inventory.look()
    await inventory.look()
    assert changes == [8]
    rate = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/rate"
    rate.write_text("200 Gb/sec (4X HDR)\n")
    await inventory.look()
    assert changes == [8]
    now[0] += PERIOD_S
    await inventory.look()
    assert changes == [8, 8]
    assert inventory.current.adapters[0].gbit_per_s == 200


def reading(index: int, fabric: tuple[int, int, str, int, int] | None = None) -> GpuReading:
    return GpuReading(index, f"0000:{0x10 + index:02x}:00", uuid=f"GPU-{index}", fabric=fabric)


def test_the_nvlink_domain_of_a_gpu_stays_until_another_one_is_read() -> None:
    known = GpuIdentities()
    known.note([reading(0, (3, 0, CLUSTER, 2, 0)), reading(1, (3, 0, "0" * 32, 0, 0))], 2)
    known.note([reading(0), reading(1)], 2)
    assert [(gpu.nvlink_cluster, gpu.nvlink_clique) for gpu in known.current()] == [(CLUSTER, 2), ("", 0)]
    known.note([reading(0, (2, 0, CLUSTER, 2, 0))], 2)  # it registers anew
    assert known.current()[0].nvlink_cluster == ""
    known.note([reading(0)], 1)
    assert [gpu.index for gpu in known.current()] == [0]
    known.forget()
    assert known.current() == ()


def in_domain(*domains: tuple[str, int]) -> Hardware:
    gpus = [
        Gpu(index=index, nvlink_cluster=cluster, nvlink_clique=clique)
        for index, (cluster, clique) in enumerate(domains)
    ]
    return Hardware(gpus=gpus)


def test_a_node_is_in_an_nvlink_domain_if_all_its_gpus_are() -> None:
    assert nvlink_domain_of(in_domain((CLUSTER, 1), (CLUSTER, 1))) == f"{CLUSTER}.1"
    assert nvlink_domain_of(in_domain((CLUSTER, 1), (CLUSTER, 2))) == ""
    assert nvlink_domain_of(in_domain((CLUSTER, 1), ("", 0))) == ""


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (Hardware(gpus=[Gpu(index=at) for at in range(65)]), "65 GPUs"),
        (Hardware(gpus=[Gpu(index=1), Gpu(index=1)]), "different indexes"),
        (Hardware(gpus=[Gpu(index=2**32 - 1)]), "different indexes"),
        (Hardware(adapters=[Adapter(name="a")] * 65), "65 network adapters"),
        (Hardware(numa_nodes=range(1025)), "1025 NUMA nodes"),
        (Hardware(gpus=[Gpu(uuid="a" * 65)]), "no name of hardware"),
        (Hardware(gpus=[Gpu(nearest_adapters=["mlx5_0,^"])]), "no name of hardware"),
        (Hardware(gpus=[Gpu(nvlink_cluster="\x1b[2J")]), "no name of hardware"),
    ],
)
def test_a_report_that_no_node_has_is_refused(report: Hardware, words: str) -> None:
    with pytest.raises(InvalidHardware, match=words):
        report_of(report)


@given(st.binary(max_size=60))
def test_no_message_breaks_the_reader_of_reports(data: bytes) -> None:
    try:
        message = Hardware.FromString(data)
    except Exception:  # noqa: BLE001  # protobuf's own refusal
        return
    try:
        report = report_of(message)
    except InvalidHardware:
        return
    assert report.gpus <= 64
    assert not report.sockets or len(report.sockets) == report.gpus


def test_the_numbers_of_nearness_are_those_of_the_wire() -> None:
    assert (Nearness.SWITCH, Nearness.NODE) == (NEARNESS_SWITCH, NEARNESS_NODE)
