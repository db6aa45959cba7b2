"""Router replay: recorded experts of each token, stored by sample and replayed in other micro-batches or layouts.

Experts are recorded in the old policy's forward pass, or by the engine during sampling. Updates, with other weights,
use the same experts and compute gates from current scores, so gradients flow as usual. Expert ids are stored on the
host: k ids of one or two bytes per token and layer of this rank, for whole sequences on every tensor- and
context-parallel rank.

Source: GSPO (arXiv 2507.18071), section 5.3 (old policy); R3 (arXiv 2510.11370) (engine).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.model.attention.context import ContextPart
from mcore_rl.megatron.model.routers import RoutingRow
from mcore_rl.megatron.step.microbatches import MicroBatch, computed_tokens
from mcore_rl.types import Mean, Metric, RankShare, TrajectoryBuffers


class RoutingStore:
    """Store of expert ids by sample, [layers of this rank, tokens, k]; tokens up to the last predictor.

    layers: indices of this rank's layers among the model's layers with experts.
    context: this rank's part of every row.
    """

    def __init__(self, layers: Sequence[int], config: TransformerConfig, context: ContextPart) -> None:
        self.layers, self.context = list(layers), context
        self.num_experts, self.topk = config.num_moe_experts or 0, config.moe_router_topk
        # Sequence parallelism splits a row over the tensor-parallel ranks.
        self.split = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self.dtype = torch.uint8 if self.num_experts <= 256 else torch.int16
        self.by_sample: dict[int, torch.Tensor] = {}
        self.is_imposed = False

    def impose(self, routing: Mapping[int, np.ndarray]) -> None:
        """Set the engine's experts. All following passes use them, including the old policy's pass.

        Shapes: [layers of the model, tokens, k] by sample.
        Raises: ValueError for other shapes.
        """
        num_layers = max(self.layers, default=-1) + 1
        for sample, ids in routing.items():
            if ids.ndim != 3 or ids.shape[0] < num_layers or ids.shape[2] != self.topk:
                raise ValueError(
                    f"sample {sample}: experts have shape {list(ids.shape)}; expected [layers, tokens, {self.topk}] "
                    f"with at least {num_layers} layers"
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
        """Build the routing data of `batch` for this rank's routers.

        replays: impose the stored experts. records: record the chosen experts. free: let routers choose, even if
        `impose` was called.

        Raises: McoreRLError for a sample that is not stored.
        """
        if not self.num_experts:
            return RoutingRow(batch.tokens.new_empty(0), batch.tokens.new_empty(0))
        sequence, place = self._token_places(batch)
        imposed = None
        if self.layers and not free and (replays or self.is_imposed):
            imposed = self._stored(batch)[:, place.cpu()].to(place.device)
        lengths = torch.tensor(batch.lengths, dtype=torch.float32, device=place.device)
        return RoutingRow(sequence, lengths, token_weight, imposed, records and imposed is None)

    def keep(self, batches: Sequence[MicroBatch], rows: Sequence[RoutingRow]) -> None:
        """Store the experts recorded in the rows. Collective: the tensor- and context-parallel ranks."""
        for batch, row in zip(batches, rows, strict=True):
            if row.found:
                parts = self._recorded(batch, row).split(list(batch.lengths), dim=1)
                self.by_sample.update((s, part.clone()) for s, part in zip(batch.samples, parts, strict=True))

    def differences(self, batches: Sequence[MicroBatch], rows: Sequence[RoutingRow]) -> dict[str, Metric]:
        """Compare recorded with stored experts, ignoring their order.

        Metrics: the fraction of differing choices (k experts of a token in a layer), and the fraction of tokens with a
        differing choice in any layer. One tensor- and context-parallel rank of each stage reports the choices of its
        layers; on the last stage it also reports the tokens.
        Collective: the tensor-, context- and pipeline-parallel ranks.
        """
        tokens = sum(sum(batch.lengths) for batch in batches)
        # A stage without layers with experts has no recorded choices, but takes part in the reduction below.
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
        """Remove the recorded experts from `row` and combine them over all ranks that share it. Returns [layers, tokens
        of all samples, k]."""
        sequence, place = self._token_places(batch)
        recorded = torch.stack([row.found.pop(index) for index in range(len(self.layers))])
        # int32, because neither NCCL nor gloo supports int16. The sum is exact: each token is on one rank.
        whole = torch.zeros(len(self.layers), sum(batch.lengths), self.topk, dtype=torch.int32, device=recorded.device)
        whole[:, place[sequence >= 0]] = recorded[:, sequence >= 0].to(torch.int32)
        group = parallel_state.get_tensor_and_context_parallel_group()
        if group.size() > 1:
            dist.all_reduce(whole, group=group)
        return whole.to(self.dtype).cpu()

    def _token_places(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Locate the t tokens that this rank routes. Returns the sequence of each token (-1 for padding) and its index
        among the tokens of all samples (padding: their total number). Shapes: int64 [t] each."""
        padded = batch.sequences.cu_seqlens_q.diff().to(torch.int64)
        number = torch.arange(len(padded), device=padded.device).repeat_interleave(padded // self.context.size)
        position = self.context.positions(padded)
        # The padding of a row forms an additional sequence.
        padding = len(padded) - len(batch.lengths)
        lengths = torch.tensor([*batch.lengths, *[0] * padding], dtype=torch.int64, device=padded.device)
        real = position < lengths[number]
        place = torch.where(real, (lengths.cumsum(0) - lengths)[number] + position, sum(batch.lengths))
        # Sequence parallelism splits the row into equal consecutive parts.
        size = len(number) // self.split
        rank = parallel_state.get_tensor_model_parallel_rank() if self.split > 1 else 0
        rank_slice = slice(rank * size, (rank + 1) * size)
        return torch.where(real, number, -1)[rank_slice], place[rank_slice]

    def _stored(self, batch: MicroBatch) -> torch.Tensor:
        """Return the stored experts of the batch. Shapes: [layers, tokens of all samples + 1, k]; the last entry is
        padding."""
        unknown = [sample for sample in batch.samples if sample not in self.by_sample]
        if unknown:
            raise McoreRLError(f"samples {unknown} have no recorded routing: call recompute_logp before the updates")
        # Padding needs k distinct experts as well: the dispatcher permutes it like other tokens.
        padding = torch.arange(self.topk, dtype=self.dtype).expand(len(self.layers), 1, -1)
        return torch.cat([*(self.by_sample[sample] for sample in batch.samples), padding], 1)


def engine_routing(shares: Sequence[RankShare], chunks: Sequence[TrajectoryBuffers]) -> dict[int, np.ndarray]:
    """Collect the engine's experts for the computed tokens of every sample, in the form of RoutingStore.impose.

    Raises: McoreRLError for trajectories without recorded experts.
    """
    experts_by_sample: dict[int, np.ndarray] = {}
    for share in shares:
        for sample, chunk, row in zip(share.samples.tolist(), share.chunk_ids, share.rows, strict=True):
            buffers = chunks[chunk]
            if buffers.routed_experts is None:
                raise McoreRLError(
                    f"actor.moe.router_replay=engine: the engine returned no experts for the tokens of sample {sample}"
                )
            start = int(buffers.token_offsets[row])
            experts = buffers.routed_experts[start : start + computed_tokens(buffers, row)]
            experts_by_sample[sample] = experts.swapaxes(0, 1)
    return experts_by_sample
