"""The result of a node check, as the program prints it and as others use it."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from enum import StrEnum

MAX_TEXT = 500
"""Characters of `hardware` and of `reason`."""


class Outcome(StrEnum):
    """What a node check has found."""

    PASSED = "passed"
    SLOW = "slow"  # all results are right; a rate is far below what the vendor publishes for this GPU
    WRONG = "wrong"  # the matrix product differs from the known one
    FAILED = "failed"  # a part of the check has failed, for example CUDA can't be used
    SILENT = "silent"  # the check did not end within its deadline


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check.

    `reason`: what is wrong, or what was not checked, in words. `hardware`: the inventory in one line. Rates are 0 if
    they were not measured: `gflops` of a matrix product (TF32 on a GPU, float32 else), `memory_gb_s` of a copy (bytes
    read and written), `host_to_device_gb_s`. Of several GPUs, the slowest one counts. `cores_shared`: other processes
    wanted the same cores, so the rates say nothing about the node. `counters`: the error counters of the GPUs before
    and after the check, in words; the caller of the check notes them.
    """

    outcome: Outcome
    reason: str = ""
    hardware: str = ""
    gflops: float = 0.0
    memory_gb_s: float = 0.0
    host_to_device_gb_s: float = 0.0
    cores_shared: bool = False
    counters: str = ""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(line: str) -> CheckResult:
        """The inverse of `to_json`. The line comes from a process of the user.

        Raises:
            ValueError: the line is not a result.
        """
        try:
            fields = json.loads(line)
            return CheckResult(
                Outcome(fields["outcome"]),
                str(fields["reason"])[:MAX_TEXT],
                str(fields["hardware"])[:MAX_TEXT],
                _rate(fields["gflops"]),
                _rate(fields["memory_gb_s"]),
                _rate(fields["host_to_device_gb_s"]),
                bool(fields["cores_shared"]),
                str(fields.get("counters", ""))[:MAX_TEXT],
            )
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not the result of a node check: {error!r}") from None


def _rate(value: float) -> float:
    rate = float(value)
    if not math.isfinite(rate) or rate < 0:
        raise ValueError(f"{value} is no rate")
    return rate
