"""Keys of `rollout` that say what an episode is: what happens between a prompt and its reward."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.config.fields import setting

SINGLE_TURN, WITH_TOOLS, WITH_ENVIRONMENT = "single_turn", "tools", "environment"


@dataclass
class EpisodeConfig:
    """The part of RolloutConfig that is about episodes."""

    episode: str | None = setting(None, choices=(SINGLE_TURN, WITH_TOOLS, WITH_ENVIRONMENT), function=True)
    """What happens to a prompt: single_turn; tools (the model calls tools until a turn calls none); environment (a
    user's class answers every turn); or `module_or_file.py:name` of a class with `async def run(self, session, prompt)`
    or of an async function of the same arguments. null: tools with rollout.tools, environment with
    rollout.environment, else single_turn."""
    episode_kwargs: dict[str, str] = field(default_factory=dict)
    """Keyword arguments of a user's episode class, or of the environment's."""
    environment: str | None = setting(None, function=True)
    """`module_or_file.py:name` of a class, made for each episode with `prompt` and rollout.episode_kwargs:
    step(action) -> (observation, reward, done), perhaps reset() -> first observation or None, and close()."""
    max_turns: int = setting(8, minimum=1, unit="turns")
    """Turns of the model in an episode; the next one ends it."""
    max_turn_tokens: int | None = setting(None, minimum=1)
    """Sampled in one turn; null: what rollout.max_response_tokens leaves, which counts all turns and what is said
    between them."""
    max_episode_seconds: float | None = setting(3600.0, above=0)
    """After which an episode ends with what there is of it, so that an environment that never answers holds up nobody
    for ever; null: no limit."""
    max_concurrent_episodes: int | None = setting(None, minimum=1)
    """Episodes of one engine that are under way together, whose tools and environments hold memory; null: four for each
    of rollout.max_concurrent_requests, so that it has enough to decode while some wait for tools."""
    failed_reward: float = 0.0
    """Reward of an episode that raised. Nothing of it is trained, but its group's mean counts it."""
    history: str | None = setting(None, choices=("keep", "new_sequence"))
    """Of chat templates that render earlier turns otherwise once something follows them (such as reasoning, which they
    leave out): keep what was sampled, one sequence per episode; or render the conversation anew for each turn, as it is
    served, and train on a new_sequence. null: keep, and such templates are refused, so that somebody chooses."""
    long_history: str = setting("end", choices=("end", "drop_turns"))
    """Of an episode that leaves no room for another turn in max_prompt_tokens + max_response_tokens: it ends, or its
    oldest turns are dropped, which begins a new sequence."""
