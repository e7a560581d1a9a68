"""What is more than a cell of the authority table: where a caller is, and what a server refuses to a uid.

The cells are tried on real servers: test_authority.
"""

import pytest

from muster.daemon.transport.authority_table import AUTHORITY, Answer, CallerKind
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.identity import Caller

ROOT, SLURM, OPERATOR, OWNER, OTHER, COORDINATOR = 0, 64030, 500, 1001, 1002, 64030
RIGHTS = Rights(frozenset({SLURM, OPERATOR}), own_uid=COORDINATOR)
DESCRIBE, DRAIN = "/muster.v1.Muster/Describe", "/muster.v1.Muster/Drain"
AGENT_ATTACH, NODE_ATTACH = "/muster.v1.AgentService/Attach", "/muster.v1.NodeService/Attach"


def _from(uid: int, address: str = "10.0.0.1") -> Caller:
    return Caller(uid, uid, address)


def test_an_agent_may_call_from_any_interface_of_its_node() -> None:
    assert RIGHTS.allows(AGENT_ATTACH, _from(OWNER, "192.0.2.7"), owner_uid=OWNER)


@pytest.mark.parametrize(
    ("uid", "address", "may"),
    [(ROOT, "10.0.0.1", True), (ROOT, "10.0.0.2", False), (OWNER, "10.0.0.1", False), (OPERATOR, "10.0.0.1", False)],
)
def test_a_node_daemon_is_root_calling_from_its_node(uid: int, address: str, may: bool) -> None:
    assert RIGHTS.allows(NODE_ATTACH, _from(uid, address), node_addresses={"10.0.0.1", "fd00::1"}) is may


def test_on_one_machine_the_coordinators_user_is_everybody() -> None:
    local = Rights(frozenset(), own_uid=OWNER)
    assert local.allows(DESCRIBE, _from(OWNER), owner_uid=OTHER)
    assert local.allows(NODE_ATTACH, _from(OWNER, "127.0.0.1"), node_addresses={"127.0.0.1"})
    assert not local.allows(DESCRIBE, _from(OTHER), owner_uid=OWNER)


@pytest.mark.parametrize(
    ("method", "uid", "refused"),
    [
        (DESCRIBE, OTHER, ""),  # of which job the call is, the message says
        (NODE_ATTACH, ROOT, ""),
        (NODE_ATTACH, COORDINATOR, ""),
        (NODE_ATTACH, OWNER, f"only root of a node may report its health: uid {OWNER} is not root"),
        (NODE_ATTACH, OPERATOR, f"only root of a node may report its health: uid {OPERATOR} is not root"),
        (DRAIN, OPERATOR, ""),
        (
            DRAIN,
            OWNER,
            "only root, SlurmUser and the operators in the coordinator's muster.toml may drain nodes: "
            f"uid {OWNER} is none of them",
        ),
        ("/muster.v1.Muster/Format", ROOT, "uid 0 may not call /muster.v1.Muster/Format here"),
    ],
)
def test_a_server_refuses_a_uid_that_can_never_call_a_method(method: str, uid: int, refused: str) -> None:
    assert RIGHTS.refusal(method, uid) == refused


@pytest.mark.parametrize("method", AUTHORITY)
def test_a_refusal_speaks_of_what_the_caller_wanted_and_not_of_methods(method: str) -> None:
    assert all(method not in RIGHTS.refusal(method, uid) for uid in (ROOT, SLURM, OPERATOR, OWNER, OTHER))


def test_an_account_coordinator_is_another_user() -> None:
    assert all(row[CallerKind.ACCOUNT_COORDINATOR] is row[CallerKind.OTHER_USER] for row in AUTHORITY.values())


def test_a_user_is_never_less_than_one_without_a_credential() -> None:
    for row in AUTHORITY.values():
        assert row[CallerKind.ANONYMOUS] in (Answer.UNPROVED, Answer.ALLOWED)
        assert row[CallerKind.ANONYMOUS] is Answer.UNPROVED or set(row.values()) == {Answer.ALLOWED}
