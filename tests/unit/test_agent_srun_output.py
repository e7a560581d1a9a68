"""--output, --error and --label of a launch name ranks, as srun would name its tasks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muster.daemon.agent.launch.file_patterns import expand
from muster.daemon.agent.launch.handover import Shown
from muster.daemon.agent.launch.output_target import OutputTarget
from muster.daemon.agent.launch.rank_output import RankOutput
from muster.daemon.agent.ranks.rank_process import Outcome
from muster.daemon.agent.user_script import output_options
from muster.daemon.agent.user_script.launch_rule import Decision, Kind
from muster.daemon.host import rank_log_files
from muster.slurm.client.srun_options import read_srun
from muster.v1.common_pb2 import JobSpec, ScriptOutput

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "a%t", "SLURM_JOB_USER": "alice"}
RANKS, LAUNCHER = Decision(Kind.RANKS, 4), Decision(Kind.LAUNCHER, 1)


@pytest.mark.parametrize(
    ("words", "decision", "environ", "output", "of_srun"),
    [
        ("", RANKS, {}, ScriptOutput(file="/o.txt"), []),
        ("-l", RANKS, {}, ScriptOutput(file="/o.txt", label_width=2), []),
        ("-l", LAUNCHER, {}, ScriptOutput(file="/o.txt"), ["--label"]),
        ("", RANKS, {"SLURM_LABELIO": "1"}, ScriptOutput(file="/o.txt", label_width=2), []),
        ("-o %x_%j_%3t", RANKS, {}, ScriptOutput(of_rank="/w/a%%t_7_%3t", error_of_rank="/w/a%%t_7_%3t"), []),
        ("-o /o_%t -e /e --open-mode=append", RANKS, {}, ScriptOutput(of_rank="/o_%t", append=True),
         ["--error=/e", "--open-mode=append"]),
        ("-o /o -e /e_%N", RANKS, {}, ScriptOutput(file="/o", error_of_rank="/e_%N"), ["--output=/o"]),
        ("-o /o_%t", LAUNCHER, {}, ScriptOutput(apart=True), ["--output=/o_%t"]),
        ("", LAUNCHER, {"SRUN_OUTPUT": "/%A_%a"}, ScriptOutput(file="/7_4294967294"), ["--output=/%A_%a"]),
        ("-o none", RANKS, {}, ScriptOutput(), ["--output=none"]),
        (r"-o /\%j", RANKS, {}, ScriptOutput(file="/%%j"), [r"--output=/\%j"]),
    ],
)  # fmt: skip
def test_what_differs_from_rank_to_rank_is_the_agents_and_all_else_sruns(
    words: str, decision: Decision, environ: dict[str, str], output: ScriptOutput, of_srun: list[str]
) -> None:
    given = read_srun(words.split())
    found = output_options.script_output(given, {**JOB, **environ}, decision, 12, "/w", "/o.txt")
    assert found == output
    assert output_options.srun_words(given, {**JOB, **environ}, found, decision.kind) == of_srun


@pytest.mark.parametrize(
    ("name", "expanded"),
    [("%t.txt", "5.txt"), ("%4t", "0005"), ("%N-%2n", "n1-01"), ("%%t", "%t"), ("%99t", "0000000005"), ("%q", "%q")],
)
def test_patterns_are_replaced_as_srun_replaces_them(name: str, expanded: str) -> None:
    assert expand(name, {"t": "5", "n": "1", "N": "n1", "%": "%"}) == expanded


class Ranks:
    """Rank 10 of a node with four, whose output is copied."""

    def __init__(self, folder: Path, output: ScriptOutput) -> None:
        self._folder, self._streams = folder, (folder / "stdout", folder / "stderr")
        stdout, stderr = (os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC) for path in self._streams)
        spec = JobSpec(script_output=output, own_nodes=["n0"], ranks_per_node=4)
        target = OutputTarget(spec, "n2.site", Shown(), stdout, stderr)
        self.output = RankOutput(str(folder), "g", "n2.site", target)

    @property
    def written(self) -> tuple[bytes, bytes]:
        """What has been written to stdout, and to stderr."""
        stdout, stderr = (path.read_bytes() for path in self._streams)
        return stdout, stderr

    def write(self, text: str, generation: int = 1, *, failed: bool = False) -> None:
        """The rank writes and ends, and all is copied."""
        log = rank_log_files.log_path(str(self._folder), "g", generation, 10)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(text)
        self.output.note([Outcome(10, 2, generation, alive=False, pid=7, exit_code=3 * failed, failed=failed)])
        self.output.copy_once()
        self.output.copy_once()


def test_a_label_is_the_number_of_the_rank_as_wide_as_sruns(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ScriptOutput(label_width=3))
    ranks.write("one\rtwo\nthree")
    assert ranks.written == (b" 10: one\rtwo\n 10: three\n", b"")


@pytest.mark.parametrize(("append", "kept"), [(False, ""), (True, "before\n")])
def test_each_rank_has_a_file_of_its_own_that_a_restart_goes_on_with(tmp_path: Path, append: bool, kept: str) -> None:
    target = ScriptOutput(of_rank=f"{tmp_path}/%N_%n_%t", error_of_rank=f"{tmp_path}/e_%3t", append=append)
    (tmp_path / "n2_2_10").write_text("before\n")
    ranks = Ranks(tmp_path, target)
    ranks.output.carried_by("n3")
    ranks.write("one\n", failed=True)
    other = Ranks(tmp_path, target)
    other.write("two\n", generation=2)
    assert (tmp_path / "n2_2_10").read_text() == f"{kept}one\ntwo\n"
    assert "exitcode  : 3" in (tmp_path / "e_010").read_text()
    assert ranks.written == (b"", b"")


def test_a_file_that_can_t_be_written_is_named_once(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ScriptOutput(of_rank=f"{tmp_path}/no/%t"))
    ranks.write("one\n")
    ranks.write("two\n", generation=2)
    told = f"muster-agent: the output of ranks goes to their logs alone: {tmp_path}/no/10: No such file or directory\n"
    assert ranks.written == (b"", told.encode())
