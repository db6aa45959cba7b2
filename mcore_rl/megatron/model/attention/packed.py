"""Core attention for packed sequences with torch's kernels, on any device; used for local layers, and for rows that
TransformerEngine's attention does not support.

The core attention of megatron.core's local layer spec does not support packed sequences. Here, short sequences of
similar length share a padded batch. With a causal mask this is exact, because a query never attends to the padding
after its sequence. With context parallelism, `context.context_attention` is used instead.

Sliding windows (`window_size` and `window_attn_skip_freq`) and attention sinks (`softmax_type` "learnable") use
`block_attention`. On GPUs, these and context parallelism use `flash.flash_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from mcore_rl.megatron.model.attention.blocks import BlockPlan, block_attention, causal_blocks
from mcore_rl.megatron.model.attention.context import SINGLE_RANK, ContextPart, context_attention
from mcore_rl.megatron.model.attention.flash import flash_attention, on_gpu

BATCHED_TOKENS = 128
"""Sequences up to this length are batched. Longer ones keep a core busy alone; batching them would only add padding."""
SIMILAR = 0.8
"""The shortest sequence of a batch is at least this fraction of the longest."""


def upload(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy to `device` without blocking the host. For CUDA it copies from pinned memory, which torch keeps alive until
    the copy is done; on the CPU it returns the tensor itself."""
    pinned = host.pin_memory() if torch.device(device).type == "cuda" else host
    return pinned.to(device, non_blocking=True)


@dataclass
class PackedRow(PackedSeqParams):
    """Packed sequences whose lengths (in tokens) are also available on the host. Attention per sequence needs them in
    every layer; reading them from the GPU would synchronize each time."""

    lengths: tuple[int, ...] = ()


def pack_sequences(
    lengths: list[int], device: torch.device | str = "cpu", *, context_parallel: bool = False
) -> PackedRow:
    """Build packed_seq_params for GPTModel.forward: concatenated sequences, positions starting from 0 in each.

    Units: lengths in tokens, each at least 1; their sum is the length of the packed row. With context_parallel, lengths
    are padded lengths of whole sequences, of which this rank's row is a part.
    """
    assert min(lengths) > 0, "a packed row must not contain an empty sequence"
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    offsets[1:] = torch.tensor(lengths).cumsum(0)
    offsets = upload(offsets, device)
    longest = max(lengths)
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        # TransformerEngine requires padded offsets with context parallelism. They equal the offsets, because padding
        # counts as part of its sequence, where no other token attends to it.
        cu_seqlens_q_padded=offsets if context_parallel else None,
        cu_seqlens_kv_padded=offsets if context_parallel else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths),
    )


@dataclass(frozen=True)
class PaddedBatch:
    """Sequences that share one SDPA call, as a padded matrix of `rows` x `width` cells.

    source: packed position of each cell's token, int64 [rows * width]; padding repeats a token of the same sequence.
    real: indices of the cells that are not padding, row by row, int64 [n].
    whole: slice of the packed row if the sequences are adjacent and of equal length, so that nothing is copied.
    """

    rows: int
    width: int
    source: torch.Tensor
    real: torch.Tensor
    whole: slice | None

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """Select the batch's tokens. Shapes: [T, ...] -> [rows, width, ...]."""
        cells = packed.index_select(0, self.source) if self.whole is None else packed[self.whole]
        return cells.unflatten(0, (self.rows, self.width))

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """Remove the padding. Shapes: [rows, width, ...] -> [n, ...]."""
        cells = padded.flatten(0, 1)
        return cells.index_select(0, self.real) if self.whole is None else cells


def _group(lengths: tuple[int, ...]) -> list[list[int]]:
    """Group sequence indices by descending length.

    Sequences longer than BATCHED_TOKENS are alone in their group. A group of shorter ones ends before the first
    sequence that is shorter than SIMILAR times its longest.
    """
    groups: list[list[int]] = []
    # Equal lengths keep the order of the row, so a batch of adjacent sequences needs no copy.
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and longest <= BATCHED_TOKENS and lengths[i] >= SIMILAR * longest:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


# Cached tensors must not be inference tensors: backward passes use them too.
@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _plan(lengths: tuple[int, ...], device: torch.device) -> tuple[list[PaddedBatch], torch.Tensor | None]:
    """Plan the batches, and the place of each packed position in their concatenated outputs (None: already in order).
    Cached, because every layer uses the same plan in forward and backward passes."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    batches, order = [], []
    for group in _group(lengths):
        width = lengths[group[0]]
        first = torch.tensor([starts[i] for i in group])[:, None]
        # Padding cells read the first token of their sequence; their results are dropped by unpad.
        column = torch.arange(width)[None]
        inside = column < torch.tensor([lengths[i] for i in group])[:, None]
        source = first + column * inside
        order.append(source[inside])
        real = inside.flatten().nonzero().flatten()
        source = source.flatten()
        start, end = starts[group[0]], starts[group[0]] + len(source)
        whole = slice(start, end) if torch.equal(source, torch.arange(start, end)) else None
        batches.append(PaddedBatch(len(group), width, upload(source, device), upload(real, device), whole))
    # argsort inverts a permutation: packed position -> place in the concatenated outputs.
    place = torch.cat(order).argsort()
    in_order = torch.equal(place, torch.arange(len(place)))
    return batches, None if in_order else upload(place, device)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[int, ...],
    *,
    scale: float | None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention within each sequence of a packed row.

    Shapes: query [T, heads, d], key and value [T, groups, d] -> [T, heads, d]. Units: lengths in tokens; their sum is
    T. scale: factor of the scores; None: 1 / sqrt(d). window: a query sees this number of keys, its own included; None:
    all earlier ones. sinks: see block_attention, [heads].
    """
    if (window is not None or sinks is not None) and on_gpu(query):
        return flash_attention(query, key, value, lengths, SINGLE_RANK, scale=scale, window=window, sinks=sinks)
    batches, place = _plan(lengths, query.device)
    outputs = []
    for batch in batches:
        q, k, v = (batch.pad(x).transpose(1, 2) for x in (query, key, value))
        out = _batch_attention(q, k, v, scale, None if window is None or window >= batch.width else window, sinks)
        outputs.append(batch.unpad(out.transpose(1, 2)))
    packed = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return packed if place is None else packed.index_select(0, place)


def _batch_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of sequences of equal length. Shapes: [rows, heads or groups, n, d]."""
    if window is None and sinks is None:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return block_attention(q, k, v, BlockPlan(causal_blocks(q.shape[2], window), scale), sinks)


class SDPACoreAttention(MegatronModule):
    """Core attention of local layers, and of TransformerEngine's layers if its own attention does not support the
    rows: causal self-attention of packed rows (THD format), grouped queries, sliding windows and sinks.

    softmax_offset: sinks of this rank's heads, [heads / tp]; only with softmax_type "learnable".
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        super().__init__(config)
        self.context = SINGLE_RANK
        if config.context_parallel_size > 1:
            assert pg_collection is not None
            self.context = ContextPart.of(pg_collection.cp)
        assert not config.attention_dropout, "build_model sets dropout to 0"
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise NotImplementedError(f"layer {layer_number}: {attention_type} attention with mask {attn_mask_type}")
        self.scale = softmax_scale
        self.window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            earlier, later = config.window_size
            assert later in (0, -1), "a causal window has no later keys"
            self.window = earlier + 1
        if config.softmax_type == "learnable":
            assert pg_collection is not None
            self.tp_group = pg_collection.tp
            heads = torch.empty(config.num_attention_heads // self.tp_group.size(), dtype=config.params_dtype)
            self.softmax_offset = torch.nn.Parameter(heads)
            config.init_method(self.softmax_offset)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Compute causal attention; attention_mask is ignored.

        Shapes: query [T, heads, d], key and value [T, groups, d] -> [T, heads * d].
        Collective: the context-parallel group.
        """
        assert packed_seq_params is not None, "this attention takes packed rows only"
        lengths, sinks = packed_seq_params.lengths, getattr(self, "softmax_offset", None)
        if self.context.size > 1:
            attend = flash_attention if on_gpu(query) else context_attention
            out = attend(query, key, value, lengths, self.context, scale=self.scale, window=self.window, sinks=sinks)
        else:
            out = packed_attention(query, key, value, lengths, scale=self.scale, window=self.window, sinks=sinks)
        return out.flatten(1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, ShardedTensor]:
        """Describe the sinks in a checkpoint, like TransformerEngine's attention."""
        if self.config.softmax_type == "vanilla":
            return {}
        assert metadata is not None
        described: dict[str, ShardedTensor] = make_sharded_tensors_for_checkpoint(
            {"softmax_offset": self.softmax_offset},
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return described


def mark_sinks(attention: torch.nn.Module) -> None:
    """Mark the sinks of a core attention, if it has any, as a shard of this tensor-parallel rank. megatron-core 0.16.1
    does not, so that gradient norms would contain the sinks of rank 0 only."""
    sinks = getattr(attention, "softmax_offset", None)
    # Layers of sharded parameters have the mark already.
    if isinstance(sinks, torch.nn.Parameter) and not hasattr(sinks, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
