"""The coordinator's metrics on loopback: who may read them, in which formats, and what they say of a recovery."""

from __future__ import annotations

import asyncio
import datetime
import http.client
import ipaddress
import re
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.metrics import families
from muster.daemon.coordinator.metrics.event_counters import EventCounters
from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.coordinator.services.login_names import LoginNames
from muster.daemon.host import private_file
from muster.daemon.metrics.metrics_access import MetricsAccess, MetricsToken
from muster.daemon.metrics.metrics_server import MAX_CONNECTIONS, SWITCH_S, MetricsServer
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.daemon.transport.authority import Authority, make_key, pem_of_key
from muster.daemon.transport.site_config import Site, SiteError
from muster.recovery_phases import RecoveryPhase
from muster.slurm.client.parsing.sbatch_request import JobRequest

TOKEN = "0123456789abcdef"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def token_file(folder: Path, mode: int = 0o600) -> Path:
    path = folder / "metrics.token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(mode)
    return path


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ScriptedWorld]:
    made = ScriptedWorld.create(tmp_path)
    site = Site(metrics_listen="127.0.0.1:0", metrics_token=token_file(tmp_path))
    made.settings["metrics"] = MetricsAccess.of_site(site)
    await made.start_coordinator()
    yield made
    await made.close()


def get(port: int, token: str = TOKEN, path: str = "/metrics", accept: str = "") -> tuple[int, str, str]:
    """Status, content type and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Accept": accept} if accept else {}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.headers.get("Content-Type", ""), answer.read().decode()
    connection.close()
    return found


async def scrape(world: ScriptedWorld, accept: str = "") -> tuple[int, str, str]:
    coordinator = await world.running_coordinator()
    return await asyncio.to_thread(get, coordinator.metrics_port, accept=accept)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


async def test_whoever_has_no_token_reads_nothing(world: ScriptedWorld) -> None:
    port = (await world.running_coordinator()).metrics_port
    for token in ("", "0123456789abcdee", f"{TOKEN}x"):
        status, _, text = await asyncio.to_thread(get, port, token)
        assert (status, "muster_" in text) == (401, False)
    assert (await asyncio.to_thread(get, port, TOKEN, "/"))[0] == 404


async def test_both_formats_are_what_their_parsers_expect(world: ScriptedWorld) -> None:
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    status, kind, text = await scrape(world, OPENMETRICS)
    assert (status, kind.partition(";")[0]) == (200, "application/openmetrics-text")
    assert {family.name for family in text_string_to_metric_families(text)} >= {"muster_build", "muster_nodes"}
    status, kind, text = await scrape(world)
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    found = list(parse_plain(text))
    assert {family.name for family in found} >= {"muster_build_info", "muster_nodes"}
    with_quantiles = {one.type for one in found if any("quantile" in sample.labels for sample in one.samples)}
    assert with_quantiles == {"summary"}, "promtool check metrics asks that"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/openmetrics-text; version=abc", "application/openmetrics-text"),
        ("application/openmetrics-text; version=1.0.0; escaping=none-such", "application/openmetrics-text"),
        ("text/plain; version=;;=, */*", "text/plain"),
        ("text/plain; version=x.y; escaping=", "text/plain"),
        ("image/png, ,", "text/plain"),
    ],
)
async def test_whatever_a_caller_accepts_it_gets_one_of_both_formats(
    world: ScriptedWorld, accept: str, kind: str
) -> None:
    status, found, text = await scrape(world, accept)
    assert (status, found.partition(";")[0], "muster_nodes" in text) == (200, kind, True)


async def test_a_silent_directory_holds_a_scrape_up_once_for_each_user(tmp_path: Path) -> None:
    asked = []

    def look_up(uid: int) -> str:
        asked.append(uid)
        raise OSError("the directory does not answer")

    world = ScriptedWorld.create(tmp_path)
    world.settings["login_names"] = LoginNames(look_up)
    await world.start_coordinator()
    coordinator = await world.running_coordinator()
    for job in range(1, 4):
        world.cluster.submit(JobRequest(nodes=1))
        coordinator.engine.post(events.GangSubmitted(f"g{job}", job, 1001, "train", events.GangSpec(2, 1), "{}"))
    text = (await asyncio.to_thread(coordinator._metrics.text)).decode()
    assert (text.count('user="uid 1001"'), asked) == (3, [1001])
    await world.close()


async def test_a_recovery_is_counted_with_its_cause_its_phases_and_its_signal(world: ScriptedWorld) -> None:
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    before = samples((await scrape(world, OPENMETRICS))[2])
    assert before["muster_recoveries_total", (("action", "swap"), ("cause", "node"))] == 0
    assert before["muster_signals_total", (("action", "unfit"), ("code", "79"), ("kind", "xid"))] == 0
    await world.agents["n1"].step(8)
    for name in ("n1", "n2"):
        await world.agents[name].report_shards(1, 5, [0, 1])
    await world.send_signal("n2", 79)
    await world.wait_for_duty("RUN 2", ["n1", "n3"])
    await world.agents["n1"].step()
    await world.wait_for_facts(facts.FirstStep, 2)
    _, _, text = await scrape(world, OPENMETRICS)
    found = samples(text)
    job = ("job_id", "1")
    assert found["muster_recoveries_total", (("action", "swap"), ("cause", "node"))] == 1
    assert found["muster_steps_repeated_total", ()] == 3
    assert found["muster_signals_total", (("action", "unfit"), ("code", "79"), ("kind", "xid"))] == 1
    assert found["muster_node_health", (("health", "UNFIT"), ("node", "n2"))] == 1
    assert found["muster_nodes", (("health", "UNFIT"),)] == 1
    assert found["muster_generation", (job,)] == 2
    assert world.coordinator
    (gang,) = world.coordinator.engine.core.observed.gangs.values()
    gang.agents["n2"].heard_at -= 500
    ages = samples((await scrape(world, OPENMETRICS))[2])
    assert gang.agents["n2"].attached
    assert ages["muster_heartbeat_age_seconds", (("quantile", "1"), ("source", "agent"))] < 400, "n2 is out of service"
    assert found["muster_spares", (job, ("state", "missing"))] == 1
    phases = {phase: found["muster_recovery_seconds_count", (("phase", phase),)] for phase in RecoveryPhase}
    assert phases == dict.fromkeys(RecoveryPhase, 1)
    exemplars = [
        one.exemplar.labels
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.exemplar is not None
    ]
    assert 0 < found["muster_job_goodput_ratio", (job,)] <= 1
    assert exemplars == [{"job_id": "1", "generation": "2"}] * len(RecoveryPhase)


def test_signals_that_nobody_knows_share_one_series() -> None:
    registry, policy = CollectorRegistry(), Policy.load()
    counters = EventCounters(registry, DurableState(), lambda: 0.0, policy)
    for code in range(100):
        counters.note_signal("xid", 100_000 + code, "ignore")
        counters.note_signal(f"new{code}", code, "ignore")
    found = {
        tuple(one.labels.values()): one.value
        for family in registry.collect()
        for one in family.samples
        if one.name == "muster_signals_total" and one.value
    }
    assert found == {("xid", "other", "ignore"): 100.0, ("other", "other", "ignore"): 100.0}


# -- who may listen where ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "token", "words"),
    [
        ("127.0.0.1:0", None, "needs metrics_token"),
        ("mgmt1:9464", None, "needs metrics_token, the file with the token of those who may read metrics, or"),
        ("mgmt1:9464", 0o600, "metrics need TLS: .*can't be read.*without TLS, metrics_listen must be a loopback"),
        ("127.0.0.1:0", 0o644, "others can read .*chmod 0600"),
    ],
)
def test_metrics_without_a_proof_or_without_tls_are_refused(
    tmp_path: Path, listen: str, token: int | None, words: str
) -> None:
    path = token_file(tmp_path, token) if token is not None else None
    missing = tmp_path / "none.pem"
    site = Site(metrics_listen=listen, metrics_token=path, tls_certificate=missing, tls_key=missing)
    with pytest.raises(SiteError, match=words):
        MetricsAccess.of_site(site)


def test_a_short_token_is_refused(tmp_path: Path) -> None:
    path = token_file(tmp_path)
    path.write_text("guess\n")
    with pytest.raises(SiteError, match="must hold 16 characters or more"):
        MetricsAccess.of_site(Site(metrics_listen="127.0.0.1:0", metrics_token=path))


def test_a_token_is_replaced_while_the_server_runs(tmp_path: Path) -> None:
    token = MetricsToken(path := token_file(tmp_path))
    path.write_text(other := TOKEN[::-1])
    assert [token.proves(f"Bearer {one}") for one in (TOKEN, other)] == [False, True]
    path.unlink()
    assert token.proves(f"Bearer {other}")


def certified(issuing: Authority, purpose: x509.ObjectIdentifier) -> tuple[bytes, str]:
    """A certificate and its key (PEM). What `muster pki` issues is for servers only."""
    key, name, now = make_key(), x509.Name([]), datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(issuing.certificate.subject, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .sign(issuing.key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM), pem_of_key(key).decode()


@pytest.fixture
def tls_site(tmp_path: Path) -> Site:
    """A site with its own authority; the readers' certificates are of another one."""
    site, readers = Authority.create("site"), Authority.create("readers")
    client, server = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
    for name, issuing, purpose in (("server", site, server), ("reader", readers, client), ("stranger", site, client)):
        certificate, key = certified(issuing, purpose)
        (tmp_path / f"{name}.pem").write_bytes(certificate)
        private_file.create(tmp_path / f"{name}.key", key)
    (tmp_path / "site.pem").write_bytes(site.pem)
    (tmp_path / "readers.pem").write_bytes(readers.pem)
    return Site(
        metrics_listen="0.0.0.0:0",
        metrics_certificate=tmp_path / "server.pem",
        metrics_key=tmp_path / "server.key",
        metrics_client_authority=tmp_path / "readers.pem",
    )


def status_over_tls(folder: Path, port: int, reader: str, token: str = "") -> int:
    """The status of an answer; 0: the connection was refused."""
    context = ssl.create_default_context(cafile=folder / "site.pem")
    if reader:
        context.load_cert_chain(folder / f"{reader}.pem", folder / f"{reader}.key")
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
    try:
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"} if token else {})
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


@contextmanager
def serving(site: Site) -> Iterator[int]:
    access = MetricsAccess.of_site(site)
    assert access is not None
    server = MetricsServer(access, CollectorRegistry())
    server.start()
    try:
        yield server.port
    finally:
        server.stop()


def test_a_certificate_of_the_readers_authority_is_needed_and_enough(tmp_path: Path, tls_site: Site) -> None:
    with serving(tls_site) as port:
        assert [status_over_tls(tmp_path, port, reader) for reader in ("reader", "stranger", "")] == [200, 0, 0]


def test_what_is_configured_is_needed_together(tmp_path: Path, tls_site: Site) -> None:
    with serving(replace(tls_site, metrics_token=token_file(tmp_path))) as port:
        assert status_over_tls(tmp_path, port, "reader") == 401
        assert status_over_tls(tmp_path, port, "reader", TOKEN) == 200
        assert status_over_tls(tmp_path, port, "", TOKEN) == 0


def test_whoever_makes_the_text_lets_the_event_loop_go_on_soon(tmp_path: Path) -> None:
    before = sys.getswitchinterval()
    try:
        with serving(Site(metrics_listen="127.0.0.1:0", metrics_token=token_file(tmp_path))):
            assert sys.getswitchinterval() <= SWITCH_S
    finally:
        sys.setswitchinterval(before)


def test_silent_callers_keep_nobody_waiting(tmp_path: Path, tls_site: Site) -> None:
    with serving(tls_site) as port, ExitStack() as silent:
        for _ in range(MAX_CONNECTIONS - 1):
            silent.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert status_over_tls(tmp_path, port, "reader") == 200


def test_a_connection_for_which_there_is_no_thread_takes_no_place_for_ever(tmp_path: Path) -> None:
    with serving(Site(metrics_listen="127.0.0.1:0", metrics_token=token_file(tmp_path))) as port:
        before = threading.stack_size(2**46)  # more than a process can have
        try:
            for _ in range(MAX_CONNECTIONS):
                with socket.create_connection(("127.0.0.1", port), timeout=60) as refused:
                    assert refused.recv(1) == b""
        finally:
            threading.stack_size(before)
        assert get(port)[0] == 200


# -- the page that lists them -----------------------------------------------------------------------------------------

PAGE = (Path(__file__).resolve().parents[2] / "docs/operations/metrics.md").read_text().partition("## Of a node")[0]


async def test_the_page_lists_each_metric_and_no_other(world: ScriptedWorld) -> None:
    rows = re.findall(r"^\| (`muster_[^|]*)\|", PAGE, re.MULTILINE)
    text = (await scrape(world))[2]
    served = {family.name + "_total" * (family.type == "counter") for family in parse_plain(text)}
    there = {name for name in {*families.GAUGES, *served, "muster_job_info"} if name.startswith("muster_")}
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == there
