"""Which command lines a zygote can run."""

import pytest

from muster.daemon.agent.ranks.python_command import PythonCommand, TargetKind, is_python, parse_python_command


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python train.py --lr 1", PythonCommand("python", (), TargetKind.SCRIPT, "train.py", ("--lr", "1"))),
        (
            "/opt/venv/bin/python3.14 -u t.py",
            PythonCommand("/opt/venv/bin/python3.14", ("-u",), TargetKind.SCRIPT, "t.py", ()),
        ),
        ("python3 -m pkg.train -x", PythonCommand("python3", (), TargetKind.MODULE, "pkg.train", ("-x",))),
        ("python3 -c pass a", PythonCommand("python3", (), TargetKind.CODE, "pass", ("a",))),
        (
            "python3 -X dev -W ignore -Wd -OO t.py",
            PythonCommand("python3", ("-X", "dev", "-W", "ignore", "-Wd", "-OO"), TargetKind.SCRIPT, "t.py", ()),
        ),
    ],
)
def test_python(line: str, expected: PythonCommand) -> None:
    assert parse_python_command(line.split()) == expected


@pytest.mark.parametrize(
    "line",
    [
        "",
        "bash train.sh",
        "pythonic train.py",
        "torchrun train.py",
        "python",
        "python -",
        "python -i t.py",
        "python -V",
        "python --help",
        "python -m",
        "python -W",
        "python -c",
        "python old.pyc",
        "env python t.py",
    ],
)
def test_not_for_the_warm_process(line: str) -> None:
    assert parse_python_command(line.split()) is None


def test_own_interpreter_counts_whatever_its_name() -> None:
    assert is_python("/opt/ml/interp", "/opt/ml/interp")
    assert not is_python("/opt/ml/interp", "/usr/bin/python3")


@pytest.mark.parametrize(
    ("line", "safe"),
    [("python -P t.py", True), ("python -I t.py", True), ("python -W P t.py", False), ("python -u t.py", False)],
)
def test_safe_path(line: str, safe: bool) -> None:
    command = parse_python_command(line.split())
    assert command is not None
    assert command.safe_path is safe
