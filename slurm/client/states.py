"""All node and job states of Slurm 24.11 to 26.05: base states, flags, and the spellings that Slurm uses.

Slurm spells one state in three ways: the data parser (`--json`: NOT_RESPONDING, INVALID_REG), the command line
(`scontrol show node`: `IDLE+DRAIN+NOT_RESPONDING`, `DOWN*`), and sinfo's short forms (`maint`, `inval`). This module
reads all of them. An unknown word becomes UNRECOGNISED, and the word itself is kept: a newer Slurm must never stop a
recovery.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, unique


@unique
class NodeState(Enum):
    """Base states (the first eight), then flags, with the names that `scontrol show node --json` prints."""

    UNKNOWN = "UNKNOWN"
    DOWN = "DOWN"
    IDLE = "IDLE"
    ALLOCATED = "ALLOCATED"
    ERROR = "ERROR"
    MIXED = "MIXED"
    FUTURE = "FUTURE"
    INVALID = "INVALID"

    BLOCKED = "BLOCKED"
    CLOUD = "CLOUD"
    COMPLETING = "COMPLETING"
    DRAIN = "DRAIN"
    DYNAMIC_FUTURE = "DYNAMIC_FUTURE"
    DYNAMIC_NORM = "DYNAMIC_NORM"
    EXTERNAL = "EXTERNAL"
    FAIL = "FAIL"
    INVALID_REG = "INVALID_REG"
    MAINTENANCE = "MAINTENANCE"
    NOT_RESPONDING = "NOT_RESPONDING"
    PLANNED = "PLANNED"
    POWER_DOWN = "POWER_DOWN"
    POWER_DOWN_ASAP = "POWER_DOWN_ASAP"
    POWER_DOWN_FORCE = "POWER_DOWN_FORCE"
    POWER_DRAIN = "POWER_DRAIN"
    POWER_UP = "POWER_UP"
    POWERED_DOWN = "POWERED_DOWN"
    POWERING_DOWN = "POWERING_DOWN"
    POWERING_UP = "POWERING_UP"
    REBOOT_CANCELED = "REBOOT_CANCELED"
    REBOOT_ISSUED = "REBOOT_ISSUED"
    REBOOT_REQUESTED = "REBOOT_REQUESTED"
    RESERVED = "RESERVED"
    RESUME = "RESUME"
    UNDRAIN = "UNDRAIN"

    UNRECOGNISED = "UNRECOGNISED"


@unique
class JobState(Enum):
    """Base states of a job, with the names that `squeue --json` prints."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"

    UNRECOGNISED = "UNRECOGNISED"

    @property
    def ended(self) -> bool:
        """Whether the job has ended. An unrecognised state does not count as an end."""
        return self not in _LIVE

    @property
    def holds_nodes(self) -> bool:
        """Whether the nodes that Slurm shows for a job in this state are the job's now."""
        return self in _HOLDS_NODES


_LIVE = frozenset({JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED, JobState.UNRECOGNISED})
_HOLDS_NODES = frozenset({JobState.RUNNING, JobState.SUSPENDED})


@unique
class JobFlag(Enum):
    """The flags that Slurm shows beside a job's base state."""

    COMPLETING = "COMPLETING"
    CONFIGURING = "CONFIGURING"
    EXPEDITING = "EXPEDITING"
    GETENV_FAILED = "GETENV_FAILED"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    POWER_UP_NODE = "POWER_UP_NODE"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESIZING = "RESIZING"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    REVOKED = "REVOKED"
    SIGNALING = "SIGNALING"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    STAGE_OUT = "STAGE_OUT"
    STOPPED = "STOPPED"

    UNRECOGNISED = "UNRECOGNISED"


_NODE_SPELLINGS = {
    "ALLOC": NodeState.ALLOCATED,
    "COMP": NodeState.COMPLETING,
    "DRAINED": NodeState.DRAIN,
    "DRAINING": NodeState.DRAIN,
    "DYNAMIC": NodeState.DYNAMIC_NORM,
    "FAILING": NodeState.FAIL,
    "INVAL": NodeState.INVALID_REG,
    "MAINT": NodeState.MAINTENANCE,
    "MIX": NodeState.MIXED,
    "NO_RESPOND": NodeState.NOT_RESPONDING,
    "PLND": NodeState.PLANNED,
    "REBOOT": NodeState.REBOOT_REQUESTED,
    "REBOOT_CANCEL": NodeState.REBOOT_CANCELED,
    "REBOOT^": NodeState.REBOOT_ISSUED,
    "RES": NodeState.RESERVED,
    "RESV": NodeState.RESERVED,
    "UNK": NodeState.UNKNOWN,
}

_NODE_SUFFIXES = {
    "*": NodeState.NOT_RESPONDING,
    "~": NodeState.POWERED_DOWN,
    "#": NodeState.POWERING_UP,
    "!": NodeState.POWER_DOWN,
    "%": NodeState.POWERING_DOWN,
    "$": NodeState.MAINTENANCE,
    "@": NodeState.REBOOT_REQUESTED,
    "^": NodeState.REBOOT_ISSUED,
    "-": NodeState.PLANNED,
}
"""sinfo's one-character suffixes, from its manual page."""

_JOB_FLAG_SPELLINGS = {
    "REQUEUE": JobFlag.REQUEUED,
    "SIGNALLING": JobFlag.SIGNALING,
}

_NODE_WORDS = {state.value: state for state in NodeState} | _NODE_SPELLINGS
_JOB_WORDS = {state.value: state for state in JobState} | {"CANCELED": JobState.CANCELLED}
_FLAG_WORDS = {flag.value: flag for flag in JobFlag} | _JOB_FLAG_SPELLINGS


def node_states(words: Iterable[str]) -> tuple[frozenset[NodeState], tuple[str, ...]]:
    """Reads state words (`["IDLE", "DRAIN"]`, `["IDLE+DRAIN"]`, `["down*"]`).

    Returns the states and the unknown words.
    """
    states: set[NodeState] = set()
    strange: list[str] = []
    for word in (part for text in words for part in text.split("+") if part):
        found = _node_word(word.upper())
        states |= found or {NodeState.UNRECOGNISED}
        if not found:
            strange.append(word)
    return frozenset(states), tuple(strange)


def _node_word(word: str) -> set[NodeState]:
    if word in _NODE_WORDS:
        return {_NODE_WORDS[word]}
    stem, suffix = word[:-1], _NODE_SUFFIXES.get(word[-1])
    return {_NODE_WORDS[stem], suffix} if suffix and stem in _NODE_WORDS else set()


def job_states(words: Iterable[str]) -> tuple[JobState, frozenset[JobFlag], tuple[str, ...]]:
    """Reads state words (`["RUNNING", "COMPLETING"]`).

    Returns the base state, the flags, and the unknown words. If there is no base state, the state is UNRECOGNISED: the
    job counts neither as running nor as ended.
    """
    base = JobState.UNRECOGNISED
    flags: set[JobFlag] = set()
    strange: list[str] = []
    for word in (part for text in words for part in text.split("+") if part):
        key = word.upper()
        if key in _JOB_WORDS:
            base = _JOB_WORDS[key]
        elif key in _FLAG_WORDS:
            flags.add(_FLAG_WORDS[key])
        else:
            flags.add(JobFlag.UNRECOGNISED)
            strange.append(word)
    return base, frozenset(flags), tuple(strange)
