"""job.toml: the user's keys, their checks, and the JobSpec that results.

The fields below define every key, its default and its limits. docs/JOBTOML.md explains them. Invalid input is refused
before anything is queued. The message names the key, the value and what would be valid (explain.py).
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from muster.daemon.host import toml_text
from muster.daemon.transport import job_limits
from muster.fabric.groups.axes import Axes, write_order
from muster.launcher.errors import WrongInput
from muster.launcher.spec.checkpoint import (
    AUTO,
    HOUR_S,
    CheckpointTable,
    check_redundancy,
    check_trust,
    check_url,
    is_url,
)
from muster.launcher.spec.cross_checks import check_model, check_placement
from muster.launcher.spec.explain import LINE_BREAK, explain_errors
from muster.launcher.spec.flags import with_options
from muster.launcher.spec.hooks import Hooks
from muster.launcher.spec.job_options import problems_of_texts
from muster.launcher.spec.job_size import fill_in_nodes, require_nodes_or_gpus
from muster.launcher.spec.loss import Loss
from muster.launcher.spec.model import Model
from muster.launcher.spec.parallelism import Parallelism
from muster.launcher.spec.placement import Placement
from muster.launcher.spec.record import Record
from muster.launcher.spec.table import Count, Table
from muster.slurm.client import names
from muster.slurm.client.parsing.gres import count_gpus
from muster.v1.common_pb2 import JobSpec

# Slurm's own forms: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s.
_TIME = re.compile(r"\d+|\d+:\d{2}|\d+:\d{2}:\d{2}|\d+-\d{1,2}(:\d{2}(:\d{2})?)?|UNLIMITED")
_SWITCHES = re.compile(r"\d+(@[\d:-]+)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
# Muster sets these variables for each rank. One value from job.toml would be wrong for all ranks but one.
_SET_BY_MUSTER = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
)

MIN_HANG_AFTER_S = 5.0
"""Seconds. Within this time Muster can tell a silent rank from a rank that reports its steps late."""
MIN_HANG_AFTER_IDLE_S = 10.0
"""Seconds. The kernel counts CPU time in hundredths of a second: a trace of it can't be measured in less."""


def _split_command(value: Any) -> Any:
    """Splits a command string as a shell does, without expansion."""
    try:
        return shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"is not a valid command line ({error}); write a list of strings") from None


def _one_line(value: str) -> str:
    if not names.is_one_line(value):
        raise ValueError("must be one line without control characters")
    return value


def _absolute(value: str) -> str:
    if value and not value.startswith("/"):
        raise ValueError("must be an absolute path on shared storage, for example /shared/runs/tiny")
    return _one_line(value)


def _check_variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f"{name!r} is not a valid variable name")
    if name in _SET_BY_MUSTER:
        raise ValueError(f"Muster sets {name} for each rank: remove it")
    return name


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain a NUL character")
    return text


OneLine = Annotated[str, Field(min_length=1), BeforeValidator(lambda v: _one_line(v) if isinstance(v, str) else v)]
Variable = Annotated[str, AfterValidator(_check_variable)]
Nodes = Annotated[int, Field(strict=True, ge=1, le=job_limits.MAX_NODES)]
ExtraNodes = Annotated[int, Field(strict=True, ge=0, le=job_limits.MAX_NODES)]
Gpus = Annotated[int, Field(strict=True, ge=1, le=job_limits.MAX_RANKS)]
RanksPerNode = Annotated[int, Field(strict=True, ge=1, le=job_limits.MAX_RANKS_PER_NODE)]


# The published schema describes what is accepted, not what becomes of it.
_STRINGS: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "minItems": 1}
Command = Annotated[
    tuple[str, ...],
    BeforeValidator(_split_command),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, _STRINGS]}),
]
TextOrNumber = Annotated[str | None, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer"}]})]


class Slurm(Table):
    """[slurm]: the job's request to Slurm. `options` are passed to sbatch unchanged."""

    partition: OneLine | None = None
    """Slurm's partition."""
    account: OneLine | None = None
    """The account that the job is charged to."""
    qos: OneLine | None = None
    """Slurm's quality of service."""
    reservation: OneLine | None = None
    """The reservation whose nodes the job uses."""
    constraint: OneLine | None = None
    """Features that all nodes must have."""
    time: TextOrNumber = None
    """The time limit: minutes, hours:minutes:seconds or days-hours."""
    mem: OneLine = "0"
    """Memory of each node. 0: all of it."""
    cpus_per_task: Count | None = None
    """CPUs of each node for the job."""
    gres: OneLine | None = None
    """Generic resources of each node, as gpu:h100:8. gpus_per_node asks for GPUs of any type."""
    exclude: OneLine | None = None
    """Nodes that the job must not get."""
    switches: TextOrNumber = None
    """At most so many leaf switches, and how long to wait for them: 1@10:00."""
    dependency: OneLine | None = None
    """Jobs that this one waits for."""
    comment: OneLine | None = None
    """A comment that Slurm keeps."""
    options: tuple[OneLine, ...] = ()
    """Further options of sbatch, each as one string."""

    @field_validator("time", mode="before")
    @classmethod
    def _check_time(cls, value: Any) -> Any:
        text = str(value) if type(value) is int else value
        if isinstance(text, str) and not _TIME.fullmatch(text):
            raise ValueError('must be a Slurm time, for example "30", "4:00:00" or "2-12:00:00"')
        return text

    @field_validator("switches", mode="before")
    @classmethod
    def _check_switches(cls, value: Any) -> Any:
        text = str(value) if type(value) is int else value
        if isinstance(text, str) and not _SWITCHES.fullmatch(text):
            raise ValueError('must be COUNT or COUNT@MAXWAIT, for example "1@10:00"')
        return text

    @field_validator("options")
    @classmethod
    def _check_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := problems_of_texts(value):
            raise ValueError("; ".join(wrong))
        return value


# Checked like an empty table of the file: with the job's own validator, so that no table needs one of its own.
_NO_TABLE: Any = Field(default_factory=dict, validate_default=True)


class Job(Table):
    """The whole job.toml."""

    # Either nodes or gpus: job_size.fill_in_nodes.
    model_config = ConfigDict(json_schema_extra=require_nodes_or_gpus)

    name: str
    """The name in Slurm, too: 1 to 64 letters, digits, '.', '_' or '-'."""
    nodes: Nodes
    """Nodes that run ranks. The job asks Slurm for spares beside them."""
    gpus: Gpus | None = None
    """GPUs that run ranks, instead of nodes: a multiple of gpus_per_node."""
    spares: ExtraNodes = 0
    """Nodes beside these that wait to take the place of one that fails. They count as used for the whole job."""
    elastic: Annotated[bool, Field(strict=True)] = False
    """Whether the job goes on with fewer nodes if no spare is left, instead of a requeue."""
    min_nodes: Nodes | None = None
    """The smallest number of nodes to go on with. Below nodes it needs elastic."""
    ranks_per_node: RanksPerNode | None = None
    """Processes that run the command on each node. Default: one for each GPU that is asked for, else 1."""
    gpus_per_node: RanksPerNode | None = None
    """GPUs to ask Slurm for on each node. Default: none."""
    command: Command
    """What each rank runs: a list of strings, or a string that is split as a shell does."""
    work_dir: str = ""
    """The working folder of the ranks. Default: the folder in which muster submit is called."""
    env: dict[Variable, Annotated[str, AfterValidator(_without_nul)]] = Field(
        default_factory=dict, max_length=job_limits.MAX_VARIABLES
    )
    """Variables of the ranks."""
    preload: tuple[str, ...] = ()
    """Modules that waiting processes import in advance."""
    run_dir: str
    """A folder on shared storage, for the logs and the script."""
    durable_dir: str = ""
    """A folder on shared storage, or a URL, for durable checkpoints. Without one, all is lost when the job ends."""
    gather_timeout: Annotated[float, Field(gt=0, le=job_limits.MAX_GATHER_TIMEOUT_S)] = 300.0
    """Seconds to wait for all nodes, from the first agent on."""
    max_failures: Annotated[int, Field(strict=True, ge=1, le=job_limits.MAX_FAILURES)] = 3
    """So many generations in a row without progress end the job."""
    hang_after: Annotated[float, Field(ge=0, le=job_limits.MAX_HANG_AFTER_S)] = 60.0
    """Seconds without a finished step before ranks may count as hanging. 0: they never do."""
    hang_after_idle: Annotated[float, Field(ge=0, le=job_limits.MAX_HANG_AFTER_S)] = 0.0
    """Seconds for which all ranks may be idle, for scripts without the library. 0: without an end."""
    pool_nodes: ExtraNodes = 2
    """How many nodes of the site's shared pool may join at once if no spare is left."""
    log_limit_gb: Annotated[float, Field(ge=0, le=job_limits.MAX_LOG_GB)] = 50.0
    """GB that the logs of the ranks may take before those of old generations are removed. 0: no limit."""
    readers: Annotated[tuple[str, ...], Field(max_length=names.MOST_READERS)] = ()
    """Who else may read the job: login names, and Unix groups as "group:NAME". They can change nothing."""
    preflight: Annotated[bool, Field(strict=True)] = False
    """Whether each node is checked before the first start."""
    requeue: Annotated[bool, Field(strict=True)] = True
    """Whether the job is requeued if no spare is left, or if Slurm preempts it."""
    requeue_at_limit: Annotated[bool, Field(strict=True)] = False
    """Whether the job is requeued at its time limit, too."""
    stop_before: Annotated[float, Field(ge=0, le=job_limits.MAX_STOP_BEFORE_S)] = 120.0
    """Seconds before the time limit at which ranks are asked to stop and save."""
    stop_signal: TextOrNumber = None
    """The signal that ranks without the library get before a planned stop, for example USR1."""
    parallelism: Parallelism = _NO_TABLE
    placement: Placement = _NO_TABLE
    model: Model = _NO_TABLE
    checkpoint: CheckpointTable = _NO_TABLE
    loss: Loss = _NO_TABLE
    record: Record = _NO_TABLE
    hooks: Hooks = Field(default_factory=dict)
    """Your programs that are told what happens to the job."""
    slurm: Slurm = _NO_TABLE

    _fill_in_nodes = model_validator(mode="before")(fill_in_nodes)

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not names.JOB.fullmatch(value):
            raise ValueError("must be 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or digit")
        return value

    @field_validator("run_dir")
    @classmethod
    def _check_run_dir(cls, value: str) -> str:
        if not value:
            raise ValueError("must name a folder on shared storage, for example /shared/runs/tiny")
        if "%" in value:
            raise ValueError("must not contain %, which Slurm replaces in the names of output files")
        return _absolute(value)

    @field_validator("work_dir")
    @classmethod
    def _check_dir(cls, value: str) -> str:
        return _absolute(value)

    @field_validator("durable_dir")
    @classmethod
    def _check_durable_dir(cls, value: str) -> str:
        return check_url(value) if is_url(value) else _absolute(value)

    @field_validator("command")
    @classmethod
    def _check_command(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or not value[0]:
            raise ValueError('must not be empty, for example ["python3", "/shared/tiny/train.py"]')
        if any("\0" in word for word in value):
            raise ValueError("must not contain a NUL character")
        return value

    @field_validator("preload")
    @classmethod
    def _check_preload(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        wrong = [repr(name) for name in value if not _MODULE.fullmatch(name)]
        if wrong:
            raise ValueError(f'not a valid module name: {", ".join(wrong)}; an example is "torch.nn"')
        return value

    @field_validator("readers")
    @classmethod
    def _check_readers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            names.check_reader(name)
        return value

    @field_validator("hang_after")
    @classmethod
    def _check_hang_after(cls, value: float) -> float:
        if 0 < value < MIN_HANG_AFTER_S:
            raise ValueError(f"must be {MIN_HANG_AFTER_S:g} or more, or 0 to switch hang detection off")
        return value

    @field_validator("hang_after_idle")
    @classmethod
    def _check_hang_after_idle(cls, value: float) -> float:
        if 0 < value < MIN_HANG_AFTER_IDLE_S:
            raise ValueError(f"must be {MIN_HANG_AFTER_IDLE_S:g} or more, or 0 to look for no idle ranks")
        return value

    @field_validator("stop_signal", mode="before")
    @classmethod
    def _check_signal(cls, value: Any) -> Any:
        number = signal_number(value)
        if number is None:
            raise ValueError('must be a signal that a program can catch, for example "USR1" or "SIGTERM"')
        return signal.Signals(number).name

    @model_validator(mode="after")
    def _check_together(self) -> Job:
        if wrong := [*self._contradictions(), *self._refused_by_tables()]:
            raise ValueError(LINE_BREAK.join(wrong))
        return self

    def _contradictions(self) -> Iterator[str]:
        """Keys that contradict each other."""
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            yield f"min_nodes = {self.min_nodes} must not be more than nodes = {self.nodes}"
        if self.min_nodes is not None and self.min_nodes < self.nodes and not self.elastic:
            yield (
                f"min_nodes = {self.min_nodes} is less than nodes = {self.nodes}: that needs elastic = true, which "
                "lets the job continue with fewer data-parallel replicas"
            )
        if self.elastic and not self.parallelism.keeps_copies_on_nodes(self.local_ranks):
            yield (
                "elastic = true needs whole copies of the model on each node, so that the job can go on with fewer: "
                "keep only data and sharding in parallelism, or a tensor that divides ranks_per_node = "
                f'{self.local_ranks} and is first in order ("tp-..."), or remove elastic'
            )
        if self.checkpoint.durable_every and not (self.durable_dir and self.checkpoint.memory):
            yield (
                "checkpoint.durable_every needs durable_dir, where checkpoints are written, and checkpoint.memory = "
                "true, from which they are written"
            )
        if self.checkpoint.copies > max(2, self.nodes):
            yield (
                f"checkpoint.copies = {self.checkpoint.copies} must not be more than nodes = {self.nodes}: only nodes "
                "with ranks hold copies"
            )
        if self.gpus_per_node and self._gpus_of_gres not in (0, self.gpus_per_node):
            yield (
                f"gpus_per_node = {self.gpus_per_node} and slurm.gres = {self.slurm.gres!r} ask for different numbers "
                "of GPUs: keep one of them"
            )
        if self.gpus_per_node and self.ranks_per_node and self.ranks_per_node % self.gpus_per_node:
            yield f"ranks_per_node = {self.ranks_per_node} must be a multiple of gpus_per_node = {self.gpus_per_node}"
        if self.world_size > job_limits.MAX_RANKS:
            yield (
                f"nodes * ranks_per_node = {self.nodes} * {self.local_ranks} = {self.world_size} ranks must be "
                f"{job_limits.MAX_RANKS} or less"
            )

    def _refused_by_tables(self) -> Iterator[str]:
        """What the tables refuse of each other, and of the job's size."""
        checks: tuple[Callable[[], object], ...] = (
            lambda: check_trust(self.durable_dir, self.checkpoint),
            lambda: check_redundancy(self.checkpoint, self.nodes),
            lambda: check_placement(self.placement, self.axes, self.local_ranks),
            lambda: check_model(self.model, self.parallelism, self.axes),
        )
        told = set[str]()
        for check in checks:
            try:
                check()
            except ValueError as error:
                if str(error) not in told:  # two checks need the axes
                    yield str(error)
                told.add(str(error))

    @property
    def local_ranks(self) -> int:
        """Ranks on each node: ranks_per_node, else one for each GPU, else 1."""
        return self.ranks_per_node or self.gpus_per_node or self._gpus_of_gres or 1

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.local_ranks

    @property
    def fewest_nodes(self) -> int:
        """The smallest number of nodes to train on: min_nodes, else half of the nodes if the job is elastic, else all
        nodes.
        """
        return self.min_nodes or ((self.nodes + 1) // 2 if self.elastic else self.nodes)

    @property
    def gres(self) -> str | None:
        """The GRES request for each node."""
        if not self.gpus_per_node or self._gpus_of_gres:
            return self.slurm.gres
        return ",".join(filter(None, (f"gpu:{self.gpus_per_node}", self.slurm.gres)))

    @property
    def _gpus_of_gres(self) -> int:
        """GPUs of each node, or parts of them, that slurm.gres names."""
        return count_gpus(self.slurm.gres or "", parts=True) or 0

    @property
    def axes(self) -> Axes:
        """The axes of parallelism of all ranks. Raises ValueError if the degrees don't fit."""
        return self.parallelism.axes(self.nodes, self.local_ranks)

    def to_proto(self, work_dir: str) -> JobSpec:
        """Returns the JobSpec with all defaults filled in. `work_dir` (absolute) is used if job.toml has none."""
        return JobSpec(
            name=self.name,
            nodes=self.nodes,
            spares=self.spares,
            ranks_per_node=self.local_ranks,
            min_nodes=self.fewest_nodes,
            command=self.command,
            env=self.env,
            preload=self.preload,
            run_dir=self.run_dir,
            durable_dir=self.durable_dir,
            memory_checkpoint=self.checkpoint.memory,
            durable_every_steps=self.checkpoint.durable_every_steps,
            durable_every_s=self.checkpoint.durable_every_s,
            durable_auto=self.checkpoint.durable_every == AUTO,
            more_copies=self.checkpoint.copies - 2,
            parity_nodes=self.checkpoint.parity,
            durable_keep=self.checkpoint.durable_keep,
            durable_keep_s=self.checkpoint.durable_keep_hours * HOUR_S,
            trust_durable_store=self.checkpoint.trust_durable_store,
            node_mtbf_s=self.checkpoint.node_mtbf_hours * HOUR_S,
            gather_timeout_s=self.gather_timeout,
            max_failures=self.max_failures,
            requeue=self.requeue,
            work_dir=self.work_dir or work_dir,
            tensor_parallel=self.parallelism.tensor,
            pipeline_parallel=self.parallelism.pipeline,
            data_parallel=self.axes.data,
            context_parallel=self.parallelism.context,
            expert_parallel=self.parallelism.expert,
            parallel_order=write_order(self.parallelism.order),
            stop_signal=signal_number(self.stop_signal) or 0,
            stop_before_s=self.stop_before,
            requeue_at_limit=self.requeue_at_limit,
            pool_nodes=self.pool_nodes,
            hang_after_s=self.hang_after,
            hang_after_idle_s=self.hang_after_idle,
            preflight=self.preflight,
            readers=self.readers,
            log_limit_bytes=int(self.log_limit_gb * 1e9),
            loss=self.loss.to_proto(),
            live=self.record.live_numbers(),
            hooks=[hook.to_proto(name) for name, hook in self.hooks.items()],
        )


_NOT_A_SCRIPT = "a job.toml describes the job and names its script in command: docs/JOBTOML.md"


def signal_number(value: Any) -> int | None:
    """The number of a signal given as "USR1", "SIGUSR1" or a number. None if no program can catch it."""
    if type(value) is int or (isinstance(value, str) and value.isdigit()):
        number = int(value)
    elif isinstance(value, str):
        name = value.upper().removeprefix("SIG")
        number = next((int(s) for s in signal.Signals if s.name == f"SIG{name}"), 0)
    else:
        return None
    known = number in {int(s) for s in signal.Signals}
    return number if known and number not in (signal.SIGKILL, signal.SIGSTOP) else None


def load(path: Path, options: argparse.Namespace | None = None) -> Job:
    """Reads the job from the file `path`. `options` of the command line replace the file's values (flags.py).

    Raises:
        WrongInput: the file cannot be read, is neither TOML nor YAML, or is not valid. The message names every error.
    """
    try:
        return parse(path.read_text("utf-8-sig"), str(path), options)  # editors of Windows begin a file with a mark
    except FileNotFoundError:
        raise WrongInput(f"{path} does not exist", "docs/JOBTOML.md describes job.toml") from None
    except OSError as error:
        raise WrongInput(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise WrongInput(f"{path} is not a text file in UTF-8") from None


def parse(text: str, where: str, options: argparse.Namespace | None = None) -> Job:
    """Reads the job from `text`. `where` names the source in error messages: YAML if it ends with .yaml or .yml, else
    TOML. `options`: as for `load`.

    Raises:
        WrongInput: as in `load`.
    """
    try:
        given = _tables(text, where)
        return Job.model_validate(with_options(given, options) if options else given)
    except ValidationError as error:
        problems = "\n".join(f"  {line}" for line in explain_errors(error, Job))
        raise WrongInput(f"{where} is not valid:\n{problems}", "docs/JOBTOML.md lists every key") from None


def _tables(text: str, where: str) -> dict[str, Any]:
    if where.endswith((".yaml", ".yml")):
        from muster.launcher.spec import yaml_text  # few jobs need it, and it takes 15 ms

        try:
            return yaml_text.loads(text)
        except yaml_text.YamlError as error:
            raise WrongInput(f"{where} is not YAML: {error}") from None
    try:
        return toml_text.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise WrongInput(f"{where} is not TOML: {error}", _NOT_A_SCRIPT) from None
