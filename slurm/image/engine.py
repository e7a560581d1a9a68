"""The only module that calls podman and docker.

Promises: nothing is ever pulled. Callers list and remove only objects that carry Muster's labels. The user's own engine
configuration is not changed, and podman does not read it: a private ``containers.conf`` in the cache folder is named by
``CONTAINERS_CONF``. Every call has a timeout. Both engines are used through their command lines, which are almost
equal. The differences are properties of `Engine`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

INSTALL_HINT = (
    "install podman with `sh slurm/image/host-setup.sh` (Debian and Ubuntu; it calls apt-get), "
    "or start the docker daemon"
)

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# podman's own default limits are above the host's. Without CAP_SYS_RESOURCE podman may not raise limits.
_LIMITS = {"nofile": (resource.RLIMIT_NOFILE, 16384), "nproc": (resource.RLIMIT_NPROC, 32768)}


class EngineError(RuntimeError):
    """A container engine is missing, refused a command, or did not finish it in time."""


def cache_dir() -> Path:
    """Muster's folder for build results and running clusters. It may be deleted when no cluster runs."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    path = Path(root) / "muster"
    path.mkdir(parents=True, exist_ok=True)
    return path


@dataclass(frozen=True)
class Outcome:
    """The result of a command."""

    argv: tuple[str, ...]
    rc: int
    stdout: str
    stderr: str

    def checked(self) -> str:
        """Returns standard output. Raises `EngineError` with the command, its exit status and its error message if it
        failed.
        """
        if self.rc != 0:
            message = self.stderr.strip() or self.stdout.strip() or "nothing"
            raise EngineError(f"`{' '.join(self.argv)}` failed with code {self.rc}: {message}")
        return self.stdout


@dataclass(frozen=True)
class Engine:
    """podman or docker, as root: faults need the host's end of each container's link."""

    name: str
    env: dict[str, str] = field(default_factory=dict)
    sudo: tuple[str, ...] = ()

    @property
    def ulimits(self) -> tuple[str, ...]:
        """Options of ``run`` that lower the resource limits. podman reads them from its configuration."""
        return () if self.name == "podman" else tuple(f"--ulimit={limit}" for limit in _ulimits())

    @property
    def without_dns(self) -> tuple[str, ...]:
        """Options of ``network create``: names come from /etc/hosts, never from the engine.

        The engine forgets the name of a dead container, and slurmctld then blocks in getaddrinfo.
        """
        return ("--disable-dns",) if self.name == "podman" else ()

    def argv(self, *args: str) -> list[str]:
        """The full command line of an engine command, for callers that replace themselves with it."""
        env = [f"{key}={value}" for key, value in self.env.items()]
        return [*self.sudo, *(["env", *env] if env else []), self.name, *args]

    def host_argv(self, *args: str) -> list[str]:
        """The full command line of a command on the host, as root."""
        return [*self.sudo, *args]

    def call(self, *args: str, stdin: bytes | None = None, timeout: float = 60.0) -> Outcome:
        """Runs an engine command. `timeout` is in seconds; raises `EngineError` after it."""
        return _finish(self.argv(*args), stdin, timeout)

    def host(self, *args: str, timeout: float = 20.0) -> Outcome:
        """Runs a command on the host as root (links, namespaces)."""
        return _finish(self.host_argv(*args), None, timeout)

    def kill(self, pid: int) -> Outcome:
        """Sends SIGKILL to the host's process `pid`, or to the process group if `pid` is negative.

        It uses the shell's own `kill`: /bin/kill is part of procps, which a minimal system lacks.
        """
        return self.host("sh", "-c", 'kill -s KILL -- "$1"', "kill", str(pid))

    def host_call(self, argv: Sequence[str], stdin: bytes | None = None, timeout: float = 60.0) -> Outcome:
        """Runs a full command line from `host_argv`. `timeout` is in seconds."""
        return _finish(argv, stdin, timeout)

    def interactive(self, *args: str) -> int:
        """Runs an engine command on the caller's terminal. Returns its exit status."""
        return subprocess.call(self.argv(*args))

    @contextlib.contextmanager
    def pipe_into(self, producer: Sequence[str], *args: str, timeout: float = 900.0) -> Iterator[str]:
        """Runs `producer` as root on the host. Its output is the standard input of an engine command.

        Yields the standard output of the engine command. Raises `EngineError` if either command fails.
        """
        with tempfile.TemporaryFile() as complaints:
            source = subprocess.Popen(
                self.host_argv(*producer), stdout=subprocess.PIPE, stderr=complaints, stdin=subprocess.DEVNULL
            )
            try:
                sink = subprocess.run(
                    self.argv(*args), stdin=source.stdout, capture_output=True, text=True, timeout=timeout
                )
                rc = source.wait(timeout=30)
            finally:
                source.kill()
                source.wait()
            complaints.seek(0)
            message = complaints.read().decode(errors="replace")[-2000:]
        Outcome(tuple(producer), rc, "", message).checked()
        yield Outcome(tuple(args), sink.returncode, sink.stdout, sink.stderr).checked().strip()

    def has_image(self, image: str) -> bool:
        """Whether `image` exists on this host."""
        return self.call("image", "inspect", "--format", "{{.Id}}", image).rc == 0


def _finish(argv: Sequence[str], stdin: bytes | None, timeout: float) -> Outcome:
    try:
        # Without `stdin` the command reads an empty input, not the caller's terminal. The command has its own process
        # group, so Ctrl-C reaches only the caller. The caller defers the interrupt (deferred_interrupts)
        # during a command that must not be cut short.
        done = subprocess.run(argv, capture_output=True, timeout=timeout, input=stdin or b"", process_group=0)
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"`{' '.join(argv)}` did not finish within {timeout:g} s") from error
    except FileNotFoundError as error:
        hint = INSTALL_HINT if argv[0] in ("podman", "docker") else "the test cluster needs it on this host"
        raise EngineError(f"{argv[0]} is not installed; {hint}") from error
    return Outcome(tuple(argv), done.returncode, _text(done.stdout), _text(done.stderr))


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def find_engine() -> Engine:
    """Returns podman, else a docker whose daemon answers. ``MUSTER_ENGINE`` overrides the choice.

    Raises:
        EngineError: there is no engine; the message says what to install.
    """
    os.environ["PATH"] = os.environ.get("PATH", "") + ":" + _SYSTEM_PATH
    wanted = os.environ.get("MUSTER_ENGINE")
    if wanted not in (None, "", "podman", "docker"):
        raise EngineError(f"MUSTER_ENGINE={wanted} is unknown; use podman or docker")
    sudo = _become_root()
    if wanted != "docker" and shutil.which("podman"):
        return Engine("podman", {"CONTAINERS_CONF": str(_containers_conf())}, sudo)
    if wanted != "podman" and shutil.which("docker"):
        docker = Engine("docker", {}, sudo)
        docker.call("version", timeout=20).checked()
        return docker
    raise EngineError(f"no container engine found: {INSTALL_HINT}")


def _become_root() -> tuple[str, ...]:
    """The command prefix that runs a command as root. On a terminal, sudo may ask for the password once."""
    if os.geteuid() == 0:
        return ()
    ask = ["sudo", "-v"] if sys.stdin.isatty() else ["sudo", "-n", "true"]
    if not shutil.which("sudo") or subprocess.call(ask) != 0:
        raise EngineError("the cluster cuts links and kills containers: run this as root, or as a user with sudo")
    return ("sudo",) if sys.stdin.isatty() else ("sudo", "-n")


def _ulimits() -> list[str]:
    limits = []
    for name, (which, wanted) in _LIMITS.items():
        hard = resource.getrlimit(which)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        limits.append(f"{name}={value}:{value}")
    return limits


def _containers_conf() -> Path:
    path = cache_dir() / "containers.conf"
    # crun refuses to start if cgroup v1 and v2 are both mounted. runc always starts.
    runtime = "runc" if shutil.which("runc") else "crun"
    limits = ", ".join(f'"{limit}"' for limit in _ulimits())
    manager = "systemd" if Path("/run/systemd/system").is_dir() else "cgroupfs"
    text = (
        f'[containers]\ndefault_ulimits = [{limits}]\nbase_hosts_file = "none"\nlog_driver = "k8s-file"\n'
        f'[engine]\nruntime = "{runtime}"\ncgroup_manager = "{manager}"\nevents_logger = "none"\n'
        f'[network]\nnetwork_backend = "netavark"\n'
    )
    if not path.exists() or path.read_text() != text:
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(text)
        aside.rename(path)
    return path


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """SIGINT and SIGTERM that arrive in the `with` block take effect after the block.

    An interrupt between a command's fork and the return of its pid would lose the pid. The command would continue, and
    nobody would wait for it before its work is undone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts only the main thread
        return
    received: list[int] = []
    which = (signal.SIGTERM, signal.SIGINT)  # restored in this order, so that no Ctrl-C arrives between the two
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in which}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
