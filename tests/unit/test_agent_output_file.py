"""One agent goes on with the output of a script whose node is lost: whole lines, none left out, none twice."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.daemon.agent.launch.handover import Shown
from muster.daemon.agent.launch.output_file import OutputFile
from muster.daemon.agent.launch.output_target import OutputTarget
from muster.daemon.agent.launch.rank_output import RankOutput
from muster.daemon.host import rank_log_files
from muster.v1.common_pb2 import JobSpec, ScriptOutput

PLAIN = Shown()
MARK = "muster: the script's node n0 is lost: n2 goes on with the output of ranks\n"


class Story:
    """A job whose srun has written a part of what its ranks have logged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / "output.txt"
        self.output = self.output_of("n2")

    def target(self, node: str = "n2", shown: Shown = PLAIN, stdout: int = 1) -> OutputTarget:
        """Where the output of ranks of `node` goes: two of each node."""
        output = ScriptOutput(file=str(self.path))
        return OutputTarget(JobSpec(script_output=output, own_nodes=["n0"], ranks_per_node=2), node, shown, stdout)

    def output_of(self, node: str, shown: Shown = PLAIN) -> OutputFile:
        """The output that the agent of `node` goes on with."""
        return OutputFile(str(self._folder), "g", node, self.target(node, shown))

    def log(self, text: str, rank: int = 0, generation: int = 1, age_s: float = 0.0) -> None:
        """A rank writes; its newest line is so old."""
        descriptor = rank_log_files.open_log(str(self._folder), "g", generation, rank)
        os.write(descriptor, text.encode())
        os.close(descriptor)
        if age_s:
            path = rank_log_files.log_path(str(self._folder), "g", generation, rank)
            os.utime(path, (path.stat().st_mtime - age_s,) * 2)

    def goes_on(self) -> str:
        """What is written behind the mark, up to now."""
        while self.output.copy_once():
            pass
        return self.path.read_text().partition(MARK)[2]


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    story = Story(tmp_path)
    yield story
    story.output.stop()


def test_the_output_goes_on_behind_the_last_line_that_srun_has_written(story: Story) -> None:
    story.log("start\nstep 1\nstep 2\nstep 3\nste")
    story.log("other 1\nother 2\n", rank=1)
    story.path.write_text("of the script\nstart\nother 1\nstep 1\nstep 2\n")
    story.output.open()
    assert story.path.read_text().endswith(f"step 2\n{MARK}")
    assert story.goes_on() == "step 3\nother 2\n"
    story.log("p 4\n")
    assert story.goes_on() == "step 3\nother 2\nstep 4\n"


def test_lines_that_come_several_times_do_not_say_how_far_srun_has_come(story: Story) -> None:
    story.log("step 1\n\n===\nstep 2\n\n===\n")
    story.path.write_text("step 1\n\n===\n")
    story.output.open()
    assert story.goes_on().endswith("step 2\n\n===\n")


@pytest.mark.parametrize("label", ["0: ", " 0: "])
def test_labels_of_srun_do_not_count(story: Story, label: str) -> None:
    story.log("step 1\nstep 2\n")
    story.path.write_text(f"{label}step 1\n")
    story.output.open()
    assert story.goes_on() == "step 2\n"


def test_lines_with_the_mark_of_their_rank_are_known_again(story: Story) -> None:
    story.output = story.output_of("n2", Shown(marks=("[eval${rank}]:", "[eval${rank}]:")))
    story.log("step 1\nstep 2\n")
    story.log("step 1\nstep 2\n", rank=1)
    story.path.write_text("[eval0]:step 1\n 0: [eval1]:step 1\n0: [eval1]:step 2\n")
    story.output.open()
    assert story.goes_on() == "[eval0]:step 2\n"


def test_ranks_whose_launcher_keeps_their_output_in_logs_stay_there(story: Story) -> None:
    story.output = story.output_of("n2", Shown(silent=frozenset({1})))
    story.log("step 1\n")
    story.log("of rank 3\n", rank=3)
    story.path.write_text("step 1\n")
    story.output.open()
    story.log("step 2\n")
    story.log("of rank 3\n", rank=3)
    assert story.goes_on() == "step 2\n"


def test_a_rank_that_has_long_been_quiet_was_copied_whole(story: Story) -> None:
    """Its lines are too far up in the output to be found."""
    story.log("hello\n", rank=1, age_s=60)
    story.path.write_text("much of rank 0\n")
    story.output.open()
    assert story.goes_on() == ""


def test_a_line_that_srun_has_cut_off_stays_a_line_of_its_own(story: Story) -> None:
    story.log("step 1\nstep 2\n")
    story.path.write_text("step 1\nst")
    story.output.open()
    assert story.path.read_text() == f"step 1\nst\n{MARK}"
    assert story.goes_on() == "step 2\n"


def test_a_generation_that_starts_later_is_copied_from_its_first_line(story: Story) -> None:
    story.path.write_text("")
    story.output.open()
    story.log("step 1\nlast words", generation=1)
    assert story.goes_on() == "step 1\n"
    story.log("step 1\n", generation=2)
    assert story.goes_on() == "step 1\nlast words\nstep 1\n"
    story.log("the end", generation=2)
    story.output.copy_rest()
    assert story.goes_on() == "step 1\nlast words\nstep 1\nthe end\n"


def test_the_next_agent_goes_on_where_the_last_one_was_lost(story: Story) -> None:
    story.log("step 1\nstep 2\n")
    story.path.write_text("step 1\n")
    story.output.open()
    assert story.goes_on() == "step 2\n"
    story.output.stop()
    story.log("step 3\n")
    other = story.output_of("n3")
    other.open()
    other.copy_rest()
    assert story.goes_on() == f"step 2\n{MARK.replace('n2', 'n3')}step 3\n"


@pytest.mark.parametrize("what", ["missing", "link", "pipe"])
def test_what_is_no_plain_file_is_left_alone(story: Story, what: str) -> None:
    story.log("step 1\n")
    if what == "link":
        story.path.symlink_to(story.path.with_name("other"))
        story.path.with_name("other").write_text("")
    elif what == "pipe":
        os.mkfifo(story.path)
    story.output.open()
    assert not story.output.copy_once()
    assert what != "link" or story.path.read_text() == ""


@pytest.mark.parametrize(("node", "written"), [("n2", MARK + "step 1\nstep 2\n"), ("n1", "")])
def test_only_the_agent_of_the_order_goes_on_and_none_writes_to_the_srun_that_is_lost(
    tmp_path: Path, node: str, written: str
) -> None:
    story, to_srun = Story(tmp_path), tmp_path / "stdout"
    story.path.write_text("")
    with to_srun.open("wb", buffering=0) as stdout:
        output = RankOutput(str(tmp_path), "g", node, story.target(node, stdout=stdout.fileno()))
        _hand_over(output, story)
    assert (story.path.read_text(), to_srun.read_text()) == (written, "")


def _hand_over(output: RankOutput, story: Story) -> None:
    output.start()
    story.log("step 1\n")
    output.carried_by("n2")
    story.log("step 2\n")
    output.carried_by("n2")
    output.close()
