"""The model and the schedule of a job.toml, with defaults for what it does not say, and what its groups send. Pure."""

from __future__ import annotations

from muster.fabric.cost.model import Checkpointing, Model, Offload, Optimizer, Precision, Sharding
from muster.fabric.cost.state_bytes import state_bytes
from muster.fabric.estimate.schedule import DDP_BUCKET, Schedule, usual_schedule
from muster.fabric.estimate.traffic import placement_weights, step_traffic
from muster.fabric.placement.weights import Weights, usual_weights
from muster.launcher.errors import WrongInput
from muster.launcher.plan.assumptions import Defaults
from muster.launcher.spec.spec import Job

_SHAPE = 128
"""Hidden size for each layer of a usual large model: GPT-3 has 128, Llama 3 405B has 130."""
_SEQUENCE = 4096
_EXPERTS_PER_TOKEN = 2
_MICRO_BATCHES_PER_STAGE = 4
_HINT = "docs/PLANNING.md lists what an estimate needs"


def model_of(job: Job, defaults: Defaults) -> Model:
    """The model of a job.

    Raises:
        WrongInput: its size is not known, or its numbers contradict one another.
    """
    given, axes = job.model, job.axes
    layers, hidden, parameters = _shape(job, defaults)
    sequence = given.sequence_length or _SEQUENCE
    if not given.sequence_length:
        defaults.take("sequence length", f"{_SEQUENCE:,} tokens", "usual", "model.sequence_length")
    batch = given.global_batch
    if not batch:
        batch = axes.data * (job.parallelism.micro_batches or _MICRO_BATCHES_PER_STAGE * axes.pipeline)
        defaults.take(
            "global batch", f"{batch:,} sequences", "a few micro-batches of one for each stage", "model.global_batch"
        )
    per_token = min(given.experts_per_token or _EXPERTS_PER_TOKEN, given.experts or 1)
    expert_parameters = _expert_parameters(job, parameters, layers, hidden, per_token, defaults)
    try:
        return Model(
            parameters=parameters,
            layers=layers,
            hidden_size=hidden,
            sequence_length=sequence,
            global_batch=batch,
            heads=given.heads or 0,
            key_value_heads=given.key_value_heads or 0,
            vocabulary=given.vocabulary or 0,
            precision=Precision(given.precision),
            optimizer=Optimizer(given.optimizer),
            activation_checkpointing=Checkpointing(given.activation_checkpointing),
            sharding=Sharding(job.parallelism.sharding),
            offload=Offload(given.offload),
            experts=given.experts or 1,
            experts_per_token=per_token,
            expert_parameters=expert_parameters,
        )
    except ValueError as error:
        raise WrongInput(f"[model]: {error}", _HINT) from None


def schedule_of(job: Job, model: Model, defaults: Defaults) -> Schedule:
    """The schedule of a job.

    Raises:
        WrongInput: the global batch can't be divided over the replicas.
    """
    split, axes = job.parallelism, job.axes
    if axes.tensor * axes.pipeline == 1 and model.sharding is Sharding.NONE:
        bucket, source = DDP_BUCKET, "PyTorch's DDP"
    else:
        bucket = max(40e6, 1e6 * axes.data) * state_bytes(model).gradient
        source = "Megatron-LM's"
    try:
        found = usual_schedule(
            model, axes, split.micro_batches, split.virtual_stages, sequence=split.sequence, bucket=bucket
        )
    except ValueError as error:
        raise WrongInput(f"the batch can't be divided: {error}", _HINT) from None
    if axes.data * axes.context > 1 and model.sharding is not Sharding.PARAMETERS:
        defaults.take("gradient bucket", f"{bucket / 1e6:,.0f} MB", source, "the script's own")
    if not split.micro_batches:
        words = f"{found.micro_batches:,} of {found.micro_batch}"
        defaults.take("micro-batches", words, "one sequence each", "parallelism.micro_batches")
    return found


def weights_of(job: Job) -> Weights:
    """What each kind of group sends in a step: of the job's model, or of a usual one if that can't be estimated."""
    defaults = Defaults()
    try:
        model = model_of(job, defaults)
        return placement_weights(step_traffic(model, job.axes, schedule_of(job, model, defaults)))
    except WrongInput:
        return usual_weights(job.axes)


def _shape(job: Job, defaults: Defaults) -> tuple[int, int, float]:
    """Layers, hidden size and parameters."""
    given = job.model
    if not given.parameters and not (given.layers and given.hidden_size):
        raise WrongInput(
            "the size of the model is not known: give model.parameters, or model.layers and model.hidden_size",
            "for example parameters = 70e9, in [model] of job.toml",
        )
    layers, hidden = given.layers, given.hidden_size
    if not layers or not hidden:
        # Dense transformers have 12·L·h² parameters and a vocabulary.
        dense = float(given.parameters or 0)
        if layers:
            hidden = _round((dense / 12 / layers) ** 0.5)
        elif hidden:
            layers = max(1, round(dense / 12 / hidden**2))
        else:
            layers = max(1, round((dense / 12 / _SHAPE**2) ** (1 / 3)))
            hidden = _round((dense / 12 / layers) ** 0.5)
        layers = max(layers, job.parallelism.pipeline * job.parallelism.virtual_stages)
        defaults.take(
            "shape", f"{layers} layers of {hidden:,}", "12·L·h² parameters", "model.layers, model.hidden_size"
        )
    parameters = float(given.parameters or 12 * layers * hidden**2 + (given.vocabulary or 0) * hidden)
    if not given.parameters:
        defaults.take("parameters", f"{parameters / 1e9:,.3g} G", "12·L·h² + V·h", "model.parameters")
    return layers, hidden, parameters


def _round(hidden: float) -> int:
    """To a multiple of a head's size."""
    return max(1, round(hidden / _SHAPE)) * _SHAPE


def _expert_parameters(
    job: Job, parameters: float, layers: int, hidden: int, per_token: int, defaults: Defaults
) -> float:
    """Parameters of all experts. What a token does not meet is the experts' but for the share that it meets."""
    given = job.model
    experts = given.experts or 1
    if experts == 1:
        return 0.0
    if not given.experts_per_token:
        defaults.take("experts for a token", str(per_token), "usual", "model.experts_per_token")
    if given.active_parameters and given.active_parameters > parameters:
        raise WrongInput(
            f"model.active_parameters = {given.active_parameters} is more than the {parameters:.6g} parameters that "
            "follow from layers and hidden_size",
            "give model.parameters: those of all experts together",
        )
    if given.active_parameters and per_token < experts:
        return min(parameters, (parameters - given.active_parameters) / (1 - per_token / experts))
    found = max(0.0, parameters - 4.0 * layers * hidden**2 - (given.vocabulary or 0) * hidden)
    defaults.take("parameters of experts", f"{found / 1e9:,.3g} G", "all but 4·L·h² + V·h", "model.active_parameters")
    return found
