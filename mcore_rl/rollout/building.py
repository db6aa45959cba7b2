"""Builds a rollout worker, and a judge, as the configuration names them."""

from __future__ import annotations

from collections.abc import Mapping

from mcore_rl.config.judge import as_policy, named_as_judge, template_text
from mcore_rl.config.schema import Config
from mcore_rl.data.tokenizer import eos_token_ids, load_tokenizer
from mcore_rl.data.transcripts import PromptSource
from mcore_rl.ports import Rewarder
from mcore_rl.rollout.judge import Judge
from mcore_rl.rollout.judge_prompts import JudgePrompts
from mcore_rl.rollout.judge_scores import score_reader
from mcore_rl.rollout.judge_worker import JudgeWorker
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


def build_judge(config: Config, prompts: Mapping[str, PromptSource]) -> JudgeWorker:
    """An engine on judge.hf_path with its weights, which stay as they are."""
    view = as_policy(config)
    with named_as_judge():
        tokenizer = load_tokenizer(view.model.tokenizer_path or view.model.hf_path)
        engine = VllmEngine(
            view.model.hf_path,
            view.rollout,
            dtype=view.model.dtype,
            eos_token_ids=eos_token_ids(tokenizer, view.model.hf_path),
            seed=config.run.seed,
        )
    questions = JudgePrompts(tokenizer, template_text(config.judge))
    judge = Judge(engine, questions, tokenizer, score_reader(config.judge), config.judge, seed=config.run.seed)
    return JudgeWorker(judge, prompts, load_tokenizer(config.model.tokenizer_path or config.model.hf_path))
