"""The site's hooks: what they are told, and how a message is brought to a command or to a web address."""

import asyncio
import hashlib
import hmac
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from muster.daemon.coordinator.core.losses.loss_watch import LossKind
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.hooks.delivery import (
    ATTEMPTS,
    MOST_WAITING,
    SIGNATURE,
    HookFailed,
    HookQueue,
    execute,
    post,
    signature,
)
from muster.daemon.coordinator.hooks.messages import Message, messages
from muster.daemon.coordinator.policy.hooks import Hook
from muster.daemon.coordinator.policy.policy import Policy, PolicyError
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.node_health import NodeHealth

MESSAGE = Message("swap", 1.0, "generation 2 starts", 42)


def program(folder: Path, lines: str) -> Hook:
    path = folder / "hook.sh"
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return Hook("pager", frozenset({"swap"}), (str(path), "gpu"))


@contextmanager
def server(*statuses: int) -> Iterator[tuple[str, list[tuple[dict[str, str], bytes]]]]:
    """A web server that answers with `statuses`, one after another. Yields its address and what it has got."""
    answers, got = list(statuses), list[tuple[dict[str, str], bytes]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((dict(self.headers), self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answers.pop(0))
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/hook", got
        http.shutdown()
        thread.join()


def test_a_command_gets_the_message_on_its_standard_input(tmp_path: Path) -> None:
    hook = program(tmp_path, f'cat > {tmp_path}/got; echo "$1 $MUSTER_OCCASION" > {tmp_path}/words')
    execute(hook, MESSAGE, b'{"text": 1}')
    assert (tmp_path / "got").read_text() == '{"text": 1}'
    assert (tmp_path / "words").read_text() == "gpu swap\n"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("echo no pager >&2; exit 3", "ended with status 3: no pager"),
        ("exit 1", "ended with status 1: no error output"),
    ],
)
def test_a_command_that_fails_says_why(tmp_path: Path, lines: str, words: str) -> None:
    with pytest.raises(HookFailed, match=words):
        execute(program(tmp_path, lines), MESSAGE, b"{}")


def test_a_command_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(HookFailed, match="can't be started: No such file"):
        execute(Hook("pager", frozenset(), (str(tmp_path / "none"),)), MESSAGE, b"{}")


def test_a_command_that_reads_nothing_is_no_failure(tmp_path: Path) -> None:
    execute(program(tmp_path, "exit 0"), MESSAGE, b"x" * (1 << 20))


def test_a_command_that_hangs_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    alive, child_end = os.pipe()
    os.set_inheritable(child_end, True)
    lines = f"exec 7>/proc/{os.getpid()}/fd/{child_end}; sleep 1000 & sleep 1000"
    hook = replace(program(tmp_path, lines), timeout_s=0.2)
    with pytest.raises(HookFailed, match=r"had not ended after 0.2 s, and was killed"):
        execute(hook, MESSAGE, b"{}")
    os.close(child_end)
    assert os.read(alive, 1) == b""  # nobody has the other end any more
    os.close(alive)


def test_a_post_is_signed(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("s3cret\n")
    with server(200) as (url, got):
        post(Hook("chat", frozenset(), url=url, secret_file=secret), b'{"a": 1}')
    headers, body = got[0]
    at, digest = (part.split("=")[1] for part in headers[SIGNATURE].split(","))
    assert digest == hmac.new(b"s3cret", at.encode() + b"." + body, hashlib.sha256).hexdigest()
    assert (body, headers["Content-Type"]) == (b'{"a": 1}', "application/json")


def test_a_post_without_a_secret_has_no_signature() -> None:
    with server(204) as (url, got):
        post(Hook("chat", frozenset(), url=url), b"{}")
    assert SIGNATURE not in got[0][0]


def test_a_server_that_is_busy_is_asked_again() -> None:
    pauses: list[float] = []
    with server(503, 429, 200) as (url, got):
        post(Hook("chat", frozenset(), url=url), b"{}", pauses.append)
    assert len(got) == 3
    assert len(pauses) == 2


def test_a_server_that_refuses_is_not_asked_again() -> None:
    with server(403) as (url, got), pytest.raises(HookFailed, match="answered 403 Forbidden"):
        post(Hook("chat", frozenset(), url=url), b"{}")
    assert len(got) == 1


def test_another_address_is_not_followed() -> None:
    with server(302) as (url, got), pytest.raises(HookFailed, match="answered 302"):
        post(Hook("chat", frozenset(), url=url), b"{}")
    assert len(got) == 1


def test_a_server_that_is_not_there_is_tried_a_few_times() -> None:
    pauses: list[float] = []
    with socket.socket() as held:  # nobody else gets this port, and nobody listens there
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}/"
        with pytest.raises(HookFailed, match=r"can't be reached: .*refused"):
            post(Hook("chat", frozenset(), url=url), b"{}", pauses.append)
    assert len(pauses) == ATTEMPTS - 1


@pytest.mark.parametrize(("text", "words"), [(None, "can't be read: No such file"), (" \n", "is empty")])
def test_without_its_secret_nothing_is_posted(tmp_path: Path, text: str | None, words: str) -> None:
    secret = tmp_path / "key"
    if text is not None:
        secret.write_text(text)
    with pytest.raises(HookFailed, match=words):
        signature(Hook("chat", frozenset(), url="https://h/", secret_file=secret), b"{}")


def test_a_queue_that_is_full_drops_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    got: list[str] = []
    busy, go_on = threading.Event(), threading.Event()

    def deliver(hook: Hook, message: Message) -> None:
        busy.set()
        go_on.wait()
        got.append(message.text)

    one = HookQueue(Hook("slow", frozenset({"swap"})), deliver)
    one.put(replace(MESSAGE, occasion="end"))  # it does not want that
    one.put(MESSAGE)
    busy.wait()  # so the queue is empty
    for number in range(MOST_WAITING + 2):
        one.put(replace(MESSAGE, text=str(number)))
    go_on.set()
    one.join()
    assert got == [MESSAGE.text, *map(str, range(MOST_WAITING))]
    assert one.dropped == 2
    assert "hook slow is too slow" in caplog.text


def test_a_hook_that_fails_gets_the_next_message(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    answers: list[Exception | None] = [HookFailed("no route"), None]

    def deliver(hook: Hook, message: Message) -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    one = HookQueue(Hook("chat", frozenset({"swap"})), deliver)
    one.put(MESSAGE)
    one.put(MESSAGE)
    one.join()
    assert answers == []
    assert one.dropped == 1
    assert "hook chat: no route" in caplog.text
    assert "hook chat works again" in caplog.text


@pytest.mark.parametrize(
    ("fact", "occasion"),
    [
        (facts.PhaseChanged("g", Phase.REQUEUED, "no spare"), "requeue"),
        (facts.PhaseChanged("g", Phase.RUNNING, ""), None),
        (facts.GangEnded("g", Phase.FAILED, 1, "rank 3 failed"), "failure"),
        (facts.GangEnded("g", Phase.DONE, 0, ""), "end"),
        (facts.GangEnded("g", Phase.CANCELLED, 1, ""), "end"),
        (facts.NodeJudged("n1", NodeHealth.UNFIT, "Xid 79"), "node"),
        (facts.NodeJudged("n1", NodeHealth.FIT, ""), None),
        (facts.ActionWithheld("g", "n1", "drain", "20 nodes within an hour"), "fleet"),
        (facts.NotFiniteReported("g", 1, 0, "n1", 9, "loss = nan"), "loss"),
        (facts.LossNoted("g", 1, LossKind.SPIKE, "n1", 9, 8.1, 2.3), "loss"),
    ],
)
def test_what_is_told(fact: facts.Fact, occasion: str | None) -> None:
    found = [message.occasion for message in messages([fact], DurableState(), 5.0)]
    assert found == ([] if occasion is None else [occasion])


def test_a_message_is_json_with_a_format() -> None:
    (message,) = messages([facts.NodeJudged("n1", NodeHealth.LOST, "nothing answers")], DurableState(), 5.0)
    told = json.loads(json.dumps(message.as_json()))
    assert told | {"text": ""} == {
        "format": 1, "occasion": "node", "at": 5.0, "text": "", "job": 0, "node": "n1", "details": {},
    }  # fmt: skip
    assert "nothing answers" in told["text"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('on = ["swop"]\nurl = "https://h/"', "an occasion is one of swap, restart, requeue"),
        ('on = ["swap"]', "a hook needs either command or url"),
        ('on = ["swap"]\nurl = "https://h/"\ncommand = ["/bin/true"]', "a hook needs either command or url"),
        ('on = ["swap"]\ncommand = ["true"]', "give the whole path of the program"),
        ('on = ["swap"]\nurl = "file:///etc/passwd"', "an address such as https://HOST/PATH"),
        ('on = ["swap"]\nurl = "https://h/tür"', "in plain ASCII letters"),
        ('on = ["swap"]\nurl = "https://a..b/"', "an address such as https://HOST/PATH"),
        ('on = ["swap"]\nurl = "https://h:99999/"', "an address such as https://HOST/PATH"),
        ('url = "https://h/"', "a hook needs on, and command or url"),
        ('on = ["swap"]\nurl = "https://h/"\nsecret = "x"', "unknown key hooks.a.secret"),
        ('on = ["swap"]\ncommand = ["/bin/true"]\nsecret_file = "/k"', "a command needs none"),
    ],
)
def test_a_wrong_table_is_refused_with_what_would_be_right(tmp_path: Path, table: str, words: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(f"[hooks.a]\n{table}\n")
    with pytest.raises(PolicyError, match=words):
        Policy.load(path)


def test_the_policy_has_the_sites_hooks(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('[hooks.pager]\non = ["failure"]\ncommand = ["/bin/page", "gpu"]\ntimeout_s = 5\n')
    assert Policy.load(path).hooks == [Hook("pager", frozenset({"failure"}), ("/bin/page", "gpu"), timeout_s=5.0)]
    assert Policy.load().hooks == []


async def test_a_recovery_reaches_a_hook(tmp_path: Path) -> None:
    """A rank ends, the ranks start again, and the coordinator has executed the site's command."""
    told = tmp_path / "told"
    os.mkfifo(told)
    world = ScriptedWorld.create(tmp_path)
    path = tmp_path / "policy.toml"
    path.write_text(f'[hooks.pager]\non = ["restart"]\ncommand = ["/bin/sh", "-c", "cat > {told}"]\n')
    world.settings["policy"] = Policy.load(path)
    await world.start_coordinator()
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    await world.agents["n1"].end_ranks(1)
    message = json.loads(await asyncio.to_thread(told.read_text))
    await world.close()
    assert (message["hook"], message["occasion"], message["job"]) == ("pager", "restart", 1)
    recovery = message["details"]["recovery"]
    assert (recovery["action"], recovery["nodes_out"], recovery["nodes_in"]) == ("restart in place", [], [])
