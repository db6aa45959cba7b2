"""Selection of the episode by its keys, and contradictions between them."""

from __future__ import annotations

import pytest

from mcore_rl.config.algorithm import AlgorithmConfig, PolicyLossConfig
from mcore_rl.config.rules.rollout import check_episodes, check_sampling_keys, episode_of, has_turns
from mcore_rl.config.schema import Config, RolloutConfig
from mcore_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [
        ({}, "single_turn"),
        ({"tools": "t.py:f"}, "tools"),
        ({"environment": "g.py:Game"}, "environment"),
        ({"tools": "t.py:f", "episode": "s.py:Solver"}, "s.py:Solver"),
    ],
)
def test_episode_of_default_depends_on_tools_and_environment(keys: dict[str, str], chosen: str) -> None:
    rollout = RolloutConfig(**keys)
    assert episode_of(rollout) == chosen
    assert has_turns(rollout) == (chosen != "single_turn")
    check_episodes(rollout, AlgorithmConfig())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"episode": "tools"}, r"^rollout\.episode=tools needs rollout\.tools: "),
        ({"episode": "environment"}, r"needs rollout\.environment=module_or_file\.py:name"),
        ({"episode": "s.py:S", "environment": "g.py:G"}, r"^rollout\.environment=g\.py:G is not used by rollout\.ep"),
        ({"tools": "t.yaml", "environment": "g.py:G"}, r"^rollout\.tools=t\.yaml is not used by rollout\.episode=env"),
        ({"tools": "t.yaml", "episode": "single_turn"}, r"^rollout\.tools=t\.yaml is not used by"),
        ({"episode_kwargs": {"a": "1"}}, r"^rollout\.episode_kwargs is not used by rollout\.episode=single_turn"),
        ({"tools": "t.yaml", "episode_kwargs": {"a": "1"}}, r"^rollout\.episode_kwargs is not used"),
        ({"max_turns": 3}, r"^rollout\.max_turns=3 has no effect; set rollout\.episode"),
        ({"history": "keep"}, r"^rollout\.history=keep has no effect"),
        (
            {"tools": "t.yaml", "max_turn_tokens": 99, "max_response_tokens": 64},
            r"^rollout\.max_turn_tokens=99 exceeds rollout\.max_response_tokens=64",
        ),
        ({"tools": "t.yaml", "max_episode_seconds": 5.0}, r"^rollout\.max_tool_seconds=30 exceeds \S+max_episode"),
    ],
)
def test_check_episodes_contradictions_are_rejected(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_episodes(RolloutConfig(**keys), AlgorithmConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "accepted"),
    [
        ({}, False),
        ({"environment": "g.py:Game"}, False),
        ({"tools": "t.py:f"}, False),
        ({"episode": "s.py:Solver"}, True),
        ({"episode": "gateway", "harness": "h.py:run"}, True),
    ],
)
def test_baseline_by_role_needs_an_episode_that_names_roles(keys: dict[str, str], accepted: bool) -> None:
    rollout, algorithm = RolloutConfig(**keys), AlgorithmConfig(baseline="role")
    if accepted:
        check_episodes(rollout, algorithm)
        return
    with pytest.raises(ConfigError, match=r"^algorithm\.baseline=role has no effect with rollout\.episode="):
        check_episodes(rollout, algorithm)


def test_check_episodes_supervised_run_passes() -> None:
    config = Config(rollout=RolloutConfig(tools="t.yaml", episode="single_turn"))
    config.algorithm = AlgorithmConfig(policy_loss=PolicyLossConfig(name="sft"))
    check_episodes(config.rollout, config.algorithm)


@pytest.mark.parametrize(("engine", "accepted"), [("vllm", True), ("sglang", False)])
def test_sampling_mask_without_truncation_needs_formats_of_replies(engine: str, accepted: bool) -> None:
    rollout = RolloutConfig(engine=engine, episode="gateway", harness="h.py:run", keep_sampling_mask=True)
    if accepted:
        check_sampling_keys(rollout, AlgorithmConfig())
        return
    with pytest.raises(ConfigError, match="has no effect on sampling from all tokens"):
        check_sampling_keys(rollout, AlgorithmConfig())
