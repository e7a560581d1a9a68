"""The units on a host with systemd as its first process: started, killed, upgraded and stopped."""

import json

import pytest

from muster.slurm.testcluster.systemd_node import SERVICES, SystemdNode, systemd_node
from muster.slurm.testcluster.waiting import wait_until

pytestmark = pytest.mark.cluster

KEEP_MEMORY = """
import fcntl, os, sys
from muster.daemon.host.kept_memory_client import SOCKET, send_request

def memfd():
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd

send_request(SOCKET, {"free": {"slurm_job_id": 7, "uid": 0}})
print(send_request(SOCKET, {"keep": {"gang_id": "g", "slurm_job_id": 7}}, [memfd(), memfd()])[0])
"""
ASK = """
import json
from muster.daemon.host.kept_memory_client import SOCKET, send_request
print(json.dumps(send_request(SOCKET, {"ask_verdict": {"slurm_job_id": 7}})[0]))
"""


def python(host: SystemdNode, program: str) -> str:
    return host.sh("/opt/muster/bin/python3 -", stdin=program).stdout.strip()


def times_attached(host: SystemdNode) -> int:
    return host.log("musterd").count(" attached to ctl:7070, term ")


def keeps_memory(host: SystemdNode) -> bool:
    return bool(json.loads(python(host, ASK))["verdict"].get("memory_kept"))


def test_the_services_start_outlive_a_kill_and_an_upgrade_and_stop() -> None:
    with systemd_node() as host:
        for service in SERVICES:
            host.sh(f"systemctl start {service}")
        wait_until(lambda: times_attached(host) >= 1, 60, "musterd is attached to the coordinator")
        assert host.sh("muster-healthcheck").stderr == ""
        assert python(host, KEEP_MEMORY) == "{}"
        killed_services_come_back(host)
        a_node_daemon_that_hangs_comes_back(host)
        an_upgrade_keeps_the_memory_of_jobs(host)
        stopped_services_leave_nothing(host)


def killed_services_come_back(host: SystemdNode) -> None:
    host.sh("systemctl kill --signal=KILL musterd")
    wait_until(lambda: times_attached(host) >= 2, 60, "musterd is attached again")
    assert (host.property("musterd", "NRestarts"), host.property("musterd", "ActiveState")) == ("1", "active")
    assert keeps_memory(host)
    host.sh("systemctl kill --signal=KILL muster-coordinator")
    wait_until(lambda: times_attached(host) >= 3, 60, "musterd is attached to the next coordinator")
    assert host.property("muster-coordinator", "NRestarts") == "1"


def a_node_daemon_that_hangs_comes_back(host: SystemdNode) -> None:
    """Its log says where it hung. The test shortens the time that systemd waits."""
    host.sh("mkdir -p /run/systemd/system/musterd.service.d")
    host.write("/run/systemd/system/musterd.service.d/short.conf", "[Service]\nWatchdogSec=3s\n")
    attached = times_attached(host)
    host.sh("systemctl daemon-reload; systemctl restart musterd")
    wait_until(lambda: times_attached(host) > attached, 60, "musterd is attached with a shorter watchdog")
    before = host.property("musterd", "MainPID")
    host.sh(f"kill -STOP {before}")
    wait_until(lambda: times_attached(host) > attached + 1, 60, "systemd has replaced the musterd that hung")
    assert host.property("musterd", "MainPID") != before
    assert "Fatal Python error: Aborted" in host.log("musterd")
    assert keeps_memory(host)
    host.sh("rm -r /run/systemd/system/musterd.service.d; systemctl daemon-reload")


def an_upgrade_keeps_the_memory_of_jobs(host: SystemdNode) -> None:
    """An administrator replaces the package and the units, and restarts the services."""
    attached = times_attached(host)
    before = [host.property(service, "MainPID") for service in ("muster-coordinator", "musterd")]
    host.sh("cp -r /opt/muster /opt/upgraded && mv /opt/muster /opt/old && mv /opt/upgraded /opt/muster")
    host.sh("echo '# of the next release' >>/etc/systemd/system/musterd.service; systemctl daemon-reload")
    host.sh("systemctl restart muster-coordinator musterd")
    after = [host.property(service, "MainPID") for service in ("muster-coordinator", "musterd")]
    wait_until(lambda: times_attached(host) > attached, 60, "the upgraded musterd is attached")
    assert not set(before) & set(after)
    assert keeps_memory(host)
    assert host.sh("muster-healthcheck").stderr == ""


def stopped_services_leave_nothing(host: SystemdNode) -> None:
    host.sh("systemctl stop musterd muster-coordinator")
    for service in ("musterd", "muster-coordinator"):
        states = [host.property(service, name) for name in ("ActiveState", "Result", "NFileDescriptorStore")]
        assert states == ["inactive", "success", "0"], service
    assert host.sh("ls -A /run/muster", check=False).stdout == ""
    assert host.sh("pgrep -f '[b]in/muster'", check=False).stdout == ""
    assert "musterd does not answer" in host.sh("muster-healthcheck").stderr
