"""What the calls of one kind may hold at one server. `muster.daemon.transport.server_limits` has the figures."""

from __future__ import annotations

from dataclasses import dataclass

FREE_BYTES = 4096
"""Bytes of each message that do not count in `CallShare.held_bytes`."""


@dataclass(frozen=True, slots=True)
class CallShare:
    """What a kind of calls may hold at one server.

    Args:
        name: for a reader.
        calls: calls at the same time, of all users; streams count while they are open.
        user_calls: those of one user. A call counts until it ends, but not while its service has admitted it
            (`call_places.admitted_call`).
        admitted_calls: those that one whom the service has admitted has under way, instead.
        reading: calls of one user that wait for their first messages at the same time. Each may hold a message of the
            largest size. Of a further one no more than `ServerLimits.unread_bytes` is taken.
        all_reading: the same, of all users.
        first_messages: messages that are read so; 0: all. Between later ones a call may be silent.
        first_message_bytes: the largest first message of a call, beyond which it is not parsed. 0: that of the server.
        held_bytes: bytes of these messages that the calls of one user hold, until they end or are admitted. A message
            is always allowed if it is the only one; `FREE_BYTES` of each count nothing. 0: as many as the calls.
        reading_wait_s: seconds in which a call must get such a place. To be refused is an answer to a probe. A probe
            lasts 0.4 s at least, so it waits less.
        first_message_s: seconds in which each of these messages must then come.
        unread_s: seconds in which an answer must find room at the client.
        unread_answer_bytes: answers that one user leaves unread at the same time. 0: as many as the calls.
    """

    name: str
    calls: int
    user_calls: int
    reading: int
    all_reading: int
    first_messages: int = 1
    first_message_bytes: int = 0
    held_bytes: int = 0
    admitted_calls: int = 8
    reading_wait_s: float = 5.0
    first_message_s: float = 5.0
    unread_s: float = 60.0
    unread_answer_bytes: int = 0
