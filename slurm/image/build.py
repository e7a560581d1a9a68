"""Builds missing image layers, and removes old ones that carry Muster's label.

Two builds can run at the same time: each build takes a lock in the cache folder, and checks again whether the image
exists.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from muster.slurm.image.engine import INSTALL_HINT, Engine, EngineError, cache_dir
from muster.slurm.image.recipe import (
    ACCOUNTING_PACKAGES,
    BUILD_PACKAGES,
    IMAGE_DIR,
    RUNTIME_PACKAGES,
    SLURM_PACKAGES,
    TEST_REQUIREMENTS,
    Recipe,
    Source,
    constraints,
    read_source,
    requirements,
)

LABEL = "muster.image"
KEEP = {"cluster": 6, "accounts": 2, "slurm": 2, "tests": 4, "base": 4, "debian": 4}
"""How many images of each kind are kept."""


def _say(line: str) -> None:
    """Progress: one line on standard error."""
    print(line, file=sys.stderr, flush=True)


def ensure_cluster_image(engine: Engine, recipe: Recipe) -> str:
    """Returns the name of an image with Muster's current source. Builds it if it does not exist."""
    source = read_source()
    image = recipe.cluster_image(source)
    if engine.has_image(image):
        return image
    below = (_ensure_accounts if recipe.accounting else _ensure_without_accounts)(engine, recipe)
    with _lock("cluster"):
        if not engine.has_image(image):
            _build_cluster(engine, below, image, source)
            _prune(engine, "cluster")
    return image


def ensure_base(engine: Engine, recipe: Recipe = Recipe()) -> str:  # noqa: B008
    """Returns the name of the base image. Builds it if it does not exist (about two minutes without any layer)."""
    if engine.has_image(recipe.base_image):
        return recipe.base_image
    with _lock(f"base-{recipe.suite}"):
        if not engine.has_image(recipe.debian_image):
            _say(f"image: Debian {recipe.suite} with Slurm and torch (once, a minute or two)")
            _build_debian(engine, recipe)
        if not engine.has_image(recipe.base_image):
            _say("image: Python packages")
            _build_base(engine, recipe)
            for kind in ("base", "debian"):
                _prune(engine, kind)
    return recipe.base_image


def ensure_tests(engine: Engine, recipe: Recipe = Recipe()) -> str:  # noqa: B008
    """Returns the name of the image with everything that the tests need, except Muster. Builds it if it does not
    exist."""
    if engine.has_image(recipe.tests_image):
        return recipe.tests_image
    base = ensure_base(engine, recipe)
    with _lock(f"tests-{recipe.suite}"):
        if not engine.has_image(recipe.tests_image):
            wheels = _wheels(engine, recipe)
            _say("image: what only the tests need")
            _install(engine, base, recipe.tests_image, "tests", TEST_REQUIREMENTS, wheels)
            _prune(engine, "tests")
    return recipe.tests_image


def _ensure_without_accounts(engine: Engine, recipe: Recipe) -> str:
    if recipe.slurm_of:
        return _ensure_slurm(engine, recipe)
    return (ensure_tests if recipe.for_tests else ensure_base)(engine, recipe)


def _ensure_slurm(engine: Engine, recipe: Recipe) -> str:
    if engine.has_image(recipe.slurm_image):
        return recipe.slurm_image
    base = ensure_base(engine, recipe)
    with _lock(f"slurm-{recipe.slurm_of}"):
        if not engine.has_image(recipe.slurm_image):
            _say(f"image: the Slurm of Debian {recipe.slurm_of}")
            wanted = [f"{name}/{recipe.slurm_of}" for name in SLURM_PACKAGES]
            _install(engine, base, recipe.slurm_image, "slurm", wanted)
            _prune(engine, "slurm")
    return recipe.slurm_image


def _ensure_accounts(engine: Engine, recipe: Recipe) -> str:
    if engine.has_image(recipe.accounts_image):
        return recipe.accounts_image
    below = _ensure_without_accounts(engine, recipe)
    with _lock(f"accounts-{recipe.suite}"):
        if not engine.has_image(recipe.accounts_image):
            _say("image: slurmdbd and its database (once, half a minute)")
            _install(engine, below, recipe.accounts_image, "accounts", ACCOUNTING_PACKAGES)
            _prune(engine, "accounts")
    return recipe.accounts_image


def _build_debian(engine: Engine, recipe: Recipe) -> None:
    if not shutil.which("mmdebstrap"):
        raise EngineError(f"mmdebstrap is not installed; {INSTALL_HINT}")
    producer = [
        *("mmdebstrap", "--quiet", "--variant=minbase", "--components=main"),
        # A mirror with an older snapshot is good enough.
        '--aptopt=Acquire::Check-Valid-Until "false"',
        *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("man", "doc", "locale")),
        f"--include={','.join(RUNTIME_PACKAGES)}",
        *(recipe.suite, "-", *_debian_mirror(engine)),
    ]
    args = ("import", "--change", f"LABEL {LABEL}=debian", "-", recipe.debian_image)
    with engine.pipe_into(producer, *args):
        pass


def _debian_mirror(engine: Engine) -> list[str]:
    """The Debian mirror of this host's apt. Empty on other systems: mmdebstrap then uses its default."""
    listing = engine.host(*("apt-get", "indextargets", "--format", "$(ORIGIN)\t$(SITE)"), "Created-By: Packages").stdout
    sites = [line.split("\t")[1] for line in listing.splitlines() if line.startswith("Debian\t")]
    return [site for site in sites if not site.rstrip("/").endswith("security")][:1]


def _wheels(engine: Engine, recipe: Recipe) -> Path:
    """A folder with the pyslurm wheel of this recipe. Empty if the recipe has none."""
    if recipe.pyslurm is None:
        folder = cache_dir() / "wheels" / "none"
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    asked = ("slurmctld", "-V"), ("python3", "--version")
    versions = [engine.call("run", "--rm", "--network=none", recipe.debian_image, *one).checked() for one in asked]
    folder = cache_dir() / "wheels" / recipe.wheel_key("".join(versions))
    if not folder.exists():
        _say(f"image: building pyslurm {recipe.pyslurm} (once, about a minute)")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as out:
            mounts, environment = _outside()
            engine.call(
                *("run", "--rm", "--network=host", *mounts, "-v", f"{out}:/out"),
                *("-v", f"{IMAGE_DIR}:/recipe:ro", recipe.debian_image),
                *("env", *environment, "sh", "/recipe/build-pyslurm.sh", recipe.pyslurm, *BUILD_PACKAGES),
                timeout=600,
            ).checked()
            shutil.copytree(out, aside := f"{out}.done")
            Path(aside).rename(folder)
    return folder


def _build_base(engine: Engine, recipe: Recipe) -> None:
    _install(engine, recipe.debian_image, recipe.base_image, "base", requirements())


def _install(
    engine: Engine, below: str, image: str, kind: str, wanted: Sequence[str], wheels: Path | None = None
) -> None:
    """Runs `install-KIND.sh` on the layer `below`, and commits the result as `image`. `wanted` are what it installs:
    requirements for pip, or Debian's packages.
    """
    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        (Path(folder) / "constraints.txt").write_text(constraints())
        (Path(folder) / "requirements.txt").write_text("".join(f"{line}\n" for line in wanted))
        shutil.copy(IMAGE_DIR / f"install-{kind}.sh", folder)
        mounts, environment = _outside()
        mounts += ["-v", f"{folder}:/recipe:ro"]
        if wheels is not None:
            mounts += ["-v", f"{wheels}:/wheels:ro"]
        with _container(engine, "--network=host", *mounts, below) as run:
            # Do not use the engine's --env: a commit would write these variables into the image.
            run("env", *environment, "sh", f"/recipe/install-{kind}.sh")
            run.commit(image, kind)


def _build_cluster(engine: Engine, below: str, image: str, source: Source) -> None:
    unpack = "mkdir /tmp/source && tar -x -C /tmp/source && /opt/muster/bin/python /tmp/source/install.py"
    with _container(engine, "--network=none", below) as run:
        run("sh", "-c", f"{unpack} && rm -r /tmp/source", stdin=source.archive)
        run.commit(image, "cluster")


class _Run:
    """A temporary container whose file system becomes an image."""

    def __init__(self, engine: Engine, name: str, options: tuple[str, ...]) -> None:
        self.engine, self.name, self.options = engine, name, options

    def __call__(self, *command: str, stdin: bytes | None = None) -> None:
        feed = ("-i",) if stdin is not None else ()
        self.engine.call(
            *("run", "--name", self.name, "--label", f"{LABEL}=build", *feed, *self.options, *command),
            stdin=stdin,
            timeout=600,
        ).checked()

    def commit(self, image: str, kind: str) -> None:
        changes = (
            f"LABEL {LABEL}={kind}",
            "ENV PATH=/opt/muster/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "ENV USE_LIBUV=0",
            "ENV LANG=C.UTF-8",
        )
        options = [part for change in changes for part in ("--change", change)]
        self.engine.call("commit", *options, self.name, image, timeout=600).checked()


@contextlib.contextmanager
def _container(engine: Engine, *options: str) -> Iterator[_Run]:
    run = _Run(engine, f"muster-build-{os.getpid()}", options)
    try:
        yield run
    finally:
        engine.call("rm", "--force", run.name)


def _outside() -> tuple[list[str], list[str]]:
    """The mounts and variables that let apt and pip in a container reach the same servers as on the host.

    They cover the host's certificate bundle, proxies, pip settings, and the local folders that these settings name.
    """
    mounts: list[str] = []
    environment = [
        f"{key}={value}"
        for key, value in os.environ.items()
        if key.startswith("PIP_") or key.lower() in ("http_proxy", "https_proxy", "no_proxy")
    ]
    bundle = Path(os.environ.get("SSL_CERT_FILE") or "/etc/ssl/certs/ca-certificates.crt")
    inside = "/etc/ssl/certs/ca-certificates.crt"
    if bundle.exists():
        mounts += ["-v", f"{bundle.resolve()}:{inside}:ro"]
        environment.append(f"PIP_CERT={inside}")
    settings = [Path("/etc/pip.conf"), Path.home() / ".config/pip/pip.conf", Path.home() / ".pip/pip.conf"]
    for path in settings:
        if path.exists():
            target = str(path).replace(str(Path.home()), "/root")
            mounts += ["-v", f"{path}:{target}:ro"]
    for folder in sorted(_folders_named_in(settings)):
        mounts += ["-v", f"{folder}:{folder}:ro"]
    return mounts, environment


def _folders_named_in(settings: list[Path]) -> set[str]:
    text = "\n".join(path.read_text() for path in settings if path.exists())
    text += "\n".join(value for key, value in os.environ.items() if key.startswith("PIP_"))
    found = set()
    for scheme, name in re.findall(r"(?:^|[\s=,])(file://)?(/[^\s,]+)", text):
        # The files of a package index are in the folder above its pages.
        path = Path(name).parent if scheme else Path(name)
        if path.is_dir() and path != Path("/"):
            found.add(str(path))
    return found


def _prune(engine: Engine, kind: str) -> None:
    listing = engine.call("images", "--filter", f"label={LABEL}={kind}", "--format", "{{.Repository}}:{{.Tag}}")
    ours = [line for line in listing.stdout.splitlines() if line.startswith(f"localhost/muster-{kind}:")]
    for image in ours[KEEP[kind] :]:
        engine.call("rmi", image)  # the engine refuses while a container uses the image; the next build removes it


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    with (cache_dir() / f"{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
