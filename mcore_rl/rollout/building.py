"""Builds a rollout worker, and a judge, as the configuration names them."""

from __future__ import annotations

from collections.abc import Mapping

from mcore_rl.config.judge import as_policy, named_as_judge, template_text
from mcore_rl.config.schema import Config
from mcore_rl.data.tokenizer import eos_token_ids, load_tokenizer
from mcore_rl.data.transcripts import PromptSource
from mcore_rl.ports import Rewarder, WeightReceiver
from mcore_rl.rollout.judge import Judge
from mcore_rl.rollout.judge_prompts import JudgePrompts
from mcore_rl.rollout.judge_scores import score_reader
from mcore_rl.rollout.judge_worker import JudgeWorker
from mcore_rl.rollout.vllm import VllmEngine
from mcore_rl.rollout.worker import RolloutWorker
from mcore_rl.weights.buckets import BucketSpec


def build_worker(
    config: Config, name: str, rewarder: Rewarder, prompts: Mapping[str, PromptSource]
) -> tuple[RolloutWorker, WeightReceiver[BucketSpec]]:
    """An engine on model.hf_path with its graders, and what takes its weights: it has none before the first publish,
    which delivers every tensor. `name` is the process's, for messages."""
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.hf_path)
    engine = VllmEngine(
        config.model.hf_path,
        config.rollout,
        dtype=config.model.dtype,
        eos_token_ids=eos_token_ids(tokenizer, config.model.hf_path),
        seed=config.run.seed,
        name=name,
        timeout_seconds=config.cluster.collective_timeout_seconds,
        load_weights=False,
        capture_routing=config.actor.moe.router_replay == "engine",
    )
    return RolloutWorker(engine, rewarder, prompts, tokenizer), engine.receiver


def build_judge(config: Config, name: str, prompts: Mapping[str, PromptSource]) -> JudgeWorker:
    """An engine on judge.hf_path with its weights, which stay as they are. `name` as in build_worker."""
    view = as_policy(config)
    with named_as_judge():
        tokenizer = load_tokenizer(view.model.tokenizer_path or view.model.hf_path)
        engine = VllmEngine(
            view.model.hf_path,
            view.rollout,
            dtype=view.model.dtype,
            eos_token_ids=eos_token_ids(tokenizer, view.model.hf_path),
            seed=config.run.seed,
            name=name,
            timeout_seconds=config.cluster.collective_timeout_seconds,
        )
    questions = JudgePrompts(tokenizer, template_text(config.judge))
    judge = Judge(engine, questions, tokenizer, score_reader(config.judge), config.judge, seed=config.run.seed)
    return JudgeWorker(judge, prompts, load_tokenizer(config.model.tokenizer_path or config.model.hf_path))
