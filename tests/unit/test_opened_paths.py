"""What a job writes or trusts is opened by daemon/host/held_folder.py alone, below a folder that is held open.

A path that is opened anywhere else may lead where a link of another user leads. Who opens one adds the file to ALLOWED,
with the reason why nobody else can lay a link there, or why a link does no harm.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEARCHED = ("checkpoint", "daemon/agent", "daemon/host", "launcher")
"""Programs that run as a job's user. The coordinator and musterd write to folders of their own."""

KERNEL = "files of /proc and /sys, which users can't make"
NAMED = "reads what the user names, with the user's rights"
ALLOWED = {
    "daemon/host/held_folder.py": "the one module that opens",
    "daemon/host/private_file.py": "makes new files only, with O_EXCL, in a folder that the user names",
    "checkpoint/durable/posix_folder.py": "makes the folder that the user names",
    "daemon/host/process/cgroup_memory.py": KERNEL,
    "checkpoint/store/memory/sealed_memory.py": "a memory file of this process",
    "daemon/agent/batch/srun.py": KERNEL,
    "daemon/agent/launch/output_file.py": "the output of the user's own job, which exists and is no link",
    "daemon/agent/launch/output_target.py": "the files that --output of the user's own srun names",
    "daemon/agent/launch/user_path/launcher_fork.py": "/dev/null, and open descriptors",
    "daemon/agent/launch/user_path/sitecustomize.py": KERNEL,
    "daemon/agent/launch/task_binding.py": "devices, and a private file that the launch has written",
    "daemon/agent/start_checks/node_problems.py": "makes durable_dir, which the user names",
    "daemon/agent/start_checks/shared_folder.py": "makes what the user names; believes only this user's file",
    "daemon/agent/link_meter.py": KERNEL,
    "daemon/agent/memory_handover.py": "memory files",
    "daemon/agent/ranks/imports/import_lessons.py": "/dev/null",
    "daemon/agent/ranks/rank_places.py": "a memory file of this process",
    "daemon/agent/ranks/place/node_inventory.py": "NCCL's settings, of the user's home and of the site",
    "daemon/agent/ranks/process_usage.py": KERNEL,
    "daemon/agent/ranks/rank_main.py": "/dev/null, and the script that the user names",
    "daemon/agent/ranks/rendezvous_store.py": "/dev/null",
    "daemon/agent/ranks/stack_dumps.py": "the memory file of a rank, and files of /proc",
    "daemon/agent/user_script/script_job.py": "what the user names, and a mark that lets a script launch once",
    "daemon/agent/user_script/script_shell.py": "makes a folder with mode 0700 beside the settings that the user names",
    "daemon/agent/user_script/srun_call.py": "the program that the user's script names",
    "daemon/agent/startup.py": NAMED,
    "daemon/host/addresses.py": KERNEL,
    "daemon/host/process_tree.py": KERNEL,
    "launcher/main.py": "/dev/null",
    "launcher/commands/pki.py": "a folder with mode 0700 that the administrator names",
    "launcher/commands/run.py": "a folder of `muster run --local`, made with mkdtemp",
    "launcher/commands/submit.py": "makes run_dir, which the user names, and removes its own script",
    "launcher/commands/top.py": NAMED,
    "launcher/report/page.py": "a file of the package",
    "launcher/report/show.py": "writes the page that the user names",
    "launcher/runs/record.py": "makes the folder that the user names; what is in it is opened through held_folder",
    "launcher/commands/topo.py": "writes the picture that the user names",
    "launcher/local/cluster.py": "a folder of `muster run --local`, made with mkdtemp",
    "launcher/local/processes.py": "a folder of `muster run --local`, made with mkdtemp, and files of /proc",
    "launcher/local/run.py": "makes the folder that the user names",
    "launcher/plan/hardware.py": NAMED,
    "launcher/policy/actions.py": NAMED,
    "launcher/scripts/in_allocation.py": "makes the folder that the user names; its own environment",
    "launcher/scripts/job_files.py": "makes run_dir, which the user names, and removes its own files",
    "launcher/scripts/queueing.py": "what the kernel says of mounts and of this process",
    "launcher/scripts/user_script.py": NAMED,
    "launcher/spec/flags.py": "a file of the package",
    "launcher/spec/spec.py": NAMED,
}

OPENED_ALREADY = ("HeldFolder", "self._store", "self._files", "self._sockets")
"""What has a method `open` that opens no path, or is the module itself."""
METHODS = ("open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "mkdir", "unlink", "rmdir")
METHODS += ("symlink_to", "hardlink_to", "FileHandler")
FUNCTIONS = ("os", "shutil", "io")
"""Modules of which every function in OF_MODULES takes a path."""
OF_MODULES = (
    "open",
    "mkdir",
    "makedirs",
    "rename",
    "replace",
    "unlink",
    "remove",
    "rmdir",
    "link",
    "symlink",
    "truncate",
)
OF_MODULES += ("rmtree", "copy", "copyfile", "copytree", "move", "open_code")


def _opens_a_path(call: ast.Call) -> bool:
    match call.func:
        case ast.Name("open"):
            # A descriptor is the value of a call, or has a name that says so.
            first = call.args[0]
            return not isinstance(first, ast.Call) and "descriptor" not in ast.unparse(first)
        case ast.Attribute(owner, name) if isinstance(owner, ast.Name) and owner.id in FUNCTIONS:
            return name in OF_MODULES
        case ast.Attribute(owner, "rename"):  # of a Path; HeldFolder's takes two names
            return len(call.args) == 1
        case ast.Attribute(owner, name):
            return name in METHODS and ast.unparse(owner) not in OPENED_ALREADY
    return False


def _lines_that_open(source: str) -> list[int]:
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return sorted(call.lineno for call in calls if _opens_a_path(call))


def _modules() -> Iterator[Path]:
    for folder in SEARCHED:
        yield from (path for path in (ROOT / folder).rglob("*.py") if "testing" not in path.parts)


def _found() -> dict[str, list[int]]:
    found = {str(path.relative_to(ROOT)): _lines_that_open(path.read_text()) for path in _modules()}
    return {path: lines for path, lines in found.items() if lines}


def test_only_one_module_opens_what_a_job_writes_or_trusts() -> None:
    assert {path: lines for path, lines in _found().items() if path not in ALLOWED} == {}, (
        "open it through daemon/host/held_folder.py, or add it to ALLOWED with the reason"
    )


def test_no_exception_is_left_over() -> None:
    assert ALLOWED.keys() - _found().keys() == set()


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        "open(f'{folder}/x', 'w')",
        "path.open('a')",
        "Path(folder, 'x').write_text('')",
        "os.open(path, os.O_RDONLY)",
        "os.rename(a, b)",
        "path.rename(other)",
        "shutil.rmtree(folder)",
        "logging.FileHandler(path)",
        "io.open(path)",
    ],
)
def test_each_way_to_open_a_path_is_seen(line: str) -> None:
    assert _lines_that_open(line) == [1]


@pytest.mark.parametrize(
    "line", ["HeldFolder.open(path)", "open(folder.create('x'), 'w')", "folder.rename('a', 'b')", "open(descriptor)"]
)
def test_what_is_open_already_is_allowed(line: str) -> None:
    assert _lines_that_open(line) == []
