"""The privileges that docs/SECURITY.md argues for are those of the units, and musterd works with no more than these."""

import asyncio
import configparser
import os
import re
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from muster.daemon.host.kept_memory_client import send_request
from muster.daemon.transport.identity import SecretCredentials

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "SECURITY.md").read_text()
UNITS = ["musterd", "muster-coordinator"]
NUMBERS = {"CAP_SYSLOG": 34}
"""Capabilities by their number in linux/capability.h."""
KMSG = Path("/dev/kmsg")
ANYBODY = 65534
"""A uid without rights."""
WAIT_S = 120.0
"""Ends a wait that would never end."""

KEEP = """
import fcntl, os, sys
from muster.checkpoint.store.memory.sealed_memory import MEMFD_SEALS
from muster.daemon.host.kept_memory_client import send_request
os.setuid(int(sys.argv[2]))
fds = [os.memfd_create("shard", os.MFD_ALLOW_SEALING) for _ in range(2)]
for fd in fds:
    os.write(fd, b"x")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, MEMFD_SEALS)
keep = {"keep": {"gang_id": "g", "slurm_job_id": 7}}
assert send_request(sys.argv[1], keep, fds, timeout_s=60) == ({}, [])
answer, back = send_request(sys.argv[1], {"take": {"gang_id": "g"}}, timeout_s=60)
assert len(back) == 2, answer
# musterd puts back what nobody has confirmed, but nobody knows when.
assert send_request(sys.argv[1], keep, fds, timeout_s=60) == ({}, [])
"""


def _unit(name: str) -> configparser.SectionProxy:
    # systemd adds up some keys that occur twice; here the last one counts.
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",), strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's keys have capitals
    parser.read_string((ROOT / "systemd" / f"{name}.service").read_text())
    return parser["Service"]


def _rows(heading: str) -> Iterator[list[str]]:
    """The rows of the table below a heading of docs/SECURITY.md."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("name", UNITS)
def test_each_capability_of_a_unit_is_argued_and_no_other_one(name: str) -> None:
    argued = {word for row in _rows("Least privilege") if name in _named(row[0]) for word in _named(row[1])}
    assert {word for word in argued if word.startswith("CAP_")} == set(_unit(name)["CapabilityBoundingSet"].split())
    assert {word for word in argued if word.startswith("User=")} == {f"User={_unit(name)['User']}"}
    assert _unit(name)["AmbientCapabilities"] == ""
    assert _unit(name)["NoNewPrivileges"] == "yes"


@pytest.mark.parametrize("name", UNITS)
def test_a_restriction_that_is_said_to_be_left_out_is_left_out_and_the_rest_is_set(name: str) -> None:
    left_out = {word for row in _rows("Restrictions left out") if name in _named(row[1]) for word in _named(row[0])}
    assert len(left_out) > 3
    assert not {word.rstrip("=") for word in left_out} & set(_unit(name))
    other = next(unit for unit in UNITS if unit != name)
    argued = {word.rstrip("=") for row in _rows("Restrictions left out") for word in _named(row[0])}
    # What one unit restricts and the other one does not has a reason.
    kinds = ("Private", "Protect", "Restrict", "Lock", "MemoryDeny", "NoNew")
    assert {key for key in set(_unit(other)) - set(_unit(name)) if key.startswith(kinds)} <= argued


def _without_privileges(capabilities: str) -> list[str]:
    kept = "".join(f",+{name.removeprefix('CAP_').lower()}" for name in capabilities.split())
    return ["setpriv", f"--bounding-set=-all{kept}", "--inh-caps=-all", "--no-new-privs"]


@asynccontextmanager
async def _musterd(folder: Path, capabilities: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A musterd of root with these capabilities only, at the kernel's own log."""
    SecretCredentials.create(folder / "secret")
    flags = ["--coordinator=127.0.0.1:1", f"--auth=secret:{folder / 'secret'}", "--listen=127.0.0.1:0", "--node=n1"]
    command = [*_without_privileges(capabilities), sys.executable, "-m", "muster.daemon.node", *flags]
    process = await asyncio.create_subprocess_exec(
        *command, f"--kmsg={KMSG}", f"--memory={folder / 'memory.sock'}", stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def _line(process: asyncio.subprocess.Process, words: str) -> str:
    assert process.stderr
    async with asyncio.timeout(WAIT_S):
        while line := (await process.stderr.readline()).decode():
            if words in line:
                return line
    raise AssertionError(f"musterd has ended without a line with {words!r}")


def _has_open(process: asyncio.subprocess.Process, path: Path) -> bool:
    return any(os.path.realpath(fd) == str(path) for fd in Path(f"/proc/{process.pid}/fd").iterdir())


needs_root = pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root, which drops its capabilities with setpriv"
)
needs_kernel_log = pytest.mark.skipif(
    not KMSG.exists() or not stat.S_ISCHR(KMSG.stat().st_mode), reason="no kernel log can be read here"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can reach, as /run/muster is."""
    with tempfile.TemporaryDirectory(prefix="muster-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


@needs_root
@needs_kernel_log
async def test_musterd_works_with_the_capabilities_of_its_unit(folder: Path) -> None:
    """It reads the kernel log, and keeps the memory of a user of the node."""
    capabilities = _unit("musterd")["CapabilityBoundingSet"]
    async with _musterd(folder, capabilities) as process:
        await _line(process, "not attached to")  # the last thing that it says of its start
        assert _has_open(process, KMSG)
        held = re.findall(r"Cap(?:Prm|Eff|Bnd):\t(\w+)", Path(f"/proc/{process.pid}/status").read_text())
        assert [int(mask, 16) for mask in held] == 3 * [sum(1 << NUMBERS[name] for name in capabilities.split())]
        socket = str(folder / "memory.sock")
        job = {"free": {"slurm_job_id": 7, "uid": ANYBODY}}
        await asyncio.to_thread(send_request, socket, job, timeout_s=WAIT_S)
        user = await asyncio.create_subprocess_exec(sys.executable, "-c", KEEP, socket, str(ANYBODY))
        async with asyncio.timeout(WAIT_S):
            assert await user.wait() == 0
        answer, _ = await asyncio.to_thread(
            send_request, socket, {"free": {"slurm_job_id": 8, "uid": 0}}, timeout_s=WAIT_S
        )
        assert answer == {"freed": 1}


@needs_root
async def test_the_coordinator_works_without_any_capability(folder: Path) -> None:
    """Even root has no rights beyond an ordinary user's then."""
    assert _unit("muster-coordinator")["CapabilityBoundingSet"] == ""
    SecretCredentials.create(folder / "secret")
    flags = ["--slurm=fake", "--listen=127.0.0.1:0", f"--auth=secret:{folder / 'secret'}"]
    command = [*_without_privileges(""), sys.executable, "-m", "muster.daemon.coordinator", *flags]
    process = await asyncio.create_subprocess_exec(
        *command, f"--state-dir={folder / 'state'}", stderr=asyncio.subprocess.PIPE
    )
    try:
        await _line(process, "listens on port")
        held = re.findall(r"Cap(?:Prm|Eff|Bnd):\t(\w+)", Path(f"/proc/{process.pid}/status").read_text())
        assert [int(mask, 16) for mask in held] == [0, 0, 0]
        process.terminate()
        async with asyncio.timeout(WAIT_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@needs_root
@needs_kernel_log
@pytest.mark.skipif(
    Path("/proc/sys/kernel/dmesg_restrict").read_text().strip() != "1", reason="any user may read the kernel log here"
)
@pytest.mark.parametrize("missing", _unit("musterd")["CapabilityBoundingSet"].split())
async def test_musterd_is_blind_without_a_capability_of_its_unit(folder: Path, missing: str) -> None:
    kept = shlex.join(set(_unit("musterd")["CapabilityBoundingSet"].split()) - {missing})
    async with _musterd(folder, kept) as process:
        assert "Operation not permitted" in await _line(process, "GPU errors go unseen")
