"""Turns the forked child into a rank: a session of its own, its environment, its log, then the user's script as
`__main__`.

Runs in a child of a zygote, before and around the user's code, with the standard library only. The script can't tell
the difference from `python script`: `sys.argv`, `sys.path[0]`, `__main__`, spawned workers, pickling, exit status and
tracebacks are the same.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import io
import os
import random
import runpy
import signal
import sys
import types
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn

from muster.checkpoint.format import stack_file
from muster.daemon.agent.ranks.python_command import PythonCommand, TargetKind
from muster.daemon.host import process_tree
from muster.daemon.host.process import step_signals

# Slurm signals every process of a step, but only the agent may signal its ranks.
_IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as in a shell


def detach(parent: int) -> None:
    """Start a new session that dies with `parent`. Reset signals as in a new process, but ignore Slurm's signals."""
    os.setsid()
    process_tree.die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *step_signals.FOR_RANKS):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def redirect_output(log: int | None) -> None:
    """Redirect stdout and stderr to the descriptor `log` and close it; None: nowhere. stdin is empty."""
    nothing = os.open(os.devnull, os.O_RDWR)
    output = nothing if log is None else log
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for descriptor in {nothing, output}:
        os.close(descriptor)


def replace_environment(environment: Mapping[str, str]) -> None:
    """Replace the whole environment."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def exec_command(argv: Sequence[str]) -> NoReturn:
    """Replace this process by the command, as a shell would."""
    # Python ignores these signals; a program expects the default action.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], list(argv))
    except FileNotFoundError:
        code, why = _NOT_FOUND, "no such program on this node; give its path, or check PATH in [env]"
    except OSError as error:
        code, why = _NOT_EXECUTABLE, str(error.strerror)
    os.write(2, f"muster: can't run {argv[0]!r}: {why}\n".encode())
    os._exit(code)


def is_too_old_for_library() -> bool:
    """Whether this interpreter can't run the checkpoint library, although it can run a zygote."""
    return sys.version_info < (3, 11)


def set_argv_and_path(command: PythonCommand, argv: Sequence[str]) -> None:
    """Set sys.argv and sys.path as the interpreter does for `argv`. After that, the script's own modules can be
    preloaded."""
    first = {TargetKind.MODULE: "-m", TargetKind.CODE: "-c", TargetKind.SCRIPT: command.target}[command.kind]
    sys.argv[:] = [first, *command.arguments]
    if hasattr(sys, "orig_argv"):  # since Python 3.10
        sys.orig_argv[:] = list(argv)
    if not (command.safe_path or getattr(sys.flags, "safe_path", False)):  # since Python 3.11
        sys.path.insert(0, _path_entry(command))


def run_as_main(command: PythonCommand) -> None:
    """Run the command's script; return when it ends.

    Raises:
        SystemExit: as the script says, or 1 after an uncaught exception, whose traceback is printed.
    """
    _reset_inherited_state()
    stack_file.register()
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    try:
        _run(command, main)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the very top of the user's program
        error.__traceback__ = _user_traceback(error)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None


def _run(command: PythonCommand, main: types.ModuleType) -> None:
    if command.kind is TargetKind.MODULE:
        runpy._run_module_as_main(command.target)  # type: ignore[attr-defined]
    elif command.kind is TargetKind.CODE:
        exec(compile(command.target + "\n", "<string>", "exec", dont_inherit=True), main.__dict__)
    elif _is_package(command.target):
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
    else:
        _run_script(command.target, main)


def _run_script(target: str, main: types.ModuleType) -> None:
    path = os.path.abspath(target)
    main.__file__ = path
    main.__dict__["__cached__"] = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    try:
        with io.open_code(path) as file:
            text = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    exec(compile(text, path, "exec", dont_inherit=True), main.__dict__)


def _path_entry(command: PythonCommand) -> str:
    if command.kind is TargetKind.CODE:
        return ""
    if command.kind is TargetKind.MODULE:
        return os.getcwd()
    path = os.path.realpath(command.target)
    return os.path.abspath(command.target) if _is_package(command.target) else os.path.dirname(path)


def _is_package(target: str) -> bool:
    """Whether the target is a folder or archive with a `__main__.py`."""
    return os.path.isdir(target) or target.endswith((".zip", ".pyz"))


def _reset_inherited_state() -> None:
    """Reset state that a process must not share with its siblings or keep from before the fork."""
    if is_too_old_for_library():  # the script is to find no Muster, and not one that can't be used
        for name in [name for name in sys.modules if name.partition(".")[0] == "muster"]:
            del sys.modules[name]
    importlib.invalidate_caches()
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    # As in a new process. torch.seed() would initialise accelerators.
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "default_generator"):
        torch.default_generator.seed()
    if (spawning := sys.modules.get("multiprocessing.process")) is not None:
        spawning.__dict__["ORIGINAL_DIR"] = os.getcwd()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # users follow the log while the rank runs
    _patch_tcp_store()


def _patch_tcp_store() -> None:
    """If torch lacks libuv, its client of the agent's store still asks for libuv (torch 2.6 to 2.14): turn that off."""
    rendezvous = sys.modules.get("torch.distributed.rendezvous")
    if rendezvous is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "1":
        rendezvous.__dict__["TCPStore"] = partial(rendezvous.__dict__["TCPStore"], use_libuv=False)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


def _user_traceback(error: BaseException) -> types.TracebackType | None:
    """The traceback without the frames of this module and of runpy."""
    part = error.__traceback__
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while part is not None and part.tb_frame.f_code.co_filename in ours:
        part = part.tb_next
    return part
