"""An address in the arguments of ranks is said where they are launched."""

from __future__ import annotations

import pytest

from muster.daemon.agent.start_checks import meeting_address
from muster.v1.common_pb2 import JobSpec


@pytest.mark.parametrize(
    ("command", "address"),
    [
        (["python", "train.py", "--init_method", "tcp://n0:29500", "--lr", "1"], "tcp://n0:29500"),
        (["python", "train.py", "--dist-url=tcp://10.0.0.7:6000"], "tcp://10.0.0.7:6000"),
        (["python", "train.py", "--master_addr", "n0"], "--master_addr n0"),
        (["python", "train.py", "--master-addr=n0.site.example"], "--master-addr=n0.site.example"),
        (["bash", "-c", "MASTER_ADDR=n0 python train.py"], "MASTER_ADDR=n0"),
        (["bash", "-c", "MASTER_ADDR=$(first_node) python train.py --init tcp://$MASTER_ADDR:1"], ""),
        (["python", "train.py", "--init", "tcp://127.0.0.1:1", "--master_addr", "localhost"], ""),
        (["python", "train.py", "--store", "http://n0:1", "--master_port", "7"], ""),
        (["python", "train.py", "--tracking-uri", "tcp://mlflow:5000", "TCP", "tcp://log.site:1"], ""),
        (["python", "train.py", "--tracking-uri=tcp://mlflow:5000", "tcp://n0.site:29500"], "tcp://n0.site:29500"),
        (["python", "train.py", "dist.init_method=tcp://gpu1-ib:6000"], "tcp://gpu1-ib:6000"),
        (["python", "train.py", "--init-method=tcp://[fd00::7]:6000"], "tcp://[fd00::7]:6000"),
        (["python", "main.py", "tcp://10.0.0.5:23456"], "tcp://10.0.0.5:23456"),
        (["python", "main.py", "--url", "tcp://[fd00::7]:6000"], "tcp://[fd00::7]:6000"),
        (["python", "main.py", "--address", "tcp://n0-ib:29500"], "tcp://n0-ib:29500"),
        (["python", "main.py", "tcp://n0i.site:29500"], "tcp://n0i.site:29500"),
        (["python", "main.py", "--url", "tcp://n01:29500", "tcp://10.log.site:1", "tcp://my-n0:1"], ""),
        (["python", "train.py", '{"rdzv": "tcp://10.0.0.7:1"}'], "tcp://10.0.0.7:1"),
    ],
)
def test_what_names_a_node_for_good(command: list[str], address: str) -> None:
    assert next((one.text for one in meeting_address.find(command, ["n0"]) if one.is_fixed), "") == address


def test_the_first_node_of_the_script_says_it_once(capfd: pytest.CaptureFixture[str]) -> None:
    spec = JobSpec(command=["python", "train.py", "--master_addr", "n0"], own_nodes=["n0", "n1"])
    for node in ("n0", "n1", "n2"):
        meeting_address.tell_if_fixed(spec, node)
    said = capfd.readouterr().err
    assert said.count("--master_addr n0 stands in the arguments") == said.count("\n") == 1
    meeting_address.tell_if_fixed(JobSpec(command=spec.command), "n0")
    assert not capfd.readouterr().err
