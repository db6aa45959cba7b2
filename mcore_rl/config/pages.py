"""Pages of the documentation by key, for errors."""

from __future__ import annotations

import re

from mcore_rl.config.reading.unknown_keys import known_keys

_KEYS = {
    "algorithms": "algorithm",
    "async": """checkpoint.drain rollout.max_staleness rollout.max_staleness_hard rollout.partial_tokens
        rollout.replay_schedule rollout.swap""",
    "configuration": "actor critic reference reward_model trainer",
    "conversion": "model.check_logits rollout.max_logp_gap",
    "data": "data rollout.max_prompt_tokens",
    "diagnostics": "cluster.collective_timeout_seconds cluster.start_timeout_seconds observe.profile",
    "distillation": "teacher",
    "engines": "actor.moe.router_replay rollout",
    "episodes": """rollout.environment rollout.episode rollout.episode_kwargs rollout.failed_reward rollout.history
        rollout.long_history rollout.max_concurrent_episodes rollout.max_episode_seconds rollout.max_turn_tokens
        rollout.max_turns""",
    "families": "actor.mtp_loss_coefficient model",
    "hosts": "cluster rollout.nodes weights",
    "lora": "actor.lora reference.hf_path reference.refresh_every_steps trainer.export_adapter",
    "low-precision": "actor.fp8 actor.quantization_aware rollout.quantization rollout.quantization_group",
    "plan": """actor.num_ranks actor.offload actor.optimizer.cpu_offload actor.parallel cluster.gpu_memory_gib
        cluster.host_memory_gib plan rollout.gpu_memory_fraction rollout.num_engines""",
    "preference": "preference trainer.objective",
    "report": "observe",
    "rewards": "judge reward reward_model.weight",
    "run-directory": "checkpoint run",
    "sandbox": "sandbox",
    "security": "cluster.isolation judge.api_key_variable",
    "slurm": "slurm",
    "sync": "weights.delta",
    "tools": """rollout.max_tool_calls_per_turn rollout.max_tool_seconds rollout.tool_answer_characters
        rollout.tool_answer_images rollout.tool_answer_keep rollout.tool_parser rollout.tool_processes rollout.tools""",
    "trackers": """observe.project observe.prometheus_host observe.prometheus_port observe.run_name
        observe.table_responses observe.trackers observe.trackers_offline""",
}
"""Page in docs/ -> keys and sections that it describes. A key belongs to its innermost section that is listed."""
PAGES = {name: f"docs/{page}.md" for page, names in _KEYS.items() for name in names.split()}
_KEY = re.compile(r"(?<![\w./-])[a-z_]+(?:\.[a-z_0-9]+)+")
"""Text that may be a key. Names of files have the same form, so only keys of the schema count."""
_PAGE = re.compile(r"(?<![\w/])docs/[\w-]+\.md\b")


def page_of(key: str) -> str:
    """Return the page about a key, such as `docs/data.md`. Raises: KeyError if the top section is unknown."""
    while key not in PAGES and "." in key:
        key = key.rpartition(".")[0]
    return PAGES[key]


def with_page(message: str) -> str:
    """Append the page about the first key that a message names, unless it names no key or already has a page.

    A message of one line stays one line.
    """
    if _PAGE.search(message):
        return message
    # Commands that fail without a configuration have not built the schema yet.
    known = set(known_keys()) if (named := _KEY.findall(message)) else set()
    key = next((name for name in named if name in known), None)
    if key is None:
        return message
    separator = "\n" if "\n" in message else " "
    return f"{message}{separator}(see {page_of(key)})"
