"""Who may do what."""

import pytest

from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.identity import Caller

ROOT, SLURM, OPERATOR, OWNER, OTHER, COORDINATOR = 0, 64030, 500, 1001, 1002, 64030
RIGHTS = Rights(frozenset({SLURM, OPERATOR}), own_uid=COORDINATOR)


def _from(uid: int, address: str = "10.0.0.1") -> Caller:
    return Caller(uid, uid, address)


@pytest.mark.parametrize(
    ("uid", "own", "operator"),
    [(ROOT, True, True), (SLURM, True, True), (OPERATOR, True, True), (OWNER, True, False), (OTHER, False, False)],
)
def test_owners_have_their_gangs_and_operators_all(uid: int, own: bool, operator: bool) -> None:
    assert RIGHTS.may_read(_from(uid), OWNER) is own
    assert RIGHTS.may_steer(_from(uid), OWNER) is own
    assert RIGHTS.is_operator(_from(uid)) is operator


@pytest.mark.parametrize(("uid", "may"), [(OWNER, True), (OTHER, False), (ROOT, False), (OPERATOR, False)])
def test_a_gang_is_registered_and_run_by_its_owner_alone(uid: int, may: bool) -> None:
    assert RIGHTS.may_register(_from(uid), OWNER) is may
    assert RIGHTS.is_agent(_from(uid), OWNER) is may


def test_an_agent_may_call_from_any_interface_of_its_node() -> None:
    assert RIGHTS.is_agent(_from(OWNER, "192.0.2.7"), OWNER)


@pytest.mark.parametrize(
    ("uid", "address", "may"),
    [(ROOT, "10.0.0.1", True), (ROOT, "10.0.0.2", False), (OWNER, "10.0.0.1", False), (OPERATOR, "10.0.0.1", False)],
)
def test_a_node_daemon_is_root_calling_from_its_node(uid: int, address: str, may: bool) -> None:
    assert RIGHTS.is_node_daemon(_from(uid, address), {"10.0.0.1", "fd00::1"}) is may


def test_on_one_machine_the_coordinators_user_is_everybody() -> None:
    local = Rights(frozenset(), own_uid=OWNER)
    assert local.is_operator(_from(OWNER))
    assert local.is_node_daemon(_from(OWNER, "127.0.0.1"), {"127.0.0.1"})
    assert not local.is_operator(_from(OTHER))
