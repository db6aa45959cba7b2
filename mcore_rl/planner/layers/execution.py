"""Settings that decide which tensors a layer saves, and the lines of the tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mcore_rl.config.models import ActorConfig
from mcore_rl.resolved.layout import sequence_parallel
from model_converters.mapping.layout import TrainLayout


class SavedTensor(NamedTuple):
    """One line of the table. `freed_by` lists modules of selective recomputation; each of them frees it."""

    component: str
    bytes_per_token: float
    freed_by: tuple[str, ...] = ()


ALWAYS = ("always",)
"""Value of SavedTensor.freed_by for tensors that a layer recomputes whatever the configuration is."""


@dataclass(frozen=True)
class Execution:
    """Settings that decide which tensors a model saves, and which training state it has.

    `section`: the model's configuration, with resolved recompute_modules. `fused`: the layers are TransformerEngine's.
    `cuda`: the ranks are on GPUs. `imbalance`: plan.moe_imbalance. `square_length`: mean square over mean length of
    sequences, in tokens. `unfused_rotation`: rotary embeddings do not use TransformerEngine's kernel. `masked`:
    rollout.keep_sampling_mask, for the policy. `float32_head`: model.float32_head.
    """

    section: ActorConfig
    layout: TrainLayout
    element_bytes: int
    fused: bool
    cuda: bool
    imbalance: float
    square_length: float
    unfused_rotation: bool = False
    masked: bool = False
    float32_head: bool = False

    @property
    def scatter(self) -> int:
        """Number of ranks over which tokens are split between tensor-parallel regions."""
        split = sequence_parallel(self.section.parallel, self.layout.tp)
        return self.layout.tp if split else 1

    @property
    def row_tokens(self) -> float:
        """Tokens of a packed row on one context-parallel rank."""
        return self.section.tokens_per_microbatch / self.layout.cp

    @property
    def optimizer_bytes(self) -> int:
        """Optimizer state per owned element: two moments, and a float32 copy of a weight in a shorter dtype."""
        return 8 + (4 if self.element_bytes < 4 else 0)

    @property
    def transformers(self) -> bool:
        """True if the layers come from transformers, not from Megatron."""
        return self.layout.hf_tensors

    def norm(self, width: float) -> float:
        """Return the bytes that a norm of `width` elements saves."""
        if self.transformers:
            return width * (4 + self.element_bytes) + 4
        wide = 8 if self.element_bytes == 2 and not self.fused else self.element_bytes
        return width * wide + 4


def core_attention(output: float, heads: float, run: Execution) -> Iterator[SavedTensor]:
    """Yield the tensors of fused core attention; `output` is the number of elements of its output per token."""
    b = run.element_bytes
    yield SavedTensor("core attention", 4 * heads + (0 if run.fused else output * b), ("core_attn",))
    yield SavedTensor("attention", output * b)
