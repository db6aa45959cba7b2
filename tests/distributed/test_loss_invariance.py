"""For every policy loss, aggregation, correction and token-level advantage: the gradients in any layout and division
into micro-batches equal those of one rank and one micro-batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.algorithms import estimator, loss_weights
from mcore_rl.config.algorithm import LOSS_AGGREGATIONS, DriftPenaltyConfig, KLConfig, ListedCorrectionConfig
from mcore_rl.config.schema import Config
from mcore_rl.types import merge_metrics
from tests.distributed import converting, policy_batch
from tests.distributed.invariance import ONE_MICROBATCH, SMALL, Case, build_actor, load_weights, policy_values
from tests.distributed.launch import launch
from tests.tiny_models import write_tiny_model

LOSSES: dict[str, dict[str, Any]] = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.6},
    "gspo": {"clip_low": 0.05, "clip_high": 0.1},
    "gmpo": {"clip_low": 0.2, "clip_high": 0.3},
    "clip_cov": {"cov_ratio": 0.3, "cov_low": 0.0, "cov_high": 100.0},
    "kl_cov": {"cov_ratio": 0.3, "kl_coef": 1.0},
    "cispo": {"clip_low": 0.2, "clip_high": 0.3},
    "cispo rollout": {"clip_low": 0.2, "clip_high": 0.3, "anchor": "rollout"},
    "sapo": {"tau_pos": 0.7, "tau_neg": 2.0},
    "dppo_tv": {"clip_low": 0.001, "clip_high": 0.002, "ratio_cap": 1.5},
    "dppo_tv old": {"clip_low": 0.001, "clip_high": 0.002, "anchor": "old"},
    "dppo_tv mask": {"clip_low": 0.001, "clip_high": 0.002, "mask_anchor": "old"},
    "dppo_kl": {"clip_low": 0.0001, "clip_high": 0.0002},
    "vespo": {"k_pos": 0.2, "lambda_pos": 0.1, "k_neg": 0.3, "lambda_neg": 0.2, "anchor": "old"},
    "vespo rollout": {"k_pos": 0.2, "lambda_pos": 0.1, "k_neg": 0.3, "lambda_neg": 0.2},
    "dro": {"beta": 0.5},
    "fipo": {"decay_tokens": 2.0, "influence_low": 0.5, "influence_high": 0.6, "safety_ratio": 1.1},
    "real": {"tau": 0.5},
    "decoupled_ppo": {},
    "decoupled_ppo loglinear": {"prox": "loglinear"},
    "reinforce": {},
    "sft": {},
    "dpo": {},
}
AGGREGATIONS = LOSS_AGGREGATIONS
CORRECTIONS: list[dict[str, Any]] = [
    {"kind": "truncate", "level": "token", "high": 1.3},
    {"kind": "truncate", "level": "sequence", "high": 1e6},
    {"kind": "mask", "level": "geometric", "high": 4.0},
    {"kind": "reject", "level": "geometric", "measure": "k3", "high": 0.4},
]
MOMENT: dict[str, Any] = {"kind": "reject", "measure": "second_moment", "high": 0.5, "policy": "current"}
LISTED: list[dict[str, Any]] = [
    {"kind": "truncate", "high": 1.3},
    {"kind": "reject", "level": "any_token", "low": 0.02, "high": 5.0},
    {"kind": "reject", "level": "geometric", "low": 0.2, "high": None, "negative_only": True, "policy": "current"},
]
TERMS: dict[str, dict[str, Any]] = {
    "unbiased KL": {"kl": KLConfig(in_loss=0.3, unbiased=True)},
    "drift from the engine": {"drift_penalty": DriftPenaltyConfig(0.4)},
    "high entropy": {"high_entropy_share": 0.4},
    "drift from the old policy": {"drift_penalty": DriftPenaltyConfig(0.4, "old")},
}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {"gamma": 0.95, "lam": 0.9},
    "reinforce_plus_plus": {"gamma": 0.9},
    "optimal_token_baseline": {},
}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {"dp2": (2, {}), "cp2": (2, {"cp": 2})}
"""A loss is computed on the last stage and is independent of experts."""
SAMPLES = policy_batch.UPDATES[0]
# Relative to the tensor's largest entry; see test_invariance.
GRADIENT_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Objectives:
    """A loss by its configuration name with a note on its options, and the kind of advantages of its tokens."""

    loss: str
    aggregation: str = "token-mean"
    correction: dict[str, Any] = field(default_factory=dict)
    corrections: list[dict[str, Any]] = field(default_factory=list)
    estimator: str | None = None
    old_logp: str = "trainer"
    terms: str = ""
    bonus: float | None = None

    def __str__(self) -> str:
        parts = [
            self.loss,
            self.aggregation,
            *map(str, self.correction.values()),
            "listed" * bool(self.corrections),
            self.estimator or "",
            self.terms,
            f"bonus {self.bonus}" * (self.bonus is not None),
            f"old {self.old_logp}" * (self.old_logp != "trainer"),
        ]
        return " ".join(part for part in parts if part)


ALL = [Objectives(loss) for loss in LOSSES]
ALL += [Objectives("ppo_clip", mode) for mode in AGGREGATIONS[1:]]
ALL += [Objectives("ppo_clip", correction=correction) for correction in CORRECTIONS]
OF_LIST = Objectives("ppo_clip", corrections=LISTED)
ALL += [OF_LIST]
ALL += [Objectives("ppo_clip", correction=MOMENT), Objectives("gspo", correction=MOMENT)]
ALL += [Objectives("kl_cov", correction=MOMENT | {"policy": "old"})]
ALL += [Objectives("ppo_clip", corrections=LISTED[2:], old_logp="rollout")]
ALL += [Objectives(loss, correction=CORRECTIONS[1]) for loss in ("kl_cov", "gspo")]
ALL += [Objectives("dppo_kl", terms=name) for name in TERMS]
ALL += [Objectives(loss, terms="high entropy") for loss in ("gspo", "kl_cov")]
ALL += [Objectives("reinforce", bonus=bonus) for bonus in (0.0, 0.5)]
ALL += [Objectives("ppo_clip", estimator=name) for name in ESTIMATORS]
MEASURED = "decoupled_ppo metrics"
LOSSES[MEASURED] = {"prox": "metrics"}
ALL += [Objectives(MEASURED)]


def test_objectives_have_names_of_their_own() -> None:
    """Results are stored by name, so two objectives of one name would be compared as one."""
    assert len({str(objective) for objective in ALL}) == len(ALL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a Hugging Face model; its Megatron checkpoint is next to it."""
    directory = write_tiny_model(tmp_path_factory.mktemp("models") / "moe", "qwen3_moe")
    converting.to_mcore(directory, Path(f"{directory}.mcore"), {"world_size": 1})
    return str(directory)


@pytest.fixture(scope="module")
def found(model: str) -> dict[str, dict[str, Any]]:
    """By layout and objective: loss, metrics, gradients by HF name."""
    cases = {"one rank": (1, Case("moe", tokens=ONE_MICROBATCH))}
    cases |= {name: (size, Case("moe", layout, tokens=SMALL)) for name, (size, layout) in LAYOUTS.items()}
    results = {}
    for name, (size, case) in cases.items():
        ranks = launch(measure_all, size, model, f"{model}.mcore", case)
        results[name] = {str(objective): join([rank[i] for rank in ranks]) for i, objective in enumerate(ALL)}
    return results


def measure_all(rank: int, directory: str, checkpoint: str, case: Case) -> list[dict[str, Any]]:
    actor = build_actor(directory, case)
    load_weights(actor, checkpoint)
    share = policy_batch.shares(actor)[0]
    old_logp = {
        sample: torch.from_numpy(logp + policy_batch.drift(sample)[held])
        for sample, (held, logp, _) in policy_values(actor, share, policy_batch.chunks()).items()
    }
    return [measure(actor, objective, share, old_logp) for objective in ALL]


def measure(
    actor: Any, objective: Objectives, share: Any, old_logp: dict[int, torch.Tensor], index: int = 1
) -> dict[str, Any]:
    """Compute the gradient of update `index`; before a later one than the first, old and current log-probabilities
    differ by `drift`."""
    from mcore_rl.megatron.step.loss.rank_batch import RankBatch
    from mcore_rl.megatron.step.objective import Objective

    config = configure(actor.config, objective)
    actor.objective = Objective.from_config(config, actor.group, actor.context)
    share = replace(share, loss_weights=weights(objective.aggregation)[share.samples])
    ref_logp = {sample: 0.7 * logp - 0.2 for sample, logp in old_logp.items()}
    batch, metrics = RankBatch([share, share], policy_batch.chunks(), old_logp, ref_logp), {}
    batch = replace(batch, entropy_coefficient=objective.bonus)
    if objective.estimator is not None:
        actor.estimator = chosen = estimator(objective.estimator, **ESTIMATORS[objective.estimator])
        values = {s: policy_batch.drift(s) for s in share.samples.tolist()} if chosen.needs.values else None
        batch, metrics, _ = actor.estimate(batch, values)
    with policy_batch.complete_gradients(actor):
        _, reports = actor.accumulate_gradients(batch, index)
    counts = actor.counts_tokens
    return {
        "loss": sum(report.loss for report in reports) if counts else 0.0,
        "metrics": merge_metrics([metrics, *(report.metrics for report in reports)]) if counts else {},
        "gradients": policy_batch.gradient_pieces(actor),
    }


def configure(config: Config, objective: Objectives) -> Config:
    loss = replace(type(config.algorithm.policy_loss)(), name=objective.loss.split()[0], **LOSSES[objective.loss])
    correction = replace(config.algorithm.correction, **objective.correction)
    listed = [ListedCorrectionConfig(**entry) for entry in objective.corrections]
    algorithm = replace(
        config.algorithm,
        policy_loss=loss,
        correction=correction,
        corrections=listed,
        old_logp=objective.old_logp,
        **TERMS.get(objective.terms, {}),
    )
    return replace(config, algorithm=algorithm)


def weights(mode: str) -> np.ndarray:
    counts = np.array([int(policy_batch.trained(sample).sum()) for sample in SAMPLES])
    options = {"norm_tokens": 20} if mode == "seq-mean-token-sum-norm" else {}
    whole = np.zeros(len(policy_batch.PROMPTS), np.float32)
    whole[SAMPLES] = loss_weights(mode, counts, policy_batch.GROUPS[SAMPLES], **options)
    return whole


def join(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "loss": sum(rank["loss"] for rank in ranks),
        "metrics": {name: m.value for name, m in merge_metrics([rank["metrics"] for rank in ranks]).items()},
        "gradients": policy_batch.assemble([rank["gradients"] for rank in ranks]),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_objective_in_every_layout_equals_one_rank(layout: str, found: dict[str, Any]) -> None:
    wrong = {}
    for objective in ALL:
        expected, ours = found["one rank"][str(objective)], found[layout][str(objective)]
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6), objective
        assert ours["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-5), objective
        assert ours["gradients"].keys() == expected["gradients"].keys()
        for name, tensor in expected["gradients"].items():
            error = float((ours["gradients"][name] - tensor).abs().max()) / (float(tensor.abs().max()) or 1.0)
            if not error <= GRADIENT_TOLERANCE:
                wrong[str(objective), name] = error
    assert wrong == {}


def test_listed_corrections_drop_a_part_of_the_tokens(found: dict[str, Any]) -> None:
    """Check the test data: a list that drops all tokens, or none, would be equal in every layout."""
    result = found["one rank"][str(OF_LIST)]
    shares = [result["metrics"][f"correction/{name}masked_fraction"] for name in ("1_", "2_", "")]
    assert all(0 < share < 1 for share in shares), shares
    assert result["gradients"]["model.embed_tokens.weight"].any()


def test_objectives_have_different_gradients(found: dict[str, Any]) -> None:
    """Check the test data: losses, aggregations and corrections must change the gradient."""
    name = "model.embed_tokens.weight"
    seen = {key: result["gradients"][name] for key, result in found["one rank"].items()}
    equal = [(a, b) for a, b in itertools.combinations(seen, 2) if torch.equal(seen[a], seen[b])]
    # A correction that is only measured changes nothing.
    assert equal == [("decoupled_ppo token-mean", f"{MEASURED} token-mean")]


def test_high_entropy_share_keeps_loss_of_tokens_with_highest_entropy(model: str) -> None:
    case = Case("moe", tokens=ONE_MICROBATCH)
    ((measured, tokens),) = launch(measure_high_entropy, 1, model, f"{model}.mcore", case)
    limit = np.sort([entropy for _, entropy, _, _ in tokens])[-int(0.4 * len(tokens))]
    kept = [(logp, advantage, weight) for logp, entropy, advantage, weight in tokens if entropy >= limit]
    assert len(kept) == int(0.4 * len(tokens)) > 3
    bonus = sum(policy_batch.ENTROPY_COEFFICIENT * entropy * weight for _, entropy, _, weight in tokens)
    expected = sum(-advantage * logp * weight for logp, advantage, weight in kept) - bonus
    assert measured["loss"] == pytest.approx(expected, rel=1e-5)
    assert measured["metrics"]["actor/high_entropy_fraction"].value == pytest.approx(len(kept) / len(tokens))


def measure_high_entropy(rank: int, directory: str, checkpoint: str, case: Case) -> Any:
    """Measure REINFORCE with some of the tokens, and return log-probability, entropy, advantage and weight of all."""
    actor = build_actor(directory, case)
    load_weights(actor, checkpoint)
    share = policy_batch.shares(actor)[0]
    found = policy_values(actor, share, policy_batch.chunks())
    given = {int(sample): float(advantage) for sample, advantage in zip(share.samples, share.advantages, strict=True)}
    scale = weights("token-mean")
    tokens = [
        (float(logp), float(entropy), given[sample], float(scale[sample]))
        for sample, (_, logps, entropies) in found.items()
        for logp, entropy in zip(logps, entropies, strict=True)
    ]
    return measure(actor, Objectives("reinforce", terms="high entropy"), share, {}), tokens


def test_rollout_as_old_policy_equals_stored_logp_of_the_engine(model: str) -> None:
    (pairs,) = launch(measure_old_policies, 1, model, f"{model}.mcore", Case("moe", tokens=ONE_MICROBATCH))
    for ours, expected in pairs:
        assert ours["loss"] == expected["loss"]
        for name, tensor in join([expected])["gradients"].items():
            assert torch.equal(join([ours])["gradients"][name], tensor), name


def measure_old_policies(rank: int, directory: str, checkpoint: str, case: Case) -> list[list[dict[str, Any]]]:
    """Measure algorithm.old_logp=rollout without stored values, and trainer with the engine's values stored. Measure
    the first update of a loss over groups, which takes no pass, and a later one of the same policy, which takes one."""
    actor = build_actor(directory, case)
    load_weights(actor, checkpoint)
    share = policy_batch.shares(actor)[0]
    engine = {
        sample: torch.from_numpy(policy_batch.logp_rollout(sample)[policy_batch.trained(sample) > 0])
        for sample in share.samples.tolist()
    }
    current = {
        s: torch.from_numpy(logp) for s, (_, logp, _) in policy_values(actor, share, policy_batch.chunks()).items()
    }
    first = measure(actor, Objectives("real"), share, {}, 0)
    infer, passes = actor.infer, []
    actor.infer = lambda *args: passes.append(args) or infer(*args)
    measure(actor, Objectives("real"), share, {}, 0)
    assert not passes
    later = measure(actor, Objectives("real"), share, current)
    assert len(passes) == 1
    return [
        [
            measure(actor, Objectives("ppo_clip", old_logp="rollout"), share, {}),
            measure(actor, Objectives("ppo_clip"), share, engine),
        ],
        [first, later],
    ]


ON_MODEL_PARALLEL_RANKS = [
    Objectives("ppo_clip", estimator="optimal_token_baseline"),
    *map(Objectives, ("real", "kl_cov", "gspo", "vespo rollout", "dppo_tv", "sft")),
    OF_LIST,
]
"""One objective of each kind: by tokens, by responses, with corrections, with a forward pass before the update."""


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
def test_objectives_on_model_parallel_ranks_equal_one_rank(model: str, layout: dict[str, int]) -> None:
    """Ranks of all pipeline stages take part in a forward pass before the update."""
    files = (model, f"{model}.mcore")
    (expected,) = launch(measure_on_model_parallel_ranks, 1, *files, Case("moe", tokens=ONE_MICROBATCH))
    ours = launch(measure_on_model_parallel_ranks, 2, *files, Case("moe", layout, tokens=SMALL))
    for i, objective in enumerate(ON_MODEL_PARALLEL_RANKS):
        found, whole = join([rank[i] for rank in ours]), join([expected[i]])
        assert found["loss"] == pytest.approx(whole["loss"], rel=1e-5, abs=1e-6), objective
        for name, tensor in whole["gradients"].items():
            error = float((found["gradients"][name] - tensor).abs().max()) / (float(tensor.abs().max()) or 1.0)
            assert error <= GRADIENT_TOLERANCE, (objective, name)


def measure_on_model_parallel_ranks(rank: int, directory: str, checkpoint: str, case: Case) -> list[dict[str, Any]]:
    actor = build_actor(directory, case)
    load_weights(actor, checkpoint)
    share = policy_batch.shares(actor)[0]
    old_logp = {
        sample: torch.from_numpy(logp + policy_batch.drift(sample)[held])
        for sample, (held, logp, _) in policy_values(actor, share, policy_batch.chunks()).items()
    }
    return [measure(actor, objective, share, old_logp) for objective in ON_MODEL_PARALLEL_RANKS]
