"""Trained tokens of a micro-batch on this rank, by sample, and values that belong to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.model.attention.context import ContextPart


@dataclass(frozen=True, kw_only=True)
class TrainedTokens:
    """The trained tokens of a micro-batch, or of some of its samples, as far as losses read them.

    samples, trained_counts, whole_counts: one entry per sequence; whole_counts are of all context-parallel ranks.
    losses: number of each sequence's loss in AlgorithmConfig.loss_settings.
    owners: with context parallelism, the rank of each of the M trained tokens of all ranks.
    staleness: version that the updates produce minus version that sampled the token; 1 if the updates start from the
        weights that sampled it, as always in synchronous runs.

    Shapes: owners int64 [M]; other tensors [N], the N trained tokens of this rank: targets int64; advantages,
    loss_weights, logp_rollout, staleness float32.
    """

    samples: tuple[int, ...]
    trained_counts: tuple[int, ...]
    whole_counts: tuple[int, ...]
    losses: tuple[int, ...]
    owners: torch.Tensor
    targets: torch.Tensor
    advantages: torch.Tensor
    loss_weights: torch.Tensor
    logp_rollout: torch.Tensor
    staleness: torch.Tensor


def select_loss_tokens(batch: TrainedTokens, number: int) -> tuple[TrainedTokens, torch.Tensor | None]:
    """Return the tokens of the samples with loss `number`, and their indices in the micro-batch, int64 [n]; None: all.

    All context-parallel ranks have the same samples, so they divide a micro-batch alike.
    """
    chosen = [each == number for each in batch.losses]
    if all(chosen):
        return batch, None
    tokens = _tokens_of(chosen, batch.trained_counts, batch.targets.device)
    names = ("targets", "advantages", "loss_weights", "logp_rollout", "staleness")
    part = TrainedTokens(
        samples=_chosen(batch.samples, chosen),
        trained_counts=_chosen(batch.trained_counts, chosen),
        whole_counts=_chosen(batch.whole_counts, chosen),
        losses=_chosen(batch.losses, chosen),
        owners=batch.owners[_tokens_of(chosen, batch.whole_counts, batch.owners.device)],
        **{name: getattr(batch, name)[tokens] for name in names},
    )
    return part, tokens


def _chosen(values: tuple[int, ...], chosen: list[bool]) -> tuple[int, ...]:
    return tuple(value for value, selected in zip(values, chosen, strict=True) if selected)


def _tokens_of(chosen: list[bool], counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the indices of the tokens of the chosen samples, int64 [n]."""
    flags = torch.tensor(chosen).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    return flags.nonzero().squeeze(1).to(device)


def by_sample(found: Iterable[tuple[TrainedTokens, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Split values of this rank's trained tokens by sample. Shapes: [N] per micro-batch -> [n] per sample."""
    return {
        sample: part
        for batch, values in found
        for sample, part in zip(batch.samples, values.split(list(batch.trained_counts)), strict=True)
    }


def own_tokens(batch: TrainedTokens, whole: Mapping[int, np.ndarray], context: ContextPart, what: str) -> torch.Tensor:
    """Select from `whole` the values of this rank's trained tokens of a micro-batch. `what` names the values in errors.

    Shapes: whole [n] by sample, all trained tokens of all context-parallel ranks -> float32 [N].
    Raises: McoreRLError that names samples missing in `whole`; ValueError for a wrong length.
    """
    unknown = [sample for sample in batch.samples if sample not in whole]
    if unknown:
        raise McoreRLError(f"samples {unknown} have no {what}")
    parts = [np.asarray(whole[sample], np.float32) for sample in batch.samples]
    for sample, part, count in zip(batch.samples, parts, batch.whole_counts, strict=True):
        if part.shape != (count,):
            raise ValueError(f"sample {sample}: {what} have shape {list(part.shape)}, not [{count}] (trained tokens)")
    joined = torch.from_numpy(np.concatenate([np.empty(0, np.float32), *parts])).to(batch.targets.device)
    return joined if context.size == 1 else joined[batch.owners == context.rank]


def whole_by_sample(batch: TrainedTokens, values: torch.Tensor, context: ContextPart) -> dict[int, np.ndarray]:
    """Gather the values of all trained tokens of a micro-batch and split them by sample.

    Shapes: values [N] of this rank's trained tokens -> float32 [n] per sample, for the whole response.
    Collective: the context-parallel group.
    """
    if context.size > 1 and len(batch.owners):
        values = context.gather(values[None], batch.owners)[0]
    ends = np.cumsum(batch.whole_counts, dtype=np.int64)
    parts = np.split(values.float().cpu().numpy(), ends)[:-1]  # np.split adds an empty part after the last sample
    return dict(zip(batch.samples, parts, strict=True))


def samples_and_positions(batch: TrainedTokens, context: ContextPart) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sample of each trained token on this rank, and its position among the sample's trained tokens.

    Shapes: int64 [N] each.
    """
    device = batch.targets.device
    counts = torch.tensor(batch.whole_counts, dtype=torch.int64, device=device)
    samples = torch.tensor(batch.samples, dtype=torch.int64, device=device).repeat_interleave(counts)
    # Position of each token in the joined tokens minus the start of its sample.
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    positions = torch.arange(len(samples), device=device) - starts
    rank_tokens = slice(None) if context.size == 1 else batch.owners == context.rank
    return samples[rank_tokens], positions[rank_tokens]
