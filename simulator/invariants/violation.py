"""The exception for a violated invariant."""

from __future__ import annotations


class InvariantViolation(Exception):
    """An invariant was violated."""


def require(holds: object, message: str) -> None:
    """Check a condition. `message` says how the invariant is violated if the condition does not hold.

    Raises:
        InvariantViolation: the condition does not hold.
    """
    if not holds:
        raise InvariantViolation(message)
