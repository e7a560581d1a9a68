"""Inputs near the kept corpus, chosen by hypothesis. The same seed gives the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

TOKENS = (
    b"\x00", b"\n", b"\\n", b"\\", b'"', b"'", b"[", b"]", b"{", b"}", b",", b"=", b".", b"-", b"%", b"\x7f",
    b"\xc2\xb2", b"\xff",
    b"0", b"-1", b"1e999", b"9" * 12, b"9" * 4400, b"0x" + b"f" * 4000, b"null", b"[null]", b"{}", b"NaN", b"\\u0000",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"[0-9999999]", b"\\x0", b"\xe2\x80\xa8",
)  # fmt: skip
"""Pieces of text that parsers stumble over."""
MOST_COPIES = 2_000
"""How often a piece is repeated: more than Python nests calls."""

Change = tuple[str, int, int, bytes, int]
"""Kind, position and length in the input (modulo its size), bytes, copies."""

_changes = st.tuples(
    st.sampled_from(("insert", "replace", "delete", "repeat", "flip", "splice")),
    st.integers(0, 1 << 16),
    st.integers(1, 48),
    st.sampled_from(TOKENS) | st.binary(min_size=1, max_size=8),
    st.sampled_from((2, 20, MOST_COPIES)),
)


def changed(data: bytes, other: bytes, changes: Sequence[Change]) -> bytes:
    """`data` after `changes`. `other` is a second input, parts of which are spliced in."""
    for kind, position, length, text, copies in changes:
        at = position % (len(data) + 1)
        before, part, after = data[:at], data[at : at + length], data[at + length :]
        match kind:
            case "insert":
                data = before + text + part + after
            case "replace":
                data = before + text + after
            case "delete":
                data = before + after
            case "repeat":
                data = before + (part or text)[: 65536 // copies] * copies + after
            case "flip":
                data = before + bytes([*part[:1]]).translate(_FLIPPED) + part[1:] + after
            case "splice":
                start = position % (len(other) + 1)
                data = before + other[start : start + 4 * length] + after
    return data


_FLIPPED = bytes(byte ^ 1 << byte % 8 for byte in range(256))


def run(check: Callable[[bytes], None], corpus: Sequence[bytes], count: int, number: int = 1) -> None:
    """Calls `check` with each input of `corpus`, then with `count` inputs near it. Raises what `check` raises.

    `number` seeds the choice.
    """
    for data in corpus:
        check(data)
    if not count:
        return
    kept = st.sampled_from(list(corpus))

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(kept, kept, st.lists(_changes, min_size=1, max_size=4))
    def search(data: bytes, other: bytes, changes: list[Change]) -> None:
        check(changed(data, other, changes))

    search()
