"""job.toml: valid values, defaults, and the error message for each kind of mistake."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.fabric.groups.axes import Axes, parse_order
from muster.fabric.groups.rank_groups import GroupKind, rank_groups
from muster.fabric.model.level import Level
from muster.fabric.model.node import FailureDomain
from muster.launcher.errors import WrongInput
from muster.launcher.spec.loss import Loss
from muster.launcher.spec.model import Model
from muster.launcher.spec.parallelism import Parallelism
from muster.launcher.spec.placement import Packing, Placement, Spreading
from muster.launcher.spec.spec import CheckpointTable, Job, Slurm, load, parse, signal_number
from muster.launcher.submission.job_message import spreading

LEAST = """
name = "tiny"
nodes = 4
command = "python3 train.py --note 'two words'"
run_dir = "/shared/tiny"
"""
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny_transformer" / "job.toml"


def refusal(text: str) -> str:
    """The error message for `text`."""
    with pytest.raises(WrongInput) as refused:
        parse(text, "job.toml")
    return refused.value.message


def test_every_default_is_filled_in() -> None:
    spec = parse(LEAST, "job.toml").to_proto(work_dir="/home/alice")
    assert (spec.name, spec.nodes, spec.spares, spec.ranks_per_node, spec.min_nodes) == ("tiny", 4, 0, 1, 4)
    assert list(spec.command) == ["python3", "train.py", "--note", "two words"]
    assert (spec.run_dir, spec.durable_dir, spec.work_dir) == ("/shared/tiny", "", "/home/alice")
    assert (spec.memory_checkpoint, spec.requeue, spec.max_failures, spec.gather_timeout_s) == (True, True, 3, 300.0)
    assert (spec.tensor_parallel, spec.pipeline_parallel, spec.data_parallel, spec.stop_signal) == (1, 1, 4, 0)
    assert (spec.hang_after_s, spec.hang_after_idle_s) == (60.0, 0.0)


def test_everything_that_is_given_is_kept() -> None:
    text = """
    name = "big"
    nodes = 16
    spares = 2
    min_nodes = 16
    gpus_per_node = 8
    command = ["python3", "-m", "train"]
    work_dir = "/home/alice/big"
    run_dir = "/shared/big"
    durable_dir = "/shared/big/checkpoints"
    preload = ["torch", "my.model"]
    gather_timeout = 60
    hang_after = 0
    hang_after_idle = 600
    max_failures = 5
    requeue = false
    stop_signal = "USR1"
    env = { NCCL_DEBUG = "WARN" }
    parallelism = { tensor = 8, pipeline = 4 }
    checkpoint = { memory = false }
    """
    job = parse(text, "job.toml")
    spec = job.to_proto(work_dir="/elsewhere")
    assert (spec.min_nodes, spec.ranks_per_node, job.gres) == (16, 8, "gpu:8")
    assert (spec.tensor_parallel, spec.pipeline_parallel, spec.data_parallel) == (8, 4, 4)
    assert (list(spec.preload), dict(spec.env)) == (["torch", "my.model"], {"NCCL_DEBUG": "WARN"})
    assert (spec.work_dir, spec.stop_signal) == ("/home/alice/big", signal.SIGUSR1)
    assert (spec.requeue, spec.memory_checkpoint, spec.max_failures, spec.gather_timeout_s) == (False, False, 5, 60.0)
    assert (spec.hang_after_s, spec.hang_after_idle_s) == (0.0, 600.0)


def test_gpus_may_be_given_instead_of_nodes() -> None:
    job = parse(LEAST.replace("nodes = 4", "gpus = 64\ngpus_per_node = 8"), "job.toml")
    assert (job.nodes, job.local_ranks, job.to_proto("/").nodes) == (8, 8, 8)


def test_axes_and_order_go_to_the_coordinator() -> None:
    text = LEAST + 'ranks_per_node = 8\nparallelism = { tensor = 2, context = 2, expert = 4, order = "cp-tp" }'
    job = parse(text, "job.toml")
    assert job.axes == Axes(tensor=2, context=2, expert=4, data=8, order=parse_order("cp-tp-ep-dp-pp"))
    spec = job.to_proto("/")
    assert (spec.context_parallel, spec.expert_parallel, spec.data_parallel) == (2, 4, 8)
    assert spec.parallel_order == "cp-tp-ep-dp-pp"


@pytest.mark.parametrize("parallelism", ['sharding = "parameters"', "tensor = 4", 'tensor = 2, sharding = "optimizer"'])
def test_a_job_with_whole_copies_of_the_model_on_each_node_may_be_elastic(parallelism: str) -> None:
    job = parse(f"{LEAST}elastic = true\nranks_per_node = 4\nparallelism = {{{parallelism}}}\n", "job.toml")
    assert job.to_proto(work_dir="/").min_nodes == 2


def test_where_groups_shall_be() -> None:
    text = 'placement = { tensor = "require node", data = "pod", spread_spares = ["require rack"] }'
    placement = parse(f"{LEAST}{text}", "job.toml").placement
    assert placement.packing(GroupKind.TENSOR) == Packing(Level.NODE, required=True)
    assert placement.packing(GroupKind.EXPERT_DATA) == Packing(Level.POD)
    assert placement.packing(GroupKind.EXPERT) == Packing(Level.LEAF)
    assert placement.spread_spares == (Spreading(FailureDomain.RACK, required=True),)
    assert Placement.model_validate(placement.model_dump()) == placement


def test_what_is_spread_goes_to_the_coordinator() -> None:
    text = 'placement = { spread_replicas = ["power", "require rack"], spread_spares = [] }'
    found = spreading(parse(f"{LEAST}{text}", "job.toml"))
    assert (list(found.replicas), list(found.spares)) == (["power", "require rack"], [])
    usual = spreading(parse(LEAST, "job.toml"))
    assert (list(usual.replicas), list(usual.spares)) == (["power", "rack", "leaf"], ["power", "rack"])


def test_a_model_may_be_written_with_exponents() -> None:
    model = parse(f"{LEAST}model = {{ parameters = 70e9, layers = 80 }}", "job.toml").model
    assert (model.parameters, model.layers, model.precision) == (70_000_000_000, 80, "bf16")


DEGREE = st.sampled_from([None, 1, 2, 3, 4, 8, 10**6, 10**9, 0, -1])


@given(
    nodes=st.integers(1, 8),
    local_ranks=st.sampled_from([1, 2, 4, 8]),
    degrees=st.fixed_dictionaries({key: DEGREE for key in ("tensor", "context", "pipeline", "data", "expert")}),
    order=st.permutations(["tp", "cp", "ep", "dp", "pp"]),
    level=st.sampled_from(["node", "prefer leaf", "require node", "require pod"]),
)
def test_axes_fit_or_are_refused_in_one_message(
    nodes: int, local_ranks: int, degrees: dict[str, int | None], order: list[str], level: str
) -> None:
    given_degrees = [f"parallelism.{key} = {value}" for key, value in degrees.items() if value is not None]
    lines = [f"ranks_per_node = {local_ranks}", f'parallelism.order = "{"-".join(order)}"', *given_degrees]
    text = "\n".join([LEAST.replace("nodes = 4", f"nodes = {nodes}"), *lines, f'placement.tensor = "{level}"'])
    try:
        job = parse(text, "job.toml")
    except WrongInput as refused:
        lines = refused.message.splitlines()
        out_of_range = [value for value in degrees.values() if value is not None and not 1 <= value <= 10**6]
        assert len(lines) == 1 + max(1, len(out_of_range))
        return
    assert job.axes.world_size == nodes * local_ranks
    assert job.axes.data * job.axes.context % job.axes.expert == 0
    for kind in GroupKind:
        assert sum(map(len, rank_groups(job.axes, kind))) == nodes * local_ranks


def test_the_example_is_right() -> None:
    spec = load(EXAMPLE).to_proto(work_dir="/")
    assert (spec.nodes, spec.spares) == (8, 2)


def test_every_key_is_in_the_reference() -> None:
    reference = (EXAMPLE.parents[2] / "docs" / "JOBTOML.md").read_text()
    for table in (Job, Slurm, Parallelism, Placement, Model, CheckpointTable, Loss):
        for key in table.model_fields:
            assert f"`{key}`" in reference or f"[{key}]" in reference, key


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("spare = 1", "spare = 1: unknown key; did you mean spares?"),
        ("[SLURM]\ntime = '1'", "SLURM: unknown key; did you mean slurm?"),
        ('partition = "gpu"', "partition = 'gpu': unknown key; it belongs in the table [slurm]"),
        ("zzz = 1", "zzz = 1: unknown key; known keys are checkpoint, command,"),
        ("spares = -1", "spares = -1: must be 0 or more"),
        ("spares = 1.5", "spares = 1.5: must be a whole number"),
        ("spares = true", "spares = True: must be a whole number"),
        ("min_nodes = 5", "min_nodes = 5 must not be more than nodes = 4"),
        ("min_nodes = 3", "min_nodes = 3 is less than nodes = 4: that needs elastic = true"),
        ("elastic = true\nparallelism.tensor = 2", "elastic = true needs whole copies of the model on each node"),
        (
            'elastic = true\nranks_per_node = 4\nparallelism = {tensor = 2, order = "dp-tp-cp-ep-pp"}',
            "is first in order",
        ),
        ("elastic = true\nranks_per_node = 4\nparallelism.pipeline = 2", "elastic = true needs whole copies"),
        ("max_failures = 0", "max_failures = 0: must be 1 or more"),
        ("ranks_per_node = 2000", "ranks_per_node = 2000: must be 1024 or less"),
        ("spares = 200000", "spares = 200000: must be 100000 or less"),
        ("hang_after = 4", "hang_after = 4: must be 5 or more, or 0 to switch hang detection off"),
        ("hang_after_idle = 9", "hang_after_idle = 9: must be 10 or more, or 0"),
        ("hang_after = -1", "hang_after = -1: must be 0 or more"),
        ("gather_timeout = 0", "gather_timeout = 0: must be more than 0"),
        ("gather_timeout = inf", "gather_timeout = inf: must be a finite number"),
        ('requeue = "yes"', "requeue = 'yes': must be true or false"),
        ('durable_dir = "out"', "durable_dir = 'out': must be an absolute path"),
        ('stop_signal = "KILL"', "stop_signal = 'KILL': must be a signal that a program can catch"),
        ('env = { RANK = "0" }', "Muster sets RANK for each rank"),
        ("env = { N = 1 }", "env.N: must be a string in quotes"),
        ("env = {" + ", ".join(f"V{n} = ''" for n in range(10_001)) + "}", "env: must have 10000 entries or less"),
        ('env = { N = "a\\u0000" }', "env.N: must not contain a NUL character"),
        ('preload = ["a-b"]', "not a valid module name: 'a-b'"),
        ("parallelism = { tensor = 3 }", "context * pipeline = 3 * 1 * 1 = 3 must divide nodes * ranks_per_node = 4"),
        ("parallelism = { tensor = 3 }", "= 4: choose nodes as a multiple of 3"),
        ("parallelism = { data = 3 }", "1 * 1 * 3 = 3 must equal nodes * ranks_per_node = 4 * 1 = 4"),
        (
            "parallelism = { data = 8 }",
            "must equal nodes * ranks_per_node = 4 * 1 = 4: remove data, or choose data = 4",
        ),
        ("parallelism = { tensor = 1000000, pipeline = 1000000, context = 1000000 }", "must divide nodes"),
        ("parallelism = { tensor = 10000000 }", "parallelism.tensor = 10000000: must be 1000000 or less"),
        ("parallelism = { expert = 3 }", "parallelism: expert = 3 must divide data * context = 4 * 1 = 4"),
        (
            "parallelism = { sequence = true }",
            "sequence = true splits activations over the tensor group: it needs tensor",
        ),
        ("parallelism = { virtual_stages = 2 }", "virtual_stages = 2 needs pipeline = 2 or more"),
        ('parallelism = { order = "tp-tp" }', "parallelism.order = 'tp-tp': 'tp-tp' is no order of axes"),
        ("parallelism = { order = 1 }", 'must be a string in quotes, for example "tp-cp-ep-dp-pp"'),
        ('parallelism = { sharding = "all" }', "must be 'none', 'optimizer', 'gradients' or 'parameters'"),
        (
            'parallelism = { expert = 2, context = 2, pipeline = 2, order = "tp-cp-pp-ep-dp" }',
            "gives expert layers other pipelines than dense layers: put pp last",
        ),
        ("elastic = true\nparallelism.expert = 2", "elastic = true needs whole copies of the model on each node"),
        ('placement = { tensor = "rack" }', "placement.tensor = 'rack': must be node, nvlink, leaf, pod or any, after"),
        ("placement = { tensor = 1 }", "placement.tensor = 1: must be node, nvlink, leaf, pod or any, after"),
        ('placement = { spread_spares = ["node"] }', "must be leaf, rack or power, after"),
        ('placement = { expret = "leaf" }', "placement.expret = 'leaf': unknown key; did you mean placement.expert?"),
        (
            'parallelism = { tensor = 2 }\nplacement = { tensor = "require node" }',
            "placement.tensor = 'require node' can't be: a group has 2 ranks, and a node has 1. Choose",
        ),
        (
            'ranks_per_node = 2\nparallelism = { tensor = 2, order = "dp-tp" }\nplacement.tensor = "require node"',
            "and a node has 2, but with this order the ranks of a group are on 2 nodes",
        ),
        ("model = { parameters = 1e30 }", "must be 1e+18 or less"),
        ("model = { parameters = 0.5 }", "model.parameters = 0.5: must be a whole number"),
        (
            "model = { parameters = 1e9, active_parameters = 2e9 }",
            "active_parameters = 2000000000 must not be more than",
        ),
        ('model = { precision = "int4" }', "model.precision = 'int4': must be 'fp32', 'tf32', 'bf16', 'fp16' or 'fp8'"),
        (
            "model.layers = 3\nparallelism.pipeline = 4",
            "model.layers = 3 can't fill parallelism.pipeline * virtual_stages",
        ),
        ("model.experts = 9\nparallelism.expert = 2", "parallelism.expert = 2 must divide model.experts = 9"),
        ("model.hidden_size = 9\nparallelism.tensor = 2", "parallelism.tensor = 2 must divide model.hidden_size = 9"),
        ("model.global_batch = 6", "parallelism.data = 4 must divide model.global_batch = 6: for example 8"),
        (
            "model.global_batch = 30\nparallelism.micro_batches = 4",
            "data * micro_batches = 4 * 4 = 16 must divide model.global_batch = 30: for example 32",
        ),
        ("gpus = 8", "nodes and gpus both give the size of the job: keep one of them"),
        ("gpus_per_node = 2\nranks_per_node = 3", "ranks_per_node = 3 must be a multiple of gpus_per_node = 2"),
        ("[slurm]\nnodes = 3", "slurm.nodes = 3: unknown key; it belongs at the top of the file"),
        ('[slurm]\ntime = "soon"', "slurm.time = 'soon': must be a Slurm time"),
        ('[slurm]\noptions = ["nice"]', "'nice' is no option of sbatch; write each option as one string"),
        ('[slurm]\npartition = "a\\nb"', "must be one line"),
        ("name", "job.toml is not TOML"),
    ],
)
def test_a_mistake_is_named_with_its_correction(line: str, words: str) -> None:
    assert words in refusal(f"{LEAST}{line}\n")


def test_a_script_in_place_of_the_file_gets_advice(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    with pytest.raises(WrongInput, match="is not TOML") as refused:
        load(script)
    assert refused.value.hint.startswith("a job.toml describes the job and names its script in command")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("nodes = 4", "", "nodes: missing; this key is required"),
        ("nodes = 4", "nodes = 0", "nodes = 0: must be 1 or more"),
        ("nodes = 4", "gpus = 16", "gpus = 16 needs gpus_per_node, for example gpus_per_node = 8"),
        (
            "nodes = 4",
            "gpus = 12\ngpus_per_node = 8",
            "gpus = 12 must be a multiple of gpus_per_node = 8: choose 8 or 16",
        ),
        ("nodes = 4", "gpus = 0\ngpus_per_node = 8", "gpus = 0: must be 1 or more"),
        ("nodes = 4", "gpus = 1\ngpus_per_node = 8", "gpus = 1 must be a multiple of gpus_per_node = 8: choose 8"),
        ("nodes = 4", "nodes = 1000\nranks_per_node = 256", "1000 * 256 = 256000 ranks must be 250000 or less"),
        ('"tiny"', '"tiny job"', "name = 'tiny job': must be 1 to 64 letters"),
        ("/shared/tiny", "runs/tiny", "run_dir = 'runs/tiny': must be an absolute path"),
        ("/shared/tiny", "/shared/%j", "must not contain %"),
        ("'two words'", "'two words", "is not a valid command line"),
    ],
)
def test_a_key_that_must_be_there_is_checked(old: str, new: str, words: str) -> None:
    assert words in refusal(LEAST.replace(old, new))


def test_all_mistakes_are_reported_at_once() -> None:
    words = refusal(LEAST + "spares = -1\nmax_failures = 0\n")
    assert "spares" in words
    assert "max_failures" in words


@pytest.mark.parametrize(
    "text",
    [f"nodes = {'1' * 5000}", f"nodes = 0x{'f' * 5000}", "env = " + "[" * 5000, "env" + ".a" * 5000 + " = 1"],
    ids=["digits", "hexadecimal", "lists", "tables"],
)
def test_a_value_that_python_can_not_show_is_refused_in_words(text: str) -> None:
    assert re.search("is not TOML: (an integer has more than 64 bits|more than 32 tables and lists)", refusal(text))


@pytest.mark.parametrize(
    ("keys", "gres", "ranks"),
    [
        ("slurm.gres = 'gpu:h100:2'", "gpu:h100:2", 2),
        ("slurm.gres = 'gpu:1g.10gb:7'", "gpu:1g.10gb:7", 7),
        ("slurm.gres = 'gpu:h100:2,nvme:1'\nranks_per_node = 1", "gpu:h100:2,nvme:1", 1),
        ("gpus_per_node = 2\nslurm.gres = 'gpu:h100:2'", "gpu:h100:2", 2),
        ("gpus_per_node = 2\nslurm.gres = 'nvme:1'", "gpu:2,nvme:1", 2),
        ("slurm.gres = 'nvme:1'", "nvme:1", 1),
    ],
)
def test_each_gpu_that_is_asked_for_has_a_rank(keys: str, gres: str, ranks: int) -> None:
    job = parse(f"{LEAST}{keys}\n", "job.toml")
    assert (job.gres, job.local_ranks) == (gres, ranks)


def test_one_answer_names_all_mistakes() -> None:
    tables = """
env = { FOO = 1, RANK = "0", "A B" = "1", WORLD_SIZE = "4" }
preload = ["a-b", "torch", "c d"]
slurm.options = ["nice", "--nodes 3", "--array=0-3", "--nice=3", "-J x", "--signal=USR1@120"]
"""
    told = refusal(f"{LEAST}{tables}")
    for words in (
        *("env.FOO: must be a string", "env.RANK: Muster sets RANK", "env.A B", "env.WORLD_SIZE", "'a-b', 'c d'"),
        *("'nice' is no option", "--nodes=3 is not allowed", "--array=0-3 is not", "--job-name=x is not allowed"),
        "--signal=USR1@120 is not allowed; use instead: stop_signal and stop_before in job.toml",
    ):
        assert words in told
    told = refusal(
        f"{LEAST}min_nodes = 9\ngpus_per_node = 2\nslurm.gres = 'gpu:1'\nmodel.global_batch = 6\n"
        "checkpoint.durable_every = '30 minutes'\n"
    )
    for words in (
        *("min_nodes = 9 must not", "checkpoint.durable_every needs", "gpus_per_node = 2 and slurm.gres = 'gpu:1'"),
        "parallelism.data = 8 must divide model.global_batch",
    ):
        assert f"\n  {words}" in told


@pytest.mark.parametrize(
    "env",
    [
        '{ TOKEN = "s3cr3t", "NO NAME" = "s3cr3t" }',
        '{ TOKEN = "s3cr3t", RANK = "0" }',
        '{ TOKEN = ["s3cr3t"] }',
        '{ TOKEN = { a = "s3cr3t" } }',
        '{ TOKEN = "s3cr3t\\u0000" }',
        '["s3cr3t"]',
        '"s3cr3t"',
    ],
)
def test_no_refusal_shows_a_value_of_the_environment(env: str) -> None:
    words = refusal(f"{LEAST}env = {env}\n")
    assert "env" in words
    assert "s3cr3t" not in words


def test_the_table_of_the_environment_may_be_misspelt() -> None:
    words = refusal(f'{LEAST}[environ]\nTOKEN = "s3cr3t"\n')
    assert "environ: unknown key" in words
    assert "s3cr3t" not in words


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"none\.toml does not exist"):
        load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "number"),
    [("USR1", 10), ("SIGTERM", 15), ("usr2", 12), (10, 10), ("9", None), ("NOPE", None), (999, None)],
)
def test_signals_by_name_and_number(text: object, number: int | None) -> None:
    assert signal_number(text) == number


def test_the_mark_with_which_editors_of_windows_begin_a_file_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(EXAMPLE.read_text(), "utf-8-sig", newline="\r\n")
    assert load(path) == load(EXAMPLE)
