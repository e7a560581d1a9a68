"""Brings messages to hooks: executes a command, or posts to a web address.

Each hook has a thread and a queue of its own, so that a slow one delays no other, and gets its messages in order. The
queue is bounded: while it is full, messages are dropped, counted and logged. A message is delivered at most once by a
coordinator, but for a post whose answer was lost, which is repeated with the same id. What is queued when the
coordinator ends is lost, and a new coordinator repeats nothing: the journal has it all (`muster events`).
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from email.message import Message as Headers
from typing import IO

import tenacity

from muster.daemon.coordinator.hooks.messages import Message
from muster.daemon.coordinator.policy.hooks import Hook
from muster.daemon.host import clock
from muster.daemon.host.lasting_problem import LastingProblem

MOST_WAITING = 256
"""Messages that wait for one hook."""
ATTEMPTS = 5
"""Attempts to post one message, within some 30 s."""
SIGNATURE = "Muster-Signature"
"""The header "t=SECONDS,v1=HEX": HMAC-SHA256 of "SECONDS.BODY" under the secret. The time is that of the attempt."""
_log = logging.getLogger(__name__)


class HookFailed(Exception):
    """A hook did not take a message. Says why."""


class HookBusy(HookFailed):
    """It may take the message later."""


class HookQueue:
    """The messages for one hook. `deliver` brings one, and raises HookFailed. It runs in a thread of its own."""

    def __init__(self, hook: Hook, deliver: Callable[[Hook, Message], None] | None = None) -> None:
        self._hook = hook
        self._deliver = deliver or _deliver
        self._waiting: queue.Queue[Message] = queue.Queue(MOST_WAITING)
        self._failing = LastingProblem(_log, f"hook {hook.name} works again")
        self._full = LastingProblem(_log, f"hook {hook.name} keeps up again")
        self.dropped = 0
        """Messages that the hook did not get: the queue was full, or all attempts failed."""
        threading.Thread(target=self._work, name=f"hook {hook.name}", daemon=True).start()

    def put(self, message: Message) -> None:
        """Queue `message`, if the hook wants it. Never waits."""
        if message.occasion not in self._hook.occasions:
            return
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            self.dropped += 1
            self._full.meet(f"hook {self._hook.name} is too slow: {self.dropped} messages were dropped so far")

    def join(self) -> None:
        """Wait until all that was queued is delivered or dropped."""
        self._waiting.join()

    def _work(self) -> None:
        while True:
            message = self._waiting.get()
            try:
                self._deliver(self._hook, message)
            except HookFailed as error:
                self.dropped += 1
                self._failing.meet(f"hook {self._hook.name}: {error}")
            else:
                self._failing.end()
                if self._waiting.empty():
                    self._full.end()
            finally:
                self._waiting.task_done()


class Hooks:
    """All hooks of the site."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._queues = [HookQueue(hook) for hook in hooks]

    def __bool__(self) -> bool:
        return bool(self._queues)

    def tell(self, messages: Iterable[Message]) -> None:
        """Queue `messages` for the hooks that want them. Never waits."""
        for message in messages:
            for one in self._queues:
                one.put(message)


def _deliver(hook: Hook, message: Message) -> None:
    body = json.dumps(message.as_json() | {"id": uuid.uuid4().hex, "hook": hook.name}).encode()
    if hook.command:
        execute(hook, message, body)
    else:
        post(hook, body)


def execute(hook: Hook, message: Message, body: bytes) -> None:
    """Execute the hook's command with `body` on its standard input.

    Raises:
        HookFailed: it can't be started, ends with another status than 0, or has not ended in time; then its whole
            process group is killed.
    """
    environment = {**os.environ, "MUSTER_HOOK": hook.name, "MUSTER_OCCASION": message.occasion}
    try:
        process = subprocess.Popen(
            hook.command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env=environment, cwd="/", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise HookFailed(f"{hook.command[0]} can't be started: {error.strerror}") from None
    with process:
        try:
            _, said = process.communicate(body, timeout=hook.timeout_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            raise HookFailed(f"{hook.command[0]} had not ended after {hook.timeout_s:g} s, and was killed") from None
    if process.returncode:
        last = said.decode(errors="replace").strip().splitlines()[-1:] or ["no error output"]
        raise HookFailed(f"{hook.command[0]} ended with status {process.returncode}: {last[0][:200]}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The site names the address. A server that answers may not name another one."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Headers, newurl: str
    ) -> None:
        return None


def post(hook: Hook, body: bytes, pause: Callable[[float], None] = time.sleep) -> None:
    """Post `body` to the hook's address, again if that may help. `pause`: waits between two attempts.

    Raises:
        HookFailed: the server has refused it, or no attempt has reached it.
    """
    opener = urllib.request.build_opener(_NoRedirect)
    attempts = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_exponential_jitter(initial=1, max=10),
        retry=tenacity.retry_if_exception_type(HookBusy),
        sleep=pause,
        reraise=True,
    )
    attempts(_post_once, opener, hook, body)


def _post_once(opener: urllib.request.OpenerDirector, hook: Hook, body: bytes) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "muster-coordinator", **signature(hook, body)}
    request = urllib.request.Request(hook.url, body, headers, method="POST")
    try:
        with opener.open(request, timeout=hook.timeout_s):
            return
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection
            kind = HookBusy if error.code >= 500 or error.code == 429 else HookFailed
            raise kind(f"{hook.url} answered {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise HookBusy(f"{hook.url} can't be reached: {why}") from None


def signature(hook: Hook, body: bytes, now: float | None = None) -> dict[str, str]:
    """The header that proves who has posted `body`, and when; none without a secret.

    Raises:
        HookFailed: the file with the secret can't be read, or is empty.
    """
    if hook.secret_file is None:
        return {}
    try:
        secret = hook.secret_file.read_bytes().strip()
    except OSError as error:
        raise HookFailed(f"{hook.secret_file} can't be read: {error.strerror}") from None
    if not secret:
        raise HookFailed(f"{hook.secret_file} is empty: it must hold the secret that signs the messages")
    at = int(clock.wall() if now is None else now)
    digest = hmac.new(secret, f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return {SIGNATURE: f"t={at},v1={digest}"}
