"""Options of sbatch, as sbatch itself reads them. (The cluster tests give some of these forms to sbatch.)"""

from __future__ import annotations

import pytest

from muster.slurm.client.sbatch_options import (
    SbatchOption,
    WrongOption,
    joined,
    read_script,
    read_texts,
    read_words,
    value_of,
)

BIG = [SbatchOption("partition", "big")]


@pytest.mark.parametrize(
    "words",
    [["--partition=big"], ["--partition", "big"], ["-pbig"], ["-p", "big"], ["--part=big"], ["--parti", "big"]],
)
def test_words_of_one_option_are_read_alike(words: list[str]) -> None:
    assert read_words(words) == BIG
    assert read_texts([" ".join(words)]) == BIG
    assert read_texts(["  ".join(words)]) == BIG
    assert read_script(f"#!/bin/bash\n#SBATCH {' '.join(words)}  # where\n#SBATCH\t{' '.join(words)}\n") == BIG * 2


def test_what_is_written_is_read_again() -> None:
    texts = ["--comment seven # eight", '--comment=it\'s "x\\y"', "--exclusive=user", "--hold", "--comment=", "-C a b"]
    options = read_texts(texts)
    script = "\n".join(["#!/bin/bash", *(option.directive for option in options), "true", "#SBATCH --array=0-3"])
    assert read_script(script) == options == read_texts(map(str, options))


def test_flags_take_no_value_and_may_share_a_word() -> None:
    found = [("hold", None), ("nice", None), ("exclusive", None), ("overcommit", None), ("nodes", "3")]
    words = ["-H", "--nice", "--exclusive", "-ON3"]
    assert read_words(words) == [SbatchOption(*option) for option in found]


def test_an_option_of_the_sites_own_keeps_its_value() -> None:
    words = ["--container-image", "a.sqsh", "--container-mount-home", "--nice=3", "--site=x y"]
    assert [str(option) for option in read_words(words)] == [
        *("--container-image=a.sqsh", "--container-mount-home", "--nice=3", "--site=x y")
    ]


@pytest.mark.parametrize("word", ["50", "train.py", "-", "--", "--=3", "-é", "", "--a\nb", "--comment=a\n#SBATCH -N9"])
def test_what_is_no_option_is_refused(word: str) -> None:
    with pytest.raises(WrongOption):
        read_words([word])


def test_the_last_value_counts_and_some_are_joined() -> None:
    options = read_words(["-p", "a", "-x", "n1", "-p", "b", "--exclude=n2"])
    assert value_of(options, "partition") == "b"
    assert value_of(options, "qos") is None
    assert [str(option) for option in joined(options, {"exclude": ","})] == ["--partition=b", "--exclude=n1,n2"]
