"""Model, configuration and random responses for benchmarks of an actor; nothing is generated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.sizes import size
from mcore_rl.config.schema import Config
from mcore_rl.types import RankShare, TrajectoryBuffers
from mcore_rl.types.json import JsonObject
from model_converters.families.parts.hf_config import integer

MODEL: JsonObject = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": size(8192, 512),
    "hidden_size": size(512, 128),
    "num_hidden_layers": size(6, 2),
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": size(1536, 128),
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
PROMPT = 32
LEARNING_RATE = 1e-5
CLIP = 0.2


def write_model(directory: Path, **changes: object) -> Path:
    """Write config.json with `changes` of MODEL, without weights: they are random."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(MODEL | changes), encoding="utf-8")
    return directory


def actor_config(model: Path, *, tokens_per_microbatch: int, **parallel: int) -> Config:
    """Return a configuration that trains `model` from random weights with PPO's clipped loss."""
    config = Config()
    config.model.hf_path = str(model)
    config.model.random_init = True
    config.observe.token_responses = 0  # there is no run directory
    config.actor.tokens_per_microbatch = tokens_per_microbatch
    config.actor.optimizer.lr = LEARNING_RATE
    for axis, ranks in parallel.items():
        setattr(config.actor.parallel, axis, ranks)
    return config


def trajectories(responses: np.ndarray) -> tuple[RankShare, TrajectoryBuffers]:
    """Return one data-parallel rank's share of an update, and its tokens.

    Shapes: responses integer [B], the tokens of each response.
    """
    generator = np.random.default_rng(0)
    count = len(responses)
    lengths = responses + PROMPT
    return (
        RankShare(
            samples=np.arange(count),
            chunk_ids=np.zeros(count, np.int32),
            rows=np.arange(count, dtype=np.int32),
            origins=np.zeros((count, 2), np.int32),
            total_tokens=lengths.astype(np.int32),
            rewards=np.zeros(count, np.float32),
            advantages=generator.choice([-1.0, 1.0], count).astype(np.float32),
            loss_weights=np.full(count, 1 / responses.sum(), np.float32),
        ),
        TrajectoryBuffers(
            tokens=generator.integers(0, integer(MODEL, "vocab_size"), lengths.sum()).astype(np.int32),
            token_offsets=np.cumsum([0, *lengths]).astype(np.int64),
            prompt_tokens=np.full(count, PROMPT, np.int32),
            response_offsets=np.cumsum([0, *responses]).astype(np.int64),
            # About log(1 / vocabulary), as a random model samples.
            logp_rollout=np.full(responses.sum(), -9.0, np.float32),
            versions=np.zeros(responses.sum(), np.int32),
            trained=np.ones(responses.sum(), np.uint8),
        ),
    )
