"""Settings: flags over environment over file over defaults, and what is refused."""

import argparse
import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.daemon.agent import __main__ as agent_command
from muster.daemon.coordinator import __main__ as coordinator_command
from muster.daemon.host.port_range import PortRange
from muster.daemon.node import __main__ as musterd_command
from muster.daemon.transport import site_config
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.site_config import Site, SiteError, node_name, split_address, split_addresses
from muster.launcher import main as muster_command

NO_RANGE = 'must be "FIRST-LAST", at least two ports from 1024 to 65535, for example "61000-61999"'
WRONG_PORTS = {
    **dict.fromkeys(
        ("61000", "true", '""', '"61000"', '"61000-"', '"61000-61000"', '"62000-61000"', '"1023-2000"', '"61000-65536"',
         '"61000-61999,62000-62999"', '" 61000-61999"', '"\u0661024-\u0661099"', '["61000-61999"]',
         "{first = 61000, last = 61999}"), f": {NO_RANGE}"
    ),
    '"7000-7999"': "must not contain 7070 or 7071, the ports of muster-coordinator and musterd",
}  # fmt: skip
"""Values of agent_ports in TOML, and why they are refused."""


def _status(command: Callable[[list[str]], object], *words: str) -> int:
    """The exit status of a command that refuses to start."""
    try:
        return int(str(command(list(words))))
    except SystemExit as ended:
        return int(str(ended.code))


def run_musterd(config: str) -> int:
    """The exit status of musterd. It could not go on: this host does not have the address."""
    return _status(musterd_command.main, "--config", config, "--memory", "", "--listen", "192.0.2.1:7071")


def run_agent(config: str) -> int:
    """The exit status of the batch process."""
    return _status(agent_command.main, "batch", "--config", config, "--gang", "g", "--", "true")


def run_muster(config: str) -> int:
    """The exit status of `muster nodes`."""
    return _status(muster_command.main, "nodes", "--config", config)


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "muster.toml"
    path.write_text(text)
    return path


def test_defaults() -> None:
    found = Site.load(environ={}, coordinator="ctl:1")
    assert (found.coordinator, found.auth, found.slurm_user, found.operators) == ("ctl:1", "munge", "slurm", ())


def test_no_coordinator_is_called_that_the_site_has_not_named(tmp_path: Path) -> None:
    config = _file(tmp_path, 'auth = "munge"\n')
    with pytest.raises(SiteError) as refused:
        Site.load(config=config, environ={})
    assert str(refused.value) == (
        f'no coordinator is configured: set coordinator = "HOST:7070" in {config}, or give --coordinator or '
        "MUSTER_COORDINATOR"
    )
    assert Site.load(config=config, environ={}, calls_coordinator=False).coordinator == ""


@pytest.mark.parametrize("address", ["ctl\n#SBATCH --uid=0:1", "ctl\x1b[2J:1", "ctl\r:1"])
def test_an_address_is_one_line(address: str) -> None:
    with pytest.raises(SiteError, match="must be one line without control characters"):
        Site.load(coordinator=address, environ={})


@pytest.mark.parametrize("program", [run_musterd, run_agent, run_muster])
def test_a_program_without_a_coordinator_refuses_to_start(
    program: Callable[[str], int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MUSTER_COORDINATOR", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    SecretCredentials.create(tmp_path / "secret")
    config = _file(tmp_path, f'auth = "secret:{tmp_path}/secret"\n')
    assert program(str(config)) == 78
    assert "no coordinator is configured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words", "status"),
    [
        (musterd_command.main, ["--heart"], 78),
        (coordinator_command.main, ["--shared"], 78),
        (agent_command.main, ["run", "--gangs"], 64),
        (muster_command.main, ["nodes", "--verbos"], 64),
    ],
)
def test_a_wrong_word_ends_a_program_with_the_status_that_its_unit_or_its_caller_knows(
    command: Callable[[list[str]], object], words: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """systemd starts no daemon again that has ended with 78."""
    assert _status(command, *words) == status
    assert words[-1] in capsys.readouterr().err


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    config = _file(tmp_path, 'coordinator = "file:1"\nauth = "munge"\n')
    environ = {"MUSTER_COORDINATOR": "environ:2", "MUSTER_AUTH": "secret:/environ"}
    assert Site.load(config=config, environ={}).coordinator == "file:1"
    assert Site.load(config=config, environ=environ).coordinator == "environ:2"
    found = Site.load(config=config, environ=environ, coordinator="flag:3")
    assert (found.coordinator, found.auth) == ("flag:3", "secret:/environ")


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    config = _file(tmp_path, 'coordinator = "file:1"\n')
    assert Site.load(environ={"MUSTER_CONFIG": str(config)}).coordinator == "file:1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'cordinator = "a:1"',
            "unknown key 'cordinator'; known keys are agent_ports, auth, connections, coordinator, ",
        ),
        ('coordinator = "host"', "coordinator = 'host': 'host' must be HOST:PORT"),
        ('auth = "none"', 'auth = \'none\': must be "munge" or "secret:/absolute/path"'),
        ('auth = "secret:relative"', 'must be "munge" or "secret:/absolute/path"'),
        ('connections = "plain text"', 'must be "tls" or "plain text, the network is trusted"'),
        ("operators = 3", 'operators = 3: must be a list of texts, for example ["one", "two"]'),
        ('operators = ["root", 3]', "operators = ['root', 3]: must be a list of texts"),
        ('management_hosts = "mgmt1"', "management_hosts = 'mgmt1': must be a list of texts"),
        ("slurm_user = true", "slurm_user = True: must be a text in quotes"),
        ("tls_key = 3", "tls_key = 3: must be a text in quotes"),
        ("encrypt_checkpoints = 1", "encrypt_checkpoints = 1: must be true or false"),
        ('hooks_without_musterd = "drain"', 'hooks_without_musterd = \'drain\': must be "pass" or "fail"'),
        ("hooks_without_musterd = []", 'hooks_without_musterd = []: must be "pass" or "fail"'),
        *(
            (f"epilog_wait_s = {value}", "must be a number of seconds from 0 to 600")
            for value in ("-1", "601", "nan", "true", '"5"')
        ),
        *(
            (f"gpu_hour_price = {value}", "must be a number from 0 to 1,000,000")
            for value in ("-1", "inf", "true", '"2"')
        ),
        (f"management_hosts = {['h'] * 1001}", "must be at most"),
        ('management_hosts = ["mgmt1", "10.0.0.300"]', "'10.0.0.300' is neither a host name nor an IP address"),
        *((f"agent_ports = {value}", words) for value, words in WRONG_PORTS.items()),
        ("coordinator = ", "is not TOML"),
        pytest.param("operators = " + "[" * 5000, "tables and lists inside each other", id="lists"),
        pytest.param(f"auth = 0x{'f' * 5000}", "more than 64 bits", id="hexadecimal"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused(tmp_path: Path, text: str, words: str) -> None:
    config = _file(tmp_path, text)
    with pytest.raises(SiteError) as refused:
        Site.load(config=config, environ={})
    assert str(config) in str(refused.value)
    assert words in str(refused.value)


def test_all_faults_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    config = _file(tmp_path, 'auth = "none"\nepilog_wait_s = -1\nunknown = 1\n')
    with pytest.raises(SiteError) as refused:
        Site.load(config=config, environ={})
    assert [line.split()[1] for line in str(refused.value).splitlines()] == ["auth", "epilog_wait_s", "unknown"]


def test_each_key_of_a_file_is_read(tmp_path: Path) -> None:
    text = """
        connections = "plain text, the network is trusted"
        tls_authority = "/tls/a"
        tls_certificate = "/tls/c"
        tls_key = "/tls/k"
        encrypt_checkpoints = true
        hooks_without_musterd = "fail"
        epilog_wait_s = 30
        gpu_hour_price = 2.5
    """
    assert Site.load(config=_file(tmp_path, text), environ={}, coordinator="ctl:1") == Site(
        coordinator="ctl:1",
        connections=site_config.PLAIN_TEXT,
        tls_authority=Path("/tls/a"),
        tls_certificate=Path("/tls/c"),
        tls_key=Path("/tls/k"),
        encrypt_checkpoints=True,
        hooks_without_musterd="fail",
        epilog_wait_s=30.0,
        gpu_hour_price=2.5,
    )


def test_a_flag_or_variable_that_cannot_be_right_is_named() -> None:
    with pytest.raises(SiteError, match="--coordinator: coordinator = 'x'"):
        Site.load(coordinator="x", environ={})
    with pytest.raises(SiteError, match="MUSTER_AUTH: auth = 'x'"):
        Site.load(environ={"MUSTER_AUTH": "x"})


def test_a_file_that_was_asked_for_must_exist(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match="does not exist"):
        Site.load(config=tmp_path / "absent", environ={})


def test_a_secret_gives_its_credentials(tmp_path: Path) -> None:
    SecretCredentials.create(tmp_path / "secret")
    site = Site.load(auth=f"secret:{tmp_path}/secret", environ={}, coordinator="ctl:1")
    assert isinstance(site.credentials(), SecretCredentials)


def test_operators_are_users_of_this_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    config = _file(tmp_path, f'slurm_user = "{me}"\noperators = ["no-such-user-here"]\n')
    assert Site.load(config=config, environ={}, coordinator="ctl:1").operator_uids() == {os.getuid()}
    assert "user 'no-such-user-here' of muster.toml is not known on this host" in caplog.text


def test_a_site_names_its_management_hosts(tmp_path: Path) -> None:
    config = _file(tmp_path, 'management_hosts = ["mgmt1.example.org", "FD00::0001"]\n')
    found = Site.load(config=config, environ={}, coordinator="ctl:1").management_hosts
    assert found == ("mgmt1.example.org", "fd00::1")


def test_agents_listen_on_the_ports_that_a_site_names_or_on_any(tmp_path: Path) -> None:
    assert Site.load(coordinator="ctl:1", environ={}).agent_ports is None
    found = Site.load(config=_file(tmp_path, 'agent_ports = "61000-61999"'), environ={}, coordinator="ctl:1")
    assert found.agent_ports == PortRange(61000, 61999)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("n1:7070", ("n1", 7070)), ("[::1]:1", ("::1", 1)), (":0", ("", 0)), ("10.0.0.1:65535", ("10.0.0.1", 65535))],
)
def test_an_address_has_host_and_port(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


def test_a_site_with_a_standby_names_both() -> None:
    site = Site.load(coordinator="ctl1:7070, ctl2:7070", environ={})
    assert split_addresses(site.coordinator) == ["ctl1:7070", "ctl2:7070"]
    with pytest.raises(SiteError, match=r"--coordinator: coordinator = 'ctl1:7070,': '' must be HOST:PORT"):
        Site.load(coordinator="ctl1:7070,", environ={})


@pytest.mark.parametrize("address", ["n1", "n1:", "n1:x", "n1:65536", "::1:7070", "n1:-1", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        split_address(address)


def test_the_node_is_named_by_flag_slurm_or_host() -> None:
    assert node_name("flag", {"SLURMD_NODENAME": "slurm"}) == "flag"
    assert node_name(None, {"SLURMD_NODENAME": "slurm"}) == "slurm"
    assert node_name(None, {}) == os.uname().nodename.partition(".")[0]


def test_all_daemons_share_their_flags() -> None:
    parser = argparse.ArgumentParser()
    site_config.add_arguments(parser, listen=":1")
    flags = parser.parse_args(["--coordinator", "a:1", "--auth", "munge", "--config", "/x", "--log-level", "debug"])
    assert (flags.coordinator, flags.listen, flags.auth, flags.config) == ("a:1", ":1", "munge", Path("/x"))
