"""What an agent makes of its settings: the spec, which address it tells the others, and what its zygotes import."""

import re
import socket

import pytest

from muster.daemon.agent.ranks.zygote_handle import PRELOAD, modules_to_import
from muster.daemon.agent.startup import BadOption, _address_towards, read_spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "--spec (or MUSTER_SPEC) must be the job's spec"),
        ("{}", "--spec: command is missing"),
        ("{]", "--spec is not a JobSpec as JSON"),
        ("/nowhere/spec.json", "'/nowhere/spec.json' can't be read"),
    ],
)
def test_a_spec_that_is_none_says_what_would_be_right(text: str, words: str) -> None:
    with pytest.raises(BadOption, match=re.escape(words)):
        read_spec(text)


def test_the_address_that_faces_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert _address_towards("127.0.0.1:7070") == "127.0.0.1"


def test_a_coordinator_on_the_same_node_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
    assert _address_towards("127.0.0.1:7070") == socket.gethostname()


def test_a_coordinator_whose_name_is_not_known() -> None:
    assert _address_towards("no-such-host.invalid:7070") == socket.gethostname()


@pytest.mark.parametrize("named", ["torch", "torch.optim", "muster.checkpoint.adapters.lightning"])
def test_ranks_get_the_whole_library_from_the_zygote_whatever_preload_names(named: str) -> None:
    """Its files may be replaced under a running job: a rank must not import a part of it later."""
    library = {module for module in PRELOAD if module.startswith("muster.")}
    assert library
    assert set(modules_to_import(["numpy", named])) == {"numpy", named} | library


def test_zygotes_import_no_torch_if_preload_names_other_modules() -> None:
    assert modules_to_import(["numpy"]) == ("numpy",)
    assert modules_to_import([]) == PRELOAD
