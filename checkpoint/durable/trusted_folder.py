"""Which durable checkpoints may be unpickled: unpickling runs what the file says, as the user of the training job.

A checkpoint is believed if nobody but the job's user and root can have written it:

- Its folder, and each file that is read, belong to the job's user or to root, and neither the group nor others may
  write to them.
- The folder that it lies in may belong to anybody, for example to a project, and a group may write to it. Others may
  write to it only if it has the sticky bit, like /tmp.
- Whoever can rename in that folder can give one checkpoint of the user the name of another one. There the manifest must
  say what the name says: the gang and the version.

The folder is opened once, without following a link that others can have laid, and the checks look at that descriptor
(muster.daemon.host.held_folder). The files are then read through it, so what was checked is what is read.

Unlike StrictModes of sshd, the folders further above are not checked. Whoever can rename one can bring in another
folder, but only one that passes the same checks: other checkpoints of the same owner. And inside a container of a user,
the folders above often belong to "nobody".
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.errors import UntrustedCheckpoint
from muster.daemon.host.held_folder import OTHERS_WRITE, HeldFolder, UntrustedPath, others_can_rename

_ROOT = 0
_MOST_LINKS = 8
"""Links from one to the next that are followed, where only this user and root can have laid them."""


def why_not_restored(folder: Path) -> str:
    """Why checkpoints that lie in `folder` would not be restored; empty: nothing is known against it.

    Raises:
        OSError: it can't be looked at.
    """
    mode = folder.stat().st_mode
    if not _all_can_rename(mode):
        return ""
    return (
        f"all users can write to {folder} (mode {stat.S_IMODE(mode):04o}), so its checkpoints would not be restored: "
        f"chmod o-w {folder} (or, if all of them share it, chmod +t {folder})"
    )


def _all_can_rename(mode: int) -> bool:
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


class TrustedFolder:
    """A checkpoint folder that may be read, while the block of `with` lasts.

    Raises:
        UntrustedCheckpoint: others can have written it, or laid the link that leads to it, or given it its name.
        OSError: it is no folder, or can't be read.
    """

    def __init__(self, folder: Path | str, uid: int | None = None) -> None:
        """`uid`: the user who reads; None: this process's."""
        self._uid = os.geteuid() if uid is None else uid
        try:
            self._held = self._open(Path(os.path.abspath(folder)))
        except UntrustedPath as error:
            raise UntrustedCheckpoint(f"{error.filename}: {error.strerror}, or name the folder it leads to") from None
        self._folder = self._held.path
        try:
            self._check(self._held.status(), self._folder)
            self._check_parent(os.stat("..", dir_fd=self._held.descriptor))
        except BaseException:
            os.close(self._held.descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._held.descriptor)

    @property
    def path(self) -> Path:
        """The opened folder itself, whatever has its name now. Files must be read below this path."""
        return Path(f"/proc/self/fd/{self._held.descriptor}")

    def check_file(self, name: str) -> None:
        """Check a file of the folder before it is read.

        Raises:
            UntrustedCheckpoint: others can have written it, or it is no plain file of this folder.
            OSError: it can't be read.
        """
        if os.path.basename(name) != name:
            raise UntrustedCheckpoint(f"{self._folder} names the file {name!r}, which is not a file of this folder")
        found = self._held.status_of(name)
        if not stat.S_ISREG(found.st_mode):
            raise UntrustedCheckpoint(f"{self._folder / name} must be a plain file, not a link or a device")
        self._check(found, self._folder / name)

    def _open(self, path: Path) -> HeldFolder:
        """Open the folder. A link is followed where only the user and root can have laid it."""
        for _ in range(_MOST_LINKS):
            if not path.name:
                break
            with HeldFolder.open_to_pass(path.parent) as parent:
                try:
                    return parent.folder(path.name)
                except UntrustedPath:
                    found = parent.status()
                    if found.st_mode & OTHERS_WRITE or found.st_uid not in (_ROOT, self._uid):
                        raise
                    path = Path(os.path.normpath(path.parent / parent.read_link(path.name)))
        return HeldFolder.open(path)

    def _check(self, found: os.stat_result, path: Path) -> None:
        why = "it would run as your user if it were loaded"
        if found.st_uid not in (_ROOT, self._uid):
            raise UntrustedCheckpoint(
                f"{path} belongs to uid {found.st_uid}, not to you (uid {self._uid}) or root: {why}. "
                "Copy the checkpoint as your own user if you trust that user"
            )
        if found.st_mode & OTHERS_WRITE:
            raise UntrustedCheckpoint(
                f"others can write to {path} (mode {stat.S_IMODE(found.st_mode):04o}), so the checkpoint may not be "
                f"yours: {why}. If you trust what is there: chmod go-w {path}"
            )

    def _check_parent(self, found: os.stat_result) -> None:
        parent = self._folder.parent
        if _all_can_rename(found.st_mode):
            raise UntrustedCheckpoint(
                f"all users can write to {parent} (mode {stat.S_IMODE(found.st_mode):04o}), so the checkpoint may not "
                f"be the one that you name. If you trust what is there: chmod o-w {parent}"
            )
        if not others_can_rename(found, self._uid):
            return
        label = durable_folders.parse_folder_name(self._folder.name)
        if label is None or not durable_folders.says_its_name(self._manifest(), label):
            raise UntrustedCheckpoint(
                f"others can rename {self._folder}, and its {durable_folders.MANIFEST} does not say what its name "
                "says, so it may be another checkpoint of yours: move it to a folder that only you can write to, or "
                "give it the name that Muster gave it"
            )

    def _manifest(self) -> dict[str, Any]:
        try:
            self.check_file(durable_folders.MANIFEST)
            with open(self._held.open_file(durable_folders.MANIFEST), "rb") as file:
                return durable_folders.parse_manifest(file.read(durable_folders.MOST_MANIFEST_BYTES))
        except FileNotFoundError:
            return {}
