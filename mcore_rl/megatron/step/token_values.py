"""Log-probabilities of engine and policy, token by token, of a few responses per step, in a file of the run directory.

Lines are JSON objects: `digest` (token_digest of prompt and response), `token_ids` of the response, and `logp_rollout`
and `logp_policy` (nats) of its trained tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mcore_rl.config.observe import TOKEN_VALUES
from mcore_rl.config.schema import Config
from mcore_rl.data.checksum import token_digest
from mcore_rl.megatron.model.attention.context import ContextPart
from mcore_rl.megatron.step.loss.trained_tokens import whole_by_sample
from mcore_rl.megatron.step.microbatches import MicroBatch
from mcore_rl.types import RankShare, TrajectoryBuffers

logger = logging.getLogger(__name__)

MAX_TOKENS = 2048
"""Tokens of a response that are recorded, from its beginning. 8 responses then take about 30 ms and 300 kB."""
DIGITS = 5
"""Decimal places of log-probabilities; float32 has 6 or 7 digits."""


@dataclass(frozen=True)
class TokenValueWriter:
    """Writer of run.dir/tokens/step_<n>.jsonl with the first `num_responses` responses of one data-parallel rank's
    micro-batches.

    A file that cannot be written is only logged: it does not concern the training.
    """

    directory: Path
    num_responses: int
    context: ContextPart

    @classmethod
    def from_config(cls, config: Config, context: ContextPart) -> TokenValueWriter | None:
        """Return the writer; None if observe.token_responses is 0."""
        number = config.observe.token_responses
        return cls(Path(config.run.dir) / TOKEN_VALUES, number, context) if number else None

    def write(
        self,
        share: RankShare,
        chunks: Sequence[TrajectoryBuffers],
        microbatches: Sequence[MicroBatch],
        logp: Mapping[int, torch.Tensor],
    ) -> None:
        """Write the values of the first update's share. `logp`: RankBatch.old_logp.

        Collective: the context-parallel group; its first rank writes.
        """
        values = self._whole(microbatches, logp)
        if self.context.rank:
            return
        # The weight version at the start of step n is n - 1.
        path = self.directory / f"step_{share.version + 1}.jsonl"
        places = {sample: place for place, sample in enumerate(share.samples.tolist())}
        lines = [json.dumps(_record(share, chunks, places[sample], found)) for sample, found in values.items()]
        try:
            self.directory.mkdir(exist_ok=True)
            path.write_text("".join(f"{line}\n" for line in lines))
        except OSError as error:
            logger.warning("%s cannot be written: %s", path, error)

    def _whole(self, microbatches: Sequence[MicroBatch], logp: Mapping[int, torch.Tensor]) -> dict[int, np.ndarray]:
        """Return the log-probabilities of the first samples, float32 [n] each."""
        values: dict[int, np.ndarray] = {}
        for microbatch in microbatches:
            missing = self.num_responses - len(values)
            if missing <= 0:
                break
            if microbatch.samples:
                row = torch.cat([logp[sample] for sample in microbatch.samples])
                whole = whole_by_sample(microbatch, row, self.context)
                values |= {sample: whole[sample] for sample in microbatch.samples[:missing]}
        return values


def _record(share: RankShare, chunks: Sequence[TrajectoryBuffers], place: int, logp: np.ndarray) -> dict[str, object]:
    buffers, row = chunks[share.chunk_ids[place]], int(share.rows[place])
    tokens = buffers.tokens[buffers.token_offsets[row] : buffers.token_offsets[row + 1]]
    response = slice(int(buffers.response_offsets[row]), int(buffers.response_offsets[row + 1]))
    trained = np.flatnonzero(buffers.trained[response])
    shown = trained[trained < MAX_TOKENS]
    return {
        "digest": token_digest(tokens),
        "token_ids": tokens[buffers.prompt_tokens[row] :][:MAX_TOKENS].tolist(),
        "logp_rollout": list(_rounded(buffers.logp_rollout[response][shown])),
        "logp_policy": list(_rounded(logp[: len(shown)])),
    }


def _rounded(values: np.ndarray) -> Iterator[float]:
    return (round(value, DIGITS) for value in values.tolist())
