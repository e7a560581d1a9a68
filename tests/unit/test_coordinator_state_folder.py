"""What a coordinator checks of its state folder before it uses it, alone or with a standby."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from muster.daemon.coordinator.leadership.lease import LeaseError
from muster.daemon.coordinator.leadership.lease_holder import LeaseHolder
from muster.daemon.coordinator.leadership.state_folder import check_shared_folder, check_unshared_folder
from muster.daemon.transport.site_config import SiteError

PROCESS = LeaseHolder(socket.gethostname(), "kernel", 1, 1)


@pytest.mark.parametrize("left", ["lease", "journal-00000003.db"])
def test_a_folder_that_was_shared_is_not_used_alone(left: str, tmp_path: Path) -> None:
    check_unshared_folder(tmp_path)
    (tmp_path / left).touch()
    with pytest.raises(SiteError, match=f"{tmp_path} is shared with a coordinator on another machine.*give --shared"):
        check_unshared_folder(tmp_path)


@pytest.mark.parametrize(("given", "shown"), [(True, "{0}/state is"), (False, "/var/lib/muster is")])
def test_a_local_folder_can_not_be_shared(given: bool, shown: str, tmp_path: Path) -> None:
    """systemd names the folders of the unit; the default folder is one of them."""
    (tmp_path / "state").mkdir(mode=0o700)
    folder = tmp_path / "state" if given else None
    with pytest.raises(SiteError, match=f"{shown.format(tmp_path)} this machine's own: give --state-dir"):
        check_shared_folder(folder, PROCESS, {"STATE_DIRECTORY": f"/nowhere:{tmp_path}/./state"})


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_shared_folder_that_others_may_write_is_an_error(mode: int, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(mode)
    words = f"written by others .mode {mode:04o}., who could take the lease: chmod 0700 {tmp_path}/state"
    with pytest.raises(SiteError, match=words):
        check_shared_folder(tmp_path / "state", PROCESS, {})


def test_a_shared_folder_must_be_writable_and_keeps_nothing_of_the_check(tmp_path: Path) -> None:
    with pytest.raises(LeaseError, match="can't write in /proc: "):
        check_shared_folder(Path("/proc"), PROCESS, {})
    tmp_path.chmod(0o700)
    assert check_shared_folder(tmp_path, PROCESS, {}) == tmp_path
    assert list(tmp_path.iterdir()) == []
