"""What a broken law raises."""

from __future__ import annotations


class Violation(Exception):
    """A law was broken."""


def must(holds: object, law: str) -> None:
    """`holds` is what a law asks for; `law` says in words how it was broken.

    Raises:
        Violation: it does not hold.
    """
    if not holds:
        raise Violation(law)
