"""What musterd knows of this node, and the site's choice for when musterd does not answer. For Slurm's hooks.

Uses the standard library only, and reads muster.toml only where its choice matters: Slurm runs the hooks often.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from muster.daemon.host.kept_memory_client import SOCKET, send_request

REPLY_TIMEOUT_S = 1.0
"""Seconds for the reply. musterd answers within milliseconds; a machine without free processors may need longer."""
CONFIG = "/etc/muster/muster.toml"
_MAX_ANSWER_CHARS = 200


class Hook(NamedTuple):
    """What a hook reaches: musterd's socket and the site's settings."""

    socket: str = SOCKET
    config: str = CONFIG

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Hook:
        """The hook that slurmd runs."""
        return cls(config=environ.get("MUSTER_CONFIG", CONFIG))


class NodeVerdict(NamedTuple):
    """musterd's answer, or the site's choice.

    complaint: why the node may run no jobs, or why musterd is not heard; empty if there is nothing to say. own_word:
    the coordinator has not answered yet, or musterd is not heard. memory_kept: of the job that was asked about.
    """

    fit: bool
    complaint: str = ""
    own_word: bool = False
    memory_kept: bool = False

    def report(self, program: str, *, only_own_word: bool = False) -> int:
        """Print the complaint; return the exit status of the program: 1 if the node may run no jobs, or with
        `only_own_word` if that is the node's own word."""
        if self.complaint:
            print(f"{program}: {self.complaint}", file=sys.stderr)
        return 0 if self.fit or (only_own_word and not self.own_word) else 1


def ask(hook: Hook, job: int = 0) -> NodeVerdict:
    """Ask musterd. If it does not answer, the site's choice counts (`hooks_without_musterd` of muster.toml)."""
    try:
        answer, _ = send_request(hook.socket, {"ask_verdict": {"slurm_job_id": job}}, timeout_s=REPLY_TIMEOUT_S)
    except (OSError, ValueError) as error:
        return _without_musterd(hook, f"musterd does not answer at {hook.socket} ({_describe(error)})")
    verdict = answer.get("verdict") if isinstance(answer, dict) else None
    if not isinstance(verdict, dict):
        return _without_musterd(hook, f"musterd gives no verdict: {str(answer)[:_MAX_ANSWER_CHARS]}")
    fit = verdict.get("fit") is True
    words = ": ".join(filter(None, [str(verdict.get("verdict", "")), str(verdict.get("reason", ""))]))
    own_word, kept = verdict.get("own_word") is True, verdict.get("memory_kept") is True
    return NodeVerdict(fit, "" if fit else words, own_word, kept)


def setting(hook: Hook, key: str, default: Any) -> Any:
    """A key of muster.toml; the default if the file lacks the key, or if it cannot be read."""
    import tomllib  # few calls need it

    try:
        with open(hook.config, "rb") as file:
            return tomllib.load(file).get(key, default)
    except (OSError, ValueError):
        return default


def _without_musterd(hook: Hook, words: str) -> NodeVerdict:
    fails = setting(hook, "hooks_without_musterd", "pass") == "fail"
    return NodeVerdict(not fails, words, own_word=True)


def _describe(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {REPLY_TIMEOUT_S:g} s"
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
