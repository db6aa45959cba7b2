"""A data-parallel rank's share of an update as packed micro-batches: sequences end to end, no padding to a maximum.

The token at position t is predicted by the hidden state at t - 1. Only those positions are listed, so prompts never
meet the output projection; what follows a sequence's last predictor has no effect and is not computed. Worked example,
two sequences (p prompt, r and s response, all of it trained):

    sequences      p p p r s   p r s
    position       0 1 2 3     4 5
    tokens         p p p r     p r          the last s is only a target
    predictors         2 3     4 5          hidden states that predict
    targets            r s     r s          trained_counts 2, 2

Context-parallel ranks build the same micro-batch and keep their part of it (see context.py): every trained token lies
on one of them, that of its predictor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.data.packing import TOKENS, SequenceCost, pack
from mcore_rl.errors import DataError, McoreRLError
from mcore_rl.megatron.model.attention import pack_sequences, upload
from mcore_rl.megatron.model.context import SINGLE_RANK, ContextPart
from mcore_rl.types import RankShare, TrajectoryBuffers


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass (see the module's example).

    Shapes: tokens int64 [T]; samples, lengths (in tokens of the whole row) and trained_counts: one entry per sequence,
    padding is none; owners int64 [M]; every other tensor [N], N trained tokens: predictors, targets int64; advantages,
    loss_weights, logp_rollout, staleness, temperatures float32.
    `temperatures`: the sampling temperature of each token (NaN: the run's), one number if all tokens have the same,
    None if all have the run's.
    `staleness`: how many versions of the weights the updates of the batch lead beyond the one that a token was sampled
    with. They lead to the version after that of the batch: 1 for a token sampled with the weights that they start from,
    as all tokens of a synchronous run are.
    `sequences` are megatron's PackedSeqParams. With context parallelism tokens and trained tokens are this rank's;
    `sequences`, `lengths`, `whole_counts` and `owners` (the rank of each of the M trained tokens) are those of all.
    A micro-batch without samples is a dummy: it keeps a rank in step with its peers and contributes exactly nothing.
    """

    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    trained_counts: tuple[int, ...]
    whole_counts: tuple[int, ...]
    owners: torch.Tensor
    tokens: torch.Tensor
    sequences: Any
    predictors: torch.Tensor
    targets: torch.Tensor
    advantages: torch.Tensor
    loss_weights: torch.Tensor
    logp_rollout: torch.Tensor
    staleness: torch.Tensor
    temperatures: torch.Tensor | float | None = None


@dataclass(frozen=True)
class Packing:
    """How micro-batches are cut.

    `tokens` is the budget of the whole row, a longer sequence is refused; `cost` is what is even over micro-batches
    within it. Each rank's row is padded to a multiple of `row_multiple` (sequence parallelism), the number of
    micro-batches to one of `count_multiple` (an interleaved pipeline). Ranks of `group` must run equally many;
    `context` is this rank's part of every row.
    """

    tokens: int
    row_multiple: int = 1
    count_multiple: int = 1
    group: dist.ProcessGroup | None = None
    device: torch.device | str = "cpu"
    cost: SequenceCost = TOKENS
    context: ContextPart = SINGLE_RANK


def distinct_samples(shares: Sequence[RankShare], *, first: int = 0) -> RankShare:
    """The samples of all shares that are not in the `first` ones, each once: further epochs repeat samples."""
    arrays = [name for name, value in vars(shares[0]).items() if isinstance(value, np.ndarray)]
    joined = {name: np.concatenate([getattr(share, name) for share in shares]) for name in arrays}
    _, index = np.unique(joined["samples"], return_index=True)
    index = index[index >= sum(len(share.samples) for share in shares[:first])]
    return replace(shares[0], **{name: values[index] for name, values in joined.items()})


def by_sample(found: Iterable[tuple[MicroBatch, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Numbers of the trained tokens that this rank has. Shapes: [N] by micro-batch -> [n] by sample."""
    return {
        sample: part
        for batch, values in found
        for sample, part in zip(batch.samples, values.split(list(batch.trained_counts)), strict=True)
    }


def own_tokens(batch: MicroBatch, whole: Mapping[int, np.ndarray], context: ContextPart, what: str) -> torch.Tensor:
    """What `whole` has for the trained tokens that this rank holds of a micro-batch, float32 [N].

    Shapes: whole [n] by sample, one for each of its trained tokens on all context-parallel ranks.
    Raises: McoreRLError naming samples that `whole` lacks; ValueError for one of another length.
    """
    unknown = [sample for sample in batch.samples if sample not in whole]
    if unknown:
        raise McoreRLError(f"samples {unknown} have no {what}")
    parts = [np.asarray(whole[sample], np.float32) for sample in batch.samples]
    for sample, part, count in zip(batch.samples, parts, batch.whole_counts, strict=True):
        if part.shape != (count,):
            raise ValueError(f"sample {sample}: {list(part.shape)} {what} for its {count} trained tokens")
    joined = torch.from_numpy(np.concatenate([np.empty(0, np.float32), *parts])).to(batch.tokens.device)
    return joined if context.size == 1 else joined[batch.owners == context.rank]


def build_microbatches(share: RankShare, chunks: Sequence[TrajectoryBuffers], packing: Packing) -> list[MicroBatch]:
    """The micro-batches of a share.

    Raises: DataError for a trajectory without a prompt, or longer than the budget; McoreRLError for one with tokens of
    newer weights than the share's.
    Collective: all ranks of packing.group.
    """
    multiple = packing.context.multiple
    lengths = -(-share.total_tokens // multiple) * multiple
    most = _most(len(pack(lengths, packing.tokens)), packing)
    count = -(-max(most, 1) // packing.count_multiple) * packing.count_multiple
    bins = pack(lengths, packing.tokens, min_bins=count, cost=packing.cost)
    bins += [np.empty(0, np.int64)] * (count - len(bins))
    return [_microbatch(share, members, chunks, packing) for members in bins]


def _most(count: int, packing: Packing) -> int:
    if packing.group is None:
        return count
    tensor = torch.tensor([count], dtype=torch.int64, device=packing.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=packing.group)
    return int(tensor.item())


def _microbatch(
    share: RankShare, members: np.ndarray, chunks: Sequence[TrajectoryBuffers], packing: Packing
) -> MicroBatch:
    # Descending lengths: attention then takes sequences of one length from the row as they lie.
    members = members[np.argsort(-share.total_tokens[members], kind="stable")]
    sequences = [_sequence(chunks[share.chunk_ids[i]], share, int(i)) for i in members]
    row = _row(sequences, packing)
    tokens, predictors, owners = _part_of_row(row, packing.context)
    mine = slice(None) if packing.context.size == 1 else owners == packing.context.rank
    responses = row.responses[mine]

    def to_device(values: np.ndarray) -> torch.Tensor:
        return upload(torch.from_numpy(values), packing.device)

    return MicroBatch(
        samples=tuple(int(sample) for sample in share.samples[members]),
        lengths=tuple(len(sequence.tokens) for sequence in sequences),
        trained_counts=_counts(responses, len(members)),
        whole_counts=_counts(row.responses, len(members)),
        owners=to_device(owners),
        tokens=to_device(tokens),
        sequences=pack_sequences(row.lengths, packing.device, context_parallel=packing.context.size > 1),
        predictors=to_device(predictors),
        targets=to_device(row.targets[mine]),
        advantages=to_device(share.advantages[members][responses].astype(np.float32)),
        loss_weights=to_device(share.loss_weights[members][responses].astype(np.float32)),
        logp_rollout=to_device(row.logp_rollout[mine]),
        staleness=to_device(row.staleness[mine]),
        temperatures=_shortest(row.temperatures[mine], to_device),
    )


def _shortest(temperatures: np.ndarray, to_device: Callable[[np.ndarray], torch.Tensor]) -> torch.Tensor | float | None:
    """As MicroBatch.temperatures. Shapes: float32 [N]."""
    if np.isnan(temperatures).all():
        return None
    first = temperatures[:1]
    return float(first[0]) if (temperatures == first).all() else to_device(temperatures)


def _part_of_row(row: _Row, part: ContextPart) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A rank's tokens, its predictors' positions among them, and the rank of every trained token of the whole row."""
    if part.size == 1:
        return row.tokens, row.predictors, np.zeros(len(row.predictors), np.int64)
    lengths = torch.tensor(row.lengths)
    cells = part.row_indices(lengths).numpy()
    place = np.full(len(row.tokens), -1)
    place[cells] = np.arange(len(cells))
    owners = part.owners(lengths).numpy()[row.predictors]
    return row.tokens[cells], place[row.predictors[owners == part.rank]], owners


def _counts(responses: np.ndarray, num_responses: int) -> tuple[int, ...]:
    return tuple(np.bincount(responses, minlength=num_responses).tolist())


@dataclass(frozen=True)
class _Row:
    """A packed row of all context-parallel ranks.

    Shapes: tokens int64 [T]; every other tensor [M], its trained tokens: responses int64, ordinals of their responses.
    """

    lengths: list[int]
    tokens: np.ndarray
    responses: np.ndarray
    predictors: np.ndarray
    targets: np.ndarray
    logp_rollout: np.ndarray
    staleness: np.ndarray
    temperatures: np.ndarray


def _row(sequences: list[_Sequence], packing: Packing) -> _Row:
    part = packing.context
    lengths = [-(-len(sequence.tokens) // part.multiple) * part.multiple for sequence in sequences]
    starts = np.cumsum([0, *lengths])
    row_multiple = math.lcm(part.multiple, part.size * packing.row_multiple)
    padding = -int(starts[-1]) % row_multiple or (0 if lengths else row_multiple)
    if padding:
        lengths.append(padding)
    tokens = np.zeros(sum(lengths), np.int64)
    for sequence, first in zip(sequences, starts, strict=False):
        tokens[first : first + len(sequence.tokens)] = sequence.tokens
    return _Row(
        lengths=lengths,
        tokens=tokens,
        responses=np.repeat(np.arange(len(sequences)), [len(sequence.targets) for sequence in sequences]),
        predictors=_join([s.predictors + first for s, first in zip(sequences, starts, strict=False)], np.int64),
        targets=_join([sequence.targets for sequence in sequences], np.int64),
        logp_rollout=_join([sequence.logp_rollout for sequence in sequences], np.float32),
        staleness=_join([sequence.staleness for sequence in sequences], np.float32),
        temperatures=_join([sequence.temperatures for sequence in sequences], np.float32),
    )


@dataclass(frozen=True)
class _Sequence:
    """Shapes: tokens [S], up to the last predictor; predictors int64 [n], ascending; targets, logp_rollout, staleness,
    temperatures [n]."""

    tokens: np.ndarray
    predictors: np.ndarray
    targets: np.ndarray
    logp_rollout: np.ndarray
    staleness: np.ndarray
    temperatures: np.ndarray


def computed_tokens(buffers: TrajectoryBuffers, row: int) -> int:
    """How many tokens of a trajectory are computed: up to its last predictor, one where nothing is trained."""
    response = slice(int(buffers.response_offsets[row]), int(buffers.response_offsets[row + 1]))
    trained = np.flatnonzero(buffers.trained[response])
    return int(buffers.prompt_tokens[row]) + int(trained[-1]) if len(trained) else 1


def _sequence(buffers: TrajectoryBuffers, share: RankShare, index: int) -> _Sequence:
    row, sample = int(share.rows[index]), int(share.samples[index])
    prompt = int(buffers.prompt_tokens[row])
    if prompt < 1:
        raise DataError(f"sample {sample} has an empty prompt: nothing predicts its first token")
    tokens = buffers.tokens[buffers.token_offsets[row] : buffers.token_offsets[row + 1]]
    response = slice(int(buffers.response_offsets[row]), int(buffers.response_offsets[row + 1]))
    trained = np.flatnonzero(buffers.trained[response])
    predictors = prompt - 1 + trained
    versions = buffers.versions[response][trained]
    newest = int(versions.max(initial=0))
    if newest > share.version:
        raise McoreRLError(f"sample {sample} has tokens of version {newest}, and its batch is of {share.version}")
    return _Sequence(
        tokens[: computed_tokens(buffers, row)],
        predictors,
        tokens[predictors + 1],
        buffers.logp_rollout[response][trained],
        share.version + 1 - versions,
        _sampled_at(buffers, response, trained),
    )


def _sampled_at(buffers: TrajectoryBuffers, response: slice, trained: np.ndarray) -> np.ndarray:
    """Temperatures of the trained tokens of a response, float32 [n]; NaN where they were not recorded."""
    if buffers.temperatures is None:
        return np.full(len(trained), np.nan, np.float32)
    if not buffers.temperatures.ndim:
        return np.full(len(trained), buffers.temperatures)
    return buffers.temperatures[response][trained]


def _join(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([*parts, np.empty(0, dtype)]).astype(dtype, copy=False)
