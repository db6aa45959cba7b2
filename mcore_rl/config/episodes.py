"""Keys of `rollout` for episodes: the interaction between a prompt and its reward."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.config.fields import setting

SINGLE_TURN, WITH_TOOLS, WITH_ENVIRONMENT, GATEWAY = "single_turn", "tools", "environment", "gateway"
SERVING = "serving"
"""Value of rollout.episode that `mcore-rl serve` sets: the gateway also answers requests without sessions."""
WITH_GATEWAY = (GATEWAY, SERVING)
KINDS = (SINGLE_TURN, WITH_TOOLS, WITH_ENVIRONMENT, *WITH_GATEWAY)
LAST, ALL, BY_HARNESS = "last", "all", "by_harness"
"""Values of rollout.gateway_branches."""


def harness_is_function(harness: str) -> bool:
    """Return whether rollout.harness names a function; else it is a command."""
    return ":" in harness and not any(character.isspace() for character in harness)


@dataclass
class EpisodeConfig:
    """Episode keys of RolloutConfig."""

    episode: str | None = setting(
        None, choices=(SINGLE_TURN, WITH_TOOLS, WITH_ENVIRONMENT, *WITH_GATEWAY), function=True
    )
    """Type of episode. single_turn: one response; tools: the model calls tools until a turn has no call; environment: a
    user's class answers every turn; gateway: a program uses the model through an OpenAI-compatible server; serving:
    like gateway, but requests need no session (`mcore-rl serve` sets it); or `module_or_file.py:name` of a class with
    `async def run(self, session, prompt)` or an async function of these arguments. null: tools if rollout.tools is set,
    environment if rollout.environment is set, else single_turn."""
    episode_kwargs: dict[str, str] = field(default_factory=dict)
    """Keyword arguments of a user's episode class or environment."""
    environment: str | None = setting(None, function=True)
    """`module_or_file.py:name` of an environment class, constructed for each episode with `prompt` and
    rollout.episode_kwargs. Methods: step(action) -> (observation, reward, done); optional: reset() -> first observation
    or None, and close()."""
    max_turns: int = setting(8, minimum=1, unit="turns")
    """Maximum number of model turns in an episode."""
    max_turn_tokens: int | None = setting(None, minimum=1)
    """Maximum number of tokens sampled in one turn; null: the rest of rollout.max_response_tokens, which counts all
    turns and the messages between them."""
    max_episode_seconds: float | None = setting(3600.0, above=0)
    """Time limit of an episode, which then ends with its current trajectory, such that an environment that never
    answers does not block the run; null: no limit."""
    max_concurrent_episodes: int | None = setting(None, minimum=1)
    """Maximum number of running episodes per engine; tools and environments of each use memory. null: 4 x
    rollout.max_concurrent_requests, so that the engine is busy while some episodes wait for tools."""
    tool_answer_images: int = setting(4, minimum=0, unit="images")
    """Maximum number of images of a tool's result in the conversation; further images are left out. 0: none."""
    failed_reward: float = 0.0
    """Reward of an episode that raised an error. It is not trained, but counts in its group's mean."""
    history: str | None = setting(None, choices=("keep", "new_sequence"))
    """Treatment of earlier turns with chat templates that render them differently once a message follows, for example
    without reasoning. keep: keep the sampled tokens, one sequence per episode; new_sequence: render the conversation
    again for each turn, as in deployment, and train separate sequences. null: keep, and such templates are rejected
    until one is chosen."""
    long_history: str = setting("end", choices=("end", "drop_turns"))
    """Treatment of an episode without room for another turn in max_prompt_tokens + max_response_tokens: end it, or drop
    its oldest turns (drop_turns), which starts a new sequence."""
    harness: str | None = None
    """Program of each episode with rollout.episode=gateway: a command, which runs in the sandbox; or
    `module_or_file.py:name` of a function of (row, base_url, api_key); null: programs such as `mcore-rl harness-worker`
    request sessions from the gateway."""
    harness_files: list[str] = field(default_factory=list)
    """Names of files that the command of rollout.harness writes and the reward function receives
    (extra_info["harness"]["files"])."""
    gateway_address: str = "127.0.0.1"
    """Address of the host on which its gateway listens; 0.0.0.0: all addresses, for programs on other machines."""
    gateway_port: int = setting(0, minimum=0, maximum=65535)
    """Port of the gateway on each host; 0: a free port, which the run directory's gateways.json lists."""
    gateway_branches: str = setting(ALL, choices=(LAST, ALL, BY_HARNESS))
    """Sequences of a session that are trained, if its program has started several. last: the sequence with the last
    reply; all; by_harness: sequences with a reply that has a reward of its own, or all if there is none."""
    gateway_sampling: str = setting("run", choices=("run", "request"))
    """Source of temperature, top_p, top_k and min_p of replies. run: the keys of the run; values in requests are
    ignored. request: the request, which is refused if its distribution cannot be trained. Stop strings and token limits
    of requests always apply."""
