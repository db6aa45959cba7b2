"""Value models (critics, reward models): a policy's trunk with a scalar head instead of the vocabulary projection.

    value of position t = w . hidden state of position t          w [1, h], no bias, float32

The head is replicated over tensor-parallel ranks. With sequence parallelism, each rank applies it to its part of the
row and the ranks exchange values, one number per token instead of a hidden state. The head's gradient is then summed
over these ranks, like the gradient of a norm. Without sequence parallelism every rank has the whole row and gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_rl.megatron.model.output import PolicyModel, unwrap
from mcore_rl.megatron.model.rows import fill_parameter
from model_converters.hf.value_head import VALUE_HEAD


class ValueHead(torch.nn.Module):
    """Linear head with one output. Parameters: weight [1, h] in the model's dtype."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        # Megatron then sums the gradient over tensor-parallel ranks, which hold different tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute values. Shapes: [..., h] -> float32 [...]."""
        return F.linear(hidden_states.float(), self.weight.float()).squeeze(-1)


class ValueModel(PolicyModel):
    """A PolicyModel whose last stage returns values. The head must be named `output_layer`, because GPTModel's code
    expects this name; it replaces the vocabulary projection that GPTModel's constructor creates."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        assert not self.share_embeddings_and_output_weights
        if self.post_process:
            self.output_layer = ValueHead(config)

    def _postprocess(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Return values on the last stage.

        Shapes: [S, B, h] (S / tp with sequence parallelism) -> float32 [B * S] on the last stage.
        """
        if not self.post_process:
            return hidden_states
        values = self.output_layer(hidden_states)
        if self.config.sequence_parallel:
            # All ranks compute the same loss from all values, so each part keeps its own gradient without a sum.
            values = tensor_parallel.gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return values.transpose(0, 1).flatten()

    def sharded_state_dict(self, *args: object, **kwargs: object) -> dict[str, ShardedTensor]:
        state = super().sharded_state_dict(*args, **kwargs)
        if self.post_process:
            # GPTModel allows a shape mismatch because of vocabulary padding. Then the first row of a policy's
            # projection would be loaded as a value head.
            state[VALUE_HEAD].allow_shape_mismatch = False
        return state


def train_head(chunks: Sequence[torch.nn.Module]) -> None:
    """Train the head although the other weights are frozen (LoRA)."""
    for parameter in heads(chunks):
        parameter.requires_grad_(True)


def heads(chunks: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    """Yield the weight of the value head, if this rank has it."""
    for chunk in map(unwrap, chunks):
        # transformers' model with tied embeddings has no output layer.
        head = getattr(chunk, "output_layer", None)
        if chunk.post_process and isinstance(head, ValueHead):
            yield head.weight


@torch.no_grad()
def initialize_head(chunks: Sequence[torch.nn.Module], seed: int) -> None:
    """Initialize the head from a normal distribution with standard deviation 1 / (h + 1).

    Initial values are near 0 for any width, and the trunk gets a gradient from the first update on, unlike with a head
    of zeros. The result is the same in every layout. Not collective.

    Source: Stiennon et al., Learning to summarize from human feedback (arXiv 2009.01325), appendix B.1; also used for
    critics by OpenRLHF.
    """
    for chunk in map(unwrap, chunks):
        if chunk.post_process:
            fill_parameter(chunk.output_layer.weight, partial(_fill_head, seed=seed))


def _fill_head(weight: torch.Tensor, seed: int) -> None:
    normal = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    weight.copy_(normal / (weight.shape[1] + 1))
