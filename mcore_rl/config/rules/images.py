"""Settings that sequences with images do not support."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.rules.models import uses_reward_model
from mcore_rl.config.rules.rollout import has_turns
from mcore_rl.config.sampling import NO_DRAFTS
from mcore_rl.config.schema import Config


@dataclass(frozen=True)
class WithoutImages:
    """Setting that does not support images: key and value, the reason (may be empty), and the remedy."""

    setting: str
    reason: str
    remedy: str


def setting_without_images(config: Config) -> WithoutImages | None:
    """Return the first setting that does not support images; None if all do."""
    rollout = config.rollout
    if rollout.draft != NO_DRAFTS:
        return WithoutImages(f"rollout.draft={rollout.draft}", "", "set it to none")
    if uses_reward_model(config.reward_model):
        return WithoutImages("reward_model.hf_path", "reward models read texts", "set it to null")
    again = "a conversation that is rendered again has no images"
    if has_turns(rollout) and rollout.long_history == "drop_turns":
        return WithoutImages("rollout.long_history=drop_turns", again, "set it to end")
    if has_turns(rollout) and rollout.history == "new_sequence":
        return WithoutImages("rollout.history=new_sequence", again, "set it to keep")
    return None
