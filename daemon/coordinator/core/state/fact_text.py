"""Facts in words: one line for a person each, for the log and the events API. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import Version

_VERBS: dict[facts.SlurmVerb, str] = {
    "drain": "drain {node}",
    "down": "drain and down {node}",
    "let_go": "let job {job} go of {node}",
    "requeue": "requeue job {job}",
    "admit": "let job {job} start on more nodes",
    "requeue_off": "take the requeue flag off job {job}",
    "complete": "complete job {job} with exit code {exit_code}",
    "cancel": "cancel job {job}",
}


def describe(fact: facts.Fact) -> str:
    """One line that says what `fact` decided, and why."""
    match fact:
        case (
            facts.NodeRegistered()
            | facts.NodeJudged()
            | facts.MemberJoined()
            | facts.MemberOut()
            | facts.EchoHeard()
            | facts.EchoOver()
        ):
            return _of_node(fact)
        case (
            facts.GenerationFenced()
            | facts.StoreMoved()
            | facts.GenerationStarted()
            | facts.FirstStep()
            | facts.HangFound()
        ):
            return _of_generation(fact)
        case facts.SlurmOwed() | facts.SlurmSettled() | facts.Withheld():
            return _of_slurm(fact)
        case facts.Flushing() | facts.Flushed():
            return _of_flush(fact)
        case _:
            return _of_gang(fact)


def version_words(version: Version | None) -> str:
    """ "step 40 (generation 2)"."""
    return f"step {version.step} (generation {version.generation})" if version else "no version"


def call_words(call: facts.SlurmOwed) -> str:
    """What Slurm is asked to do: "drain n3"."""
    return _VERBS[call.verb].format(node=call.node, job=call.job, exit_code=call.exit_code)


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _names(nodes: Iterable[str]) -> str:
    return " ".join(nodes) or "none"


def _of_node(
    fact: facts.NodeRegistered
    | facts.NodeJudged
    | facts.MemberJoined
    | facts.MemberOut
    | facts.EchoHeard
    | facts.EchoOver,
) -> str:
    match fact:
        case facts.EchoHeard():
            return f"node {fact.node} may echo a peer's loss, which is waited for{_because(fact.reason)}"
        case facts.EchoOver():
            what = f"the echo of {fact.peer}'s loss" if fact.peer else "its own: no peer of it is lost"
            return f"what node {fact.node} has signalled is {what}"
        case facts.NodeRegistered():
            return f"node {fact.node}: its daemon registered, at {fact.probe_address}"
        case facts.NodeJudged():
            return f"node {fact.node} is {fact.verdict}{_because(fact.reason)}"
        case facts.MemberJoined():
            leaf, host = (f", leaf {fact.leaf}" if fact.leaf else ""), (", batch host" if fact.batch_host else "")
            return f"{fact.node} joined from job {fact.job}, at {fact.peer_address}{leaf}{host}"
        case facts.MemberOut():
            return f"{fact.node} is out of the gang{_because(fact.reason)}"


def _of_generation(
    fact: facts.GenerationFenced | facts.StoreMoved | facts.GenerationStarted | facts.FirstStep | facts.HangFound,
) -> str:
    match fact:
        case facts.HangFound():
            return f"the stacks of generation {fact.generation} are kept beside its logs{_because(fact.reason)}"
        case facts.GenerationFenced() if fact.generation == 0:
            return f"preflight; {fact.store_node} opens the rendezvous store{_because(fact.cause)}"
        case facts.GenerationFenced():
            return f"generation {fact.generation} is fenced at step {fact.step_before}{_because(fact.cause)}"
        case facts.StoreMoved():
            return f"{fact.store_node} opens the rendezvous store instead"
        case facts.FirstStep():
            return f"generation {fact.generation} finished step {fact.step}, its first"
        case facts.GenerationStarted():
            return _of_start(fact)


def _of_start(fact: facts.GenerationStarted) -> str:
    origin = "afresh"
    if fact.version:
        origin = f"from memory at {version_words(fact.version)}"
    elif fact.durable_path:
        origin = f"from {fact.durable_path}"
    spares = _names(seat.node for seat in fact.spares)
    seats = _names(seat.node for seat in fact.seats)
    action = f" ({fact.action})" if fact.action else ""
    return f"generation {fact.generation} starts {origin}{action} on {seats}; spares: {spares}"


def _of_slurm(fact: facts.SlurmOwed | facts.SlurmSettled | facts.Withheld) -> str:
    if isinstance(fact, facts.Withheld):
        what = _VERBS[fact.verb].format(node=fact.node, job="", exit_code="")
        return f"withheld: {what}{_because(fact.reason)}"
    if isinstance(fact, facts.SlurmSettled):
        return f"Slurm call {fact.call} " + (f"was refused: {fact.error}" if fact.error else "is done")
    exclude = f", without {_names(fact.exclude)}" if fact.exclude else ""
    admit = f", again with {_names(fact.admit)}" if fact.admit else ""
    return f"Slurm call {fact.call}: {call_words(fact)}{exclude}{admit}{_because(fact.text)}"


def _of_flush(fact: facts.Flushing | facts.Flushed) -> str:
    if isinstance(fact, facts.Flushing):
        return f"flush {fact.serial} of {version_words(fact.version)} to durable storage{_because(fact.reason)}"
    if fact.error:
        return f"flush {fact.serial} failed: {fact.error}"
    return f"flush {fact.serial} is done: {fact.path}"


def _of_gang(fact: facts.Fact) -> str:
    match fact:
        case facts.GangRegistered():
            spec = fact.spec
            size = f"{spec.nodes} nodes and {spec.spares} spares, {spec.ranks_per_node} ranks each"
            return f"{fact.name or fact.gang} registered: job {fact.job} of uid {fact.owner_uid}, {size}"
        case facts.PhaseChanged():
            return f"{fact.phase}{_because(fact.reason)}"
        case facts.GangEnded():
            return f"{fact.phase}, exit code {fact.exit_code}{_because(fact.reason)}"
        case facts.StopPlanned():
            return f"the ranks are asked to stop{_because(fact.reason)}; then {fact.after}"
        case facts.JobRestarted():
            return f"Slurm started job {fact.job} again (restart {fact.restart_count})"
        case facts.JobChanged():
            return f"Slurm gives the job {_names(fact.nodes)}"
        case facts.JobOver():
            return f"Slurm calls the job {fact.state}"
        case facts.PoolAsked():
            return (
                f"{fact.via} asks Slurm for a node of the shared pool ({' '.join(fact.options)}): request {fact.serial}"
            )
        case facts.PoolQueued():
            return f"request {fact.serial} for a node of the shared pool is job {fact.job}"
        case facts.PoolClosed():
            return f"request {fact.serial} for a node of the shared pool is over{_because(fact.reason)}"
        case facts.GangForgotten():
            return "leaves the durable state; its history stays"
        case _:
            return facts.encode(fact)[1]
