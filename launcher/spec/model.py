"""[model] of job.toml: what is trained, for estimates of time, memory and cost. Nothing of it changes the job. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from muster.launcher.spec.table import Count, Table

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Optimizer = Literal["adam", "adamw", "sgd", "momentum"]
ActivationCheckpointing = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "parameters"]


def _whole(value: Any) -> Any:
    """70e9 is a float in TOML, and a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


BigCount = Annotated[int, Field(strict=True, ge=1, le=10**18), BeforeValidator(_whole)]


class Model(Table):
    """[model]: the model and its training, as far as they are known."""

    parameters: BigCount | None = None
    """Parameters of the whole model: 70e9."""
    active_parameters: BigCount | None = None
    """Parameters that one token passes through, if the model has experts. Default: all."""
    layers: Count | None = None
    """Layers of the model."""
    hidden_size: Count | None = None
    """Width of a layer."""
    heads: Count | None = None
    """Attention heads of a layer."""
    key_value_heads: Count | None = None
    """Heads of keys and values, if queries share them. Default: as many as `heads`."""
    vocabulary: BigCount | None = None
    """Tokens of the vocabulary."""
    experts: Count | None = None
    """Experts of one layer."""
    experts_per_token: Count | None = None
    """Experts of one layer that a token passes through."""
    sequence_length: BigCount | None = None
    """Tokens of one sample."""
    global_batch: BigCount | None = None
    """Samples of one step, of all ranks together."""
    tokens: BigCount | None = None
    """Tokens of the whole training."""
    precision: Precision = "bf16"
    """Of matrix products."""
    optimizer: Optimizer = "adam"
    """`momentum` is SGD with momentum."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Which activations are calculated again: none, those of attention (selective), or all of each layer (full)."""
    offload: Offload = "none"
    """What is kept in the host's memory: the state of the optimizer, or parameters too."""

    @model_validator(mode="after")
    def _check_together(self) -> Model:
        if self.active_parameters and self.active_parameters > (self.parameters or self.active_parameters):
            raise ValueError(
                f"active_parameters = {self.active_parameters} must not be more than parameters = {self.parameters}"
            )
        return self
