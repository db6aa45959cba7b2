"""Rejection of keys that the schema does not have, with a suggestion: other trainers' names, and similar keys."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass

from mcore_rl.config.fields import field_types, leaves
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError

_NAMES = {
    # The model, its data, the run.
    "model.hf_path": "actor_rollout_ref.model.path hf_checkpoint model_name_or_path pretrain",
    "critic.hf_path": "critic.model.path",
    "reward_model.hf_path": "reward_model.model.path reward_pretrain",
    "data.train": "train_files prompt_data",
    "data.val": "val_files eval_prompt_data",
    "data.weights": "prompt_data_probs",
    "data.curriculum": "sampler.class_path",
    "data.workers": "filter_overlong_prompts_workers",
    "data.prompt_key": "input_key",
    "data.answer_key": "label_key",
    "data.long_prompts": "filter_overlong_prompts truncation",
    "data.template_kwargs": "apply_chat_template_kwargs chat_template_kwargs",
    "run.dir": "default_local_dir output_dir",
    # Batches and steps.
    "trainer.prompts_per_step": "train_batch_size rollout_batch_size",
    "trainer.prompts_per_update": "ppo_mini_batch_size global_batch_size num_steps_per_rollout",
    "critic.update_epochs": "critic.ppo_epochs",
    "trainer.update_epochs": "ppo_epochs num_iterations max_epochs",
    "trainer.steps": "total_training_steps total_epochs num_rollout max_steps",
    "trainer.validate_every_steps": "test_freq eval_steps eval_interval",
    "trainer.validate_before": "val_before_train",
    "trainer.critic_warmup_steps": "critic_warmup",
    "checkpoint.every_steps": "save_freq save_steps save_interval",
    "checkpoint.keep_last": "max_actor_ckpt_to_keep save_total_limit",
    # Generation.
    "rollout.samples_per_prompt": "rollout.n n_samples_per_prompt num_generations group_size",
    "rollout.max_turns": "multi_turn.max_assistant_turns",
    "rollout.tools": "multi_turn.tool_config_path multi_turn.function_tool_path",
    "rollout.max_tool_calls_per_turn": "multi_turn.max_parallel_calls",
    "rollout.tool_answer_characters": "multi_turn.max_tool_response_length",
    "rollout.tool_parser": "multi_turn.format",
    "rollout.episode": "agent.default_agent_loop",
    "rollout.validation_samples": "val_kwargs.n",
    "rollout.max_prompt_tokens": "max_prompt_length rollout_max_prompt_len prompt_max_len",
    "rollout.max_response_tokens": (
        "max_response_length rollout_max_response_len max_completion_length generate_max_len max_new_tokens"
    ),
    "rollout.temperature": "rollout_temperature",
    "rollout.stop": "rollout_stop",
    "rollout.validation_temperature": "val_kwargs.temperature",
    "rollout.validation_top_p": "val_kwargs.top_p",
    "rollout.validation_top_k": "val_kwargs.top_k",
    "rollout.engine": "rollout.name",
    "rollout.tp": "rollout.tensor_model_parallel_size rollout_num_gpus_per_engine vllm_tensor_parallel_size",
    "rollout.num_engines": "vllm_num_engines",
    "rollout.gpu_memory_fraction": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "rollout.max_concurrent_requests": "max_num_seqs",
    "rollout.max_batched_tokens": "max_num_batched_tokens",
    # The algorithm.
    "algorithm.advantage": "adv_estimator advantage_estimator",
    "algorithm.normalize_by_std": "norm_adv_by_std_in_grpo scale_rewards",
    "algorithm.lam": "lambd",
    "algorithm.policy_loss.name": "loss_mode",
    "algorithm.loss_aggregation": "loss_agg_mode loss_type",
    "algorithm.policy_loss.clip_low": "clip_ratio clip_ratio_low eps_clip epsilon",
    "algorithm.policy_loss.clip_high": "clip_ratio_high eps_clip_high epsilon_high",
    "algorithm.policy_loss.dual_clip": "clip_ratio_c eps_clip_c",
    "algorithm.entropy_coefficient": "entropy_coeff entropy_coef",
    "algorithm.kl.in_loss": "use_kl_loss kl_loss_coef beta",
    "algorithm.kl.loss_kind": "kl_loss_type",
    "algorithm.kl.in_reward": "use_kl_in_reward kl_ctrl.kl_coef init_kl_coef",
    "algorithm.dynamic_sampling.enable": "filter_groups.enable",
    "algorithm.dynamic_sampling.metric": "filter_groups.metric",
    "algorithm.dynamic_sampling.max_batches": "filter_groups.max_num_gen_batches",
    # Rewards.
    "reward.function": "custom_reward_function.path custom_rm_path remote_rm_url reward_funcs",
    "reward.manager": "reward_manager reward_manager.name",
    "reward.weighted": "reward_weights",
    "reward.overlong.enable": "overlong_buffer.enable",
    "reward.overlong.buffer_tokens": "overlong_buffer.len",
    "reward.overlong.penalty": "overlong_buffer.penalty_factor",
    # Trainer ranks.
    "critic.optimizer.lr": "critic.optim.lr critic_learning_rate",
    "actor.optimizer.lr": "learning_rate actor_learning_rate",
    "actor.optimizer.warmup_steps": "lr_warmup_steps",
    "actor.optimizer.schedule": "lr_scheduler_type lr_decay_style",
    "actor.optimizer.clip_grad": "grad_clip max_grad_norm",
    "critic.clip_range": "cliprange_value value_clip",
    "actor.tokens_per_microbatch": (
        "ppo_max_token_len_per_gpu max_tokens_per_gpu ppo_micro_batch_size_per_gpu micro_batch_size "
        "micro_train_batch_size per_device_train_batch_size"
    ),
    "actor.parallel.tp": "tensor_model_parallel_size",
    "actor.parallel.pp": "pipeline_model_parallel_size",
    "actor.parallel.vpp": "virtual_pipeline_model_parallel_size",
    "actor.parallel.cp": "context_parallel_size",
    "actor.parallel.ep": "expert_model_parallel_size",
    "actor.parallel.etp": "expert_tensor_parallel_size",
    "actor.offload.params": "param_offload",
    "actor.offload.grads": "grad_offload",
    "actor.offload.optimizer": "optimizer_offload",
    "cluster.nodes": "nnodes actor_num_nodes",
    "cluster.gpus_per_node": "n_gpus_per_node actor_num_gpus_per_node",
}
"""Our key -> keys of verl, slime, TRL and OpenRLHF with the same meaning, each given by its last components."""
ALIASES = {alias: key for key, names in _NAMES.items() for alias in names.split()}
_SIMILAR = 0.8
"""Minimum difflib ratio of similarly spelled keys."""
_SIMILAR_WORDS = 0.6
"""Minimum difflib ratio of two keys without their shared leading sections."""
_GENERIC = ("dir", "enable", "hf_path", "kwargs", "name", "path", "weight")
"""Last components that are too generic to match without a section in common."""


def known_keys() -> list[str]:
    """Return all leaf keys of the schema, dotted and sorted."""
    return sorted(leaf.key for leaf in leaves(Config()))


def reject_unknown(tree: Mapping[str, object], place: Callable[[str], str]) -> None:
    """Raise ConfigError for the first key of the tree that does not exist, or for a value in place of a section.
    place: returns the source of a key, with which the message begins."""
    for key in _unknown(tree, Config, "", place):
        if key in tree and key in known_keys():
            *around, name = key.split(".")
            nested = f"{{{name}: ...}}"
            for section in reversed(around[1:]):
                nested = f"{{{section}: {nested}}}"
            raise ConfigError(f"{place(key)}: files have sections instead of points; write {around[0]}: {nested}")
        sections = dict(_sections(Config, ""))
        around = [section for section in sections if key.startswith(f"{section}.")]
        # A section is a useful suggestion only if the key is not already in it.
        near = nearest(key, [*known_keys(), *(section for section in sections if section not in around)])
        # The deepest section is the last one.
        where = f"{around[-1]} has the keys" if around else "the sections are"
        names = ", ".join(field_types(sections[around[-1]] if around else Config))
        hint = (
            f"did you mean {near}?"
            if near is not None
            else (f"no key has this name or a similar one ({where} {names}; `mcore-rl keys WORD` searches all keys)")
        )
        raise ConfigError(f"{place(key)}: unknown key {key}; {hint}")


def _unknown(tree: Mapping[str, object], node: object, prefix: str, place: Callable[[str], str]) -> Iterator[str]:
    """Yield the keys of a tree that `node`, a dataclass or None, does not have."""
    hints = {} if node is None else field_types(node)
    for name, value in tree.items():
        hint = hints.get(name)
        key, section = f"{prefix}{name}", hint if isinstance(hint, type) and is_dataclass(hint) else None
        if section is not None and not isinstance(value, dict):
            example = f"{key}.{fields(section)[0].name}"
            raise ConfigError(f"{place(key)}: {key} is a section; set the keys in it, such as {example}")
        if isinstance(value, dict) and value and (section is not None or name not in hints):
            yield from _unknown(value, section, f"{key}.", place)
        elif name not in hints:
            yield key


def _sections(node: object, prefix: str) -> Iterator[tuple[str, object]]:
    """Yield name and dataclass of each section; subsections follow their section."""
    for name, hint in field_types(node).items():
        if isinstance(hint, type) and is_dataclass(hint):
            yield f"{prefix}{name}", hint
            yield from _sections(hint, f"{prefix}{name}.")


def nearest(key: str, known: Sequence[str]) -> str | None:
    """Return the key or section in `known` that `key` probably means, or None.

    Tried in this order: an alias, a similarly spelled key of the same section, a key with the same last component in a
    similar section, a similarly spelled key.
    """
    words = key.replace("-", "_").lower().split(".")
    endings = [".".join(words[start:]) for start in range(len(words))]
    if alias := next((ALIASES[ending] for ending in endings if ending in ALIASES), None):
        return alias
    section = ".".join(words[:-1])
    siblings = {each.rpartition(".")[2]: each for each in known if section and each.rpartition(".")[0] == section}
    if similar := difflib.get_close_matches(words[-1], siblings, n=1, cutoff=_SIMILAR):
        return siblings[similar[0]]
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
    """Return whether keys are similar apart from shared leading sections, which alone would make long keys similar."""
    shared = next((i for i, (a, b) in enumerate(zip(words, others, strict=False)) if a != b), 0)
    return difflib.SequenceMatcher(None, ".".join(words[shared:]), ".".join(others[shared:])).ratio() >= _SIMILAR_WORDS
