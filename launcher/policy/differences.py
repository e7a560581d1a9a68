"""What a site's policy file changes, in words."""

from __future__ import annotations

from collections.abc import Iterator

from muster.daemon.coordinator.policy.policy import Change, Policy
from muster.wording import counted


def differences(policy: Policy, site: str) -> Iterator[str]:
    """A line for the file `site`, and one for each value that it sets."""
    changes = policy.changes()
    different = [change for change in changes if change.shipped != change.site]
    same = len(changes) - len(different)
    words = f"{site}: no mistakes, {_number(len(different), 'difference')} from the shipped table"
    yield words + (f", {_number(same, 'value')} as shipped" if same else "")
    yield from (f"  {_in_words(change)}" for change in different)


def _in_words(change: Change) -> str:
    if change.shipped is None:
        return f"{change.key} = {change.site!r} (new)"
    return f"{change.key} = {change.site!r} (shipped: {change.shipped!r})"


def _number(count: int, noun: str) -> str:
    return counted(count, noun)
