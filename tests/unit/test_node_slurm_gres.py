"""How many GPUs a node has in Slurm, as its slurm.conf says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.daemon.node.sensors.slurm_gres import NodeGres, gpus_of_node
from muster.slurm.client.parsing.gres import count_gpus

CONF = """
ClusterName=one
# NodeName=n1 Gres=gpu:99
NodeName=DEFAULT CPUs=2 Gres=gpu:2
NodeName=login1
nodename=n[1-4],m07 \\
    CPUs=96 Gres=gpu:h100:8(S:0-1)   # the new ones
NodeName=cpu[1-9] Gres="shard:4"
NodeName=split Gres=gpu:1g.10gb:7
PartitionName=all Nodes=ALL
"""


@pytest.mark.parametrize(
    ("node", "gpus"), [("n1", 8), ("m07", 8), ("login1", 2), ("cpu3", 0), ("split", None), ("n5", None), ("", None)]
)
def test_the_line_of_the_node_counts(node: str, gpus: int | None) -> None:
    assert gpus_of_node(CONF, node) == gpus


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("", 0),
        ("gpu", 1),
        ("gpu:8", 8),
        ("gpu:h100", 1),
        ("gpu:h100:4(S:0),gpu:a100:4(S:1,2),shard:64", 8),
        ("gpu:h100:no_consume:4", 4),
        ("nic:2,GPU:tesla:2", None),  # Slurm knows only lower-case letters
        ("gpu:a100_3g.20gb:2,gpu:4", None),
        ("gpu:h100:4:5", None),
        ("mps:400", 0),
    ],
)
def test_gpus_are_counted(gres: str, gpus: int | None) -> None:
    assert count_gpus(gres) == gpus


def test_the_file_is_read_again_when_it_has_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    conf = tmp_path / "slurm.conf"
    gres = NodeGres("n1", [tmp_path / "absent", conf])
    assert gres.gpus() is None
    conf.write_text("NodeName=n1 Gres=gpu:4\n")
    assert gres.gpus() == 4
    conf.write_text("NodeName=n1 Gres=gpu:8\n")
    os.utime(conf, ns=(1, 1))
    assert gres.gpus() == 8
    conf.write_text("NodeName=n[1 Gres=gpu:8 # half written")
    assert gres.gpus() is None
    assert "how many GPUs Slurm expects is not known" in caplog.text


@given(st.text(max_size=200))
def test_no_text_breaks_it(text: str) -> None:
    try:
        found = gpus_of_node(f"NodeName=n1 {text}", "n1")
    except ValueError:
        return
    assert found is None or found >= 0
