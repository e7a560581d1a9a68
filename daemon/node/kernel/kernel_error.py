"""An error of which a message of the kernel tells, and how its text is written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelError:
    """One error in one message.

    `kind`, `code`: those of the coordinator's policy.toml. `device`: the PCI address as printed, in lower case, or the
    name of a disk, a network interface, a CPU or a memory controller; empty if the message has none. `text`: the
    message in one line, its control characters escaped.
    """

    kind: str
    code: int
    device: str
    text: str


def one_line(message: str) -> str:
    """`message` with its control characters escaped as the kernel escapes them."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in message)
