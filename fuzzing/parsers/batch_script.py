"""A user's own batch script. It is refused in words, queued as it is, or gives one launch that its own lines show."""

from muster.launcher.errors import WrongInput
from muster.launcher.main import parser
from muster.launcher.scripts import template  # noqa: F401  # imported when it is needed, that would count as work
from muster.launcher.scripts.call import ScriptCall
from muster.launcher.scripts.plan import Supervised, Unsupervised, look_over, settle
from muster.launcher.scripts.user_script import UserScript
from muster.slurm.client import names

_NOTHING = "Nothing was queued"
_OPTIONS = parser(["submit"]).parse_args(["submit", "job.toml"])


def check(data: bytes) -> None:
    """`data` as the text behind the first line of a script of bash."""
    script = UserScript("#!/bin/bash\n" + data.decode(errors="surrogateescape"), "train.sbatch")
    try:
        looked = look_over(script, ScriptCall((), (), "train.sbatch"), None, {}, lambda _: "")
        found = looked if isinstance(looked, Unsupervised) else settle(looked, _OPTIONS, {}, "/shared")
    except WrongInput as error:
        assert _NOTHING in f"{error.message} {error.hint}"
        assert len(error.message) <= 1_000 + 100 * len(data)
        return
    if isinstance(found, Unsupervised):
        assert found.reason
        assert "\n" not in found.reason + found.instead
    else:
        _check_supervised(found, script)


def _check_supervised(found: Supervised, script: UserScript) -> None:
    launch, added = found.looked.launch, {option.name: option.value for option in found.added}
    assert 1 < launch.line <= max(launch.last_line, launch.line) <= script.text.count("\n") + 1
    assert launch.words
    names.check_job(found.job.name)
    assert all(names.is_one_line(value or "") for value in added.values())
    assert "no-kill" in added
    if found.job.spares:
        assert found.nodes.fewest is not None
        assert (added["nodes"] or "").startswith(str(found.nodes.fewest + found.job.spares))
