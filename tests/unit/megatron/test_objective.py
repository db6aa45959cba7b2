"""Losses and corrections that are rejected before the run starts."""

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


def test_correction_is_built_for_supported_losses_only() -> None:
    for loss in ("decoupled_ppo", "sft"):
        Objective.from_config(config(loss, "none"), None)
        with pytest.raises(ConfigError, match=rf"algorithm\.correction\.kind=truncate: .*name={loss}"):
            Objective.from_config(config(loss, "truncate"), None)
    for loss in ("ppo_clip", "gspo", "kl_cov", "reinforce"):
        assert Objective.from_config(config(loss, "mask"), None).corrections


@dataclass(frozen=True)
class LossOfValues:
    needs: ClassVar[Needs] = Needs(advantages=True, values=True)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        raise NotImplementedError


def test_loss_that_needs_unavailable_inputs_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICY_LOSSES, "of_values", LossOfValues)
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss\.name=of_values needs values: not available"):
        Objective.from_config(config("of_values", "none"), None)


@pytest.mark.parametrize(("prox", "reads"), [("recomputed", True), ("metrics", True), ("loglinear", False)])
def test_objective_with_loglinear_prox_needs_no_old_logp(prox: str, reads: bool) -> None:
    made = config("decoupled_ppo", "none")
    made.algorithm.policy_loss.prox = prox
    assert Objective.from_config(made, None).needs_old_logp is reads
    # A correction needs old_logp even if the loss does not.
    assert not Objective.from_config(config("reinforce", "none"), None).needs_old_logp
    assert Objective.from_config(config("reinforce", "truncate"), None).needs_old_logp


def test_rollout_as_old_policy_needs_no_pass_and_no_weights() -> None:
    made = Config()
    made.algorithm.old_logp, made.rollout.quantization = "rollout", "fp8"
    objective = Objective.from_config(made, None)
    assert not objective.needs_old_logp
    assert objective.corrections == ()  # the automatic one would weigh the difference a second time


def test_terms_on_the_old_policy_need_its_logp() -> None:
    made = config("dppo_tv", "none")
    assert not Objective.from_config(made, None).needs_old_logp
    made.algorithm.kl.in_loss, made.algorithm.kl.unbiased = 0.1, True
    assert Objective.from_config(made, None).needs_old_logp
    # The loss itself reads no old policy, but the KL term does.
    made.algorithm.old_logp = "rollout"
    assert not Objective.from_config(made, None).needs_old_logp


@pytest.mark.parametrize(("loss", "reason"), [("decoupled_ppo", "reads the log-prob"), ("reinforce", "reads no old")])
def test_rollout_as_old_policy_is_rejected_for_losses_without_use(loss: str, reason: str) -> None:
    made = config(loss, "auto")
    made.algorithm.old_logp = "rollout"
    with pytest.raises(ConfigError, match=rf"algorithm\.old_logp=rollout has no effect: .*name={loss} {reason}"):
        Objective.from_config(made, None)
