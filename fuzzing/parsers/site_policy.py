"""A site's policy.toml and muster.toml. Both are refused in words, or hold only values that their readers allow."""

import os
import tempfile
from pathlib import Path
from typing import get_args

from muster.daemon.coordinator.policy.policy import Policy, PolicyError, SignalAction
from muster.daemon.transport.site_config import Site, SiteError, split_address, split_addresses

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-policy-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
_FILE = Path(_FOLDER.name) / "policy.toml"
_ACTIONS = get_args(SignalAction)
Policy.load()  # a process reads the shipped table once: that is no work for the site's file


def check(data: bytes) -> None:
    """`data` as both files."""
    _FILE.write_bytes(data)
    _check_policy(len(data))
    _check_site(len(data))


def _check_policy(size: int) -> None:
    try:
        policy = Policy.load(_FILE)
    except PolicyError as error:
        assert str(_FILE) in str(error)
        assert len(str(error)) <= 5_000 + 200 * size
        return
    for kind, code in (("xid", 79), ("sxid", 20034), ("gpu-lost", 0), ("unheard-of", 1)):
        decision = policy.decide(kind, code)
        assert decision.action in _ACTIONS
        assert "\n" not in decision.reason
    assert repr(policy.limits)  # a number of thousands of digits can't be shown
    assert 0 <= policy.limits.fraction <= 1
    assert all(option.startswith("--") for option in policy.limits.pool.options)


def _check_site(size: int) -> None:
    try:
        site = Site.load(config=_FILE, environ={})
    except SiteError as error:
        assert len(str(error)) <= 5_000 + 200 * size
        return
    assert site.coordinator.isprintable()
    assert site.agent_ports is None or 1024 <= site.agent_ports.first < site.agent_ports.last <= 65535
    for address in split_addresses(site.coordinator):
        assert 0 <= split_address(address)[1] <= 65535
