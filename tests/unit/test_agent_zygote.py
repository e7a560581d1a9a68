"""A zygote with real children: what a script sees, how it ends, and that no process is left. Without torch."""

import ast
import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from muster.daemon.agent.ranks.zygote_handle import CannotStart, ZygoteHandle, ZygoteSpec
from muster.daemon.host import rank_log_files
from muster.daemon.host.packets import Message
from muster.daemon.host.process.step_signals import FOR_RANKS
from muster.daemon.testing.scripted_gang import alive, gone

PYTHON = sys.executable


@dataclass
class Harness:
    """One zygote in a scratch folder, and all that it says."""

    folder: Path
    said: list[Message] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    runs: int = 0

    def __post_init__(self) -> None:
        self.warm = ZygoteHandle(self._heard, self.ended.set)

    def start(self, *argv: str, preload: tuple[str, ...] = (), learns: bool = False, **environment: str) -> None:
        spec = ZygoteSpec(argv, preload, {**os.environ, **environment}, str(self.folder), learns=learns)
        self.warm.start(spec)

    async def run(self, cold: str = "", **environment: str) -> tuple[int, str]:
        """Start a rank, wait until nothing of it is left; its exit code and output."""
        key = self.launch(cold, **environment)
        code = (await self.until("exit", key))["code"]
        await self.until("gone", key)
        self.warm.reap(key)
        return code, self.log(key)

    def launch(self, cold: str = "", **environment: str) -> str:
        self.runs += 1
        key = f"run{self.runs}"
        link, other = socket.socketpair()
        with link, other:
            self.warm.run_rank(key, {**os.environ, **environment}, self._where(key), link.fileno(), cold=cold)
        return key

    def log(self, key: str) -> str:
        log = rank_log_files.log_path(*self._where(key))
        return log.read_text() if log.exists() else ""

    def _where(self, key: str) -> tuple[str, str, int, int]:
        return str(self.folder), "g", int(key.removeprefix("run")), 0

    async def until(self, word: str, key: str = "") -> Message:
        async with asyncio.timeout(120):
            while True:
                for message in self.said:
                    if (message["say"], message["key"]) == (word, key):
                        return message
                self.news.clear()
                await self.news.wait()

    async def lines(self, key: str, count: int) -> list[str]:
        """The first `count` lines of a rank's output, once they are there."""
        async with asyncio.timeout(120):
            while len(found := self.log(key).split()) < count:  # noqa: ASYNC110 - a file tells nobody
                await asyncio.sleep(0.01)
        return found

    def script(self, text: str, name: str = "train.py") -> str:
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    def _heard(self, message: Message) -> None:
        self.said.append(message)
        self.news.set()


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    found = Harness(tmp_path)
    yield found
    await found.warm.stop()


SEEN = """
    import gc, os, pickle, sys
    import beside

    class Mine:
        pass

    main = sys.modules["__main__"]
    assert main.Mine is Mine and __name__ == "__main__" and main.__dict__ is globals()
    assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
    assert not [name for name in sys.modules if name.startswith("asyncio")]
    assert gc.isenabled()
    print(sys.argv, sys.path[0], __file__, beside.word, os.environ["RANK"], os.getsid(0) == os.getpid())
    print(os.environ.get("GONE"), file=sys.stderr)
    sys.exit(7)
"""


async def test_a_script_runs_as_main(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    harness.script("word = 'found'", "beside.py")
    harness.start(PYTHON, harness.script(SEEN), "--lr", "1", GONE="set at the start")
    code, output = await harness.run(RANK="3")
    here = os.path.realpath(harness.folder)
    assert output == f"['train.py', '--lr', '1'] {here} {harness.folder}/train.py found 3 True\nNone\n"
    assert code == 7


@pytest.mark.parametrize("cold", ["", "as asked"])
async def test_an_environment_may_be_larger_than_a_packet(harness: Harness, cold: str) -> None:
    large = {f"LARGE{number}": "ü" * 50_000 for number in range(8)}
    show = "import os; print(sum(len(v) for k, v in os.environ.items() if k[:5] == 'LARGE'), os.environ['RANK'])"
    harness.start(PYTHON, harness.script(show), **large)
    assert await harness.run(cold, RANK="2", **large) == (0, "400000 2\n")


async def test_it_serves_one_generation_after_the_other(harness: Harness) -> None:
    harness.start(PYTHON, harness.script("import os; print(os.environ['RANK'])"))
    assert [await harness.run(RANK=str(n)) for n in range(3)] == [(0, f"{n}\n") for n in range(3)]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["-c", "import sys; print(sys.argv, sys.path[0] == '', __name__)", "a"], "['-c', 'a'] True __main__\n"),
        (["-m", "pkg.train", "a"], "['{folder}/pkg/train.py', 'a'] True pkg.train pkg\n"),
        (["-P", "pkg/show.py"], "False\n"),
        (["-O", "-c", "print(__debug__)"], "False\n"),
    ],
)
async def test_ways_to_name_the_program(harness: Harness, argv: list[str], expected: str) -> None:
    (harness.folder / "pkg").mkdir()
    harness.script("", "pkg/__init__.py")
    harness.script(
        "import os, sys; print(sys.argv, sys.path[0] == os.getcwd(), __spec__.name, __package__)", "pkg/train.py"
    )
    harness.script("import os, sys; print(os.path.join(os.getcwd(), 'pkg') in sys.path)", "pkg/show.py")
    harness.start(PYTHON, *argv)
    assert await harness.run() == (0, expected.format(folder=harness.folder))


OLD = sorted(str(path) for path in Path(os.path.expanduser("~/.pyenv/versions")).glob("3.[91]*/bin/python3.*[0-9]"))
SEEN_BY_ALL = """
    import pickle, sys, threading
    import slow
    print(sys.version_info[:2], sys.argv, "early" in sys.modules, __file__, flush=True)
    try:
        import muster
    except ModuleNotFoundError:
        print("no muster")
    threading.Thread(target=print, args=("a thread",)).start()
"""


@pytest.mark.skipif(not OLD, reason="no pyenv is here")
@pytest.mark.parametrize("python", OLD, ids=lambda python: python.rpartition("/")[2])
async def test_any_python_from_3_9_on_forks_ranks_and_learns_what_they_import(
    tmp_path: Path, harness: Harness, python: str
) -> None:
    """What is loaded in it keeps to the syntax and the library of Python 3.9. A script finds no Muster where it has
    none, and above all not one that its interpreter can't run."""
    (tmp_path / "site-packages").mkdir()
    for name in ("early", "slow"):
        harness.script("", f"site-packages/{name}.py")
    modules = ("early", "muster.checkpoint.data.sharded_sampler")
    path = str(tmp_path / "site-packages")
    harness.start(python, harness.script(SEEN_BY_ALL), "a", preload=modules, learns=True, PYTHONPATH=path)
    minor = int(python.rpartition(".")[2])
    shown = f"(3, {minor}) ['train.py', 'a'] True {tmp_path}/train.py\n" + "no muster\n" * (minor < 11)
    assert await harness.run(RANK="0", PYTHONPATH=path) == (0, f"{shown}a thread\n")
    assert (await harness.until("started", "run1"))["cold"] == ""
    words = (await harness.until("imported"))["words"]
    assert "slow" in words
    harness.warm.learn(words)
    assert "slow" in (await harness.until("learned"))["modules"]
    assert (await harness.run("as asked", RANK="0", PYTHONPATH=path))[0] == 0


def test_what_is_loaded_in_users_interpreters_keeps_to_the_syntax_of_python_3_9() -> None:
    """Also where no such interpreter is."""
    listed = "import sys, muster.daemon.agent.ranks.zygote, muster.daemon.agent.launch.user_path.launcher_fork; "
    listed += "print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'muster' and m.__file__))"
    files = subprocess.run([PYTHON, "-c", listed], capture_output=True, text=True, check=True).stdout.split()
    assert len(files) > 15
    for file in files:
        ast.parse(Path(file).read_text(), file, feature_version=(3, 9))


SPAWNS = """
    import multiprocessing

    class Mine:
        def __init__(self, word): self.word = word

    def work(mine): print(mine.word, __name__)

    if __name__ == "__main__":
        for method in ("spawn", "forkserver", "fork"):
            worker = multiprocessing.get_context(method).Process(target=work, args=(Mine(method),))
            worker.start(); worker.join(); assert worker.exitcode == 0
"""


async def test_spawned_workers_find_the_script(harness: Harness) -> None:
    harness.start(PYTHON, harness.script(SPAWNS))
    code, output = await harness.run()
    assert (code, output) == (0, "spawn __mp_main__\nforkserver __mp_main__\nfork __main__\n")


@pytest.mark.parametrize(
    ("text", "code", "last"),
    [
        ("raise ValueError('bad')", 1, "ValueError: bad"),
        ("import sys; sys.exit('words')", 1, "words"),
        ("import os; print('kept'); os.kill(os.getpid(), 9)", -9, "kept"),
        ("import atexit, threading; atexit.register(print, 'last')", 0, "last"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), 12); print('on')", 0, "on"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGUSR1)", -10, None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGALRM)", -14, None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN)", -34, None),
        ("import nowhere", 1, "ModuleNotFoundError: No module named 'nowhere'"),
        ("def f(:", 1, "SyntaxError: invalid syntax"),
    ],
)
async def test_ends(harness: Harness, text: str, code: int, last: str | None) -> None:
    harness.start(PYTHON, harness.script(text))
    found, output = await harness.run()
    assert found == code
    assert (output.splitlines() or [None])[-1] == last


async def test_a_traceback_shows_the_users_frames_alone(harness: Harness) -> None:
    harness.start(PYTHON, harness.script("def f():\n    raise KeyError('x')\nf()\n"))
    _, output = await harness.run()
    files = [line.split('"')[1] for line in output.splitlines() if line.startswith("  File ")]
    assert files == [f"{harness.folder}/train.py"] * 2


async def test_a_script_that_is_not_there(harness: Harness) -> None:
    harness.start(PYTHON, "absent.py")
    code, output = await harness.run()
    assert code == 2
    assert "can't open file" in output


async def test_a_full_run_folder_keeps_only_the_first_generation_from_starting(
    small_disk: Path, harness: Harness
) -> None:
    harness.start(PYTHON, harness.script("print('trained')"))
    assert await harness.run() == (1, "")
    assert "no space is left for logs" in (await harness.until("refused", "run1"))["words"]
    assert await harness.run() == (0, "")
    assert "no space is left for logs" in (await harness.until("unlogged", "run2"))["words"]


async def test_random_generators_differ_between_generations(harness: Harness) -> None:
    harness.start(PYTHON, harness.script("import random; print(random.random())"), preload=("random",))
    assert (await harness.run())[1] != (await harness.run())[1]


async def test_other_programs_are_executed(harness: Harness) -> None:
    harness.start("sh", "-c", "echo $RANK; kill -TERM $$; test -e /proc/self/fd/$MUSTER_AGENT_FD && exit 3")
    assert await harness.run(RANK="1") == (3, "1\n")
    assert (await harness.until("started", "run1"))["cold"] == "the command is not a Python script"


@pytest.mark.parametrize(("program", "code"), [("no-such-program", 127), ("/etc/passwd", 126)])
async def test_a_program_that_cannot_run(harness: Harness, program: str, code: int) -> None:
    harness.start(program)
    found, output = await harness.run()
    assert found == code
    assert output.startswith(f"muster: can't run '{program}':")


async def test_an_interpreter_that_is_not_there(harness: Harness) -> None:
    with pytest.raises(CannotStart, match="no '/opt/none/python3' on this node"):
        harness.start("/opt/none/python3", "train.py")


async def test_an_interpreter_in_a_relative_folder_of_path(harness: Harness) -> None:
    """It is that of the working folder, as a shell there would find it, and not one of the agent's own folder."""
    (harness.folder / "bin").mkdir()
    (harness.folder / "bin" / "python3").symlink_to(PYTHON)
    harness.start("python3", harness.script("import sys; print(sys.executable)"), PATH=f"bin{os.pathsep}{os.defpath}")
    assert await harness.run() == (0, f"{harness.folder}/bin/python3\n")


async def test_a_working_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"the working folder .*/none' can't be used"):
        Harness(tmp_path / "none").start(PYTHON, "train.py")


async def test_threads_make_it_start_afresh(harness: Harness) -> None:
    harness.script("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "busy.py")
    harness.start(PYTHON, harness.script("import sys; print('busy' in sys.modules)"), preload=("busy",))
    ready = await harness.until("ready")
    assert [note for note in ready["notes"] if "busy starts threads" in note]
    assert await harness.run() == (0, "False\n")
    assert (await harness.until("started", "run1"))["cold"] == "it has 2 threads"


async def test_what_fails_to_import_is_noted_and_left_to_the_script(harness: Harness) -> None:
    harness.script("1 / 0", "broken.py")
    harness.start(PYTHON, "-c", "print('on')", preload=("no_such_module", "broken"))
    ready = await harness.until("ready")
    assert "no_such_module can't be imported" in ready["notes"][0]
    assert "broken can't be imported: ZeroDivisionError" in ready["notes"][1]
    assert ready["broken"] == "broken can't be imported: ZeroDivisionError: division by zero"
    assert await harness.run() == (0, "on\n")


@pytest.mark.parametrize(
    ("module", "broken"),
    [
        ("import library.lost", "library can't be imported: ModuleNotFoundError: No module named 'library.lost'"),
        ("raise ImportError('a.so: file too short')", "library can't be imported: ImportError: a.so: file too short"),
        ("import no_such_module", ""),
    ],
)
async def test_what_is_not_installed_is_not_broken(harness: Harness, module: str, broken: str) -> None:
    """A job may not need it. Neither does a job need all that Muster's own library needs."""
    (harness.folder / "library").mkdir()
    harness.script(module, "library/__init__.py")
    modules = ("no_such_module", "muster.no_such_module", "library")
    harness.start(PYTHON, "-c", "print('on')", preload=modules)
    ready = await harness.until("ready")
    assert (len(ready["notes"]), ready["broken"]) == (3, broken)


FAMILY = """
    import os, subprocess, sys, time
    # One child in our session, one in a session of its own, and its orphaned child.
    sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
    first = subprocess.Popen(sleep)
    second = subprocess.Popen(sleep, start_new_session=True)
    third = subprocess.run(["sh", "-c", "sleep 100 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True)
    print(os.getpid(), first.pid, second.pid, third.stdout.strip(), flush=True)
    time.sleep(100 if len(sys.argv) > 1 else 0)
"""


@pytest.mark.parametrize("how", ["kill", "end"])
async def test_nothing_outlives_a_rank(harness: Harness, how: str) -> None:
    harness.start(PYTHON, harness.script(FAMILY), *(["wait"] if how == "kill" else []))
    key = harness.launch()
    pids = [int(pid) for pid in await harness.lines(key, 4)]
    if how == "kill":
        os.kill(pids[0], signal.SIGKILL)
    assert (await harness.until("exit", key))["code"] == (-9 if how == "kill" else 0)
    await harness.until("gone", key)
    assert not [pid for pid in pids if alive(pid)]


async def test_ranks_die_with_their_warm_process(harness: Harness) -> None:
    harness.start(PYTHON, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(100)")
    (pid,) = await harness.lines(harness.launch(), 1)
    harness.warm.kill()
    await gone(int(pid))
    await harness.ended.wait()


async def test_it_ends_with_the_last_of_its_children_when_it_is_let_go(harness: Harness) -> None:
    harness.start(PYTHON, harness.script(FAMILY), "wait")
    pids = [int(pid) for pid in await harness.lines(harness.launch(), 4)]
    await harness.warm.stop()
    assert not [pid for pid in pids if alive(pid)]


async def test_slurms_signals_do_it_no_harm(harness: Harness) -> None:
    harness.start(PYTHON, "-c", "print('on')")
    await harness.until("ready")
    for number in (signal.SIGTERM, signal.SIGINT, *FOR_RANKS):
        os.kill(harness.warm.pid, number)
    assert await harness.run() == (0, "on\n")


STORE = """
    import socket

    class TCPStore:
        def __init__(self, *_: object, **__: object) -> None:
            self.listening = socket.create_server(("127.0.0.1", 0))
            self.port = self.listening.getsockname()[1]
"""
"""A store that listens, as torch's does, where torch is not installed."""


async def test_slurms_signals_do_a_store_no_harm(harness: Harness) -> None:
    (harness.folder / "torch").mkdir()
    harness.script("", "torch/__init__.py")
    harness.script(STORE, "torch/distributed.py")
    harness.start(PYTHON, harness.script(""))
    harness.warm.open_store("store", [])
    port = (await harness.until("store", "store"))["port"]
    pid = (await harness.until("started", "store"))["pid"]
    for number in (signal.SIGTERM, signal.SIGINT, *FOR_RANKS):
        os.kill(pid, number)
    assert await harness.run() == (0, "")  # the zygote has looked at its children meanwhile
    socket.create_connection(("127.0.0.1", port), timeout=60).close()
    assert alive(pid)


WITHOUT_LIBUV = """
    class DistError(RuntimeError):
        pass

    class DistNetworkError(DistError):
        pass

    class TCPStore:
        def __init__(self, *_: object, use_libuv: bool, **__: object) -> None:
            raise {error}("use_libuv was requested but PyTorch was built without libuv support")
"""


@pytest.mark.parametrize(
    ("error", "libuv"), [("RuntimeError", False), ("DistError", False), ("DistNetworkError", True)]
)
async def test_whether_torch_has_libuv(error: str, libuv: bool, harness: Harness) -> None:
    """torch 2.6 says it by a RuntimeError, and newer ones by a DistError. One with libuv finds nobody who listens."""
    (harness.folder / "torch").mkdir()
    harness.script("", "torch/__init__.py")
    harness.script(WITHOUT_LIBUV.format(error=error), "torch/distributed.py")
    harness.start(PYTHON, harness.script(""), preload=("torch.distributed",))
    ready = await harness.until("ready")
    assert (ready["torch"], ready["libuv"]) == (True, libuv)
