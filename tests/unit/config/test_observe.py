"""Profiled steps and ranks must exist."""

from __future__ import annotations

import pytest

from mcore_rl.config import load_config
from mcore_rl.config.rules.validation import validate_keys
from mcore_rl.errors import ConfigError

STEPS = "observe.profile.steps"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{STEPS}=[0]"], "observe.profile.steps=[0] must be at least 1"),
        ([f"{STEPS}=[3,101]"], "observe.profile.steps has step 101, but the run ends after trainer.steps=100"),
        ([f"{STEPS}=[3]", "observe.profile.ranks=[0,-1]"], "observe.profile.ranks=[0, -1] must be 0 or more"),
        ([f"{STEPS}=[3]", "observe.profile.ranks=[4]"], "has rank 4, but the run has 4 trainer ranks"),
        ([f"{STEPS}=[3]", "observe.profile.ranks=[2]", "actor.num_ranks=2"], "but the run has 2 trainer ranks"),
        ([f"{STEPS}=[3]", "observe.profile.ranks=[]"], "observe.profile.ranks is empty"),
        (["observe.profile.ranks=[1]"], "set observe.profile.steps"),
        ([f"{STEPS}=true"], STEPS),
        ([f"{STEPS}=[x]"], STEPS),
    ],
)
def test_profile_of_missing_steps_or_ranks_names_the_key(base: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate_keys(load_config(base, overrides))
    assert message in str(raised.value)


def test_profile_of_first_and_last_step_and_rank_is_valid(base: str) -> None:
    config = load_config(base, [f"{STEPS}=[1,100]", "observe.profile.ranks=[0,3]"])
    validate_keys(config)
    assert (config.observe.profile.steps, config.observe.profile.ranks) == ([1, 100], [0, 3])


def test_profile_of_one_step_and_rank_needs_no_list(base: str) -> None:
    config = load_config(base, [f"{STEPS}=3", "observe.profile.ranks=1"])
    validate_keys(config)
    assert (config.observe.profile.steps, config.observe.profile.ranks) == ([3], [1])


def test_trajectories_of_supervised_training_name_the_key(base: str) -> None:
    kept = "observe.keep_trajectories=2"
    validate_keys(load_config(base, [kept]))
    with pytest.raises(ConfigError, match=r"^observe\.keep_trajectories=2 has no effect: .* set it to 0$"):
        validate_keys(load_config(base, [kept, "algorithm.policy_loss.name=sft"]))
