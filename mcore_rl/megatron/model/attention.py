"""Core attention by torch's SDPA: what megatron.core's local layer spec lacks (packed sequences), on any device.

Used where TransformerEngine is absent. Packed sequences (THD) are never mixed: short ones of similar length share a
padded batch, which under a causal mask is exact, because a query never reaches the padding behind its sequence.
Over context-parallel ranks `context_attention` takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from mcore_rl.megatron import cpu
from mcore_rl.megatron.model.context import ALONE, ContextPart
from mcore_rl.megatron.model.context_attention import context_attention

cpu.install()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402

BATCHED_TOKENS = 128
"""Sequences up to this length are batched; longer ones keep a core busy on their own and pay only for padding."""
SIMILAR = 0.8
"""The shortest sequence of a batch is at least this fraction of the longest."""


def upload(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The same values on `device`, without a wait of the host: a GPU copies from pinned memory, which torch keeps until
    the copy is done. On the CPU the tensor itself."""
    pinned = host.pin_memory() if torch.device(device).type == "cuda" else host
    return pinned.to(device, non_blocking=True)


@dataclass
class PackedRow(PackedSeqParams):
    """With the sequences' lengths on the host as well: attention that works sequence by sequence asks for them in every
    layer, and would wait for a GPU each time. Units: tokens."""

    lengths: tuple[int, ...] = ()


def pack_sequences(
    lengths: list[int], device: torch.device | str = "cpu", *, context_parallel: bool = False
) -> PackedRow:
    """What GPTModel.forward takes as packed_seq_params for sequences laid end to end, positions from 0 in each.

    Units: lengths in tokens, each at least 1; their sum is the length of the packed row. With context_parallel they are
    those of the whole sequences, padded, and the rank's row is a part of theirs.
    """
    assert min(lengths) > 0, "a packed row has no empty sequence"
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    offsets[1:] = torch.tensor(lengths).cumsum(0)
    offsets = upload(offsets, device)
    longest = max(lengths)
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        # TransformerEngine refuses packed sequences on context-parallel ranks without these. They are no others:
        # padding belongs to its sequence, where no token sees it.
        cu_seqlens_q_padded=offsets if context_parallel else None,
        cu_seqlens_kv_padded=offsets if context_parallel else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths),
    )


@dataclass(frozen=True)
class PaddedBatch:
    """Sequences that share one SDPA call.

    `whole` is the stretch of the packed row that they are, one after the other, where they are of one length: nothing
    is copied then.

    Shapes: source int64 [rows * width], the packed position each padded cell reads (padding repeats a token of the
    same sequence); real int64 [n], the cells that are no padding, row by row.
    """

    rows: int
    width: int
    source: torch.Tensor
    real: torch.Tensor
    whole: slice | None

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [rows, width, ...]."""
        cells = packed.index_select(0, self.source) if self.whole is None else packed[self.whole]
        return cells.unflatten(0, (self.rows, self.width))

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """[rows, width, ...] -> [n, ...]."""
        cells = padded.flatten(0, 1)
        return cells.index_select(0, self.real) if self.whole is None else cells


def _group(lengths: tuple[int, ...]) -> list[list[int]]:
    """Sequence indices by descending length, cut where a sequence is too long or too unlike its group's first."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and longest <= BATCHED_TOKENS and lengths[i] >= SIMILAR * longest:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _plan(lengths: tuple[int, ...], device: torch.device) -> tuple[list[PaddedBatch], torch.Tensor | None]:
    """Batches, and for each packed position its place among the batches' real cells (None: they are in order).
    Cached: every layer, forward and backward, asks for the same one."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    batches, order = [], []
    for group in _group(lengths):
        width = lengths[group[0]]
        first = torch.tensor([starts[i] for i in group])[:, None]
        column = torch.arange(width)[None]
        inside = column < torch.tensor([lengths[i] for i in group])[:, None]
        source = first + column * inside
        order.append(source[inside])
        real = inside.flatten().nonzero().flatten()
        source = source.flatten()
        start, end = starts[group[0]], starts[group[0]] + len(source)
        whole = slice(start, end) if torch.equal(source, torch.arange(start, end)) else None
        batches.append(PaddedBatch(len(group), width, upload(source, device), upload(real, device), whole))
    place = torch.cat(order).argsort()
    in_order = torch.equal(place, torch.arange(len(place)))
    return batches, None if in_order else upload(place, device)


class SDPACoreAttention(MegatronModule):
    """core_attention of a local layer spec: causal self-attention, grouped queries, THD and BSHD; over
    context-parallel ranks on the CPU only."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.context = ALONE
        if config.context_parallel_size > 1:
            assert not torch.cuda.is_available(), (
                "resolved.model rejects this layout on GPUs: the kernels here run on CPUs only"
            )
            group = pg_collection.cp
            self.context = ContextPart(group.rank(), group.size(), group)
        assert not config.attention_dropout, "the model builder turns dropout off"
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise NotImplementedError(f"layer {layer_number}: {attention_type} attention with mask {attn_mask_type}")
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Shapes: query [T, heads, d], key and value [T, groups, d] when packed, giving [T, heads * d];
        [S, B, heads, d] and [S, B, groups, d] otherwise, giving [S, B, heads * d]. The mask is always causal.
        Collective: the context-parallel group."""
        if self.context.size > 1:
            return self._attend_over_ranks(query, key, value, packed_seq_params)
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)
        batches, place = _plan(packed_seq_params.lengths, query.device)
        outputs = []
        for batch in batches:
            q, k, v = (batch.pad(x).transpose(1, 2) for x in (query, key, value))
            outputs.append(batch.unpad(self._attend(q, k, v).transpose(1, 2)))
        packed = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return (packed if place is None else packed.index_select(0, place)).flatten(1)

    def _attend_over_ranks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedRow | None
    ) -> torch.Tensor:
        """Shapes: as of forward, of this rank's tokens."""
        if packed is not None:
            return context_attention(query, key, value, packed.lengths, self.context, scale=self.scale).flatten(1)
        length, rows = query.shape[:2]
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        lengths = (length * self.context.size,) * rows
        out = context_attention(q, k, v, lengths, self.context, scale=self.scale)
        return out.unflatten(0, (rows, length)).transpose(0, 1).flatten(2)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Shapes: [rows, heads or groups, width, d] -> [rows, heads, width, d]."""
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
