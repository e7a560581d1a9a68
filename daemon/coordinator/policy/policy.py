"""The site's policy: which action follows a hardware signal, the circuit breaker's limits, the shared pool,
losses, and hooks.

The policy is the shipped policy.toml with a site's own file merged over it.

    policy = Policy.load(Path("/etc/muster/policy.toml"))
    policy.decide("xid", 79)       # SignalDecision("unfit", "Xid 79: GPU has fallen off the bus")
    policy.limits.nodes_per_hour   # 20

Both files are checked when they are read. `decide` has an answer for every signal and never fails.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from muster.daemon.coordinator.core.losses.loss_rule import LossResponse, LossRule
from muster.daemon.coordinator.core.state.limits import Limits, Pool, StragglerRule
from muster.daemon.coordinator.core.state.state_tables import Response
from muster.daemon.coordinator.policy.hooks import OCCASIONS, Hook, HooksTable, HookTable
from muster.daemon.host import toml_text
from muster.daemon.transport.job_limits import LOSS_BOUNDS

SignalAction = Literal["unfit", "unfit_unless_explained", "degraded", "rank", "ignore"]
"""What Muster does about a hardware signal; policy.toml explains each value."""

Over = Literal["over"]
"""The action of a report that a signal which lasted is over. No row has it."""

OVER = "-over"
"""The end of a kind's name in a report that a signal which lasted is over."""

_ReasonText = Annotated[str, StringConstraints(min_length=1, max_length=80, pattern=r"^[^\"\\\n]+$")]


SITE_POLICY = Path("/etc/muster/policy.toml")
"""A site's own file. The coordinator reads it if it exists."""


class PolicyError(Exception):
    """The site's fault: a policy file can't be read, or a key or value is wrong. Says what would be right.

    `mistakes`: each mistake in one line.
    """

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


@dataclass(frozen=True, slots=True)
class SignalDecision:
    """The action that follows a signal. `reason` can be a Slurm drain reason: "Xid 79: GPU has fallen off the bus".
    `response`: with "degraded", what follows. `by_program`: the signal is an error of a program."""

    action: SignalAction | Over
    reason: str
    response: Response = Response.RECORD
    by_program: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """The row that decides about a signal. `key`: its place in the file, "xid.codes.79" or "xid.default".
    `site_keys`: what of it the site's file sets."""

    key: str
    decision: SignalDecision
    source: str
    when: SignalRule | None
    site_keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A value of the site's file. `shipped`: the value that it replaces; None: the shipped table has no such key."""

    key: str
    shipped: Any
    site: Any


@dataclass(frozen=True, slots=True)
class SignalRule:
    """When a condition that the node daemon samples becomes the signal `kind` with `code`, and when that is over.

    `count` is not 0: it is raised when so many lines of the kernel log have come within `window_s` seconds, and again
    only after `clear_s` seconds without one. Otherwise it is raised when the condition held for `share` (0 to 1) of the
    last `window_s` seconds; share 0: at once. It is over when the condition held for no more than `clear_share` of the
    last `clear_s` seconds.
    """

    kind: str
    code: int
    share: float
    window_s: float
    clear_share: float
    clear_s: float
    count: int = 0


_LONGEST_SAMPLED_S = 3600
"""Seconds of the longest window for a condition that is sampled each second."""


@dataclass(frozen=True, slots=True)
class UnfitSignals:
    """The signals of `kind` that are unfit: those with `codes`, or (`all_but`) those with any other code."""

    kind: str
    codes: tuple[int, ...]
    all_but: bool


class _Condition(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    share: Annotated[float, Field(ge=0, le=1)] | None = None
    count: Annotated[int, Field(ge=1, le=10_000)] | None = None
    window_s: Annotated[float, Field(ge=0, le=86400)]
    clear_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    clear_s: Annotated[float, Field(ge=0, le=86400)]

    @model_validator(mode="after")
    def _check_numbers(self) -> _Condition:
        if (self.share is None) == (self.count is None):
            raise ValueError("a condition needs either share or count, beside window_s and clear_s")
        if self.clear_share > (self.share or 0):
            raise ValueError("clear_share must not exceed share: the signal would come and go")
        if self.share is not None and self.window_s > _LONGEST_SAMPLED_S:
            raise ValueError(f"window_s must not exceed {_LONGEST_SAMPLED_S} for a share: the samples are kept")
        return self

    def rule(self, kind: str, code: int) -> SignalRule:
        """The rule for a signal whose row has this condition."""
        return SignalRule(
            kind, code, self.share or 0.0, self.window_s, self.clear_share, self.clear_s, self.count or 0
        )  # fmt: skip


class _SignalRow(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    action: SignalAction
    reason: _ReasonText
    response: Response = Response.RECORD
    """Of account only with the action degraded."""
    by_program: bool = False
    source: str = ""
    when: _Condition | None = None


def _plain_number(key: Any) -> Any:
    """Two ways to write one code would be two keys, of which one counts."""
    if isinstance(key, str) and key.isascii() and key.isdigit() and key != str(int(key)):
        raise PydanticCustomError("code", "written otherwise")
    return key


class _SignalKind(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    title: _ReasonText
    source: str = ""
    """The source of rows that name none."""
    default: _SignalRow
    codes: dict[Annotated[int, BeforeValidator(_plain_number), Field(ge=0)], _SignalRow] = {}


class _Limits(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    nodes_per_hour: Annotated[int, Field(ge=0)]
    fraction: Annotated[float, Field(ge=0, le=1)]
    nodes_at_least: Annotated[int, Field(ge=0)]
    reported_drains_per_hour_of_job: Annotated[int, Field(ge=0)]
    reported_drains_per_hour_of_user: Annotated[int, Field(ge=0)]
    swaps_per_hour: Annotated[int, Field(ge=0)]
    gangs_per_user: Annotated[int, Field(ge=0)]
    spec_mib_per_user: Annotated[int, Field(ge=0)]
    journal_mib_per_job: Annotated[float, Field(gt=0)]
    journal_mib_per_user: Annotated[float, Field(gt=0)]
    lemon_after: Annotated[int, Field(ge=0)]
    node_mtbf_hours: Annotated[float, Field(ge=0, le=1e7)]
    resume_after_check: bool
    observe: bool


class Comments(BaseModel):
    """[comments]: which of Muster's lines Slurm shows of a job."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    comment: bool = True
    admin_comment: bool = True


class _Goodput(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    kept_days: Annotated[float, Field(ge=1, le=36_500)]


def _within(name: str) -> Any:
    least, most = LOSS_BOUNDS[name]
    return Field(ge=least, le=most, strict=True)


class _Pool(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    partition: str
    reservation: str
    constraint: str
    wait_s: Annotated[float, Field(ge=0)]

    def to_core(self) -> Pool:
        options = {"partition": self.partition, "reservation": self.reservation, "constraint": self.constraint}
        return Pool(tuple(f"--{key}={value}" for key, value in options.items() if value), self.wait_s)


class _Loss(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    not_finite: LossResponse
    spike: LossResponse
    plateau: LossResponse
    deviations: Annotated[float, _within("deviations")]
    in_a_row: Annotated[int, _within("in_a_row")]
    window: Annotated[int, _within("window")]
    plateau_values: Annotated[int, _within("plateau_values")]
    margin_steps: Annotated[int, _within("margin_steps")]
    roll_backs: Annotated[int, _within("roll_backs")]
    within_steps: Annotated[int, _within("within_steps")]

    @model_validator(mode="after")
    def _check_plateau(self) -> _Loss:
        if self.plateau is LossResponse.ROLL_BACK:
            raise ValueError('plateau = "roll_back": record or stop, because a plateau begins at no certain step')
        return self


_LIMITS, _POOL, _HOOKS, _COMMENTS, _LOSS, _GOODPUT = "limits", "pool", "hooks", "comments", "loss", "goodput"
_NO_KINDS = frozenset((_LIMITS, _POOL, _HOOKS, _COMMENTS, _LOSS, _GOODPUT))
"""Tables that are no kind of signal."""
_STRAGGLER = "straggler"
"""The one kind whose signals come from ranks: the core finds them, and no node daemon needs its rule."""
_LIMITS_SCHEMA = TypeAdapter(_Limits)
_POOL_SCHEMA = TypeAdapter(_Pool)
_GOODPUT_SCHEMA = TypeAdapter(_Goodput)
_LOSS_SCHEMA = TypeAdapter(_Loss)
_HOOKS_SCHEMA = TypeAdapter(HooksTable)
_COMMENTS_SCHEMA = TypeAdapter(Comments)
_KINDS_SCHEMA = TypeAdapter(dict[str, _SignalKind])
T = TypeVar("T")


class Policy:
    """A checked policy. The shipped file fixes the kinds of signals, because each kind needs a sensor."""

    def __init__(
        self,
        kinds: Mapping[str, _SignalKind],
        limits: Limits,
        site: Mapping[str, Any] | None = None,
        hooks: Mapping[str, HookTable] | None = None,
        comments: Comments | None = None,
        goodput: _Goodput | None = None,
    ) -> None:
        self._kinds = kinds
        self._site = _flat(site or {})
        self.limits = limits
        self.hooks: list[Hook] = [table.hook(name) for name, table in (hooks or {}).items()]
        self.comments = comments or Comments()
        self.goodput_kept_s = 86400.0 * (goodput.kept_days if goodput else 400)

    @classmethod
    def load(cls, override: Path | None = None) -> Policy:
        """The shipped policy.toml, with the file `override` merged over it.

        Raises:
            PolicyError: `override` can't be read, or some of its keys or values are wrong.
        """
        shipped = _shipped_table()
        if override is None:
            return cls._from_table(shipped, {}, "policy.toml", [])
        site, mistakes = _read(override), list[str]()
        for unknown in sorted(set(site) - set(shipped)):
            mistakes.append(f"{override}: unknown kind of signal {unknown!r}{_suggestion(unknown, list(shipped))}")
            del site[unknown]
        return cls._from_table(_merged(shipped, site, str(override), mistakes), site, str(override), mistakes)

    @classmethod
    def _from_table(cls, table: dict[str, Any], site: dict[str, Any], where: str, mistakes: list[str]) -> Policy:
        rows = {name: rows for name, rows in table.items() if name not in _NO_KINDS}
        kinds = _checked(_KINDS_SCHEMA, rows, where, mistakes)
        limits = _checked(_LIMITS_SCHEMA, table[_LIMITS], where, mistakes, _LIMITS)
        pool = _checked(_POOL_SCHEMA, table[_POOL], where, mistakes, _POOL)
        loss = _checked(_LOSS_SCHEMA, table[_LOSS], where, mistakes, _LOSS)
        hooks = _checked(_HOOKS_SCHEMA, table[_HOOKS], where, mistakes, _HOOKS)
        comments = _checked(_COMMENTS_SCHEMA, table[_COMMENTS], where, mistakes, _COMMENTS)
        goodput = _checked(_GOODPUT_SCHEMA, table[_GOODPUT], where, mistakes, _GOODPUT)
        mistakes += (f"{where}: {words}" for words in _useless_conditions(kinds or {}))
        straggler = _straggler_rule(kinds[_STRAGGLER], where, mistakes) if kinds else None
        if mistakes or kinds is None or limits is None or pool is None or hooks is None or loss is None:
            raise PolicyError(*mistakes)
        rule = LossRule(**loss.model_dump())
        whole = Limits(**limits.model_dump(), pool=pool.to_core(), straggler=straggler, loss=rule)
        return cls(kinds, whole, site, hooks, comments, goodput)

    def decide(self, kind: str, code: int) -> SignalDecision:
        """The action that follows a signal. A kind that this policy lacks (from a newer node daemon) is ignored."""
        if kind.endswith(OVER) and kind.removesuffix(OVER) in self._kinds:
            return SignalDecision("over", f"{self.decide(kind.removesuffix(OVER), code).reason}: over")
        known = self._kinds.get(kind)
        if known is None:
            return SignalDecision("ignore", f"{kind} {code}: a kind of signal that this policy does not know")
        row = known.codes.get(code, known.default)
        number = f" {code}" if code or known.codes else ""
        return SignalDecision(row.action, f"{known.title}{number}: {row.reason}", row.response, row.by_program)

    def row(self, kind: str, code: int) -> Row | None:
        """The row with which `decide` answers; None if this policy does not know the kind."""
        known = self._kinds.get(kind)
        if known is None:
            return None
        row = known.codes.get(code)
        key = f"{kind}.codes.{code}" if row else f"{kind}.default"
        row = row or known.default
        when = row.when.rule(kind, code) if row.when else None
        site_keys = tuple(name.removeprefix(f"{key}.") for name in self._site if name.startswith(f"{key}."))
        return Row(key, self.decide(kind, code), row.source or known.source, when, site_keys)

    def changes(self) -> list[Change]:
        """What the site's file sets, in its order, values equal to the shipped ones included."""
        shipped = _flat(_shipped_table())
        return [Change(key, shipped.get(key), value) for key, value in self._site.items()]

    def free_code(self, kind: str) -> int:
        """A code of the kind without a row of its own."""
        return max(self.codes(kind), default=-1) + 1

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of signals."""
        return tuple(self._kinds)

    def rules(self) -> list[SignalRule]:
        """The rules of all rows whose condition must last."""
        return [
            row.when.rule(kind, code)
            for kind, known in self._kinds.items()
            for code, row in known.codes.items()
            if row.when and kind != _STRAGGLER
        ]

    def unfit_signals(self) -> list[UnfitSignals]:
        """All signals whose action is unfit; none in observe mode."""
        found = []
        for kind, known in self._kinds.items():
            all_but = known.default.action == "unfit"
            codes = tuple(code for code, row in sorted(known.codes.items()) if (row.action == "unfit") != all_but)
            found.append(UnfitSignals(kind, codes, all_but))
        return [] if self.limits.observe else [signals for signals in found if signals.codes or signals.all_but]

    def codes(self, kind: str) -> frozenset[int]:
        """The codes of a kind that have their own row."""
        return frozenset(self._kinds[kind].codes)


def _straggler_rule(kind: _SignalKind, where: str, mistakes: list[str]) -> StragglerRule | None:
    """When a straggler has lasted, and what follows; None if nothing follows. Ranks prove no fault of a node."""
    row = kind.codes.get(0, kind.default)
    if row.action in ("unfit", "unfit_unless_explained"):
        mistakes.append(f"{where}: {_STRAGGLER}.codes.0.action = {row.action!r}: degraded, rank or ignore")
    if row.action != "degraded" or row.when is None or row.when.share is None:
        return None
    return StragglerRule(row.when.share, row.when.window_s, row.response)


@cache
def _shipped_table() -> dict[str, Any]:
    """The shipped policy.toml. Nobody may change it: all callers share it."""
    return tomllib.loads(files("muster.daemon.coordinator.policy").joinpath("policy.toml").read_text())


def _read(path: Path) -> dict[str, Any]:
    try:
        site: dict[str, Any] = _with_present_names(toml_text.loads(path.read_text()))
        return site
    except OSError as error:
        raise PolicyError(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path} is not TOML: {error}") from None


def _with_present_names(table: Any) -> Any:
    """A site's table. Its file may call an action `verdict`, and one action `echo`, as it had to once."""
    if not isinstance(table, dict):
        return table
    present: dict[str, Any] = {key: _with_present_names(value) for key, value in table.items()}
    if "verdict" in present and "action" not in present:
        present["action"] = present.pop("verdict")
    if present.get("action") == "echo":
        present["action"] = "unfit_unless_explained"
    return present


def _sampled_kinds() -> tuple[frozenset[str], frozenset[str]]:
    """The kinds whose conditions a sensor samples; and those that come in no other way.

    What is observed, as a line of the kernel log is, has no share. A few kinds come in both ways.
    """
    tables = _shipped_table().items()
    shares = {
        kind: ["share" in row.get("when", {}) for row in table.get("codes", {}).values()] for kind, table in tables
    }
    sampled = frozenset(kind for kind, rows in shares.items() if any(rows))
    return sampled, frozenset(kind for kind in sampled if all(shares[kind]))


def _useless_conditions(kinds: Mapping[str, _SignalKind]) -> Iterator[str]:
    """Conditions that would have no effect, in words."""
    sampled, only_sampled = _sampled_kinds()
    for kind, known in kinds.items():
        if known.default.when:
            yield f"{kind}.default.when: a condition needs a code: give the code a row of its own"
        for code, row in known.codes.items():
            at = f"{kind}.codes.{code}"
            if kind in only_sampled and row.when is None and row.action != "ignore":
                yield f"{at}.when is missing: a sensor samples {kind}, so a new row needs when"
            elif kind in sampled and row.when and row.when.share is None:
                yield f"{at}.when: a sensor samples {kind}, so the condition needs share, window_s and clear_s"
            elif kind not in sampled and row.when and row.when.count is None:
                yield f"{at}.when: {kind} comes as single messages, so the condition needs count, window_s and clear_s"


def _flat(table: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """Each value of a table and of the tables in it, by its whole key."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{parent}{key}.") if isinstance(value, dict) else {f"{parent}{key}": value}
    return found


def _merged(shipped: Any, site: Any, where: str, mistakes: list[str]) -> Any:
    """`shipped` with the values of `site` in place of its own, table by table. What does not fit is a mistake."""
    if not isinstance(shipped, dict):
        return site
    if not isinstance(site, dict):
        mistakes.append(f"{where} = {site!r}: this key needs a table")
        return shipped
    merged = dict(shipped)
    for key, value in site.items():
        merged[key] = _merged(shipped[key], value, f"{where}: {key}", mistakes) if key in shipped else value
    return merged


def _checked(schema: TypeAdapter[T], table: Any, where: str, mistakes: list[str], *parents: str) -> T | None:
    """The checked table; None, and its mistakes, if it has some."""
    try:
        return schema.validate_python(table)
    except ValidationError as error:
        mistakes += (f"{where}: {_describe(fault, parents)}" for fault in error.errors())
        return None


def _describe(fault: Any, parents: tuple[str, ...]) -> str:
    *path, last = (*parents, *(str(part) for part in fault["loc"] if part != "[key]"))
    at = ".".join([*path, last])
    match fault["type"]:
        case "extra_forbidden":
            tables: dict[str, type[BaseModel]] = {
                _LIMITS: _Limits,
                _POOL: _Pool,
                _HOOKS: HookTable,
                _COMMENTS: Comments,
                _GOODPUT: _Goodput,
                _LOSS: _Loss,
            }
            model = tables[parents[0]] if parents else _Condition if "when" in path else _row_model(path)
            return f"unknown key {at}{_suggestion(last, list(model.model_fields))}"
        case "enum" if parents == (_LOSS,):
            return f"{at} = {fault['input']!r}: a response to a loss is one of {', '.join(LossResponse)}"
        case "enum":
            return f"{at} = {fault['input']!r}: a response is one of {', '.join(Response)}"
        case "literal_error" if parents == (_HOOKS,):
            return f"{at} = {fault['input']!r}: an occasion is one of {', '.join(OCCASIONS)}"
        case "literal_error":
            return f"{at} = {fault['input']!r}: an action is one of {', '.join(get_args(SignalAction))}"
        case "int_parsing" | "code":
            return f"{at}: a code is a whole number, written in digits only, without a zero in front"
        case "missing" if "when" in path:
            return f"{at} is missing: a condition needs share, window_s and clear_s (messages: count in place of share)"
        case "missing" if parents == (_HOOKS,):
            return f"{at} is missing: a hook needs on, and command or url"
        case "missing":
            return f"{at} is missing: a new row needs action and reason"
        case "value_error":
            return f"{at}: {fault['ctx']['error']}"
        case "string_pattern_mismatch":
            return f"{at} = {fault['input']!r}: no quotation mark, backslash or line end (it becomes a drain reason)"
        case _:
            return f"{at} = {fault['input']!r}: {fault['msg']}"


def _row_model(path: list[str]) -> type[BaseModel]:
    return _SignalRow if len(path) > 1 else _SignalKind


def _suggestion(word: str, known: list[str]) -> str:
    close_matches = difflib.get_close_matches(word, known, n=1)
    return f": did you mean {close_matches[0]!r}?" if close_matches else f"; known: {', '.join(known)}"
