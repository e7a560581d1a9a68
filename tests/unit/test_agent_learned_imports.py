"""A zygote imports what its rank was seen to import, and nothing that could harm the next one. Without torch."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from tests.unit.test_agent_zygote import Harness

from muster.daemon.agent.ranks.imports import job_imports
from muster.daemon.agent.ranks.imports.job_imports import JobImports, KeptImports
from muster.daemon.host import rank_log_files

SHOW = "import sys; print(sorted({'slow', 'inner', 'helper', 'bad'} & set(sys.modules)))\n"


@pytest.fixture
async def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    """A zygote that learns, with a folder of installed modules."""
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site-packages"))
    found = Harness(tmp_path)
    yield found
    await found.warm.stop()


def start(harness: Harness, script: str, **installed: str) -> None:
    for name, text in installed.items():
        harness.script(text, f"site-packages/{name}.py")
    harness.start(sys.executable, harness.script(script), learns=True, OF_SCRIPT="old")


async def learn(harness: Harness, *words: str) -> list[str]:
    harness.said.clear()
    harness.warm.learn(words)
    return list((await harness.until("learned"))["modules"])


async def test_what_a_script_imports_is_there_when_it_is_started_again(harness: Harness) -> None:
    script = SHOW + "import os; os.environ['OF_SCRIPT'] = 'new'\nimport helper\n"
    harness.script("import slow", "helper.py")
    start(harness, script, slow="import inner; print('slow is imported')", inner="")
    assert await harness.run(RANK="0") == (0, "[]\nslow is imported\n")
    words = (await harness.until("imported"))["words"]
    assert [word for word in words if word[-1:] != "="] == ["helper", "slow", "inner"]
    assert {"RANK=", "OF_SCRIPT="} < set(words[: words.index("slow")])
    assert await learn(harness, *words) == ["slow"]
    assert await harness.run(RANK="0") == (0, "['inner', 'slow']\n")
    assert (await harness.until("started", "run2"))["cold"] == ""


async def test_a_killed_rank_has_told_what_it_imports(harness: Harness) -> None:
    start(harness, "import slow, os; os.kill(os.getpid(), 9)", slow="")
    await harness.run()
    assert "slow" in (await harness.until("imported"))["words"]


async def test_what_a_library_only_looks_for_is_not_imported(harness: Harness) -> None:
    """As transformers looks for tensorflow."""
    slow = "import importlib.util; importlib.util.find_spec('inner'); import bad"
    start(harness, "import slow", slow=slow, inner="", bad="")
    await harness.run()
    assert [word for word in (await harness.until("imported"))["words"] if word[-1:] != "="] == ["slow", "bad"]


async def test_a_rank_that_looks_in_each_step_for_a_module_that_is_not_there(harness: Harness) -> None:
    """As accelerate's optimizer does."""
    step = "\ntry:\n    import nowhere\nexcept ImportError:\n    time.sleep(0.1)\n".replace("\n", "\n    ")
    start(harness, f"import slow, time\nwhile True:{step}", slow="")
    harness.launch()
    assert "slow" in (await harness.until("imported"))["words"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "it has 2 threads"),
        ("import os; place = os.environ.get('RANK')", "it reads RANK, which a rank has otherwise"),
        ("import os; place = dict(os.environ)", "it reads RANK, which a rank has otherwise"),
        ("import os; os.environ['MORE'] = '1'", "it changes the environment"),
        ("import signal; signal.signal(signal.SIGCHLD, print)", "it handles signals"),
        ("import subprocess; subprocess.Popen(['sleep', '600'])", "it starts processes"),
        ("import helper", "it imports helper, which is not installed"),
        ("1 / 0", "it can't be imported: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(0)", "it can't be imported: SystemExit: 0"),
        ("import os; os.kill(os.getpid(), 9)", "its import ends by signal 9"),
    ],
)
async def test_a_module_that_could_do_harm_is_left_to_the_script(harness: Harness, text: str, why: str) -> None:
    harness.script("", "helper.py")
    start(harness, SHOW, bad=text, slow="")
    assert await learn(harness, "RANK=", "bad", "slow") == ["slow"]
    assert [(m["name"], m["why"]) for m in harness.said if m["say"] == "left"] == [("bad", why)]
    assert await learn(harness, "RANK=", "bad", "slow") == []  # it is not tried again
    assert await harness.run() == (0, "['slow']\n")
    assert (await harness.until("started", "run1"))["cold"] == ""


async def test_what_a_module_imports_is_there_though_the_module_itself_is_left_to_the_script(harness: Harness) -> None:
    """PyTorch Lightning reads RANK as it is imported, and is slow because of what it imports."""
    start(harness, SHOW + "import slow\n", slow="import os, inner; rank = os.environ.get('RANK')", inner="")
    assert await harness.run(RANK="0") == (0, "[]\n")
    assert await learn(harness, *(await harness.until("imported"))["words"]) == ["inner"]
    assert await harness.run(RANK="0") == (0, "['inner']\n")


async def test_modules_of_the_script_are_not_even_tried(harness: Harness) -> None:
    """They may have changed when the script is started again, and belong to nobody but the script."""
    harness.script("open('tried', 'w')", "helper.py")
    start(harness, SHOW)
    assert await learn(harness, "helper", "no_such_module") == []
    assert not (harness.folder / "tried").exists()


async def test_packages_of_pip_install_target_are_learned_and_what_lies_beside_them_is_not(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", f"{harness.folder}/site-packages:{harness.folder}/no_such_folder:{harness.folder}/pip/"
    )
    for name in ("slow-1.0.dist-info", "quick-1.0.dist-info", "no_record-1.0.dist-info", "slow"):
        (harness.folder / "pip" / name).mkdir(parents=True)
    harness.script("quick\n", "pip/quick-1.0.dist-info/top_level.txt")
    harness.script("", "pip/quick.py")
    harness.script("slow/__init__.py,sha256=x,12\nslow-1.0.dist-info/RECORD,,\n", "pip/slow-1.0.dist-info/RECORD")
    harness.script("import inner", "pip/slow/__init__.py")
    harness.script("", "pip/helper.py")
    start(harness, SHOW + "import slow, quick\nimport helper\n", inner="")
    assert await harness.run() == (0, "[]\n")
    words = (await harness.until("imported"))["words"]
    assert [word for word in words if word[-1:] != "="] == ["slow", "inner", "quick", "helper"]
    assert await learn(harness, *words) == ["slow", "quick"]


async def test_a_rank_starts_while_a_module_is_tried(harness: Harness) -> None:
    start(harness, SHOW, slow="import time; time.sleep(600)")
    await harness.until("ready")
    harness.warm.learn(["slow"])
    assert await harness.run() == (0, "[]\n")


class Zygote:
    """What a zygote is told."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []

    def learn(self, words: Sequence[str]) -> None:
        self.told.append(list(words))


def test_zygotes_learn_one_after_the_other_while_ranks_train() -> None:
    imports, first, second = JobImports(lambda: 1), Zygote(), Zygote()
    imports.join(first)
    imports.join(second)
    imports.add(["a", "b"])
    assert (first.told, second.told) == ([["a", "b"]], [])
    imports.add(["b", "c"])
    imports.finish(first)
    assert (first.told[1:], second.told) == ([["a", "b", "c"]], [])
    imports.finish(first)
    imports.finish(second)
    assert (first.told[1:], second.told) == ([["a", "b", "c"]], [["a", "b", "c"]])


def test_when_a_zygote_dies_of_a_lesson_no_other_one_learns_it(caplog: pytest.LogCaptureFixture) -> None:
    imports, first, second = JobImports(lambda: 1), Zygote(), Zygote()
    imports.join(first)
    imports.add(["a"])
    imports.leave(first)
    imports.join(second)
    assert not second.told
    assert "a warm process has ended as it imported what the script imports" in caplog.text


def kept(folder: Path, imports: JobImports, *, has_ranks: bool) -> KeptImports:
    return KeptImports(str(folder), "g", imports, lambda: has_ranks, lambda: has_ranks, asyncio.sleep)


async def test_a_node_without_ranks_reads_what_the_node_of_rank_0_has_written(tmp_path: Path) -> None:
    spare, training = JobImports(lambda: 1), JobImports(lambda: 1)
    await kept(tmp_path, spare, has_ranks=False).look()
    assert spare.words == []
    training.add(["RANK=", "library.part"])
    await kept(tmp_path, training, has_ranks=True).look()
    await kept(tmp_path, spare, has_ranks=False).look()
    assert spare.words == ["RANK=", "library.part"]
    file = rank_log_files.log_folder(str(tmp_path), "g") / rank_log_files.AGENTS / "imports"
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["a\nb; import os\n", "\0\xff", "a" * 10**6])
async def test_a_list_that_is_none_is_said_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    spare, reader = JobImports(lambda: 1), JobImports(lambda: 1)
    with rank_log_files.hold_log_folder(str(tmp_path), "g", rank_log_files.AGENTS) as folder:
        (folder.path / "imports").write_text(text)
    await kept(tmp_path, reader, has_ranks=False).look()
    assert (reader.words, spare.words) == ([], [])
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith(f"{tmp_path}/logs/g/agents/imports is not used: ")
    assert len(line) < 1000


def test_a_list_has_a_bound() -> None:
    imports = JobImports(lambda: 1)
    imports.add([f"module{number}" for number in range(10_000)])
    assert len(imports.words) == job_imports.MOST_WORDS
