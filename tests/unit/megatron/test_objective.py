"""Losses and corrections that are rejected before the run starts."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult
from mcore_rl.algorithms.registry import POLICY_LOSSES
from mcore_rl.config.algorithm import CorrectionConfig
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.model.output import ModelChunk
from mcore_rl.megatron.step import logprobs, reverse_kl, tiles
from mcore_rl.megatron.step.loss.rank_batch import RankBatch
from mcore_rl.megatron.step.loss.token_choice import TokenChoice
from mcore_rl.megatron.step.microbatches import MicroBatch
from mcore_rl.megatron.step.objective import Objective
from mcore_rl.megatron.step.observations import Observations


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
        assert Objective.from_config(config(loss, "mask"), None).losses[0].corrections


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
    assert objective.losses[0].corrections == ()  # the automatic one would weigh the difference a second time


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


WEIGHTS = {0: 0.5, 1: 0.0, 2: 0.25, 3: 0.0}
"""Loss weight of each sample's tokens; 0: filtered."""
ENTROPIES = {0: [1.0, 2.0], 1: [9.0, 8.0, 7.0], 2: [3.0, 4.0], 3: [0.1, 6.0, 0.2]}
GAPS = {0: [0.1, 0.4], 1: [0.0, 0.0, 0.0], 2: [0.2, 0.3], 3: [0.9, 0.0, 0.0]}
"""Difference of the log-probabilities of trainer and engine."""


def part(*samples: int) -> tuple[MicroBatch, torch.Tensor, torch.Tensor]:
    """Micro-batch of the samples, with the log-probabilities and entropies of its tokens."""
    counts = tuple(len(ENTROPIES[sample]) for sample in samples)
    gaps, entropies = (torch.tensor([value for s in samples for value in of[s]]) for of in (GAPS, ENTROPIES))
    weights = torch.tensor([WEIGHTS[s] for s in samples for _ in ENTROPIES[s]])
    nothing, logp = torch.empty(0, dtype=torch.int64), torch.full_like(gaps, -1.0)
    batch = MicroBatch(
        samples=samples,
        losses=(0,) * len(samples),
        lengths=counts,
        trained_counts=counts,
        whole_counts=counts,
        owners=nothing,
        tokens=nothing,
        sequences=None,  # type: ignore[arg-type]  # not read
        predictors=nothing,
        targets=nothing,
        advantages=gaps * 2 - weights,
        loss_weights=weights,
        logp_rollout=logp - gaps,
        staleness=torch.zeros_like(gaps),
    )
    return batch, logp, entropies


def choices(settings: Config, *parts: tuple[MicroBatch, torch.Tensor, torch.Tensor]) -> TokenChoice:
    objective = Objective.from_config(settings, None)
    return objective.losses[0].choose_tokens(parts, RankBatch((), ()), seed=1, all_reduce=lambda tensor: tensor)


@pytest.mark.parametrize("cut", [[(0, 1, 2, 3)], [(1,), (0, 3), (2,)]])
def test_choice_by_entropy_leaves_out_tokens_without_weight(cut: list[tuple[int, ...]]) -> None:
    made = Config()
    made.algorithm.high_entropy_share = 0.5
    kept = choices(made, *(part(*samples) for samples in cut)).kept
    assert kept is not None
    # Two of the four tokens with a weight; 9, 8, 7 and 6 have none.
    assert {sample: flags.tolist() for sample, flags in kept.items()} == {
        0: [False, False],
        1: [False] * 3,
        2: [True, True],
        3: [False] * 3,
    }


@pytest.mark.parametrize("cut", [[(0, 1, 2, 3)], [(1,), (0, 3), (2,)]])
def test_choice_by_second_moment_leaves_out_tokens_without_weight(cut: list[tuple[int, ...]]) -> None:
    """Squares 0.01, 0.16, 0.04, 0.09: the mean without the largest is 0.047. With the zeros of the others it is less
    for all tokens."""
    made = Config()
    made.algorithm.correction = CorrectionConfig(kind="reject", measure="second_moment", high=0.05, policy="current")
    within = choices(made, *(part(*samples) for samples in cut)).within
    assert within is not None
    assert within[0].tolist() == [True, False]
    assert within[2].tolist() == [True, True]


def test_choice_of_the_loss_leaves_out_tokens_without_weight() -> None:
    made = Config()
    made.algorithm.policy_loss.name, made.algorithm.policy_loss.cov_ratio = "kl_cov", 0.5
    whole, alone = choices(made, part(0, 1, 2, 3)).of_loss, choices(made, part(0, 2)).of_loss
    assert whole is not None
    assert alone is not None
    assert [whole[sample].tolist() for sample in (0, 2)] == [alone[sample].tolist() for sample in (0, 2)]
    assert not any(whole[sample].any() for sample in (1, 3))


def test_choice_of_a_rank_without_weights_has_no_tokens() -> None:
    made = Config()
    made.algorithm.high_entropy_share = 0.5
    kept = choices(made, part(1), part()).kept
    assert kept is not None
    assert kept[1].tolist() == [False] * 3


class Head(ModelChunk):
    """A chunk that has an output projection only."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.post_process, self.share_embeddings_and_output_weights = True, False
        self.output_layer = torch.nn.Linear(4, 10, bias=False)


@pytest.mark.parametrize("chosen", [True, False])
def test_float32_head_reaches_all_products_of_the_backward_pass(chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, all of them are float32; tests/gpu/test_logprobs.py checks the products of GPUs."""
    found, original = [], tiles.accumulate_product

    def product(*tensors: torch.Tensor, float32_head: bool) -> None:
        found.append(float32_head)
        original(*tensors, float32_head=float32_head)

    for module in (logprobs, reverse_kl, tiles):
        monkeypatch.setattr(module, "accumulate_product", product)
    made = Config()
    made.model.float32_head = chosen
    outputs, head = Objective.from_config(made, None).outputs, Head()
    hidden = torch.randn(3, 4, requires_grad=True)
    fields = {"predictors": torch.arange(3), "targets": torch.arange(3), "temperatures": None, "kept": None}
    batch = cast("Any", SimpleNamespace(**fields))
    policy = outputs.projection(head, batch)
    values = (
        outputs.logp(head, hidden, batch, compute_entropy=True)[0],
        reverse_kl.linear_reverse_kl(hidden, policy, hidden.detach(), policy),
        reverse_kl.linear_logp_at(hidden, policy, torch.arange(3)[:, None]),
        outputs.observation_loss(head, hidden, Observations(torch.arange(3), torch.arange(3), torch.ones(3)))[0],
    )
    sum(value.sum() for value in values).backward()
    assert found == [chosen] * 8  # gradients of hidden states and weight
