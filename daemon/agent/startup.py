"""From a command line to a running agent or batch process: settings, logging, signals, the event loop."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

from google.protobuf import json_format

from muster.daemon.agent import agent_log
from muster.daemon.agent.agent import Agent
from muster.daemon.agent.agent_settings import AgentSettings
from muster.daemon.agent.batch.batch_process import RemoteCoordinator, run_batch
from muster.daemon.agent.batch.run_hooks import Hooked
from muster.daemon.agent.batch.run_summary import Summarised
from muster.daemon.agent.batch.srun import Allocation
from muster.daemon.agent.ending import INTERRUPTED
from muster.daemon.agent.failure_detector.peers import AgentIdentity
from muster.daemon.agent.launch import task_binding
from muster.daemon.agent.launch.handover import MACRO, Handover, Shown, WrongHandover
from muster.daemon.agent.launch.task import Task
from muster.daemon.agent.launch.task_binding import TaskBinding
from muster.daemon.agent.pool_jobs import PoolRequestDefaults, job_end_time
from muster.daemon.agent.ranks import rank_environment
from muster.daemon.agent.ranks.rank_supervisor import NodeJob
from muster.daemon.agent.ranks.zygote_handle import StartedAs, ZygoteSpec, modules_to_import
from muster.daemon.agent.start_checks import meeting_address, node_problems
from muster.daemon.host import private_file, process_tree
from muster.daemon.transport.site_config import Site, node_name, split_address, split_addresses, start_logging
from muster.slurm.client import names
from muster.slurm.client.batch_script import RANK_ENVIRONMENT, PoolJob
from muster.slurm.client.launch_settings import binding_file
from muster.v1.api_pb2 import BatchRef
from muster.v1.common_pb2 import JobSpec


class BadOption(Exception):
    """The caller's fault: an option or the spec is wrong."""


def run(options: argparse.Namespace) -> int:
    """`muster-agent run`: serve until an order, a dismissal or SIGTERM ends the agent; return the exit code.

    Raises:
        BadOption, SiteError, IdentityError, ListenError: the message says what would be right.
    """
    spec = read_spec(options.spec, launches=bool(options.words))
    site = _load_site(options)
    # Do not use asyncio.run: it waits for all tasks and threads, even blocked ones. The end of the process does not.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(_launch(options, spec, site) if options.words else _run(options, spec, site))
    finally:
        agent_log.stop()


def batch(options: argparse.Namespace) -> int:
    """`muster-agent batch`: see muster.daemon.agent.batch.batch_process.

    Raises:
        BadOption, SiteError, IdentityError: the message says what would be right.
    """
    if not options.gang:
        raise BadOption("--gang (or MUSTER_GANG) must name the gang")
    if not os.environ.get("SLURM_JOB_ID"):  # srun would ask for an allocation of its own
        raise BadOption("this script is for a job of Slurm: queue it with `muster submit job.toml`")
    site = _load_site(options)
    start_logging(
        options.log_level, options.log_format, "muster-agent", gang=options.gang, job=os.environ["SLURM_JOB_ID"]
    )
    spec = read_spec(text) if (text := os.environ.get("MUSTER_SPEC", "")) else None
    if spec:
        node_problems.write_tokens(spec, os.environ)
    run = BatchRef(
        gang_id=options.gang, slurm_job_id=int(os.environ["SLURM_JOB_ID"]), slurm_restart_count=_restart_count()
    )
    remote = RemoteCoordinator(site.coordinator, site.credentials(), run, site.trust())
    seen = Hooked(Summarised(remote, spec.run_dir, options.gang), spec.hooks, spec.run_dir) if spec else remote
    allocation = Allocation.of(spec, run.slurm_job_id, run.slurm_restart_count, os.environ) if spec else None
    return asyncio.run(run_batch(options.command, seen, allocation))


def _load_site(options: argparse.Namespace) -> Site:
    return Site.load(
        coordinator=options.coordinator, auth=options.auth, connections=options.connections, config=options.config
    )


def read_spec(text: str, *, launches: bool = False) -> JobSpec:
    """Parse the JobSpec from `text`: JSON, or the path of a file with JSON. `launches`: a launcher says the command.

    Raises:
        BadOption: `text` is neither.
    """
    if not text:
        raise BadOption("--spec (or MUSTER_SPEC) must be the job's spec as JSON, or a file that holds it")
    try:
        spec = json_format.Parse(text if text.lstrip().startswith("{") else Path(text).read_text(), JobSpec())
    except OSError as error:
        raise BadOption(f"--spec: {text!r} can't be read: {error.strerror}") from None
    except json_format.ParseError as error:
        raise BadOption(f"--spec is not a JobSpec as JSON: {error}") from None
    for field in ("run_dir",) if launches else ("command", "run_dir", "ranks_per_node"):
        if not getattr(spec, field):
            raise BadOption(f"--spec: {field} is missing")
    return spec


async def _run(options: argparse.Namespace, spec: JobSpec, site: Site) -> int:
    code, _ = await _serve(options, _settings(options, spec, site, _identity(options), _given_environment()))
    return code


async def _launch(options: argparse.Namespace, spec: JobSpec, site: Site) -> int:
    """Run the command with which a user's own script launches, and what its launcher hands over."""
    own = _identity(options)
    environment = rank_environment.without_agent_settings(_given_environment())
    _on_end(lambda: None)  # a signal that comes while the command starts is looked at after that
    task = Task.start(options.words, rank_environment.task_environment(environment, tuple(spec.own_nodes), own.node))
    if isinstance(task, int):
        return task
    _on_end(task.terminate)
    found = await task.handed_over()
    if isinstance(found, int):
        print(f"muster: on {own.node}, the launch has ended with exit code {found}, and Muster has started no rank",
              file=sys.stderr)  # fmt: skip
        return found
    try:
        spec = found.of_job(spec)
    except WrongHandover as error:
        return await task.refuse(str(error))
    meeting_address.tell_if_fixed(spec, own.node)
    settings = _settings(options, spec, site, own, found.environment, found, {task.pid})
    forks = task.forks(found, settings.job.zygote_spec.environment)
    settings = replace(settings, job=replace(settings.job, forks=forks))
    code, job_is_over = await _serve(options, settings)
    _on_end(task.terminate)
    if not job_is_over:  # this node leaves the gang: nothing behind the launch is to run here
        task.terminate()
    await task.finish(code)
    return code


def _identity(options: argparse.Namespace) -> AgentIdentity:
    if not options.gang:
        raise BadOption("--gang (or MUSTER_GANG) must name the gang")
    try:
        gang, node = names.check_gang(options.gang), names.check_node(node_name(options.node))
    except names.InvalidName as error:
        raise BadOption(str(error)) from None
    return AgentIdentity(gang, node, secrets.token_hex(8), os.getuid())


def _settings(
    options: argparse.Namespace,
    spec: JobSpec,
    site: Site,
    own: AgentIdentity,
    given: Mapping[str, str],
    launch: Handover | None = None,
    other_children: Collection[int] = (),
) -> AgentSettings:
    """`given`: the environment of ranks, before [env]. `launch`: what a launcher has handed over."""
    environment = rank_environment.shared_environment(given, spec.env)
    from_script = bool(os.environ.get(RANK_ENVIRONMENT))
    pool_serial = int(os.environ.get("MUSTER_POOL") or 0)
    pool_job = PoolJob(
        own.gang,
        spec,
        _restart_count(),
        os.environ.get("MUSTER_COORDINATOR", ""),
        sys.argv[0],
        _environment_for_pool(own, spec, launch),
    )
    modules, learns = modules_to_import(spec.preload), not spec.preload
    zygote_spec = ZygoteSpec(tuple(spec.command), modules, environment, spec.work_dir, learns=learns)
    bound = _bindings(own, spec) if spec.ranks_of_srun else {}
    zygote_spec = replace(zygote_spec, processors={local: one.processors for local, one in bound.items()})
    if launch is not None:
        started_as = StartedAs(launch.processors, launch.limits, launch.umask)
        zygote_spec = replace(zygote_spec, started_as=started_as, macro=MACRO)
    variables = {local: one.variables for local, one in bound.items()}
    return AgentSettings(
        identity=own,
        job=NodeJob(
            own.gang,
            own.node,
            zygote_spec,
            spec.run_dir,
            spec.ranks_per_node,
            from_script,
            spec.ranks_of_srun,
            variables,
            tuple(spec.own_nodes),
        ),
        spec=spec,
        coordinator=site.coordinator,
        credentials=site.credentials(),
        trust=site.trust(),
        encrypt_checkpoints=site.encrypt_checkpoints,
        listen=options.listen,
        ports=site.agent_ports,
        host=options.advertise or _address_towards(split_addresses(site.coordinator)[0]),
        notice_s=options.notice,
        pool=PoolRequestDefaults(pool_job, job_end_time(), dict(os.environ)),
        slurm_job_id=int(os.environ.get("SLURM_JOB_ID", 0)),
        slurm_restart_count=_restart_count(),
        batch_host=os.environ.get("SLURM_NODEID") == "0" and not pool_serial,
        pool_serial=pool_serial,
        # A pool job is never requeued.
        memory_socket="" if pool_serial else options.memory,
        environ=given,
        other_children=frozenset(other_children),
        shown=(Shown() if launch is None else launch.shown) if from_script else None,
        hardware_socket=options.memory,
        failure=node_problems.find_problems(spec, os.environ, environment.get("PATH", os.defpath)),
    )


def _bindings(own: AgentIdentity, spec: JobSpec) -> dict[int, TaskBinding]:
    """What each local rank has, if the launch has asked srun to bind its tasks."""
    return task_binding.read(binding_file(spec.run_dir, own.gang), own.node, task_binding.open_gpus())


def _given_environment() -> dict[str, str]:
    """What a process on this node would have in its environment if srun had been started where the user's own batch
    script launches. Without such a script: the environment of this process."""
    path = os.environ.get(RANK_ENVIRONMENT, "")
    if not path:
        return dict(os.environ)
    try:
        launch = process_tree.read_environment(Path(path).read_bytes())
    except OSError as error:
        raise BadOption(f"{RANK_ENVIRONMENT} = {path!r} can't be read: {error.strerror}") from None
    return rank_environment.launched_environment(os.environ, launch)


def _environment_for_pool(own: AgentIdentity, spec: JobSpec, launch: Handover | None) -> str:
    """The file with the environment of ranks on nodes of the shared pool, where no launcher runs; empty: as here."""
    if launch is None or not spec.pool_nodes:
        return os.environ.get(RANK_ENVIRONMENT, "")
    path = Path(spec.run_dir, f"{own.gang}-{own.node}.environment")
    try:
        private_file.replace(path, rank_environment.environment_text(launch.environment))
    except OSError as error:
        raise BadOption(f"{path} can't be written: {error.strerror}") from None
    return str(path)


def _restart_count() -> int:
    """How often Slurm has restarted the gang's own job. In a pool job: the count when the pool job was submitted."""
    return int(os.environ.get("MUSTER_RESTARTS") or os.environ.get("SLURM_RESTART_COUNT") or 0)


def _address_towards(towards: str) -> str:
    """This host's address on the route to "host:port"; the host name if that is unknown."""
    host, port = split_address(towards)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(target)  # sends nothing
            own = str(sock.getsockname()[0])
    except OSError:
        return socket.gethostname()
    # The coordinator runs on this node, but other nodes need an address that leads here from their network.
    if ip_address(own.partition("%")[0]).is_loopback and "SLURM_JOB_NODELIST" in os.environ:
        return socket.gethostname()
    return f"[{own}]" if ":" in own else own


async def _serve(options: argparse.Namespace, settings: AgentSettings) -> tuple[int, bool]:
    """The exit code, and whether the whole job is over."""
    own, job = settings.identity, os.environ.get("SLURM_JOB_ID", "")
    place = (settings.spec.run_dir, own.gang, own.node, job)
    agent_log.start(options.log_level, options.log_format, *place, for_script=settings.shown is not None)
    agent = Agent(settings)
    _on_end(agent.wind_down.on_sigterm)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, agent.wind_down.on_sigterm, INTERRUPTED)
    return await agent.run(), agent.job_is_over


def _on_end(follow: Callable[[], None]) -> None:
    """What SIGTERM and SIGINT do from now on."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, follow)
