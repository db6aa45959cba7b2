"""Comparison of the trainer's log-probabilities with transformers on a few random sequences, before training starts.

It detects fields of config.json that the trainer and transformers interpret differently. The transformers model runs
on the driver's CPU while the processes of the run start.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from mcore_rl.config.models import ActorConfig, ModelConfig
from mcore_rl.config.rules.models import uses_lora
from mcore_rl.data.batching import UpdateSchedule, build_batch, gather
from mcore_rl.data.packing import SequenceCost
from mcore_rl.data.prompts import trained_chunk
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.megatron.hf_logits import transformers_logits
from mcore_rl.runtime.roles.trainer import TrainerGroup
from mcore_rl.types import Metric, RolloutScalars, TrajectoryBuffers
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.size import reason_not_to_compare

KEY = "model.check_logits"
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.03}
"""Limit of the mean absolute difference of log-probabilities in nats, by model.dtype; transformers computes in float32.
A wrong rotary embedding, norm or router causes a far larger difference. A slightly wrong constant is hidden by the
rounding of bfloat16, but not of float32."""
_NUM_SEQUENCES, _MAX_TOKENS = 2, 48

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def model_check(
    model: ModelConfig, actor: ActorConfig, num_dp_ranks: int, cost: SequenceCost, *, predicts_tokens: bool = True
) -> Iterator[Callable[[TrainerGroup], None]]:
    """Run the transformers model in a thread during the block. The yielded function waits for it and compares.

    predicts_tokens: False for a reward model, which has no log-probabilities to compare.

    Raises: ConfigError (from the function) naming the directory and the difference.
    """
    reason = _skip_reason(model, actor) if predicts_tokens else "the actor is a reward model"
    if reason is not None:
        logger.info("log-probabilities are not compared with transformers (%s): %s", KEY, reason)
        yield lambda ranks: None
        return
    # transformers needs a few seconds on the CPU; the processes of the run start during this time.
    with ThreadPoolExecutor(1) as pool:
        expected = pool.submit(_expected, model.hf_path, actor.tokens_per_microbatch, num_dp_ranks)
        schedule = UpdateSchedule(_NUM_SEQUENCES * num_dp_ranks, num_dp_ranks=num_dp_ranks, cost=cost)

        def check(ranks: TrainerGroup) -> None:
            buffers, scalars = expected.result()
            batch = build_batch([ranks.store(buffers)], gather([scalars]), schedule=schedule)
            _require_equal(model, ranks.compare(batch))

        yield check


def _skip_reason(model: ModelConfig, actor: ActorConfig) -> str | None:
    """Return why the comparison is skipped, or None.

    Raises: ConfigError if the comparison is required but impossible.
    """
    mode, reason = model.check_logits, None
    if mode == "never":
        return "set to never"
    if model.random_init:
        reason = "model.random_init=true has no weights to compare"
    elif uses_lora(actor) and actor.lora.path is not None:
        reason = "the adapters of actor.lora.path are not in model.hf_path"
    elif actor.fp8 != "none":
        reason = f"actor.fp8={actor.fp8} rounds too much"
    else:
        with HFCheckpoint(model.hf_path) as source:
            if source.quantisation:
                reason = f"transformers computes in {source.quantisation}, the trainer with dequantised weights"
            elif mode == "auto":
                return reason_not_to_compare(source)
    if mode == "always" and reason is not None:
        raise ConfigError(f"{KEY}=always, but {reason}; set it to auto")
    return reason


def _expected(directory: str, max_tokens: int, copies: int) -> tuple[TrajectoryBuffers, RolloutScalars]:
    """Return random sequences with transformers' log-probabilities in place of an engine's, one copy per data-parallel
    rank."""
    sequences = _sequences(directory, max_tokens)
    try:
        logits = transformers_logits(directory, sequences)
    except CheckpointError as error:
        raise ConfigError(f"model.hf_path: {error}; {KEY}=never skips this comparison") from error
    # The logits at a position predict the next token.
    logp = [
        part[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()
        for part, tokens in zip(logits, sequences, strict=True)
    ]
    tokens, rows = [each.numpy() for each in sequences] * copies, np.arange(len(sequences) * copies)
    prompts, responses = [each[:1] for each in tokens], [each[1:] for each in tokens]
    return trained_chunk(prompts, responses, rows, np.concatenate(logp * copies, dtype=np.float32))


def _sequences(directory: str, max_tokens: int) -> list[torch.Tensor]:
    with HFCheckpoint(directory) as source:
        arguments = source.family.model_arguments(source.config)
    exact = arguments.rotary.max_tokens or _MAX_TOKENS
    length = min(_MAX_TOKENS, max_tokens, arguments.max_position_embeddings, exact)
    # The same tokens at every start, so that the result of a check can be reproduced.
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, arguments.vocab_size, (length,), generator=generator) for _ in range(_NUM_SEQUENCES)]


def _require_equal(model: ModelConfig, metrics: Mapping[str, Metric]) -> None:
    mean, largest = (metrics[f"rollout/logp_diff_{kind}"].value for kind in ("mean", "max"))
    if not mean <= TOLERANCE[model.dtype]:  # also true for NaN
        raise ConfigError(
            f"model.hf_path={model.hf_path}: log-probabilities of random tokens differ from transformers by "
            f"{mean:.3g} nats on average, {largest:.3g} at most. The trainer interprets a field of its config.json "
            f"differently; {KEY}=never skips this comparison"
        )
