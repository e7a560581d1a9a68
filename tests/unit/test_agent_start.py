"""Which address an agent tells the others."""

import socket

import pytest

from muster.daemon.agent.startup import _address_towards


def test_the_address_that_faces_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert _address_towards("127.0.0.1:7070") == "127.0.0.1"


def test_a_coordinator_on_the_same_node_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
    assert _address_towards("127.0.0.1:7070") == socket.gethostname()


def test_a_coordinator_whose_name_is_not_known() -> None:
    assert _address_towards("no-such-host.invalid:7070") == socket.gethostname()
