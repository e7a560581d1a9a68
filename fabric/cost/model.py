"""The model that is trained, as far as its cost depends on it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Precision(StrEnum):
    """The number format of the matrix products."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"


class Optimizer(StrEnum):
    """What keeps state for each parameter."""

    ADAM = "adam"
    ADAMW = "adamw"
    SGD = "sgd"
    MOMENTUM = "momentum"
    """SGD with momentum."""


class Checkpointing(StrEnum):
    """Which activations are thrown away and computed again in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"
    """The attention's own: scores and softmax. Fused attention does that by itself."""
    FULL = "full"
    """All but the input of each layer."""


class Sharding(StrEnum):
    """What the data-parallel ranks divide among themselves: stages 0 to 3 of ZeRO. FSDP is stage 3."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"

    @property
    def stage(self) -> int:
        """ZeRO's number."""
        return list(Sharding).index(self)


class Offload(StrEnum):
    """What stands in the host's memory instead of the GPU's."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"
    """The optimizer's state, the parameters and the gradients; the layers in use are on the GPU."""


@dataclass(frozen=True, slots=True)
class Model:
    """A transformer.

    Raises:
        ValueError: a number is below 1, or the numbers contradict one another.
    """

    parameters: float
    layers: int
    hidden_size: int
    sequence_length: int
    """Tokens of one sequence."""
    global_batch: int
    """Sequences of one step, of all ranks together."""
    heads: int = 0
    """Attention heads; 0: one for each 128 of the hidden size."""
    key_value_heads: int = 0
    """Heads of keys and values; 0: as many as `heads`."""
    vocabulary: int = 0
    """Tokens of the vocabulary; 0: the output layer's activations are left out."""
    precision: Precision = Precision.BF16
    optimizer: Optimizer = Optimizer.ADAM
    activation_checkpointing: Checkpointing = Checkpointing.NONE
    sharding: Sharding = Sharding.NONE
    offload: Offload = Offload.NONE
    gradient_bytes: int = 0
    """Bytes of one gradient as it is summed; 0: those of the precision. Megatron-LM sums bf16 gradients in fp32: 4."""
    experts: int = 1
    experts_per_token: int = 1
    fused_attention: bool = True
    """Whether the attention's scores never stand in memory, as with FlashAttention."""
    expert_parameters: float = 0.0
    """Parameters of all experts together; they are a part of `parameters`."""

    def __post_init__(self) -> None:
        counts = (self.parameters, self.layers, self.hidden_size, self.sequence_length, self.global_batch, self.experts)
        if not all(1 <= count < float("inf") for count in counts):
            raise ValueError(
                "parameters, layers, hidden_size, sequence_length, global_batch and experts must be 1 or more"
            )
        if self.key_value_heads > self.head_count:
            raise ValueError(f"key_value_heads = {self.key_value_heads} must be at most heads = {self.head_count}")
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f"experts_per_token = {self.experts_per_token} must be 1 to experts = {self.experts}")
        if not 0 <= self.expert_parameters <= self.parameters:
            raise ValueError("expert_parameters must be a part of parameters")

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_batch * self.sequence_length

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation on the wire. Products in fp8 still pass bf16 on."""
        return 4 if self.precision in (Precision.FP32, Precision.TF32) else 2

    @property
    def head_count(self) -> int:
        """Attention heads."""
        return self.heads or max(1, self.hidden_size // 128)

    @property
    def key_value_size(self) -> float:
        """Elements of the keys of one token: hidden · key_value_heads / heads."""
        return self.hidden_size * (self.key_value_heads or self.head_count) / self.head_count

    @property
    def active_parameters(self) -> float:
        """Parameters that one token meets."""
        return self.dense_parameters + self.expert_parameters * self.experts_per_token / self.experts

    @property
    def dense_parameters(self) -> float:
        """Parameters that are no expert's."""
        return self.parameters - self.expert_parameters

    @property
    def expert_width(self) -> float:
        """Width of one expert's feed-forward layer, which is two matrices of h times this. 0 without experts."""
        if self.experts < 2:
            return 0.0
        return self.expert_parameters / (2 * self.layers * self.experts * self.hidden_size)

    @property
    def keeps_scores(self) -> bool:
        """Whether a layer's attention scores wait in memory for the backward pass."""
        return self.activation_checkpointing is Checkpointing.NONE and not self.fused_attention
