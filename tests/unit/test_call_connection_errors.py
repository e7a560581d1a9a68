"""What a user reads when a server is not reached. The details are gRPC's own, of real faults."""

import pytest

from muster.daemon.transport.calls.connection_errors import why_unreached

ALL = "failed to connect to all addresses; last error: "


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (
            f"{ALL}UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused",
            "nothing listens at 127.0.0.1:1 (connection refused)",
        ),
        (
            f"{ALL}UNKNOWN: ipv6:%5B::1%5D:1: Failed to connect to remote host: Connection refused",
            "nothing listens at [::1]:1 (connection refused)",
        ),
        (
            "errors resolving ctl.x:7070: [field:hostname lookup error:address lookup failed for ctl.x:7070: "
            "Domain name not found]",
            "this host can't resolve the name",
        ),
        (
            f"{ALL}UNKNOWN: ipv4:127.0.0.1:7999: connection attempt timed out before receiving SETTINGS frame",
            "what listens at 127.0.0.1:7999 accepts connections and says nothing",
        ),
        (
            f"{ALL}UNAVAILABLE: ipv4:127.0.0.1:7998: Socket closed",
            "what listens at 127.0.0.1:7998 closes each connection",
        ),
        (f"{ALL}UNKNOWN: a fault of a later gRPC", "UNKNOWN: a fault of a later gRPC"),
        ("Deadline Exceeded", "no answer came in time"),
        ("the journal is on a full disk: Connection refused", "the journal is on a full disk: Connection refused"),
    ],
)
def test_a_server_that_is_not_reached_is_told_in_plain_words(details: str, words: str) -> None:
    assert why_unreached(details) == words
