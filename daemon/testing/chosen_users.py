"""Credentials of any uid, for tests that need several users on one machine.

The tokens are random and valid in this process only: nobody outside it can make one.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from muster.daemon.transport.identity import CredentialRefused, Proof


@dataclass(frozen=True, slots=True)
class ChosenUser:
    """The credentials of a process of `uid`. `issued`: all unused tokens of all users, with uid and payload."""

    uid: int
    issued: dict[str, tuple[int, str]] = field(default_factory=dict, repr=False)

    def as_uid(self, uid: int) -> ChosenUser:
        """The credentials of another user, which this user's processes accept."""
        return ChosenUser(uid, self.issued)

    def issue(self, payload: str) -> str:
        """See muster.daemon.transport.identity.Credentials.issue."""
        token = secrets.token_hex(16)
        self.issued[token] = (self.uid, payload)
        return token

    def check(self, token: str) -> Proof:
        """See muster.daemon.transport.identity.Credentials.check."""
        if token not in self.issued:
            raise CredentialRefused("the credential is refused: it was not made here, or has been used before")
        uid, payload = self.issued.pop(token)
        return Proof(uid, uid, payload)
