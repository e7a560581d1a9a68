"""The content of the image, and the digests that show whether an existing image is current.

There are four layers, and two that only some clusters need. The tag of each layer is a digest of everything that it was
built from:

``muster-debian``   Debian's own packages (slow: a minute or more)
``muster-base``     adds the users, and the Python packages that Muster needs and Debian lacks
``muster-tests``    adds what only the tests need: pytest, torchdata, and pyslurm, whose build takes a minute
``muster-accounts`` adds slurmdbd and MariaDB (90 MB, half a minute), for a cluster with accounting
``muster-slurm``    puts the Slurm of another Debian into the base (4 MB), for a few tests on an older Slurm
``muster-cluster``  adds Muster itself (about a second, after every change of the source)

`make demo` does not use ``muster-tests``: its cluster image is built on ``muster-base``. Without pyslurm, Muster uses
Slurm's commands.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from muster.slurm.image import nvml_stand_in
from muster.slurm.image.engine import EngineError

IMAGE_DIR = Path(__file__).resolve().parent
ROOT = IMAGE_DIR.parent.parent

RUNTIME_PACKAGES = [
    "ca-certificates",
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "munge",
    "python3",
    "python3-venv",
    "python3-pip",
    "python3-setuptools",
    "python3-torch",
    # Without this package torch multiplies matrices with the reference BLAS, which is about four times slower.
    "libopenblas0-pthread",
    "python3-numpy",
    "iproute2",
    "iputils-ping",
    "procps",
    "less",
]

# Installed only in a temporary container: the image has no compiler and no headers.
BUILD_PACKAGES = ["gcc", "libc6-dev", "python3-dev", "libslurm-dev"]

SLURM_PACKAGES = [name for name in RUNTIME_PACKAGES if name.startswith("slurm")]

ACCOUNTING_PACKAGES = ["slurmdbd", "mariadb-server-core", "mariadb-client-core"]

TEST_REQUIREMENTS = ("pytest", "pytest-asyncio", "hypothesis", "torchdata", "matplotlib", "textual")

PYSLURM = "25.11.2"

SUITES = {"forky": "26.05", "trixie": "24.11"}
"""The Debian suites, and the Slurm of each."""


@dataclass(frozen=True)
class Recipe:
    """One image. `suite` is the Debian suite. `pyslurm` is a version, or None if no pyslurm builds against that Slurm.

    `for_tests`: build the cluster image on the layer for the tests. `accounting`: with slurmdbd and its database.
    `slurm_of`: the suite whose Slurm replaces that of `suite`; empty: none does. Such an image lacks what only the
    tests need.
    """

    suite: str = "forky"
    pyslurm: str | None = PYSLURM
    for_tests: bool = True
    accounting: bool = False
    slurm_of: str = ""

    @staticmethod
    def of(suite: str, for_tests: bool = True, accounting: bool = False, only_slurm: bool = False) -> Recipe:
        """The recipe for one of `SUITES`. pyslurm does not build against Slurm 24.11.

        `only_slurm`: all but Slurm is of the suite of the other tests, whose layers are there anyway.
        """
        if only_slurm:
            return Recipe(pyslurm=None, for_tests=False, accounting=accounting, slurm_of=suite)
        return Recipe(suite, PYSLURM if suite == "forky" else None, for_tests, accounting)

    @property
    def debian_image(self) -> str:
        """Name and tag of the layer with Debian's packages."""
        return f"localhost/muster-debian:{_digest(self.suite, *RUNTIME_PACKAGES)}"

    def wheel_key(self, versions: str) -> str:
        """A digest of everything that pyslurm is built from. `versions` are those of Slurm and Python in the image."""
        script = (IMAGE_DIR / "build-pyslurm.sh").read_text()
        return _digest(versions, str(self.pyslurm), script, *BUILD_PACKAGES)

    @property
    def base_image(self) -> str:
        """Name and tag of the layer that changes only with Muster's dependencies."""
        script = (IMAGE_DIR / "install-base.sh").read_text()
        return f"localhost/muster-base:{_digest(self.debian_image, script, constraints(), *requirements())}"

    @property
    def tests_image(self) -> str:
        """Name and tag of the layer with pyslurm and the other packages that only the tests need."""
        script = (IMAGE_DIR / "install-tests.sh").read_text()
        return f"localhost/muster-tests:{_digest(self.base_image, self.wheel_key(''), script, *TEST_REQUIREMENTS)}"

    @property
    def accounts_image(self) -> str:
        """Name and tag of the layer with slurmdbd and its database."""
        script = (IMAGE_DIR / "install-accounts.sh").read_text()
        return f"localhost/muster-accounts:{_digest(self._without_accounts, script, *ACCOUNTING_PACKAGES)}"

    @property
    def slurm_image(self) -> str:
        """Name and tag of the layer with the Slurm of another Debian."""
        script = (IMAGE_DIR / "install-slurm.sh").read_text()
        return f"localhost/muster-slurm:{_digest(self.base_image, script, self.slurm_of, *SLURM_PACKAGES)}"

    @property
    def _without_accounts(self) -> str:
        if self.slurm_of:
            return self.slurm_image
        return self.tests_image if self.for_tests else self.base_image

    def cluster_image(self, source: Source) -> str:
        """Name and tag of the image with Muster's source `source`."""
        below = self.accounts_image if self.accounting else self._without_accounts
        return f"localhost/muster-cluster:{_digest(below, source.digest)}"


@dataclass(frozen=True)
class Source:
    """Muster's files as one tar archive, and its digest. The digest covers exactly what is installed."""

    archive: bytes
    digest: str


def requirements() -> list[str]:
    """The requirements of the package, of the coordinator and of the node daemon, from the project file."""
    path = ROOT / "pyproject.toml"
    if not path.exists():
        raise EngineError("the image can be built only from a checkout of Muster's repository")
    project = tomllib.loads(path.read_text())["project"]
    extras = project.get("optional-dependencies", {})
    return sorted({*project["dependencies"], *extras.get("coordinator", []), *extras.get("daemon", [])})


def constraints() -> str:
    """The pinned versions for development, without torch: the image has Debian's torch."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "".join(f"{line}\n" for line in lines if not line.startswith("torch=="))


def read_source() -> Source:
    """Reads Muster's package (following links), its project file, its installer, and the stand-in for NVIDIA's library
    (if this host has a compiler).
    """
    files = {"pyproject.toml": ROOT / "pyproject.toml", "install.py": IMAGE_DIR / "install.py"}
    if compiled := nvml_stand_in.library():
        files[nvml_stand_in.LIBRARY] = compiled
    package = ROOT / "src" / "muster"
    for folder in (package, *(link for link in package.iterdir() if link.is_symlink())):
        for path in folder.resolve().rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                files[f"muster/{_inside(package, folder, path)}"] = path
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, path in sorted(files.items()):
            _add(archive, name, path.read_bytes())
    return Source(buffer.getvalue(), _digest_bytes(buffer.getvalue()))


def _inside(package: Path, folder: Path, path: Path) -> str:
    inner = path.relative_to(folder.resolve())
    return str(inner if folder == package else Path(folder.name) / inner)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    archive.addfile(entry, io.BytesIO(content))


def _digest(*parts: str) -> str:
    return _digest_bytes("\0".join(parts).encode())


def _digest_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
