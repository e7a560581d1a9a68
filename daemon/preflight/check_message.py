"""The result of a node check as a message of the wire. The program of the check does without it: its interpreter is the
job's."""

from __future__ import annotations

from muster.daemon.preflight.check_result import CheckResult, Outcome
from muster.v1.common_pb2 import CheckOutcome, NodeCheck

_OUTCOMES = {
    Outcome.PASSED: CheckOutcome.CHECK_OUTCOME_PASSED,
    Outcome.SLOW: CheckOutcome.CHECK_OUTCOME_SLOW,
    Outcome.WRONG: CheckOutcome.CHECK_OUTCOME_WRONG,
    Outcome.FAILED: CheckOutcome.CHECK_OUTCOME_FAILED,
    Outcome.SILENT: CheckOutcome.CHECK_OUTCOME_SILENT,
}


def as_message(result: CheckResult) -> NodeCheck:
    """The result as it goes over the wire."""
    return NodeCheck(
        outcome=_OUTCOMES[result.outcome],
        reason=result.reason,
        hardware=result.hardware,
        gflops=result.gflops,
        memory_gb_s=result.memory_gb_s,
        host_to_device_gb_s=result.host_to_device_gb_s,
        cores_shared=result.cores_shared,
        counters=result.counters,
    )
