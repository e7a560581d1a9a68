"""The units: they start real commands with known flags, document their exit statuses, and drop unneeded privileges."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from muster.daemon.host.kept_memory_client import MAX_FDS, SOCKET
from muster.daemon.node.kept_memory.memory_service import MAX_CALLS
from muster.daemon.transport.server_limits import COORDINATOR, LOCAL_SERVER, MIB, NODE_DAEMON, ServerLimits
from muster.daemon.transport.site_config import EXIT_CONFIG

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MODULES = {"musterd": "muster.daemon.node.__main__", "muster-coordinator": "muster.daemon.coordinator.__main__"}
UNITS = sorted(MODULES)
ANALYZE = shutil.which("systemd-analyze")


class Unit:
    """One unit file."""

    def __init__(self, name: str) -> None:
        self.path = ROOT / "systemd" / f"{name}.service"
        self.text = self.path.read_text()
        # systemd adds up some keys that occur twice (SystemCallFilter=); here the last one counts.
        parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",), strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's keys have capitals
        parser.read_string(self.text)
        self.service = parser["Service"]
        self.command, *self.flags = shlex.split(self.service["ExecStart"])

    def comment(self) -> str:
        """The comment before the first section."""
        head = self.text.partition("[Unit]")[0]
        return " ".join(line.lstrip("# ") for line in head.splitlines())


def _statuses(text: str) -> set[int]:
    """The numbers of a sentence "Exit status ...: 0 success; 69 the address ...; 70 a bug", or of a list with one
    number per line."""
    sentence = text.partition("Exit status")[2].partition(":")[2]
    return {int(found) for found in re.findall(r"(?:^|;|\n)\s*(\d+) ", sentence)}


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_starts_a_command_of_the_package(name: str) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert Unit(name).command == name
    assert scripts[name] == f"{MODULES[name]}:main"
    assert callable(import_module(MODULES[name]).main)


@pytest.mark.parametrize("name", UNITS)
def test_the_command_has_the_flags_that_the_unit_gives(name: str) -> None:
    flags = [flag for flag in Unit(name).flags if flag.startswith("--")]
    values = [part for flag in flags for part in (flag, "/nowhere")]
    command = [sys.executable, "-Im", MODULES[name], *values, "--auth=none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    # Settings are checked after the flags: an unknown flag would give status 2.
    assert done.returncode == EXIT_CONFIG, done.stderr


@pytest.mark.parametrize("name", UNITS)
def test_units_document_the_exit_statuses(name: str) -> None:
    unit, documented = Unit(name), _statuses(import_module(MODULES[name]).__doc__ or "")
    assert {0, EXIT_CONFIG} < documented
    assert _statuses(unit.comment()) == documented
    assert unit.service["RestartPreventExitStatus"] == str(EXIT_CONFIG)
    assert unit.service["Restart"] == "always"


def test_the_node_daemon_may_open_the_kernel_log_and_nvidia_gpus_and_nothing_else() -> None:
    unit = Unit("musterd")
    service = unit.service
    assert service["CapabilityBoundingSet"] == "CAP_SYSLOG"
    assert service["DevicePolicy"] == "closed"
    assert re.findall(r"^DeviceAllow=(.*)$", unit.text, re.MULTILINE) == ["/dev/kmsg r", "char-nvidia* rw"]
    # Each of these would hide /dev/kmsg.
    assert not {"ProtectKernelLogs", "PrivateDevices"} & set(service)


def test_kept_memory_survives_a_restart_of_the_node_daemon() -> None:
    service = Unit("musterd").service
    # One descriptor more than the memfds, for the note. A replacement is stored before the old ones are removed. Some
    # are left for the sockets that reserve the port: one, or one for each address of the host in --listen.
    assert int(service["FileDescriptorStoreMax"]) >= 2 * (1 + MAX_FDS) + 64
    assert int(service["LimitNOFILE"]) > (MAX_CALLS + 2) * (1 + MAX_FDS)
    assert (service["NotifyAccess"], service["RuntimeDirectoryPreserve"]) == ("main", "restart")
    assert Path(SOCKET).parent == Path("/run", service["RuntimeDirectory"])
    assert service["RuntimeDirectoryMode"] == "0755", "every user's agent has to reach the socket"


@pytest.mark.parametrize(
    ("name", "limits", "needed_bytes"),
    [
        # 83 MiB, and a third of a MiB for each connection, NVRx's included, on which calls arrive as fast as they can.
        ("musterd", NODE_DAEMON, 83 * MIB + (NODE_DAEMON.connections + LOCAL_SERVER.connections) * MIB // 3),
        # 200 MB of state, and 50 KB for a stream of each of 12,500 node daemons and as many agents.
        ("muster-coordinator", COORDINATOR, 200 * MIB + 25_000 * 50_000),
    ],
)
def test_memory_and_descriptors_are_limited_and_suffice(name: str, limits: ServerLimits, needed_bytes: int) -> None:
    service = Unit(name).service
    number, unit = re.fullmatch(r"(\d+)([MG])", service["MemoryMax"]).groups()  # type: ignore[union-attr]
    assert int(number) * {"M": MIB, "G": 1024 * MIB}[unit] > 1.5 * needed_bytes
    assert 64 < int(service["TasksMax"]) < 1024
    assert "MemoryHigh" not in service, "a throttled daemon seems to be silent"
    # What callers over TCP leave is enough for the local socket with its memfds, and for the journal.
    of_nvrx = LOCAL_SERVER.connections
    assert int(service["LimitNOFILE"]) - limits.connections - of_nvrx > (MAX_CALLS + 2) * (1 + MAX_FDS)


def test_a_node_daemon_that_hangs_is_restarted_and_its_log_says_where_it_hung() -> None:
    unit = Unit("musterd")
    assert (unit.service["Type"], unit.service["Restart"], unit.service["NotifyAccess"]) == ("notify", "always", "main")
    assert unit.service["WatchdogSec"] == "30s"
    assert "Environment=PYTHONFAULTHANDLER=1" in unit.text.splitlines()
    assert unit.service["LimitCORE"] == "0", "its memory holds the key of its certificate"


def test_the_node_daemon_leaves_cores_to_the_ranks_and_is_not_starved() -> None:
    number, unit = re.fullmatch(r"(\d+)(%)", Unit("musterd").service["CPUQuota"]).groups()  # type: ignore[union-attr]
    assert (100 < int(number) <= 400, unit) == (True, "%")


def test_the_coordinator_has_no_capability_and_keeps_its_journal() -> None:
    service = Unit("muster-coordinator").service
    assert service["CapabilityBoundingSet"] == ""
    assert (service["User"], service["StateDirectory"]) == ("slurm", "muster")
    # munge asks the kernel for the caller's uid: a user namespace would hide it.
    assert "PrivateUsers" not in service


def test_users_and_folders_are_created() -> None:
    users = _rows("sysusers.d/muster.conf")
    folders = _rows("tmpfiles.d/muster.conf")
    assert [row[:2] for row in users] == [["u", "slurm"]]
    assert {row[1]: row[2:5] for row in folders} == {
        "/etc/muster": ["0755", "root", "root"],
        "/var/lib/muster": ["0700", "slurm", "slurm"],
    }


def _rows(name: str) -> list[list[str]]:
    lines = (ROOT / "systemd" / name).read_text().splitlines()
    return [shlex.split(line) for line in lines if line and not line.startswith("#")]


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """The units with this environment's commands in place of installed commands."""
    for name in UNITS:
        unit = Unit(name)
        (tmp_path / unit.path.name).write_text(unit.text.replace(f"ExecStart={name}", f"ExecStart={BIN / name}"))
    return sorted(tmp_path.iterdir())


@pytest.mark.skipif(ANALYZE is None, reason="systemd is not installed here; the other checks run without it")
def test_systemd_accepts_the_units(units: list[Path]) -> None:
    assert ANALYZE
    command = [ANALYZE, "verify", "--man=no", *map(str, units)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    complaints = [line for line in done.stderr.splitlines() if any(name in line for name in UNITS)]
    assert (done.returncode, complaints) == (0, [])


@pytest.mark.skipif(ANALYZE is None, reason="systemd is not installed here; the other checks run without it")
@pytest.mark.parametrize(("name", "most"), [("musterd", 22), ("muster-coordinator", 15)])
def test_exposure_stays_low(units: list[Path], name: str, most: int) -> None:
    """systemd's own exposure level, in tenths of 0 to 10."""
    assert ANALYZE
    (path,) = (unit for unit in units if unit.stem == name)
    command = [ANALYZE, "security", "--offline=yes", "--no-pager", f"--threshold={most}", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "LC_ALL": "C.UTF-8"})
    if "unrecognized option" in done.stderr:
        pytest.skip("systemd is older than 250: no offline analysis")
    assert done.returncode == 0, done.stdout[-200:] + done.stderr
