"""A user's own launcher becomes the gang: what it hands over, what its ranks get of it, how it learns of the end.

The launcher of these tests has the seam of PyTorch's, and nothing else: `torch.distributed.launcher.api.launch_agent`.
tests/torch has the real one.
"""

import ast
import asyncio
import itertools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from muster.daemon.agent.launch import handover
from muster.daemon.agent.launch.task import USER_PATH
from muster.daemon.agent.launch.user_path import sitecustomize
from muster.daemon.agent.ranks.zygote import EXIT_TOO_OLD
from muster.daemon.testing.scripted_gang import Gang, scripted_gang
from muster.v1.agent_pb2 import DUTY_EXIT, RANK_PHASE_EXITED, Order
from muster.v1.common_pb2 import JobSpec

API = """
    class LaunchConfig:
        def __init__(self, nodes, ranks):
            self.min_nodes = self.max_nodes = nodes
            self.nproc_per_node = ranks
            self.max_restarts, self.role, self.run_id = 4, "trainer", "chosen"
            self.logs_specs = None

    def launch_agent(config, entrypoint, args):
        print("nobody took the launch over")

    def launch(config, entrypoint, args):
        return launch_agent(config, entrypoint, args)
"""
LAUNCHER = """
    import sys
    from torch.distributed.launcher import api

    nodes, ranks, *args = sys.argv[1:]
    print("results:", api.launch(api.LaunchConfig(int(nodes), int(ranks)), sys.executable, ["-u", *args]))
"""
SHOW = """
    import os, resource, sys
    print(sys.argv[1:], os.getcwd(), os.environ.get("PYTHONPATH"), os.environ.get("MUSTER_TASK_SOCKET"))
    print(*(os.environ[name] for name in ("ROLE_NAME", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS")))
    print(os.environ["RANK"], os.environ["OF_WRAPPER"], resource.getrlimit(resource.RLIMIT_NOFILE)[0], oct(os.umask(0)))
    sys.exit(int(os.environ["RANK"]))
"""


def interpreters() -> list[str]:
    """All interpreters of pyenv from Python 3.9 on, and this one."""
    found = Path(os.path.expanduser("~/.pyenv/versions")).glob("3.*/bin/python")
    old = ("3.6", "3.7", "3.8")
    return [sys.executable, *sorted(str(path) for path in found if not path.parts[-3].startswith(old))]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder with lib/torch and launcher.py."""
    folder = tmp_path / "lib/torch/distributed/launcher"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent, folder.parent.parent):
        (path / "__init__.py").touch()
    (folder / "api.py").write_text(textwrap.dedent(API))
    (tmp_path / "launcher.py").write_text(textwrap.dedent(LAUNCHER))
    return tmp_path


@pytest.fixture
async def gang(library: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gang]:
    monkeypatch.setenv("PYTHONPATH", f"{library}/lib")
    async with scripted_gang(library) as found:
        yield found


async def run_two_ranks(gang: Gang) -> None:
    """From the hand-over on, until both ranks of the one node have ended."""
    await gang.until(lambda: "n0" in gang.coordinator.agents and gang.status("n0").warm == 2)
    gang.fence(0)
    await gang.until(lambda: gang.status("n0").store_generation == 1)
    order = gang.run_order(1)
    order.world_size = 2
    order.places.add(rank=1, node="n0", local_rank=1)
    gang.coordinator.order(order)
    await gang.until(lambda: [r.phase for r in gang.status("n0").ranks] == [RANK_PHASE_EXITED] * 2)


async def test_what_a_launcher_would_start_becomes_the_gang_and_it_learns_of_the_end(gang: Gang) -> None:
    (gang.folder / "sub").mkdir()
    (gang.folder / "sub/show.py").write_text(textwrap.dedent(SHOW))
    wrapper = f"""
        cd sub && export OF_WRAPPER=yes && ulimit -Sn 321 && umask 027
        {sys.executable} ../launcher.py 1 2 show.py --lr 1 "a b"
        code=$?; echo after: $code; exit $code
    """
    gang.launch_task("n0", "bash", "-c", wrapper, nodes=1)
    await run_two_ranks(gang)
    spec = gang.coordinator.agents["n0"].hello.spec
    assert list(spec.command) == [sys.executable, "-u", "show.py", "--lr", "1", "a b"]
    assert (spec.ranks_per_node, spec.work_dir) == (2, str(gang.folder / "sub"))
    shown = gang.output(1, 1).splitlines()
    assert shown == [
        f"['--lr', '1', 'a b'] {gang.folder}/sub {gang.folder}/lib None",
        "trainer chosen 4",
        "1 yes 321 0o27",
    ]
    gang.coordinator.order(Order(duty=DUTY_EXIT, exit_code=9, job_over=True))
    assert await gang.exit_code("n0") == 9
    assert (gang.folder / "n0.out").read_text() == "after: 9\n"


RUN = """
    import faulthandler, os, sys
    from torch.distributed.launcher import api

    def main():
        faulthandler.enable()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        sys.last_value = "of the launcher"
        try:
            api.launch(api.LaunchConfig(1, 2), sys.executable, ["-u", *sys.argv[1:]])
        except Exception:
            print("never in a fork")

    if __name__ == "__main__":
        main()
"""
TORCHRUN = """
    import sys
    from torch.distributed.run import main
    if __name__ == "__main__":
        sys.exit(main())
"""
SEEN = """
    import atexit, ctypes, faulthandler, gc, inspect, json, logging, os, resource, signal, sys, threading, warnings
    from torch.distributed.launcher import api
    import torch

    def described(stream):
        buffered = stream.write_through, stream.line_buffering
        return repr(stream), repr(stream.buffer), stream.errors, stream.newlines, *buffered

    def state(pid):
        text = open(f"/proc/{pid}/status").read()
        return [line for line in text.splitlines() if line[:4] in ("SigI", "SigB", "SigC", "Cpus", "Thre")]

    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    path = json.dumps(sys.path), os.getcwd(), sys.argv, sys.orig_argv[1:] if hasattr(sys, "orig_argv") else None
    print("forked:", "torch.distributed.run" in sys.modules or "main" in dir(torch))
    print("path:", *path)
    own = ("MUSTER_AGENT_FD", "MUSTER_HOSTFILE")
    print(*(f"variable {pair}" for pair in sorted(os.environ.items()) if pair[0] not in own), sep="\\n")
    print("as torch is imported:", torch.THREADS)
    print("as C has it:", libc.getenv(b"OMP_NUM_THREADS"), libc.getenv(b"MUSTER_TASK_SOCKET"))
    print("main:", sorted(vars(sys.modules["__main__"]))[:9], len(inspect.stack()), gc.isenabled())
    print("flags:", sys.flags, sys.warnoptions, sys._xoptions, sys.dont_write_bytecode)
    print("limits:", oct(os.umask(0)), [resource.getrlimit(n) for n in range(16)], os.nice(0))
    print("signals:", [str(signal.getsignal(n)) for n in signal.valid_signals()])
    print("states:", state("self"), state(os.getppid()))
    links = [f"/proc/self/fd/{n}" for n in range(99) if os.path.lexists(f"/proc/self/fd/{n}")]
    print("files:", sorted(os.readlink(link).split(":")[0] for link in links))
    print("streams:", *map(described, (sys.stdin, sys.stdout, sys.stderr)), sys.stdin.read())
    print("hooks:", [str(finder)[:40] for finder in sys.meta_path], sys.excepthook, sys.__stderr__ is sys.stderr)
    print("at the end:", faulthandler.is_enabled(), atexit._ncallbacks(), hasattr(sys, "last_value"))
    print("modules:", sorted(n for n in sys.modules if "custom" in n), logging.root.handlers)
    print("session:", os.getsid(0) == os.getpid(), os.getsid(os.getppid()) == os.getppid(), threading.active_count())
    print("warnings:", warnings.filters)
    print("launch:", api.launch_agent.__module__, type(torch.__loader__.__dict__.get("exec_module")))
    atexit.register(print, "left")
    raise ValueError("at the end")
"""


@pytest.fixture
def torchrun(library: Path) -> Path:
    """A folder with lib/torch, torchrun and show.py."""
    (library / "lib/torch/__init__.py").write_text(
        "import ctypes\nf = ctypes.CDLL(None).getenv\nf.restype = ctypes.c_char_p\nTHREADS = f(b'OMP_NUM_THREADS')\n"
    )
    store = "class TCPStore:\n    port = 1\n    def __init__(self, *_, **__): pass\n"
    (library / "lib/torch/distributed/__init__.py").write_text(store)
    (library / "lib/torch/distributed/run.py").write_text(textwrap.dedent(RUN))
    (library / "torchrun").write_text(textwrap.dedent(TORCHRUN))
    (library / "show.py").write_text(textwrap.dedent(SEEN))
    return library


async def shown_by_rank_1(folder: Path, words: str) -> list[str]:
    """What show.py prints, launched so."""
    async with scripted_gang(folder, preload=("torch.distributed",)) as gang:
        gang.launch_task("n0", "bash", "-c", f"umask 027; ulimit -Sn 321; exec 7</dev/null; {words}", nodes=1)
        await run_two_ranks(gang)
        found = gang.output(1, 1).splitlines()
        gang.log(1, 1).unlink()
        (folder / "secret").unlink()
    return found


@pytest.mark.parametrize(
    "python", [sys.executable, *(pytest.param(path, marks=pytest.mark.long) for path in interpreters()[1:])]
)
async def test_a_rank_of_a_forked_launcher_is_as_one_of_a_new_interpreter(
    torchrun: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second launcher runs with a flag of its own, and is not forked."""
    monkeypatch.setenv("PYTHONPATH", f"{torchrun}/lib")
    forked = await shown_by_rank_1(torchrun, f"{python} torchrun show.py --lr 1")
    started = await shown_by_rank_1(torchrun, f"{python} -q torchrun show.py --lr 1")
    assert (forked.pop(0), started.pop(0)) == ("forked: True", "forked: False")
    differ = [pair for pair in itertools.zip_longest(forked, started) if pair[0] != pair[1]]
    assert not differ, "\n".join(f"{one}\n{other}" for one, other in differ)
    assert forked[-2:] == ["ValueError: at the end", "left"]


ACCELERATE = """
    import os, sys

    def prepare_simple_launcher_cmd_env(args):
        return [sys.executable, *args.training], {**os.environ, "ACCELERATE_USE_CPU": "True"}
"""
ALONE = """
    import subprocess, sys, types
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    hosts, *training = sys.argv[1:]
    args = types.SimpleNamespace(mpirun_hostfile=hosts or None, num_machines=1, training=training)
    argv, environ = prepare_simple_launcher_cmd_env(args)
    sys.exit(subprocess.call(argv, env=environ))
"""


@pytest.fixture
def accelerate(library: Path) -> Path:
    """A launcher of one process on each node: alone.py."""
    folder = library / "lib/accelerate/utils"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent):
        (path / "__init__.py").touch()
    (folder / "launch.py").write_text(textwrap.dedent(ACCELERATE))
    (library / "alone.py").write_text(textwrap.dedent(ALONE))
    return library


@pytest.mark.usefixtures("accelerate")
async def test_accelerates_launch_of_one_process_a_node_becomes_the_gang(gang: Gang) -> None:
    (gang.folder / "show.py").write_text("import os, sys; print(sys.argv[1:], os.environ['ACCELERATE_USE_CPU'])")
    words = f"{sys.executable} alone.py '' show.py a; echo after $?"
    gang.launch_task("n0", "bash", "-c", words, nodes=1)
    await gang.until(lambda: "n0" in gang.coordinator.agents and gang.status("n0").warm == 1)
    gang.fence(0)
    await gang.until(lambda: gang.status("n0").store_generation == 1)
    gang.coordinator.order(gang.run_order(1))
    await gang.until(lambda: gang.rank("n0", 1).phase == RANK_PHASE_EXITED)
    assert gang.output(0, 1) == "['a'] True\n"
    gang.coordinator.order(Order(duty=DUTY_EXIT, job_over=True))
    assert await gang.exit_code("n0") == 0
    assert "after 0\n" in (gang.folder / "n0.out").read_text()


def test_accelerates_launch_through_mpi_stays_as_it_is(accelerate: Path) -> None:
    environment = {"PYTHONPATH": f"{USER_PATH}:{accelerate}/lib", "MUSTER_TASK_SOCKET": "none"}
    argv = [sys.executable, "alone.py", "hosts", "-c", "print('itself')"]
    found = subprocess.run(argv, env=environment, cwd=accelerate, capture_output=True, text=True, check=True)
    assert found.stdout == "itself\n"


OLD = [python for python in interpreters() if "/3.9." in python or "/3.10." in python]


async def test_an_interpreter_that_is_too_old_for_a_zygote_starts_each_rank_anew(gang: Gang) -> None:
    old = gang.folder / "python3"
    old.write_text(f'#!/bin/sh\ncase "$*" in *zygote*) exit {EXIT_TOO_OLD} ;; esac\necho "$@"\n')
    old.chmod(0o755)
    (gang.folder / "launcher.py").write_text(textwrap.dedent(LAUNCHER).replace("sys.executable", "'./python3'"))
    gang.launch_task("n0", sys.executable, "launcher.py", "1", "2", "show.py", nodes=1)
    await run_two_ranks(gang)
    assert gang.output(1, 1) == "-u show.py\n"
    assert "started by exec: its Python is older than 3.9" in (gang.folder / "n0.err").read_text()


@pytest.mark.skipif(not OLD, reason="no interpreter before Python 3.11 is here")
async def test_an_old_interpreter_launches_ranks_of_its_own(gang: Gang) -> None:
    (gang.folder / "show.py").write_text(
        "import os, sys; print(sys.version_info[:2], os.environ['RANK'], sys.argv[1:])"
    )
    gang.launch_task("n0", OLD[0], "launcher.py", "1", "2", "show.py", "--local-rank=${local_rank}", nodes=1)
    await run_two_ranks(gang)
    version = (3, 9) if "/3.9." in OLD[0] else (3, 10)
    assert gang.output(1, 1) == f"{version} 1 ['--local-rank=1']\n"
    assert "started by exec" not in (gang.folder / "n0.err").read_text()


async def test_a_good_end_returns_what_the_launcher_expects(gang: Gang) -> None:
    (gang.folder / "show.py").write_text("")
    gang.launch_task("n0", sys.executable, "launcher.py", "1", "2", "show.py", nodes=1)
    await run_two_ranks(gang)
    gang.coordinator.order(Order(duty=DUTY_EXIT, job_over=True))
    assert await gang.exit_code("n0") == 0
    assert (gang.folder / "n0.out").read_text() == "results: {0: None, 1: None}\n"


async def test_on_a_node_that_leaves_the_gang_nothing_runs_behind_the_launch(gang: Gang) -> None:
    (gang.folder / "show.py").write_text("")
    wrapper = f"trap 'echo ended; exit' TERM; {sys.executable} launcher.py 1 2 show.py & wait; echo after"
    gang.launch_task("n0", "bash", "-c", wrapper, nodes=1)
    await run_two_ranks(gang)
    gang.coordinator.order(Order(duty=DUTY_EXIT, reason="its GPU has failed"))
    assert await gang.exit_code("n0") == 0
    assert (gang.folder / "n0.out").read_text() == "ended\n"


async def test_a_command_that_launches_nothing_ends_with_its_own_exit_code(gang: Gang) -> None:
    gang.launch_task("n0", "bash", "-c", "echo prepared; exit 7", nodes=1)
    assert await gang.exit_code("n0") == 7
    assert (gang.folder / "n0.out").read_text() == "prepared\n"
    assert "ended with exit code 7, and Muster has started no rank" in (gang.folder / "n0.err").read_text()


async def test_a_command_that_does_not_exist_is_named(gang: Gang) -> None:
    gang.launch_task("n0", "/no/torchrun", "train.py", nodes=1)
    assert await gang.exit_code("n0") == 127
    assert "can't run '/no/torchrun': No such file" in (gang.folder / "n0.err").read_text()


async def test_a_launcher_of_another_number_of_nodes_is_refused_in_words(gang: Gang) -> None:
    gang.launch_task("n0", sys.executable, "launcher.py", "1", "2", "show.py", nodes=4)
    assert await gang.exit_code("n0") == 64
    assert (
        "muster: the launcher asks for --nnodes=1, and the ranks are to run on 4 nodes: write"
        in (gang.folder / "n0.err").read_text()
    )


async def test_sigterm_before_the_launch_ends_the_command(gang: Gang) -> None:
    gang.launch_task("n0", "bash", "-c", "trap 'echo told; exit 3' TERM; echo $$; sleep 60 & wait", nodes=1)
    output = gang.folder / "n0.out"
    while not output.exists() or not output.read_text():  # noqa: ASYNC110 - a file tells nobody
        await asyncio.sleep(0.01)
    gang.agents["n0"].terminate()
    assert await gang.exit_code("n0") == 3
    assert output.read_text().splitlines()[1:] == ["told"]


async def test_a_launcher_that_keeps_muster_out_is_said_not_to_be_supervised(gang: Gang) -> None:
    ranks = "TORCHELASTIC_RUN_ID=none RANK=0 sleep 100 & wait"
    gang.launch_task("n0", "bash", "-c", ranks, nodes=1)
    errors = gang.folder / "n0.err"
    while "muster: not supervised: a launcher has started its ranks itself" not in errors.read_text():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    gang.agents["n0"].terminate()
    assert await gang.exit_code("n0") == 128 + signal.SIGTERM


async def test_a_task_sees_the_nodes_of_the_script_and_its_place_among_them(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gang.folder / "env").write_bytes(b"PATH=/bin:/usr/bin\0OF_LAUNCH=1\0SLURM_NNODES=9\0")
    monkeypatch.setenv("MUSTER_RANK_ENVIRONMENT", str(gang.folder / "env"))
    monkeypatch.setenv("SLURM_STEP_ID", "4")
    words = "echo $OF_LAUNCH $SLURM_PROCID $SLURM_NODEID $SLURM_NNODES $SLURM_NTASKS $SLURM_STEP_NODELIST $MUSTER_SPEC"
    for node in ("n1", "n5"):  # n5 is a spare
        gang.launch_task(node, "bash", "-c", words, nodes=3, own_nodes=["n2", "n1", "n0"])
        assert await gang.exit_code(node) == 0
    assert (gang.folder / "n1.out").read_text() == "1 1 1 3 3 n2,n1,n0\n"
    assert (gang.folder / "n5.out").read_text() == "1 2 2 3 3 n2,n1,n0\n"


# --- the module in the user's interpreter ---------------------------------------------------------------------------


def test_what_runs_in_the_users_interpreter_keeps_to_python_3_9() -> None:
    ast.parse(Path(sitecustomize.__file__).read_text(), feature_version=(3, 9))


@pytest.mark.parametrize("python", interpreters())
def test_it_replaces_the_launcher_lets_the_next_sitecustomize_run_and_leaves_no_trace(
    python: str, library: Path
) -> None:
    (library / "lib/sitecustomize.py").write_text("print('the next one')")
    show = """
        import sys, sitecustomize
        from torch.distributed.launcher import api
        print(sitecustomize.__file__, api.launch_agent.__name__, [p for p in sys.path if "muster" in p])
    """
    environment = {"PYTHONPATH": f"{USER_PATH}:{library}/lib", "MUSTER_TASK_SOCKET": "none"}
    argv = [python, "-c", textwrap.dedent(show)]
    found = subprocess.run(argv, env=environment, cwd=library, capture_output=True, text=True, check=True)
    assert found.stdout == f"the next one\n{library}/lib/sitecustomize.py hand_over []\n"
    lost = [python, "launcher.py", "1", "1", "x"]
    ended = subprocess.run(lost, env=environment, cwd=library, capture_output=True, text=True, check=False)
    words = "muster: the agent on this node can't be reached: Connection refused\n"
    assert (ended.returncode, ended.stderr) == (1, words)
    del environment["MUSTER_TASK_SOCKET"]
    found = subprocess.run(lost, env=environment, cwd=library, capture_output=True, text=True, check=True)
    assert found.stdout == "the next one\nnobody took the launch over\nresults: None\n"


@pytest.mark.parametrize("python", interpreters())
def test_torch_is_imported_without_the_collector_which_then_goes_on(python: str, library: Path) -> None:
    """A folder that is only called torch is imported as ever."""
    torch = library / "lib/torch/__init__.py"
    torch.write_text("import gc; collected = gc.isenabled()")
    show = """
        import gc, torch
        print(getattr(torch, "collected", "none"), gc.isenabled(), gc.get_freeze_count() > 0)
    """
    environment = {"PYTHONPATH": f"{USER_PATH}:{library}/lib", "MUSTER_TASK_SOCKET": "none"}

    def shown(before: str = "") -> str:
        argv = [python, "-c", before + textwrap.dedent(show)]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout

    assert shown() == "False True True\n"
    assert shown("import gc; gc.disable()") == "False False True\n"
    torch.unlink()
    assert shown().startswith("none True ")


def test_ranks_lose_the_folder_and_nothing_else_of_pythonpath() -> None:
    environ = {"PYTHONPATH": f"{USER_PATH}:/a::/b", "MUSTER_TASK_SOCKET": "x", "A": "1"}
    assert sitecustomize.environment_of_ranks(environ) == {"PYTHONPATH": "/a::/b", "A": "1"}
    assert sitecustomize.environment_of_ranks({"PYTHONPATH": f"{USER_PATH}"}) == {}


def handed_over(**changed: object) -> handover.Handover:
    settings = {
        **{"argv": ("/venv/bin/python", "-u", "x.py"), "ranks_per_node": 4, "environment": {}, "folder": "/work"},
        **{"min_nodes": 2, "max_nodes": 2, "max_restarts": 0, "shown": handover.Shown()},
        **{"processors": frozenset(), "limits": {}, "umask": 0o22, **changed},
    }
    return handover.Handover(**settings)  # type: ignore[arg-type]


def test_an_elastic_launcher_fits_each_number_of_nodes_between_its_bounds_and_goes_on_with_the_fewest() -> None:
    elastic = handed_over(min_nodes=1, max_nodes=4)
    assert elastic.of_job(JobSpec(nodes=3, min_nodes=3)).min_nodes == 1
    assert elastic.of_job(JobSpec(nodes=3, min_nodes=2)).min_nodes == 2, "as the job says"
    with pytest.raises(handover.WrongHandover, match=r"--nnodes=1:4, and the ranks are to run on 5 nodes: write"):
        elastic.of_job(JobSpec(nodes=5))
    with pytest.raises(handover.WrongHandover, match="no UTF-8"):
        handed_over(argv=("caf\udce9",)).of_job(JobSpec(nodes=2))


@pytest.mark.parametrize("ranks", [-1, 0, 1025])
def test_a_number_of_ranks_that_no_node_runs_is_refused(ranks: int) -> None:
    with pytest.raises(handover.WrongHandover, match=f"--nproc-per-node={ranks}: a node runs at least 1 rank"):
        handed_over(ranks_per_node=ranks).of_job(JobSpec(nodes=2))


@pytest.mark.parametrize(("restarts", "failures"), [(0, 3), (1, 3), (4, 5), (10**9, 10**6)])
def test_ranks_are_started_again_as_often_as_the_launcher_would_at_least(restarts: int, failures: int) -> None:
    made = handed_over(max_restarts=restarts).of_job(JobSpec(nodes=2, max_failures=3))
    assert made.max_failures == failures


def test_a_fork_has_imported_as_its_ranks_would_unless_a_variable_differs_that_an_import_may_read() -> None:
    launch = handed_over(imported_with={"PATH": "/bin", "OMP_NUM_THREADS": "1"})
    ranks = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "ROLE_NAME": "default", "NCCL_SOCKET_IFNAME": "lo"}
    assert launch.imports_as(ranks)
    assert not launch.imports_as({**ranks, "OMP_NUM_THREADS": "4"})
    assert not launch.imports_as({**ranks, "KMP_AFFINITY": "none"})
    assert not launch.imports_as({"OMP_NUM_THREADS": "1"})


class Logs:
    """As torch has it: one value for all ranks, or one for some."""

    def __init__(self, redirects: object, tee: object, shown: set[int] | None) -> None:
        self._redirects, self._tee, self._local_ranks_filter = redirects, tee, shown


@pytest.mark.parametrize(
    ("logs", "silent"),
    [
        (Logs(0, 0, None), []),
        (Logs(3, 0, None), [0, 1, 2]),
        (Logs(3, 3, None), []),
        (Logs(1, 0, None), []),
        (Logs({0: 3, 1: 1}, 0, None), [0]),
        (Logs(0, 0, {2}), [0, 1]),
        (None, []),
    ],
)
def test_ranks_are_silent_whose_output_is_redirected_or_not_wanted(logs: object, silent: list[int]) -> None:
    assert sitecustomize._silent(SimpleNamespace(logs_specs=logs, nproc_per_node=3)) == silent


@pytest.mark.parametrize(
    ("tee", "template", "marks"),
    [
        (0, "[${rank}]: ", ["", "", ""]),
        (3, None, ["[eval0]:", "[eval1]:", "[eval2]:"]),
        ({1: 1}, "[${role_name}/${local_rank}/${rank}/$none]: ", ["", "[eval/1/${rank}/$none]: ", ""]),
    ],
)
def test_lines_of_ranks_are_marked_as_tee_asks(tee: object, template: str | None, marks: list[str]) -> None:
    logs = SimpleNamespace(logs_specs=Logs(0, tee, None), nproc_per_node=3, role="eval")
    logs.log_line_prefix_template = template
    assert sitecustomize._marks(logs) == marks


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b'{"argv": 1}', b"\xff", b'{"limits": {"CORE": 1}}'])
def test_what_is_no_handover_is_refused(line: bytes) -> None:
    with pytest.raises(handover.WrongHandover, match="no hand-over"):
        handover.read(line)
