"""What of a loss and its correction is refused before anything runs."""

from __future__ import annotations

import pytest

from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.objective import Objective


def config(loss: str, correction: str) -> Config:
    made = Config()
    made.algorithm.policy_loss.name, made.algorithm.correction.kind = loss, correction
    return made


@pytest.mark.parametrize("loss", ["decoupled_ppo", "sft"])
def test_a_correction_of_a_loss_that_has_no_place_for_it(loss: str) -> None:
    Objective.from_config(config(loss, "none"), None)
    with pytest.raises(ConfigError, match=rf"algorithm\.correction\.kind=truncate: .*name={loss}"):
        Objective.from_config(config(loss, "truncate"), None)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "kl_cov", "reinforce"])
def test_other_losses_take_one(loss: str) -> None:
    assert Objective.from_config(config(loss, "mask"), None).correction is not None


def test_a_loss_that_needs_what_ranks_do_not_have() -> None:
    made = config("decoupled_ppo", "none")
    made.algorithm.policy_loss.prox = "loglinear"
    with pytest.raises(ConfigError, match="staleness"):
        Objective.from_config(made, None)
