"""Suggestions for unknown keys: key names of other trainers, and similar keys."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

ALIASES = {
    # The model, its data, the run.
    "actor_rollout_ref.model.path": "model.hf_path",
    "hf_checkpoint": "model.hf_path",
    "model_name_or_path": "model.hf_path",
    "pretrain": "model.hf_path",
    "critic.model.path": "critic.hf_path",
    "reward_model.model.path": "reward_model.hf_path",
    "reward_pretrain": "reward_model.hf_path",
    "train_files": "data.train",
    "prompt_data": "data.train",
    "val_files": "data.val",
    "eval_prompt_data": "data.val",
    "prompt_data_probs": "data.weights",
    "sampler.class_path": "data.curriculum",
    "filter_overlong_prompts_workers": "data.workers",
    "input_key": "data.prompt_key",
    "label_key": "data.answer_key",
    "filter_overlong_prompts": "data.long_prompts",
    "apply_chat_template_kwargs": "data.template_kwargs",
    "chat_template_kwargs": "data.template_kwargs",
    "truncation": "data.long_prompts",
    "default_local_dir": "run.dir",
    "output_dir": "run.dir",
    # Batches and steps.
    "train_batch_size": "trainer.prompts_per_step",
    "rollout_batch_size": "trainer.prompts_per_step",
    "ppo_mini_batch_size": "trainer.prompts_per_update",
    "global_batch_size": "trainer.prompts_per_update",
    "num_steps_per_rollout": "trainer.prompts_per_update",
    "critic.ppo_epochs": "critic.update_epochs",
    "ppo_epochs": "trainer.update_epochs",
    "num_iterations": "trainer.update_epochs",
    "max_epochs": "trainer.update_epochs",
    "total_training_steps": "trainer.steps",
    "total_epochs": "trainer.steps",
    "num_rollout": "trainer.steps",
    "max_steps": "trainer.steps",
    "test_freq": "trainer.validate_every_steps",
    "eval_steps": "trainer.validate_every_steps",
    "eval_interval": "trainer.validate_every_steps",
    "val_before_train": "trainer.validate_before",
    "critic_warmup": "trainer.critic_warmup_steps",
    "save_freq": "checkpoint.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_interval": "checkpoint.every_steps",
    "max_actor_ckpt_to_keep": "checkpoint.keep_last",
    "save_total_limit": "checkpoint.keep_last",
    # Generation.
    "rollout.n": "rollout.samples_per_prompt",
    "multi_turn.max_assistant_turns": "rollout.max_turns",
    "multi_turn.tool_config_path": "rollout.tools",
    "multi_turn.function_tool_path": "rollout.tools",
    "multi_turn.max_parallel_calls": "rollout.max_tool_calls_per_turn",
    "multi_turn.max_tool_response_length": "rollout.tool_answer_characters",
    "multi_turn.format": "rollout.tool_parser",
    "agent.default_agent_loop": "rollout.episode",
    "val_kwargs.n": "rollout.validation_samples",
    "n_samples_per_prompt": "rollout.samples_per_prompt",
    "num_generations": "rollout.samples_per_prompt",
    "group_size": "rollout.samples_per_prompt",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "rollout_max_prompt_len": "rollout.max_prompt_tokens",
    "prompt_max_len": "rollout.max_prompt_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "rollout_max_response_len": "rollout.max_response_tokens",
    "max_completion_length": "rollout.max_response_tokens",
    "generate_max_len": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "rollout_temperature": "rollout.temperature",
    "rollout_stop": "rollout.stop",
    "val_kwargs.temperature": "rollout.validation_temperature",
    "val_kwargs.top_p": "rollout.validation_top_p",
    "val_kwargs.top_k": "rollout.validation_top_k",
    "rollout.name": "rollout.engine",
    "rollout.tensor_model_parallel_size": "rollout.tp",
    "rollout_num_gpus_per_engine": "rollout.tp",
    "vllm_tensor_parallel_size": "rollout.tp",
    "vllm_num_engines": "rollout.num_engines",
    "gpu_memory_utilization": "rollout.gpu_memory_fraction",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_fraction",
    "max_num_seqs": "rollout.max_concurrent_requests",
    "max_num_batched_tokens": "rollout.max_batched_tokens",
    # The algorithm.
    "adv_estimator": "algorithm.advantage",
    "advantage_estimator": "algorithm.advantage",
    "norm_adv_by_std_in_grpo": "algorithm.normalize_by_std",
    "scale_rewards": "algorithm.normalize_by_std",
    "lambd": "algorithm.lam",
    "loss_mode": "algorithm.policy_loss.name",
    "loss_agg_mode": "algorithm.loss_aggregation",
    "loss_type": "algorithm.loss_aggregation",
    "clip_ratio": "algorithm.policy_loss.clip_low",
    "clip_ratio_low": "algorithm.policy_loss.clip_low",
    "eps_clip": "algorithm.policy_loss.clip_low",
    "epsilon": "algorithm.policy_loss.clip_low",
    "clip_ratio_high": "algorithm.policy_loss.clip_high",
    "eps_clip_high": "algorithm.policy_loss.clip_high",
    "epsilon_high": "algorithm.policy_loss.clip_high",
    "clip_ratio_c": "algorithm.policy_loss.dual_clip",
    "eps_clip_c": "algorithm.policy_loss.dual_clip",
    "entropy_coeff": "algorithm.entropy_coefficient",
    "entropy_coef": "algorithm.entropy_coefficient",
    "use_kl_loss": "algorithm.kl.in_loss",
    "kl_loss_coef": "algorithm.kl.in_loss",
    "beta": "algorithm.kl.in_loss",
    "kl_loss_type": "algorithm.kl.loss_kind",
    "use_kl_in_reward": "algorithm.kl.in_reward",
    "kl_ctrl.kl_coef": "algorithm.kl.in_reward",
    "init_kl_coef": "algorithm.kl.in_reward",
    "filter_groups.enable": "algorithm.dynamic_sampling.enable",
    "filter_groups.metric": "algorithm.dynamic_sampling.metric",
    "filter_groups.max_num_gen_batches": "algorithm.dynamic_sampling.max_batches",
    # Rewards.
    "custom_reward_function.path": "reward.function",
    "custom_rm_path": "reward.function",
    "remote_rm_url": "reward.function",
    "reward_funcs": "reward.function",
    "reward_manager": "reward.manager",
    "reward_manager.name": "reward.manager",
    "reward_weights": "reward.weighted",
    "overlong_buffer.enable": "reward.overlong.enable",
    "overlong_buffer.len": "reward.overlong.buffer_tokens",
    "overlong_buffer.penalty_factor": "reward.overlong.penalty",
    # Trainer ranks.
    "critic.optim.lr": "critic.optimizer.lr",
    "critic_learning_rate": "critic.optimizer.lr",
    "learning_rate": "actor.optimizer.lr",
    "actor_learning_rate": "actor.optimizer.lr",
    "lr_warmup_steps": "actor.optimizer.warmup_steps",
    "lr_scheduler_type": "actor.optimizer.schedule",
    "lr_decay_style": "actor.optimizer.schedule",
    "grad_clip": "actor.optimizer.clip_grad",
    "max_grad_norm": "actor.optimizer.clip_grad",
    "cliprange_value": "critic.clip_range",
    "value_clip": "critic.clip_range",
    "ppo_max_token_len_per_gpu": "actor.tokens_per_microbatch",
    "max_tokens_per_gpu": "actor.tokens_per_microbatch",
    "ppo_micro_batch_size_per_gpu": "actor.tokens_per_microbatch",
    "micro_batch_size": "actor.tokens_per_microbatch",
    "micro_train_batch_size": "actor.tokens_per_microbatch",
    "per_device_train_batch_size": "actor.tokens_per_microbatch",
    "tensor_model_parallel_size": "actor.parallel.tp",
    "pipeline_model_parallel_size": "actor.parallel.pp",
    "virtual_pipeline_model_parallel_size": "actor.parallel.vpp",
    "context_parallel_size": "actor.parallel.cp",
    "expert_model_parallel_size": "actor.parallel.ep",
    "expert_tensor_parallel_size": "actor.parallel.etp",
    "param_offload": "actor.offload.params",
    "grad_offload": "actor.offload.grads",
    "optimizer_offload": "actor.offload.optimizer",
    "nnodes": "cluster.nodes",
    "actor_num_nodes": "cluster.nodes",
    "n_gpus_per_node": "cluster.gpus_per_node",
    "actor_num_gpus_per_node": "cluster.gpus_per_node",
}
"""Endings of keys of verl, slime, TRL and OpenRLHF, mapped to our key with the same meaning."""
_SIMILAR = 0.8
"""Minimum difflib ratio of similarly spelled keys."""
_SIMILAR_WORDS = 0.6
"""Minimum difflib ratio without shared leading sections."""
_GENERIC = ("dir", "enable", "hf_path", "kwargs", "name", "path", "weight")
"""Last components that are too generic to match without a similar section."""


def nearest(key: str, known: Sequence[str]) -> str | None:
    """Return the key or section in `known` that `key` probably means, or None: an alias, else a key with the same last
    component in a similar section, else a similarly spelled key."""
    words = key.replace("-", "_").lower().split(".")
    endings = [".".join(words[start:]) for start in range(len(words))]
    if alias := next((ALIASES[ending] for ending in endings if ending in ALIASES), None):
        return alias
    # The same last word in another section is a better suggestion than a similar spelling.
    same_word = [each for each in known if each.rpartition(".")[2] == words[-1]]
    if same_word:
        best = difflib.get_close_matches(key, same_word, n=1, cutoff=0.0)[0]
        shares_section = bool(set(words[:-1]) & set(best.split(".")[:-1]))
        if len(words) == 1 or shares_section or words[-1] not in _GENERIC:
            return best
    spelt_alike = difflib.get_close_matches(".".join(words), known, n=3, cutoff=_SIMILAR)
    return next((each for each in spelt_alike if _differ_little(words, each.split("."))), None)


def _differ_little(words: list[str], others: list[str]) -> bool:
    """Compare without shared leading sections, which alone make long keys similar."""
    shared = next((i for i, (a, b) in enumerate(zip(words, others, strict=False)) if a != b), 0)
    return difflib.SequenceMatcher(None, ".".join(words[shared:]), ".".join(others[shared:])).ratio() >= _SIMILAR_WORDS
