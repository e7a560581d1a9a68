"""Credentials of any uid, for tests that need several users on one machine.

The tokens are random and valid in this process only: nobody outside it can make one.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from muster.daemon.transport.identity import CredentialRefused


@dataclass(frozen=True, slots=True)
class ChosenUser:
    """The credentials of a process of `uid`. `issued`: all unused tokens of all users, with uid and method."""

    uid: int
    issued: dict[str, tuple[int, str]] = field(default_factory=dict, repr=False)

    def as_uid(self, uid: int) -> ChosenUser:
        """The credentials of another user, which this user's processes accept."""
        return ChosenUser(uid, self.issued)

    def issue(self, method: str) -> str:
        """See muster.daemon.transport.identity.Credentials.issue."""
        token = secrets.token_hex(16)
        self.issued[token] = (self.uid, method)
        return token

    def check(self, token: str, method: str) -> tuple[int, int]:
        """See muster.daemon.transport.identity.Credentials.check."""
        uid, made_for = self.issued.pop(token, (0, ""))
        if made_for != method:
            raise CredentialRefused(f"the credential is refused: it was not made for {method}, or is used up")
        return uid, uid
