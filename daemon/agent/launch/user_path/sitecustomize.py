"""Hands what a launcher of PyTorch would start to the agent on this node, which starts it in the launcher's place.

The folder of this file is the first one of PYTHONPATH in a task of `muster-agent run -- WORDS`. Every interpreter of
the task imports it before all else. torchrun, `python -m torch.distributed.run` and `accelerate launch` read their
options and then call `torch.distributed.launcher.api.launch_agent`. That function is replaced when its module is
imported, so no option is read twice, and a program without torch pays nothing. `accelerate launch` of one process a
node (`--cpu` always) starts it itself, with what `prepare_simple_launcher_cmd_env` returns, which is replaced likewise.
Ranks don't have this folder in PYTHONPATH.

It runs in the user's interpreter: syntax and library of Python 3.9, no import of Muster, but for that of a launcher
which is forked (`launcher_fork.py`). Nothing here may harm a program that launches nothing.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # the module typing would cost every program of the task its import
if TYPE_CHECKING:
    from typing import Any, NoReturn

SOCKET = "MUSTER_TASK_SOCKET"
"""Environment variable: the name of the agent's socket, in the abstract namespace."""
_TORCH, _API, _ALONE = "torch", "torch.distributed.launcher.api", "accelerate.utils.launch"
_RUN = "torch.distributed.run"
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.abspath(os.path.join(_FOLDER, *[os.pardir] * 5))
"""The folder of the package `muster`."""
FORKS = "-forks"
"""Behind the name of the socket: that of the socket for forks of a launcher."""
_OMP = "OMP_NUM_THREADS"
_at_start: Any = None
"""See launcher_fork.AtStart."""
_replaced: list[Any] = []
"""torch's own launch_agent."""
_imported_with: dict[str, str] = {}
"""The environment with which torchrun has imported torch, as far as the libraries know; empty: this is not torchrun."""
_SIGNALS_OF_RANKS = ("SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGPOLL", "SIGPWR")
_LIMITS = ("AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "RSS", "STACK")
_REFUSED = 64
_OF_UUID = [8, 4, 4, 4, 12]
"""Letters of the parts of an id that torch makes up."""


class ReplacedLauncher:
    """A finder of modules that replaces the launchers when their modules are imported, and finds nothing itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """See importlib.abc.MetaPathFinder."""
        if name not in (_TORCH, _API, _ALONE):
            return None
        others = sys.meta_path[sys.meta_path.index(FINDER) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:  # a mere folder has none
            (_import_uncollected if name == _TORCH else _replace_after)(spec.loader)
        return spec


FINDER = ReplacedLauncher()


def _import_uncollected(loader: Any) -> None:
    """Have `loader` import without the collector, which finds nothing and takes a seventh of torch's import. It never
    looks at what is imported, also not later."""
    run = loader.exec_module

    def run_uncollected(module: Any) -> None:
        import gc

        del loader.exec_module  # the loader is as it was
        _expect_threads_of_ranks()
        was_on = gc.isenabled()
        gc.disable()
        try:
            run(module)
        finally:
            gc.freeze()
            if was_on:
                gc.enable()

    loader.exec_module = run_uncollected


def _expect_threads_of_ranks() -> None:
    """torchrun is to import torch with the number of threads that its ranks have: libraries read it once, some of them
    late. They see the variable of the C library, and torchrun's own code does not."""
    if _at_start is not None and _is_torchrun():
        _imported_with.update({_OMP: "1", **_at_start[0]})
        if _OMP not in os.environ:
            os.putenv(_OMP, "1")


def _open_descriptors() -> frozenset[str]:
    names = os.listdir("/proc/self/fd")  # with that of the listing, which is closed then
    return frozenset(name for name in names if os.path.lexists(f"/proc/self/fd/{name}"))


def _is_torchrun() -> bool:
    """Whether this process was started as torchrun, with no flag of the interpreter but -u."""
    with open("/proc/self/cmdline", "rb") as file:
        words = [os.fsdecode(word) for word in file.read().split(b"\0")[1:4]]
    rest = [word for word in words if word != "-u"]
    return rest[:2] == ["-m", _RUN] or os.path.basename(rest[0] if rest else "") == "torchrun"


def _replace_after(loader: Any) -> None:
    """Have `loader` replace the launcher as soon as it has run the module."""
    run = loader.exec_module

    def run_and_replace(module: Any) -> None:
        del loader.exec_module
        run(module)
        if module.__name__ == _API:
            _replaced.append(module.launch_agent)
            module.launch_agent = hand_over
        else:
            module.prepare_simple_launcher_cmd_env = _hand_over_after(module.prepare_simple_launcher_cmd_env)

    loader.exec_module = run_and_replace


def _hand_over_after(prepare: Any) -> Any:
    """In the place of accelerate's `prepare`, which returns command and environment of the one process of a node."""

    def prepared(args: Any) -> Any:
        argv, environ = prepare(args)
        if args.mpirun_hostfile is None:
            nodes = args.num_machines or 1
            _launch(argv, 1, nodes, nodes, environ)
            sys.exit(0)
        return argv, environ

    return prepared


def hand_over(config: Any, entrypoint: Any, args: list[Any], *_: Any, **__: Any) -> dict[int, None]:
    """In the place of launch_agent: have the agent run the ranks, and wait until the gang has ended.

    Returns:
        What torch returns: the (empty) result of each local rank.

    Raises:
        SystemExit: the gang has ended with another exit code than 0, or the launch is refused.
    """
    argv = _command(entrypoint, args)
    if argv is None:
        _exit("the launcher starts a Python function, and not a program: give torchrun a script", _REFUSED)
    if getattr(config, "virtual_local_rank", False):
        _exit("--virtual-local-rank is not possible under Muster: each rank has a LOCAL_RANK of its own", _REFUSED)
    if getattr(config, "numa_options", None) is not None:
        sys.stderr.write("muster: --numa-binding is not taken over: ranks run on the processors of the launcher\n")
    environ = {**os.environ, **_said_to_ranks(config)}
    more: dict[str, Any] = {"max_restarts": config.max_restarts, "silent": _silent(config), "marks": _marks(config)}
    if _imported_with and sys.version_info >= (3, 9):
        forks = _fork(config.nproc_per_node, argv, environment_of_ranks(environ), sys._getframe(1))
        more.update({"forks": forks, "imported_with": environment_of_ranks(_imported_with)})
    _launch(argv, config.nproc_per_node, config.min_nodes, config.max_nodes, environ, more)
    return dict.fromkeys(range(config.nproc_per_node))


def _fork(count: int, argv: list[str], environment: dict[str, str], frame: Any) -> list[int]:
    """Fork this process into the warm processes of its ranks, if it may be forked. Returns their pids."""
    path, environ = list(sys.path), dict(os.environ)
    sys.path.append(_ROOT)
    try:
        from muster.daemon.agent.launch.user_path import launcher_fork

        start = launcher_fork.AtStart(*_at_start)
        if launcher_fork.reason_not_to_fork(start, argv, frame):
            return []
        return launcher_fork.fork(count, "\0" + os.environ[SOCKET] + FORKS, environment, start, _leave)
    except (ImportError, OSError):  # another package of that name comes first; its folder is gone
        return []
    finally:
        sys.path[:] = path
        for name in set(os.environ) - set(environ):
            del os.environ[name]


def _leave() -> None:
    """Leave no trace in a fork that becomes ranks."""
    sys.meta_path.remove(FINDER)
    for name in (_API, _API.rpartition(".")[0]):
        if getattr(sys.modules.get(name), "launch_agent", None) is hand_over:
            sys.modules[name].launch_agent = _replaced[-1]  # type: ignore[attr-defined]
    if getattr(sys.modules.get("sitecustomize"), "hand_over", None) is hand_over:
        del sys.modules["sitecustomize"]


def _launch(argv: list[str], ranks: int, min_nodes: int, max_nodes: int, environ: Any, more: Any = None) -> None:
    """Have the agent run the ranks, and return when the gang has ended with 0. Raises SystemExit.

    `more`: what else it is told of the launch.
    """
    _ignore_signals_of_ranks()
    answer = _ask({**_described(argv, ranks, min_nodes, max_nodes, environ), **(more or {})})
    if answer.get("refused"):
        _exit(answer["refused"], _REFUSED)
    if answer["exit_code"]:
        sys.exit(answer["exit_code"])


def _command(entrypoint: Any, args: list[Any]) -> list[str] | None:
    """The command of one rank; None: it is none."""
    if isinstance(entrypoint, str):
        return [entrypoint, *map(str, args)]
    if getattr(entrypoint, "__name__", "") == "run_script_path":  # torchrun --run-path
        return [sys.executable, "-u", *map(str, args)]
    return None


def _described(argv: list[str], ranks: int, min_nodes: int, max_nodes: int, environ: Any) -> dict[str, Any]:
    import resource

    umask = os.umask(0o77)
    os.umask(umask)
    return {
        "argv": argv,
        "ranks": ranks,
        "min_nodes": min_nodes,
        "max_nodes": max_nodes,
        "environment": environment_of_ranks(environ),
        "folder": os.getcwd(),
        "processors": sorted(os.sched_getaffinity(0)),
        "limits": {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in _LIMITS},
        "umask": umask,
    }


def _said_to_ranks(config: Any) -> dict[str, str]:
    """What torch would tell each rank of its options. An id that torch has made up would differ on each node."""
    said = {"ROLE_NAME": config.role, "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts)}
    if config.run_id not in ("", "none") and [len(part) for part in config.run_id.split("-")] != _OF_UUID:
        said["TORCHELASTIC_RUN_ID"] = config.run_id
    if hasattr(config, "signals_to_handle"):
        said["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    return said


def _silent(config: Any) -> list[int]:
    """The local ranks whose output the user wants in files alone. stdout and stderr of a rank are one stream."""
    logs = config.logs_specs
    both, local_ranks = 3, range(config.nproc_per_node)
    redirected, teed = (_streams(getattr(logs, name, 0), local_ranks) for name in ("_redirects", "_tee"))
    shown = getattr(logs, "_local_ranks_filter", None) or local_ranks
    return [rank for rank in local_ranks if rank not in shown or redirected[rank] & ~teed[rank] == both]


def _marks(config: Any) -> list[str]:
    """What torch writes in front of each line of a local rank with --tee; empty: nothing. The agent knows ${rank}."""
    from string import Template

    local_ranks = range(config.nproc_per_node)
    teed = _streams(getattr(config.logs_specs, "_tee", 0), local_ranks)
    mark = Template(getattr(config, "log_line_prefix_template", None) or "[${role_name}${local_rank}]:")
    return [mark.safe_substitute(role_name=config.role, local_rank=rank) if teed[rank] else "" for rank in local_ranks]


def _streams(given: Any, local_ranks: Any) -> list[int]:
    """Of each rank: 1 for stdout, 2 for stderr, 3 for both. torch has one value for all, or one for some ranks."""
    return [int(given.get(rank, 0)) if isinstance(given, dict) else int(given) for rank in local_ranks]


def environment_of_ranks(environ: Any) -> dict[str, str]:
    """The launcher's environment without what brought this module here."""
    kept = dict(environ)
    kept.pop(SOCKET, None)
    path = [entry for entry in kept.pop("PYTHONPATH", "").split(os.pathsep) if not _is_own(entry)]
    if any(path):
        kept["PYTHONPATH"] = os.pathsep.join(path)
    return kept


def _is_own(folder: str) -> bool:
    return bool(folder) and os.path.abspath(folder) == _FOLDER


def _ask(message: dict[str, Any]) -> dict[str, Any]:
    """Send one line to the agent, and wait for the line that it answers when the gang has ended."""
    import json
    import socket
    import struct

    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.connect("\0" + os.environ[SOCKET])
            peer = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if peer[1] != os.getuid():
                raise OSError("another user has its socket")
            link.sendall(json.dumps(message).encode() + b"\n")
            line = link.makefile("rb").readline()
        except OSError as error:
            _exit(f"the agent on this node can't be reached: {error.strerror or error}", 1)
    if not line:
        _exit("the agent on this node has ended before the job", 1)
    answer: dict[str, Any] = json.loads(line)
    return answer


def _exit(words: str, code: int) -> NoReturn:
    sys.stderr.write(f"muster: {words}\n")
    sys.exit(code)


def _ignore_signals_of_ranks() -> None:
    """Slurm passes them to all processes of a step. They are meant for ranks, and would end this process."""
    import signal

    for name in _SIGNALS_OF_RANKS:
        try:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        except ValueError:  # not the main thread: then they are as the launcher has them
            return


def _import_next() -> None:
    """Run the sitecustomize that the interpreter would have without this one."""
    sys.path[:] = [entry for entry in sys.path if not _is_own(entry)]
    own = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, own)


if __name__ == "sitecustomize":
    if SOCKET in os.environ:
        sys.meta_path.insert(0, FINDER)
    _import_next()
    if SOCKET in os.environ:
        try:
            _at_start = (dict(os.environ), list(sys.path), os.getcwd(), _open_descriptors())
        except OSError:  # its folder is gone
            pass
