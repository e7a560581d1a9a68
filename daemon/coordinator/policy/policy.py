"""The table from hardware signals to verdicts, the limits on what follows from them, and the shared pool: policy.toml,
with a site's own file merged over it.

    policy = Policy.load(Path("/etc/muster/policy.toml"))
    policy.judge("xid", 79)        # Judgement("unfit", "Xid 79: GPU has fallen off the bus")
    policy.limits.nodes_per_hour   # 20

The files are checked when they are read; `judge` knows an answer for every signal and never fails.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from muster.daemon.coordinator.core.state.limits import Limits, Pool

Verdict = Literal["unfit", "echo", "degraded", "rank", "ignore"]

_Words = Annotated[str, StringConstraints(min_length=1, max_length=80, pattern=r"^[^\"\\\n]+$")]


class PolicyError(Exception):
    """The site's fault: a policy file can't be read or can't be meant; says where and what would be right."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a signal comes to. `reason` is fit for a Slurm drain reason: "Xid 79: GPU has fallen off the bus"."""

    verdict: Verdict
    reason: str


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    verdict: Verdict
    reason: _Words


class _Kind(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    title: _Words
    default: _Row
    codes: dict[Annotated[int, Field(ge=0)], _Row] = {}


class _Limits(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes_per_hour: Annotated[int, Field(ge=0)]
    fraction: Annotated[float, Field(ge=0, le=1)]
    nodes_at_least: Annotated[int, Field(ge=0)]
    swaps_per_hour: Annotated[int, Field(ge=0)]
    observe: bool


class _Pool(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    partition: str
    reservation: str
    constraint: str
    wait_s: Annotated[float, Field(ge=0)]

    def terms(self) -> Pool:
        named = {"partition": self.partition, "reservation": self.reservation, "constraint": self.constraint}
        return Pool(tuple(f"--{key}={value}" for key, value in named.items() if value), self.wait_s)


_LIMITS, _POOL = "limits", "pool"
_LimitsTable = TypeAdapter(_Limits)
_PoolTable = TypeAdapter(_Pool)
_Table = TypeAdapter(dict[str, _Kind])
T = TypeVar("T")


class Policy:
    """A checked table. Kinds of signals are fixed by those of the shipped file: a sensor must exist for each."""

    def __init__(self, kinds: Mapping[str, _Kind], limits: Limits) -> None:
        self._kinds = kinds
        self.limits = limits

    @classmethod
    def load(cls, override: Path | None = None) -> Policy:
        """The shipped table, with the file `override` merged over it.

        Raises:
            PolicyError: `override` can't be read, or has a key or value that can't be meant.
        """
        shipped = tomllib.loads(files("muster.daemon.coordinator.policy").joinpath("policy.toml").read_text())
        if override is None:
            return cls._of(shipped, "policy.toml")
        own = _read(override)
        if unknown := sorted(set(own) - set(shipped)):
            raise PolicyError(f"{override}: unknown kind of signal {unknown[0]!r}{_instead(unknown[0], list(shipped))}")
        return cls._of(_merged(shipped, own, where=str(override)), str(override))

    @classmethod
    def _of(cls, table: dict[str, Any], where: str) -> Policy:
        kinds: dict[str, _Kind] = _checked(
            _Table, {name: rows for name, rows in table.items() if name not in (_LIMITS, _POOL)}, where
        )
        limits = _checked(_LimitsTable, table[_LIMITS], where, _LIMITS)
        pool = _checked(_PoolTable, table[_POOL], where, _POOL)
        return cls(kinds, Limits(**limits.model_dump(), pool=pool.terms()))

    def judge(self, kind: str, code: int) -> Judgement:
        """What the signal comes to. A kind that is not known here (a newer node daemon's) is ignored."""
        known = self._kinds.get(kind)
        if known is None:
            return Judgement("ignore", f"{kind} {code}: a kind of signal that this policy does not know")
        row = known.codes.get(code, known.default)
        number = f" {code}" if code or known.codes else ""
        return Judgement(row.verdict, f"{known.title}{number}: {row.reason}")

    def codes(self, kind: str) -> frozenset[int]:
        """The codes of a kind that have a row of their own."""
        return frozenset(self._kinds[kind].codes)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise PolicyError(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path} is not TOML: {error}") from None


def _merged(shipped: Any, own: Any, where: str) -> Any:
    """`own` over `shipped`, table by table."""
    if not isinstance(shipped, dict):
        return own
    if not isinstance(own, dict):
        raise PolicyError(f"{where} = {own!r}: a table is needed here")
    both = dict(shipped)
    for key, value in own.items():
        both[key] = _merged(shipped[key], value, f"{where}: {key}") if key in shipped else value
    return both


def _checked(shape: TypeAdapter[T], table: Any, where: str, *under: str) -> T:
    try:
        return shape.validate_python(table)
    except ValidationError as error:
        raise PolicyError("\n".join(f"{where}: {_words(fault, under)}" for fault in error.errors())) from None


def _words(fault: Any, under: tuple[str, ...]) -> str:
    *path, last = (*under, *(str(part) for part in fault["loc"] if part != "[key]"))
    at = ".".join([*path, last])
    match fault["type"]:
        case "extra_forbidden":
            tables: dict[str, type[BaseModel]] = {_LIMITS: _Limits, _POOL: _Pool}
            model = tables[under[0]] if under else _Row if len(path) > 1 else _Kind
            return f"unknown key {at}{_instead(last, list(model.model_fields))}"
        case "literal_error":
            return f"{at} = {fault['input']!r}: a verdict is one of {', '.join(get_args(Verdict))}"
        case "int_parsing":
            return f"{at}: a code is a whole number"
        case "missing":
            return f"{at} is missing: a new row needs verdict and reason"
        case "string_pattern_mismatch":
            return f"{at} = {fault['input']!r}: no quotation mark, backslash or line end (it becomes a drain reason)"
        case _:
            return f"{at} = {fault['input']!r}: {fault['msg']}"


def _instead(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f": did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
