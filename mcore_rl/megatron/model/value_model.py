"""Value models (critics, reward models): a policy's trunk with a scalar head instead of the vocabulary projection.

    value of position t = w . hidden state of position t          w [1, h], no bias, float32

The head is replicated over tensor-parallel ranks. With sequence parallelism, each rank applies it to its part of the
row and the ranks exchange values, one number per token instead of a hidden state. The head's gradient is then summed
over these ranks, like the gradient of a norm. Without sequence parallelism every rank has the whole row and gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_rl.config.roles import ModelRole
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.model.model import build_model
from mcore_rl.megatron.model.names import canonical_tensors
from mcore_rl.megatron.model.output import PolicyModel, unwrap
from mcore_rl.resolved.model import ResolvedModel
from model_converters.errors import ConversionError
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.loader import load_tensors
from model_converters.hf.value_head import VALUE_HEAD, resolve_value_head, value_model_config
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.table import bind


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


def value_chunks(role: ModelRole, spec: ResolvedModel, gpus_per_node: int) -> list[PolicyModel]:
    """Build this rank's chunks of a value model. The caller loads their weights.

    Raises: ConfigError.
    Collective: all ranks, after parallel.initialize.
    """
    return build_model(
        spec.hf_config, role.section, role.model, spec.layout, gpus_per_node=gpus_per_node, kind=ValueModel, names=role
    )


def load_value_model(
    chunks: Sequence[torch.nn.Module], directory: str | Path, layout: TrainLayout, seed: int | None, key: str
) -> None:
    """Load an HF classification model with one label (its head becomes the value head) or an HF causal model (the head
    is initialized with `seed`), like loading.load_hf.

    Raises: ConfigError that lists missing, unknown, truncated or misshapen tensors; also for a causal model without
    `seed`.
    """
    tensors = canonical_tensors(chunks)
    dtype = next(iter(tensors.values())).dtype
    if seed is not None:
        initialize_head(chunks, seed)
    try:
        with HFCheckpoint(directory) as checkpoint, torch.no_grad():
            rows, dropped = resolve_value_head(checkpoint, required=seed is None)
            # A causal model has no head: keep the initialized one.
            if all(row.mcore != VALUE_HEAD for row in rows):
                tensors.pop(VALUE_HEAD, None)
            bound = bind(rows, value_model_config(checkpoint.config), dtype)
            load_tensors(checkpoint, bound, layout, dist.get_rank(), tensors, dropped=dropped)
    except ConversionError as error:
        raise ConfigError(f"{key}={directory}: {error}") from error


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
            weight = chunk.output_layer.weight
            normal = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
            weight.copy_(normal / (weight.shape[1] + 1))
