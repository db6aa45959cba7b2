"""What of a loss and its correction is refused before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult
from mcore_rl.algorithms.registry import POLICY_LOSSES
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.step.objective import Objective


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


@dataclass(frozen=True)
class OfValues:
    needs: ClassVar[Needs] = Needs(advantages=True, values=True)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        raise NotImplementedError


def test_a_loss_that_needs_what_ranks_do_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICY_LOSSES, "of_values", OfValues)
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss\.name=of_values needs values: not available"):
        Objective.from_config(config("of_values", "none"), None)


@pytest.mark.parametrize(("prox", "reads"), [("recomputed", True), ("metrics", True), ("loglinear", False)])
def test_an_interpolated_proximal_policy_needs_no_pass_before_the_updates(prox: str, reads: bool) -> None:
    made = config("decoupled_ppo", "none")
    made.algorithm.policy_loss.prox = prox
    assert Objective.from_config(made, None).needs_old_logp is reads
    # A correction weighs with them whatever the loss reads.
    assert not Objective.from_config(config("reinforce", "none"), None).needs_old_logp
    assert Objective.from_config(config("reinforce", "truncate"), None).needs_old_logp
