"""Packed micro-batches of a data-parallel rank's share of an update: concatenated sequences, not padded to equal
length.

The token at position t is predicted by the hidden state at t - 1. Only the predictors of trained tokens are listed, so
the output projection skips prompts. Tokens after the last predictor of a sequence have no effect and are not computed.
Example with two sequences (p: prompt, r and s: response, all trained):

    sequences      p p p r s   p r s
    position       0 1 2 3     4 5
    tokens         p p p r     p r          the last s is only a target
    predictors         2 3     4 5          hidden states that predict
    targets            r s     r s          trained_counts 2, 2

Context-parallel ranks build the same micro-batch and keep their part of it (see context.py). A trained token belongs to
the rank of its predictor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.data.packing import TOKENS, SequenceCost, pack
from mcore_rl.data.trajectories import images_of
from mcore_rl.errors import DataError, McoreRLError
from mcore_rl.megatron.model.attention.context import SINGLE_RANK, ContextPart
from mcore_rl.megatron.model.attention.packed import PackedRow, pack_sequences, upload
from mcore_rl.megatron.model.vision.tower import RowImages
from mcore_rl.megatron.step.images import image_inputs
from mcore_rl.megatron.step.kept_tokens import KeptTokens, trained_sets
from mcore_rl.megatron.step.loss.trained_tokens import TrainedTokens, whole_by_sample
from mcore_rl.megatron.step.observations import Observations, observation_predictors
from mcore_rl.types import RankShare, TrajectoryBuffers
from model_converters.families.parts.vision import VisionArguments


@dataclass(frozen=True, kw_only=True)
class MicroBatch(TrainedTokens):
    """Input of one forward pass (see the example in the module docstring).

    lengths: one entry per sequence, without padding, in tokens.
    sequences: Megatron's PackedSeqParams.
    temperatures: sampling temperature of each token (NaN: rollout.temperature); a number if it is the same for all
        tokens; None if it is rollout.temperature for all.
    kept: sets that the trained tokens were sampled from; None: all tokens of the vocabulary, or without
        Packing.masked.
    observations: tokens that were not sampled, without Packing.observed None.
    positions, images: of a row with images: the positions of all ranks' tokens in time, height and width, and the
        images; else None.

    With context parallelism, `tokens` and per-token tensors hold this rank's part; sequences, lengths, whole_counts and
    owners describe all ranks. A micro-batch without samples is a dummy: it makes the number of passes equal on all
    ranks and contributes exactly zero.

    Shapes: tokens int64 [T]; predictors int64, temperatures float32 [N], see TrainedTokens; positions int32 [3, tokens
    of all ranks].
    """

    lengths: tuple[int, ...]
    tokens: torch.Tensor
    sequences: PackedRow
    predictors: torch.Tensor
    temperatures: torch.Tensor | float | None = None
    positions: torch.Tensor | None = None
    images: RowImages | None = None
    kept: KeptTokens | None = None
    observations: Observations | None = None


@dataclass(frozen=True)
class Packing:
    """Parameters of the division into micro-batches.

    tokens: budget of the whole row; a longer sequence is an error.
    row_multiple: each rank's row is padded to a multiple of it (sequence parallelism).
    count_multiple: the number of micro-batches is padded to a multiple of it (interleaved pipeline).
    group: ranks that must run the same number of micro-batches.
    cost: cost to be balanced over micro-batches, within the token budget.
    context: this rank's part of every row.
    vision: vision tower of the model; None: trajectories must not have images.
    observed: list the observations of the responses.
    masked: move the sets that tokens were sampled from to the device.
    """

    tokens: int
    row_multiple: int = 1
    count_multiple: int = 1
    group: dist.ProcessGroup | None = None
    device: torch.device | str = "cpu"
    cost: SequenceCost = TOKENS
    context: ContextPart = SINGLE_RANK
    vision: VisionArguments | None = None
    observed: bool = False
    masked: bool = False


def distinct_samples(shares: Sequence[RankShare], *, first: int = 0) -> RankShare:
    """Join the shares after the `first` ones, with each sample once (further epochs repeat samples)."""
    arrays = [name for name, value in vars(shares[0]).items() if isinstance(value, np.ndarray)]
    joined = {name: np.concatenate([getattr(share, name) for share in shares]) for name in arrays}
    # np.unique returns first occurrences, so samples that the `first` shares contain are dropped below.
    _, index = np.unique(joined["samples"], return_index=True)
    index = index[index >= sum(len(share.samples) for share in shares[:first])]
    return replace(shares[0], **{name: values[index] for name, values in joined.items()})


def chosen_samples(share: RankShare, chosen: np.ndarray) -> RankShare:
    """Select samples of a share. Shapes: chosen bool [b]."""
    arrays = {name: value[chosen] for name, value in vars(share).items() if isinstance(value, np.ndarray)}
    return replace(share, **arrays)


def sequence_sums(found: Iterable[tuple[MicroBatch, torch.Tensor]], context: ContextPart) -> dict[int, float]:
    """Sum the values of every sample over its trained tokens, in float64.

    Shapes: values [N] of this rank's trained tokens, per micro-batch.
    Collective: the context-parallel group.
    """
    return {
        sample: float(values.sum(dtype=np.float64))
        for batch, logp in found
        # A dummy micro-batch, on all context-parallel ranks alike: none of them gathers.
        if batch.samples
        for sample, values in whole_by_sample(batch, logp, context).items()
    }


def build_microbatches(share: RankShare, chunks: Sequence[TrajectoryBuffers], packing: Packing) -> list[MicroBatch]:
    """Build the micro-batches of a share.

    Raises: DataError for a trajectory without a prompt or longer than the budget; McoreRLError for a trajectory with
    tokens of newer weights than the share's version, or with a token outside the set that it was sampled from.
    Collective: all ranks of packing.group.
    """
    multiple = packing.context.multiple
    lengths = -(-share.total_tokens // multiple) * multiple
    # All ranks need the same number of micro-batches: take the largest, then pack again into that many, balanced by
    # cost.
    most = _max_over_ranks(len(pack(lengths, packing.tokens)), packing)
    count = -(-max(most, 1) // packing.count_multiple) * packing.count_multiple
    bins = pack(lengths, packing.tokens, min_bins=count, cost=packing.cost)
    bins += [np.empty(0, np.int64)] * (count - len(bins))
    return [_microbatch(share, members, chunks, packing) for members in bins]


def _max_over_ranks(count: int, packing: Packing) -> int:
    if packing.group is None:
        return count
    tensor = torch.tensor([count], dtype=torch.int64, device=packing.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=packing.group)
    return int(tensor.item())


_TRAINED = {
    "predictors": np.int64,
    "targets": np.int64,
    "logp_rollout": np.float32,
    "staleness": np.float32,
    "temperatures": np.float32,
}
"""Arrays with one entry per trained token, of a sequence or of a row before it is split over context-parallel ranks,
and their dtypes in a row."""


def _microbatch(
    share: RankShare, members: np.ndarray, chunks: Sequence[TrajectoryBuffers], packing: Packing
) -> MicroBatch:
    # Sort by descending length, so that sequences of equal length are adjacent and attention copies nothing.
    members = members[np.argsort(-share.total_tokens[members], kind="stable")]
    sequences = [_sequence(chunks[share.chunk_ids[i]], share, int(i)) for i in members]
    images = [images_of(chunks[share.chunk_ids[i]], int(share.rows[i])) for i in members]
    row_lengths, row, trained = _row(sequences, packing)
    tokens, predictors, owners = _part_of_row(row_lengths, row, trained["predictors"], packing.context)
    mine = slice(None) if packing.context.size == 1 else owners == packing.context.rank
    positions, row_images = image_inputs(
        [computed for computed, _ in sequences], images, row_lengths, packing.vision, packing.context
    )
    whole_responses = np.repeat(np.arange(len(sequences)), [len(arrays["targets"]) for _, arrays in sequences])
    responses = whole_responses[mine]
    sets = trained_sets(share, members, chunks, trained["targets"]) if packing.masked else None

    def to_device(values: np.ndarray) -> torch.Tensor:
        return upload(torch.from_numpy(values), packing.device)

    return MicroBatch(
        samples=tuple(int(sample) for sample in share.samples[members]),
        losses=(0,) * len(members) if share.losses is None else tuple(share.losses[members].tolist()),
        lengths=tuple(len(computed) for computed, _ in sequences),
        trained_counts=_counts(responses, len(members)),
        whole_counts=_counts(whole_responses, len(members)),
        owners=to_device(owners),
        tokens=to_device(tokens),
        sequences=pack_sequences(row_lengths, packing.device, context_parallel=packing.context.size > 1),
        predictors=to_device(predictors),
        targets=to_device(trained["targets"][mine]),
        advantages=to_device(share.advantages[members][responses].astype(np.float32)),
        loss_weights=to_device(share.loss_weights[members][responses].astype(np.float32)),
        logp_rollout=to_device(trained["logp_rollout"][mine]),
        staleness=to_device(trained["staleness"][mine]),
        temperatures=_compact_temperatures(trained["temperatures"][mine], to_device),
        positions=None if positions is None else to_device(positions),
        images=None if row_images is None else row_images.on(packing.device),
        kept=None if sets is None else KeptTokens.of(sets.take(np.arange(len(sets))[mine]), to_device),
        observations=_observations(share, members, chunks, packing, row_lengths, row) if packing.observed else None,
    )


def _observations(
    share: RankShare,
    members: np.ndarray,
    chunks: Sequence[TrajectoryBuffers],
    packing: Packing,
    row_lengths: list[int],
    row: np.ndarray,
) -> Observations:
    """List the observations of a row, int64 [tokens], that consists of the share's `members` and padding."""
    starts = np.cumsum([0, *row_lengths])[: len(members)]
    found = []
    for i, start in zip(members, starts, strict=True):
        buffers, place = chunks[share.chunk_ids[i]], int(share.rows[i])
        predictors = observation_predictors(buffers, place, computed_tokens(buffers, place), packing.vision)
        found.append(start + predictors)
    whole = np.concatenate([np.empty(0, np.int64), *found])
    _, predictors, owners = _part_of_row(row_lengths, row, whole, packing.context)
    mine = slice(None) if packing.context.size == 1 else owners == packing.context.rank
    assert share.observation_weights is not None
    counts = np.array([len(each) for each in found], np.int64)
    weights = np.repeat(share.observation_weights[members] / np.maximum(counts, 1), counts).astype(np.float32)
    arrays = (predictors, row[whole + 1][mine], weights[mine])
    return Observations(*(upload(torch.from_numpy(values), packing.device) for values in arrays))


def _compact_temperatures(
    temperatures: np.ndarray, to_device: Callable[[np.ndarray], torch.Tensor]
) -> torch.Tensor | float | None:
    """Convert to the form of MicroBatch.temperatures. Shapes: float32 [N]."""
    if np.isnan(temperatures).all():
        return None
    first = temperatures[:1]
    return float(first[0]) if (temperatures == first).all() else to_device(temperatures)


def _part_of_row(
    row_lengths: list[int], row: np.ndarray, predictors: np.ndarray, part: ContextPart
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rank's tokens, the positions of its predictors among them, and the rank of every trained token of the
    full row."""
    if part.size == 1:
        return row, predictors, np.zeros(len(predictors), np.int64)
    lengths = torch.tensor(row_lengths)
    indices = part.row_indices(lengths).numpy()
    position_on_rank = np.full(len(row), -1)
    position_on_rank[indices] = np.arange(len(indices))
    owners = part.owners(lengths).numpy()[predictors]
    return row[indices], position_on_rank[predictors[owners == part.rank]], owners


def _counts(responses: np.ndarray, num_responses: int) -> tuple[int, ...]:
    return tuple(np.bincount(responses, minlength=num_responses).tolist())


_Sequence = tuple[np.ndarray, dict[str, np.ndarray]]
"""Tokens of a trajectory up to its last predictor [S], and its arrays in _TRAINED [n], in the order of the
predictors."""


def _row(sequences: list[_Sequence], packing: Packing) -> tuple[list[int], np.ndarray, dict[str, np.ndarray]]:
    """Join sequences to a row of all context-parallel ranks. Returns the padded lengths of the sequences, the tokens
    (int64), and the arrays of all trained tokens."""
    part = packing.context
    lengths = [-(-len(computed) // part.multiple) * part.multiple for computed, _ in sequences]
    starts = np.cumsum([0, *lengths])[:-1]
    # The row is split over context-parallel ranks first, then over tensor-parallel ones (sequence parallelism).
    row_multiple = math.lcm(part.multiple, part.size * packing.row_multiple)
    # A dummy micro-batch consists of padding only: attention needs at least one sequence.
    padding = -sum(lengths) % row_multiple or (0 if lengths else row_multiple)
    if padding:
        lengths.append(padding)
    tokens = np.zeros(sum(lengths), np.int64)
    for (computed, _), first in zip(sequences, starts, strict=True):
        tokens[first : first + len(computed)] = computed
    # The empty array gives a row without sequences its type.
    trained = {
        name: np.concatenate([*(arrays[name] for _, arrays in sequences), np.empty(0, dtype)]).astype(dtype, copy=False)
        for name, dtype in _TRAINED.items()
    }
    trained["predictors"] += np.repeat(starts, [len(arrays["predictors"]) for _, arrays in sequences])
    return lengths, tokens, trained


def computed_tokens(buffers: TrajectoryBuffers, row: int) -> int:
    """Number of tokens of a trajectory that are computed: up to its last predictor; 1 if no token is trained."""
    response = slice(int(buffers.response_offsets[row]), int(buffers.response_offsets[row + 1]))
    trained = np.flatnonzero(buffers.trained[response])
    return int(buffers.prompt_tokens[row]) + int(trained[-1]) if len(trained) else 1


def _sequence(buffers: TrajectoryBuffers, share: RankShare, index: int) -> _Sequence:
    row, sample = int(share.rows[index]), int(share.samples[index])
    prompt = int(buffers.prompt_tokens[row])
    if prompt < 1:
        raise DataError(f"sample {sample} has an empty prompt, so its first token has no predictor")
    tokens = buffers.tokens[buffers.token_offsets[row] : buffers.token_offsets[row + 1]]
    response = slice(int(buffers.response_offsets[row]), int(buffers.response_offsets[row + 1]))
    trained = np.flatnonzero(buffers.trained[response])
    predictors = prompt - 1 + trained
    versions = buffers.versions[response][trained]
    newest = int(versions.max(initial=0))
    if newest > share.version:
        raise McoreRLError(
            f"sample {sample} has tokens of version {newest}, newer than version {share.version} of its batch"
        )
    return tokens[: computed_tokens(buffers, row)], {
        "predictors": predictors,
        "targets": tokens[predictors + 1],
        "logp_rollout": buffers.logp_rollout[response][trained],
        "staleness": share.version + 1 - versions,
        "temperatures": _temperatures(buffers, response, trained),
    }


def _temperatures(buffers: TrajectoryBuffers, response: slice, trained: np.ndarray) -> np.ndarray:
    """Return the sampling temperatures of a response's trained tokens, float32 [n]; NaN if not recorded."""
    if buffers.temperatures is None:
        return np.full(len(trained), np.nan, np.float32)
    if not buffers.temperatures.ndim:
        return np.full(len(trained), buffers.temperatures)
    return buffers.temperatures[response][trained]
