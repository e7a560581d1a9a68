"""Two versions of Muster side by side on a test cluster: the wheel of an earlier commit, and the replacement of files.

A host's files are replaced as pip does it: processes that run keep the modules that they have loaded.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from muster.slurm.image.engine import EngineError
from muster.slurm.image.recipe import ROOT
from muster.slurm.testcluster.cluster import CONTROLLER, COORDINATOR, LOGIN, Cluster

EARLIER = "e3971d2f1692b1f24886dcb59e863fbe886bbfa2"
"""The commit before processes said their versions. Every version since works beside it."""
OWN, OLD, BROKEN = "own", "old", "broken"
"""The version of the image; the one of EARLIER; one that can't be imported, as in the midst of a replacement."""
MUSTERD = "musterd"
_VERSIONS = "/shared/versions"
_TIMEOUT_S = 300

USERS = "users"
"""The folder of the user's own environment, where `replace_in_users_environment` puts a version."""

# usage: replace VERSION [FOLDER]; without a folder: where the host's programs have their packages
_REPLACE = f"""
set -eu
site=${{2:-$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')}}
mkdir -p "$site"
cp -r {_VERSIONS}/$1/muster "$site/muster.new"
rm -rf "$site/muster"
mv "$site/muster.new" "$site/muster"
"""


def wheel_of(commit: str, into: Path) -> Path:
    """Builds the wheel of `commit` of this repository into the folder `into`, without a network.

    Raises:
        EngineError: the repository lacks the commit, or its wheel can't be built.
    """
    with tempfile.TemporaryDirectory() as name:
        sources, archive = Path(name) / "sources", Path(name) / "sources.tar"
        made = _run("git", "-C", str(ROOT), "archive", "--output", str(archive), commit)
        if made.returncode:
            raise EngineError(
                f"the test of upgrades needs the commit {commit}, which {ROOT} lacks: run it in a whole clone "
                f"(git fetch --unshallow). git says: {made.stderr.strip()}"
            )
        with tarfile.open(archive) as files:
            files.extractall(sources, filter="tar")
        pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
        built = _run(*pip, "--wheel-dir", str(into), str(sources))
    if built.returncode:
        raise EngineError(f"the wheel of {commit} can't be built: {built.stderr[-2000:]}")
    return next(into.glob("muster-*.whl"))


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)


def earlier_script() -> str:
    """The example's train.py of EARLIER: it asks for nothing that the library lacked then."""
    shown = _run("git", "-C", str(ROOT), "show", f"{EARLIER}:examples/tiny_transformer/train.py")
    if shown.returncode:
        raise EngineError(f"{ROOT} lacks the script of {EARLIER}: {shown.stderr.strip()}")
    return shown.stdout


def bring_versions(cluster: Cluster) -> None:
    """Puts the image's version, the earlier one, and one that is broken, where all hosts see them."""
    shared = cluster.shared / Path(_VERSIONS).name
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(wheel_of(EARLIER, Path(name))) as wheel:
        wheel.extractall(shared / OLD)
    site = cluster.sh(LOGIN, "python3 -c 'import muster; print(muster.__path__[0])'")
    cluster.sh(LOGIN, f"mkdir -p {_VERSIONS}/{OWN} && cp -r {site} {_VERSIONS}/{OWN}/")
    broken = shared / BROKEN / "muster" / "__init__.py"
    broken.parent.mkdir(parents=True, exist_ok=True)
    broken.write_text("raise ImportError('a module of Muster was imported while its files were replaced')\n")


def package_folder(version: str) -> str:
    """What an environment of the user that has this version itself has in PYTHONPATH."""
    return f"{_VERSIONS}/{version}"


def replace(cluster: Cluster, version: str, *hosts: str) -> None:
    """Replaces Muster's files on the hosts. What runs there goes on with what it has loaded."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda host: cluster.exec(host, "bash", "-c", _REPLACE, "replace", version), hosts))


def replace_in_users_environment(cluster: Cluster, version: str) -> None:
    """The same in the user's own environment, `package_folder(USERS)`."""
    cluster.exec(LOGIN, "bash", "-c", _REPLACE, "replace", version, package_folder(USERS))


def upgrade_coordinator(cluster: Cluster, version: str, host: str = CONTROLLER) -> None:
    """Replaces the files of a management node, and restarts the coordinator there."""
    replace(cluster, version, host)
    cluster.restart_coordinator("TERM", host)


def upgrade_daemons(cluster: Cluster, version: str, *nodes: str) -> None:
    """Replaces the nodes' files, and restarts `musterd` there. Agents that run there go on."""
    replace(cluster, version, *nodes)
    for node in nodes:
        cluster.restart_service(node, MUSTERD)


def upgrade_all(cluster: Cluster, version: str) -> None:
    """Every host has this version, and the coordinator begins its journal anew. A standby is left stopped."""
    replace(cluster, version, LOGIN, *cluster.spec.coordinators)
    for host in cluster.spec.coordinators:
        cluster.stop_service(host, COORDINATOR)
    cluster.sh(CONTROLLER, "rm -f /var/lib/muster/journal* /shared/muster/journal*")
    cluster.start_service(CONTROLLER, COORDINATOR)
    upgrade_daemons(cluster, version, *cluster.nodes)
