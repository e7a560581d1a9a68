"""Options of a user's own batch script: how the command line and the script's lines are read, and how sizes grow."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from muster.launcher.errors import WrongInput
from muster.launcher.scripts import call, keys
from muster.launcher.scripts.asked import Asked, ask, refuse
from muster.launcher.scripts.call import Kind, ScriptCall
from muster.launcher.scripts.size import Size, gpus_of_node, grown, note_of_nodelist, size_of
from muster.slurm.client.sbatch_options import WrongOption, read_words
from muster.slurm.client.script_lines import WrongLine, late_line, words_of_lines
from muster.slurm.client.srun_options import described

OWN = {"--spares": Kind(True), "--dry-run": Kind(False), "--elastic": Kind(True, is_truth=True)} | {
    name: Kind(True) for name in ("--nodes", "--gpus", "--name")
}
OWN["--requeue"] = Kind(True, is_truth=True)
PLUGINS = described("Options provided by plugins:\n      --image=<path>   a\n      --writable   b\n")


def split(line: str, *, is_piped: bool = False) -> tuple[list[str], ScriptCall | None]:
    return call.split(line.split(), OWN, PLUGINS.get, is_piped=is_piped)


@pytest.mark.parametrize(
    ("line", "muster", "sbatch", "script", "arguments"),
    [
        ("a.sbatch", "", "", "a.sbatch", ""),
        ("-N 4 --time=1 --spares 1 a.sbatch x --spares 2", "--spares=1", "-N 4 --time=1", "a.sbatch", "x --spares 2"),
        ("-N4 --dry-run -p big a.sbatch", "--dry-run", "-N4 -p big", "a.sbatch", ""),
        ("--nodes 4 --gpus 8 --requeue a.sbatch", "", "--nodes 4 --gpus 8 --requeue", "a.sbatch", ""),
        ("--requeue=false a.sbatch", "--requeue=false", "", "a.sbatch", ""),
        ("--elastic a.sbatch", "--elastic=true", "", "a.sbatch", ""),
        ("--elastic false a.sbatch b.toml", "--elastic=false", "", "a.sbatch", "b.toml"),
        ("--image i.toml --writable a.sbatch", "", "--image i.toml --writable", "a.sbatch", ""),
        ("-Wk -- a.sbatch -- b", "", "-Wk", "a.sbatch", "-- b"),
        ("--wrap hostname", "", "--wrap hostname", "", ""),
    ],
)  # fmt: skip
def test_the_words_of_a_command_line_are_divided(
    line: str, muster: str, sbatch: str, script: str, arguments: str
) -> None:
    own, found = split(line)
    assert own == [*muster.split(), script or "-"]
    assert found is not None
    assert (" ".join(found.words), found.script, " ".join(found.arguments)) == (sbatch, script, arguments)


@pytest.mark.parametrize(
    "line",
    [
        "job.toml",
        "--nodes 4 job.toml",
        "--requeue true a/b.yaml -- -N 2",
        "--requeue yes job.toml",
        "--help",
        "-N 2 -h a.sbatch",
        "--dry-run",
    ],
)
def test_a_job_file_or_a_call_for_help_is_left_alone(line: str) -> None:
    assert split(line) == (line.split(), None)


@pytest.mark.parametrize("line", ["--dry-run --spares a.sbatch", "-p a.sbatch"])
def test_an_option_that_takes_the_script_as_its_value_is_named(line: str) -> None:
    with pytest.raises(WrongOption, match=r"no script is named: (--spares|-p) takes a.sbatch as its value"):
        split(line)
    assert split(line, is_piped=True)[1] is not None


@pytest.mark.parametrize("line", ["--spare=1 a.sbatch", "--spare 1 a.sbatch", "--spars 1 a.sbatch"])
def test_an_option_that_is_nearly_one_of_muster_is_no_option_of_sbatch(line: str) -> None:
    with pytest.raises(WrongOption, match=r"there is no option --[a-z]+: did you mean --spares"):
        split(line)
    plugins = {"spare": True, "spars": True}
    assert call.split(line.split(), OWN, plugins.get, is_piped=False)[1] is not None


def test_a_script_comes_through_a_pipe() -> None:
    own, found = split("-N 2 --spares 1", is_piped=True)
    assert own == ["--spares=1", "-"]
    assert found is not None
    assert (found.script, found.words) == ("", ("-N", "2"))


def asked(script: str = "", options: str = "", environ: Mapping[str, str] | None = None) -> Asked:
    return ask(words_of_lines(script), environ or {}, read_words(options.split()))


def test_the_command_line_overrides_variables_and_these_override_lines() -> None:
    lines, environ = "#SBATCH --gpus=1 --output=a\n#SBATCH -e b", {"SBATCH_GPUS": "2", "SBATCH_OUTPUT": "c"}
    found = asked(lines, "-G 3", environ)
    assert [found.value(name) for name in ("gpus", "output", "error", "qos")] == ["3", "c", "b", None]
    assert str(found.last("error")) == "line 2: --error=b"
    assert str(found.last("output")) == "SBATCH_OUTPUT of this shell: --output=c"


@pytest.mark.parametrize(
    ("lines", "options"),
    [
        ("#! /bin/bash\n#SBATCH --nodes=2 --mem=1 # why\n\n  # a\n#SBATCH\t-J x#y\ntrue\n#SBATCH -N9", "N2 mem=1 Jx"),
        ("##SBATCH -N 9\n# SBATCH -N 8\n #SBATCH -N 7\n#SBATCH-N 1", "N1"),
        ('#SBATCH --comment="a # b" -J \'c d\'\n#SBATCH -C a\\ b', "comment=a # b/Jc d/Ca b"),
        ('#SBATCH -N 2 "" -n 3\n#SBATCH --time 1', "N2 time=1"),
        ("#SBATCH --nodes\n#SBATCH 4", "N4"),
        ("#SBATCH --tasks-per-node=2", "ntasks-per-node=2"),
    ],
)  # fmt: skip
def test_lines_are_read_as_sbatch_reads_them(lines: str, options: str) -> None:
    wanted = [
        option
        for word in options.split("/" if "/" in options else None)
        for option in read_words([f"--{word}" if "=" in word else f"-{word}"])
    ]
    assert [given.option for given in asked(lines).given] == wanted


def test_a_quote_that_is_not_closed_is_said_with_its_line() -> None:
    with pytest.raises(WrongLine, match='line 2: the quote " is not closed'):
        words_of_lines('#SBATCH -N 1\n#SBATCH --comment="a\n')


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("#SBATCH -N 1\n#SBATCH hetjob\n#SBATCH -N 2", "line 2: hetjob"),
        ("#SBATCH -N 1\n#SBATCH packjob", "line 2: packjob"),
        ("#SBATCH -N 1\n\n#SBATCH N 2", "line 3: 'N' is no option"),
        ("#SBATCH --oversubscribe", "line 1: --oversubscribe shares nodes"),
        ("\n#SBATCH --exclusive=user", "line 2: --exclusive=user shares nodes"),
        ("#SBATCH -M other", "line 1: --clusters=other sends the job to another cluster"),
        ("#SBATCH -m arbitrary", "line 1: --distribution=arbitrary"),
        ("#SBATCH -N 2\n#SBATCH -n " + "9" * 4400, "line 2: --ntasks: a number of more than nine digits"),
    ],
)
def test_what_can_not_be_is_refused_with_its_line(lines: str, says: str) -> None:
    with pytest.raises(WrongInput) as refused:
        refuse(asked(lines))
    assert refused.value.message.startswith(says)
    assert refused.value.hint.endswith("Nothing was queued")


def test_an_exclusive_line_later_takes_back_a_shared_one() -> None:
    refuse(asked("#SBATCH --exclusive=user", "--exclusive"))
    refuse(asked("", "", {"SBATCH_EXCLUSIVE": "user"}))


@pytest.mark.parametrize(
    ("options", "nodes", "more"),
    [
        ("-N 4", 4, "--nodes=5"),
        ("-N4 -n4", 4, "--nodes=5 --ntasks=5"),
        ("-N 2 -n 16", 2, "--nodes=3 --ntasks=24"),
        ("-N 2 -G 16", 2, "--nodes=3 --gpus=24 --gpus-per-node=8"),
        ("-N 2 -G a100:8,h100:4", 2, "--nodes=3 --gpus=a100:12,h100:6 --gpus-per-node=a100:4,h100:2"),
        ("-N 2 --gpus-per-node=8 --ntasks-per-node=8 --gres=gpu:8 --mem=4G", 2, "--nodes=3"),
        ("-n 8 --ntasks-per-node=4", 2, "--nodes=3 --ntasks=12"),
        ("-G 16 --gpus-per-node=8", 2, "--nodes=3 --gpus=24"),
        ("-G 1", 1, "--nodes=2 --gpus=2 --gpus-per-node=1"),
        ("-w n[1-3]", 3, "--nodes=4"),
        ("-N 1k", 1024, "--nodes=1025"),
        ("-N 4-4", 4, "--nodes=5"),
        ("-n 1", 1, "--nodes=2 --ntasks=2"),
        ("", 1, "--nodes=2"),
    ],
)
def test_options_of_size_grow_with_a_spare(options: str, nodes: int, more: str) -> None:
    given = asked("", options)
    size = size_of(given, elastic=False)
    assert size.nodes == nodes
    assert " ".join(map(str, grown(given, size, 1))) == more
    assert list(grown(given, size, 0)) == []


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ("-N 2 -G 16", "8"),
        ("-N 2 -G a100:8,h100:4", "a100:4,h100:2"),
        *(
            (f"-N 2 {options}", "")
            for options in ("", "-G 3", "-G h100", "-G 4 --gpus-per-node=2", "-G 4 --gpus-per-task=1")
        ),
    ],
)
def test_gpus_of_the_whole_job_are_those_of_its_nodes(options: str, each: str) -> None:
    given = asked("", options)
    assert gpus_of_node(given, size_of(given, elastic=False)) == each


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("-n 8", "--ntasks=8 without --nodes"),
        ("-G 8", "--gpus=8 without --nodes"),
        ("-F hosts", "--nodefile=hosts without --nodes"),
        ("-w ./hosts", "--nodelist=./hosts without --nodes"),
        ("-N 2 -n 3", "--ntasks=3 is not the same on each of 2 nodes"),
        ("-N 2 -G 3", "--gpus=3 is not the same on each of 2 nodes"),
        ("-N 2-8", "--nodes=2-8 lets Slurm choose"),
        ("-N 2,4", "--nodes=2,4: Muster needs one number"),
        ("-N 4 --segment=4", "--segment=4 must divide the 5 nodes"),
    ],
)
def test_a_size_that_slurm_would_choose_is_refused(options: str, says: str) -> None:
    given = asked("", options)
    with pytest.raises(WrongInput, match=f"the command line: {says}") as refused:
        list(grown(given, size_of(given, elastic=False), 1))
    assert "Nothing was queued" in refused.value.hint


def test_keys_behind_the_first_command_are_found() -> None:
    text = "#!/bin/bash\n#MUSTER --spares=1\n# a\n\nhostname\n# b\n#MUSTERED\n#MUSTER --elastic\n"
    assert late_line(text, keys.MARK) == 8
    assert late_line(text.replace("hostname", ""), keys.MARK) == 0


def test_without_spares_slurm_may_choose() -> None:
    assert size_of(asked("", "-n 8"), elastic=False) == Size(None, None)


def test_an_elastic_job_may_ask_for_a_range() -> None:
    given = asked("", "-N 2-8")
    assert [*map(str, grown(given, size_of(given, elastic=True), 2))] == ["--nodes=4-10"]


def test_a_short_list_of_nodes_is_said() -> None:
    assert "names 2 of 3 nodes" in note_of_nodelist(asked("", "-w n[1-2]"), 3)
    assert note_of_nodelist(asked("", "-w n[1-3]"), 3) == ""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--spares=1 --tensor=8", {"--spares": "1", "--parallelism.tensor": "8"}),
        ("--spares 1 --elastic --durable-dir /d", {"--spares": "1", "--elastic": "true", "--durable-dir": "/d"}),
        ("--elastic false --launch-line=7", {"--elastic": "false", "--launch-line": "7"}),
        ("--checkpoint.copies=3 --placement.tensor=pod", {"--checkpoint.copies": "3", "--placement.tensor": "pod"}),
    ],
)
def test_keys_beside_the_options_of_sbatch(line: str, found: dict[str, str]) -> None:
    read = keys.read_lines(words_of_lines(f"#MUSTER {line} # spare nodes", keys.MARK))
    assert {name: word.text for name, word in read.items()} == found


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--spars=1", "line 1: there is no key '--spars=1' of Muster: did you mean --spares?"),
        ("spares=1", "line 1: there is no key 'spares=1' of Muster: did you mean --spares?"),
        ("--partition=big", "line 1: there is no key '--partition=big' of Muster: it is an option of sbatch"),
        ("-p big", "line 1: there is no key '-p' of Muster: it is an option of sbatch"),
        ("--command=x", "line 1: --command is for job.toml: with a script, write the line of the script"),
        ("--spares", "line 1: --spares needs a value"),
        ("--spares --elastic", "line 1: --spares needs a value"),
        ("--nodes=4", "line 1: --nodes is for job.toml: with a script, write --nodes on an #SBATCH line"),
        ("--slurm.time=1", "line 1: --slurm.time is for job.toml: with a script, write the option of sbatch"),
        ("--name=x", "line 1: --name is for job.toml: with a script, write --job-name"),
    ],
)
def test_a_wrong_key_is_refused_with_its_line(line: str, says: str) -> None:
    with pytest.raises(WrongInput) as refused:
        keys.read_lines(words_of_lines(f"#MUSTER {line}", keys.MARK))
    assert refused.value.message.startswith(says)
