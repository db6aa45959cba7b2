"""Builds a rollout worker as the configuration names it."""

from __future__ import annotations

from collections.abc import Mapping

from mcore_rl.config.schema import Config
from mcore_rl.data.tokenizer import eos_token_ids, load_tokenizer
from mcore_rl.data.transcripts import PromptSource
from mcore_rl.ports import Rewarder
from mcore_rl.rollout.vllm import VllmEngine
from mcore_rl.rollout.worker import RolloutWorker


def build_worker(config: Config, rewarder: Rewarder, prompts: Mapping[str, PromptSource]) -> RolloutWorker:
    """An engine on model.hf_path without its weights (the first publish delivers every tensor), with its graders."""
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.hf_path)
    engine = VllmEngine(
        config.model.hf_path,
        config.rollout,
        dtype=config.model.dtype,
        eos_token_ids=eos_token_ids(tokenizer, config.model.hf_path),
        seed=config.run.seed,
        load_weights=False,
        capture_routing=config.actor.moe.router_replay == "engine",
    )
    return RolloutWorker(engine, rewarder, prompts, tokenizer)
