"""Which experts each token was routed to, kept by sample and replayed under another cut into micro-batches or layout.

The old policy's pass chooses, or the engine did when it sampled; updates, whose weights differ, choose the same experts
and compute their gates from the current scores, so that gradients flow as ever. Ids lie on the host: k numbers of one
or two bytes per token and layer of this rank, whole sequences on every tensor- and context-parallel rank.

Source: routing replay of the old policy, GSPO (arXiv 2507.18071), section 5.3; of the engine, R3 (arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.errors import McoreRLError
from mcore_rl.megatron import cpu
from mcore_rl.megatron.model.context import ContextPart
from mcore_rl.megatron.model.routers import RoutingRow
from mcore_rl.megatron.step.microbatches import MicroBatch, computed_tokens
from mcore_rl.types import Mean, Metric, RankShare, TrajectoryBuffers

cpu.install()

from megatron.core import parallel_state  # noqa: E402


class RoutingStore:
    """Experts by sample: [layers of this rank, tokens, k]; tokens as in a micro-batch, up to the last predictor.

    `layers` are their places among the model's layers with experts; `split` is the tensor-parallel size where rows are
    split over those ranks, else 1, `context` this rank's part of every row.
    """

    def __init__(self, layers: Sequence[int], *, num_experts: int, topk: int, split: int, context: ContextPart) -> None:
        self.context = context
        self.layers, self.num_experts, self.topk, self.split = list(layers), num_experts, topk, split
        self.dtype = torch.uint8 if num_experts <= 256 else torch.int16
        self.by_sample: dict[int, torch.Tensor] = {}
        self.is_imposed = False

    def impose(self, routing: Mapping[int, np.ndarray]) -> None:
        """From now on every pass routes the samples so, an update with an old policy of its own as well.

        Shapes: [layers of the model, tokens, k] by sample.
        Raises: ValueError for other shapes.
        """
        num_layers = max(self.layers, default=-1) + 1
        for sample, ids in routing.items():
            if ids.ndim != 3 or ids.shape[0] < num_layers or ids.shape[2] != self.topk:
                raise ValueError(
                    f"sample {sample}: experts of shape {list(ids.shape)}; needed are [layers, tokens, {self.topk}] "
                    f"of at least {num_layers} layers"
                )
        self.is_imposed = True
        self.by_sample = {
            sample: torch.from_numpy(np.asarray(ids)[self.layers]).to(self.dtype) for sample, ids in routing.items()
        }

    def row(
        self,
        batch: MicroBatch,
        *,
        token_weight: float | None = None,
        replays: bool = False,
        records: bool = False,
        free: bool = False,
    ) -> RoutingRow:
        """What routers of this rank need to know of `batch`; with `replays` it imposes the stored experts, with `free`
        not even those of `impose`.

        Raises: McoreRLError for a sample that is not stored.
        """
        if not self.num_experts:
            return RoutingRow(batch.tokens.new_empty(0), batch.tokens.new_empty(0))
        sequence, place = self._places(batch)
        imposed = None
        if self.layers and not free and (replays or self.is_imposed):
            imposed = self._stored(batch)[:, place.cpu()].to(place.device)
        lengths = torch.tensor(batch.lengths, dtype=torch.float32, device=place.device)
        return RoutingRow(sequence, lengths, token_weight, imposed, records and imposed is None)

    def keep(self, batches: Sequence[MicroBatch], rows: Sequence[RoutingRow]) -> None:
        """Stores what the rows have recorded.

        Collective: the tensor- and context-parallel ranks.
        """
        for batch, row in zip(batches, rows, strict=True):
            if row.found:
                parts = self._recorded(batch, row).split(list(batch.lengths), dim=1)
                self.by_sample.update((s, part.clone()) for s, part in zip(batch.samples, parts, strict=True))

    def differences(self, batches: Sequence[MicroBatch], rows: Sequence[RoutingRow]) -> dict[str, Metric]:
        """How many of the choices that the rows have recorded are not those stored, whatever their order: as a share of
        all layers' choices of k experts for a token, and of the tokens, which differ if a layer's choice does.

        One tensor- and context-parallel rank counts the choices of its layers, that of the last stage the tokens.
        Collective: the tensor-, context- and pipeline-parallel ranks.
        """
        tokens = sum(sum(batch.lengths) for batch in batches)
        differ = torch.zeros(len(self.layers), tokens, dtype=torch.bool)
        if self.layers and tokens:
            pairs = [
                (self._recorded(batch, row), self._stored(batch)[:, :-1])
                for batch, row in zip(batches, rows, strict=True)
            ]
            recorded, stored = (torch.cat(parts, 1).sort(-1).values for parts in zip(*pairs, strict=True))
            differ = (recorded != stored).any(-1)
        anywhere = differ.any(0).to(torch.int32)
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        if pipeline.size() > 1 and tokens:
            on_device = anywhere.to(batches[0].tokens.device)
            dist.all_reduce(on_device, op=dist.ReduceOp.MAX, group=pipeline)
            anywhere = on_device.cpu()
        if parallel_state.get_tensor_and_context_parallel_group().rank():
            return {}
        metrics: dict[str, Metric] = {"routing/differing_choices": Mean(int(differ.sum()), differ.numel())}
        if pipeline.rank() == pipeline.size() - 1:
            metrics["routing/differing_tokens"] = Mean(int(anywhere.sum()), tokens)
        return metrics

    def _recorded(self, batch: MicroBatch, row: RoutingRow) -> torch.Tensor:
        """What a row has recorded, taken out of it, of all ranks that share it: [layers, tokens of all samples, k]."""
        sequence, place = self._places(batch)
        recorded = torch.stack([row.found.pop(index) for index in range(len(self.layers))])
        # int32: no collective of NCCL or gloo takes int16. Every token is on one rank.
        whole = torch.zeros(len(self.layers), sum(batch.lengths), self.topk, dtype=torch.int32, device=recorded.device)
        whole[:, place[sequence >= 0]] = recorded[:, sequence >= 0].to(torch.int32)
        group = parallel_state.get_tensor_and_context_parallel_group()
        if group.size() > 1:
            dist.all_reduce(whole, group=group)
        return whole.to(self.dtype).cpu()

    def _places(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each token that this rank routes: its sequence, -1 for padding, and its place among the tokens of all
        samples, the number of these for padding. Shapes: int64 [t] each."""
        padded = batch.sequences.cu_seqlens_q.diff().to(torch.int64)
        number = torch.arange(len(padded), device=padded.device).repeat_interleave(padded // self.context.size)
        position = self.context.positions(padded)
        # What pads a row is one more sequence.
        padding = len(padded) - len(batch.lengths)
        lengths = torch.tensor([*batch.lengths, *[0] * padding], dtype=torch.int64, device=padded.device)
        real = position < lengths[number]
        place = torch.where(real, (lengths.cumsum(0) - lengths)[number] + position, sum(batch.lengths))
        size = len(number) // self.split
        rank = parallel_state.get_tensor_model_parallel_rank() if self.split > 1 else 0
        rank_slice = slice(rank * size, (rank + 1) * size)
        return torch.where(real, number, -1)[rank_slice], place[rank_slice]

    def _stored(self, batch: MicroBatch) -> torch.Tensor:
        """Shapes: [layers, tokens of all samples + 1, k]; the last is padding's."""
        unknown = [sample for sample in batch.samples if sample not in self.by_sample]
        if unknown:
            raise McoreRLError(f"samples {unknown} have no recorded routing: recompute_logp comes before the updates")
        padding = torch.arange(self.topk, dtype=self.dtype).expand(len(self.layers), 1, -1)
        return torch.cat([*(self.by_sample[sample] for sample in batch.samples), padding], 1)


def engine_routing(shares: Sequence[RankShare], chunks: Sequence[TrajectoryBuffers]) -> dict[int, np.ndarray]:
    """What the engine chose for the tokens that are computed of every sample, as RoutingStore.impose takes it.

    Raises: McoreRLError for trajectories without it.
    """
    experts_by_sample: dict[int, np.ndarray] = {}
    for share in shares:
        for sample, chunk, row in zip(share.samples.tolist(), share.chunk_ids, share.rows, strict=True):
            buffers = chunks[chunk]
            if buffers.routed_experts is None:
                raise McoreRLError(
                    f"actor.moe.router_replay=engine: sample {sample} came without the experts of its tokens"
                )
            start = int(buffers.token_offsets[row])
            experts = buffers.routed_experts[start : start + computed_tokens(buffers, row)]
            experts_by_sample[sample] = experts.swapaxes(0, 1)
    return experts_by_sample
