"""What a broken law raises."""

from __future__ import annotations


class InvariantViolation(Exception):
    """A law was broken."""


def require(holds: object, message: str) -> None:
    """`holds` is what a law asks for; law says in words how it was broken.

    Raises:
        InvariantViolation: it does not hold.
    """
    if not holds:
        raise InvariantViolation(message)
