"""A policy's trunk with one number per position in the place of the vocabulary: critics, and models that score.

    value of position t = w . hidden state of position t          w [1, h], no bias, float32

The head is replicated over tensor-parallel ranks. With sequence parallelism each applies it to its part of the row and
the ranks exchange values, a number per token instead of a hidden state; the head's gradient is then a sum over these
ranks, as that of a norm is. Without it every rank has the whole row, and the whole gradient of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mcore_rl.config.names import role_key
from mcore_rl.errors import ConfigError
from mcore_rl.megatron import cpu
from mcore_rl.megatron.model.names import canonical_tensors
from mcore_rl.megatron.model.output import PolicyModel, unwrap
from model_converters.errors import ConversionError
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.loader import load_tensors
from model_converters.hf.value_head import VALUE_HEAD, resolve_value_head, value_model_config
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.table import bind

cpu.install()

from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


class ValueHead(torch.nn.Module):
    """Parameters: weight [1, h] in the model's dtype."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        # Tells megatron to sum the gradient over tensor-parallel ranks, which have other tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Shapes: [..., h] -> float32 [...]."""
        return F.linear(hidden_states.float(), self.weight.float()).squeeze(-1)


class ValueModel(PolicyModel):
    """A PolicyModel whose last stage returns values. Its head is called `output_layer`, as GPTModel's code wants its
    last module; GPTModel makes a vocabulary projection first, which is let go at once."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        assert not self.share_embeddings_and_output_weights
        if self.post_process:
            self.output_layer = ValueHead(config)

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Shapes: [S, B, h] (S / tp with sequence parallelism) -> float32 [B * S] on the last stage."""
        if not self.post_process:
            return hidden_states
        values = self.output_layer(hidden_states)
        if self.config.sequence_parallel:
            # All ranks derive the same loss from all values: each part takes its own gradient back, no sum.
            values = tensor_parallel.gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return values.transpose(0, 1).flatten()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().sharded_state_dict(*args, **kwargs)
        if self.post_process:
            # GPTModel lets its vocabulary be padded: a policy's projection would pass for a head, by its first row.
            state[VALUE_HEAD].allow_shape_mismatch = False
        return state


def load_value_model(
    chunks: Sequence[torch.nn.Module], directory: str | Path, layout: TrainLayout, seed: int | None
) -> None:
    """As loading.load_hf, of a classification model with one label, whose head is the value head, or of an HF causal
    model, whose head is initialised with `seed`; without a seed a causal model is refused.

    Raises: ConfigError saying what is missing, unknown, truncated or misshapen.
    """
    tensors = canonical_tensors(chunks)
    dtype = next(iter(tensors.values())).dtype
    if seed is not None:
        initialize_head(chunks, seed)
    try:
        with HFCheckpoint(directory) as checkpoint, torch.no_grad():
            rows, dropped = resolve_value_head(checkpoint, required=seed is None)
            if all(row.mcore != VALUE_HEAD for row in rows):
                tensors.pop(VALUE_HEAD, None)
            bound = bind(rows, value_model_config(checkpoint.config), dtype)
            load_tensors(checkpoint, bound, layout, dist.get_rank(), tensors, dropped=dropped)
    except ConversionError as error:
        raise ConfigError(f"{role_key('model.hf_path')}={directory}: {error}") from error


@torch.no_grad()
def initialize_head(chunks: Sequence[torch.nn.Module], seed: int) -> None:
    """Draws the head from a normal distribution of deviation 1 / (h + 1): values start near 0, whatever the width, and
    the trunk has a gradient from the first update on, which a head of zeros would not give it. The same in every
    layout. Not collective.

    Source: Stiennon et al., Learning to summarize from human feedback (arXiv 2009.01325), appendix B.1; the start of
    OpenRLHF's critics as well.
    """
    for chunk in map(unwrap, chunks):
        if chunk.post_process:
            weight = chunk.output_layer.weight
            drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
            weight.copy_(drawn / (weight.shape[1] + 1))
