"""The critic: values, gradients and updates equal plain torch on transformers' token classification model, in every
layout and division into micro-batches, and a checkpoint can be resumed in another layout.

One launch per number of ranks runs all its cases.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.types import merge_metrics
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import ONE_MICROBATCH, SMALL, case_parameters, check_gradients, launch_cases
from tests.distributed.launch import launch
from tests.selection import usual_cases
from tests.tiny_models import checkpoint_tensors, tiny_config, tiny_model, write_tiny_model

# Float32 compared with float64, with a different summation order in each layout. A wrongly replicated head, a value of
# the neighbouring position or a factor of an axis is off by 1e-2 or more.
VALUE_TOLERANCE = 1e-5  # values are of size 1
WEIGHT_TOLERANCE = 4e-6  # weights are of size 1 and move by about 1e-3
CLIP_RANGE, LR, SEED = 0.25, 4e-3, 11
Case = tuple[str, dict[str, Any], int]
EVERY_CASE: dict[int, dict[str, Case]] = {
    1: {"dense": ("dense", {}, ONE_MICROBATCH), "moe": ("moe", {}, ONE_MICROBATCH), "dense cut": ("dense", {}, SMALL)},
    2: {
        "dense dp2": ("dense", {}, SMALL),
        "dense sharded": ("dense", {"shard_parameters": True}, SMALL),
        "dense fsdp2": ("dense", {"strategy": "fsdp2"}, SMALL),
        "dense tp2": ("dense", {"tp": 2}, SMALL),
        "dense tp2 without sp": ("dense", {"tp": 2, "sequence_parallel": False}, SMALL),
        "dense pp2": ("dense", {"pp": 2}, SMALL),
        "dense cp2": ("dense", {"cp": 2}, SMALL),
        "moe ep2": ("moe", {"ep": 2}, SMALL),
        "moe fsdp2": ("moe", {"strategy": "fsdp2"}, SMALL),
        "moe tp2": ("moe", {"tp": 2}, SMALL),
        "moe pp2": ("moe", {"pp": 2}, SMALL),
    },
}
USUAL = {
    "dense",
    "moe",
    "dense cut",
    "dense fsdp2",
    "dense sharded",
    "dense tp2 without sp",
    "dense pp2",
    "dense cp2",
    "moe ep2",
}
"""Cases that are always tested: each axis, and each special part of a model, once."""
CASES = usual_cases(EVERY_CASE, USUAL)
SAVED, RESUMED = "dense fsdp2", "dense pp2"
SAMPLES = sorted(s for update in policy_batch.UPDATES for s in update)


def returns(sample: int) -> np.ndarray:
    count = int(policy_batch.trained(sample).sum())
    return np.random.default_rng(400 + sample).normal(0.5, 1.0, count).astype(np.float32)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("critics")
    for name, kind in (("dense", "qwen3"), ("moe", "qwen3_moe")):
        _write_classifier(root / name, kind)
    write_tiny_model(root / "causal", "qwen2", tie_word_embeddings=True)
    write_tiny_model(root / "policy", "qwen3")
    return {name: str(root / name) for name in ("dense", "moe", "causal", "policy", "checkpoints")}


def _write_classifier(directory: Path, kind: str) -> None:
    """Save a token classification model with one label with transformers."""
    from transformers import AutoModelForTokenClassification

    config = tiny_config(kind, num_labels=1)
    model = AutoModelForTokenClassification.from_config(config, attn_implementation="eager").float()
    trunk = tiny_model(kind).model.state_dict()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.model.load_state_dict(trunk)
        model.score.weight.normal_(0, 0.2, generator=generator)
        model.score.bias.zero_()
    model.save_pretrained(directory)


class _Reference:
    """transformers' model in float64, one unpacked sequence at a time."""

    def __init__(self, directory: str) -> None:
        from transformers import AutoModelForTokenClassification

        loops = {"attn_implementation": "eager", "experts_implementation": "eager", "local_files_only": True}
        self.model = AutoModelForTokenClassification.from_pretrained(directory, **loops).double().eval()
        with torch.no_grad():
            self.values = {sample: self.of(sample) for sample in SAMPLES}

    def of(self, sample: int) -> torch.Tensor:
        """Compute the values at the positions before the trained tokens."""
        tokens = torch.from_numpy(policy_batch.sequence(sample).astype(np.int64))
        positions = policy_batch.PROMPTS[sample] + np.flatnonzero(policy_batch.trained(sample)) - 1
        return self.model(tokens[None]).logits[0, positions, 0]

    def loss(self) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the clipped loss of the first update, token by token, and its metrics."""
        samples = policy_batch.UPDATES[0]
        weights = policy_batch.loss_weights(samples).astype(float)
        total = torch.zeros((), dtype=torch.float64)
        clips, targets, errors, seen = [], [], [], []
        for sample in samples:
            old = (self.values[sample] + torch.from_numpy(policy_batch.drift(sample))).tolist()
            for value, before, target in zip(self.of(sample), old, returns(sample).tolist(), strict=True):
                bounded = value.clamp(before - CLIP_RANGE, before + CLIP_RANGE)
                plain, clipped = (value - target) ** 2, (bounded - target) ** 2
                total = total + weights[sample] * 0.5 * torch.maximum(plain, clipped)
                clips.append(bool(clipped > plain))
                seen.append(value.detach().item())
                targets.append(target)
                errors.append(target - before)
        return total, {
            "critic/loss": total.item(),
            "critic/clip_fraction": float(np.mean(clips)),
            "critic/value_mean": float(np.mean(seen)),
            "critic/explained_variance": 1 - float(np.var(errors) / np.var(targets)),
        }


@pytest.fixture(scope="module")
def references(directories: dict[str, str]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in ("dense", "moe"):
        reference = _Reference(directories[name])
        loss, metrics = reference.loss()
        loss.backward()
        gradients = {n: p.grad for n, p in reference.model.named_parameters() if n != "score.bias"}
        found[name] = {
            "values": reference.values,
            "metrics": metrics,
            "gradients": checkpoint_tensors(reference.model, gradients),
        }
    return found


def _critic(rank: int, directory: str, parallel: dict[str, Any], tokens: int, **keys: Any) -> Any:
    import torch.distributed as dist

    from mcore_rl.megatron.roles.critic import MegatronCritic

    config = policy_batch.config("nowhere", {"tp": 64}, 1)  # the critic reads no setting of the actor
    config.run.seed = SEED
    section = config.critic
    section.hf_path, section.tokens_per_microbatch, section.clip_range = directory, tokens, CLIP_RANGE
    policy_batch.set_layout(section, parallel)
    optimizer = section.optimizer
    # eps and warm-up: see test_actor_update. The norm is clipped, so a head that is counted twice changes the result.
    optimizer.lr, optimizer.eps, optimizer.warmup_steps, optimizer.clip_grad = LR, 1e-2, 1, 0.05
    for key, value in keys.items():
        setattr(section, key, value)
    return MegatronCritic(config, rank, dist.get_world_size(), None)


def _pieces(critic: Any, *, gradients: bool = False) -> list[Any]:
    """Return parameters or gradients as this rank's slices of HF tensors."""
    from model_converters.families import family_for
    from model_converters.hf.value_head import with_value_head
    from model_converters.mapping.plan import export_pieces, export_plan
    from model_converters.mapping.separate import trainer_rows
    from model_converters.mapping.table import bind

    hf_config, held = critic.hf_config, critic.tensors()
    if gradients:
        pairs = [(p, p.main_grad) for chunk in critic.ddp for p in chunk.parameters()]
        # A rank without rows of a tensor has no gradient of it.
        held = {name: policy_batch.part_like(tensor, pairs, tensor) for name, tensor in held.items()}
    rows = trainer_rows(with_value_head(family_for(hf_config).rows(hf_config), hf_config), critic.layout)
    plan = export_plan(bind(rows, hf_config, torch.float32), critic.layout)
    return [
        (tensor.hf_name, tensor.shape, piece.dim, piece.start, piece.rows, view.detach().float().numpy().copy())
        for tensor, piece, view in export_pieces(plan, held, critic.rank)
    ]


def _train(rank: int, directories: dict[str, str], cases: dict[str, Case]) -> dict[str, Any]:
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from tests.distributed.saving import save_checkpoint

    found: dict[str, Any] = {}
    saved = Path(directories["checkpoints"])
    for name, (model, parallel, tokens) in cases.items():
        critic = _critic(rank, directories[model], parallel, tokens)
        chunks, shares = policy_batch.chunks(), policy_batch.shares(critic)
        batch = critic.values(shares, chunks)
        result = found[name] = {"values": dict(batch.values)}
        batch = replace(batch, values={s: values + policy_batch.drift(s) for s, values in batch.values.items()})
        wanted = {sample: returns(sample) for sample in SAMPLES}
        with policy_batch.complete_gradients(critic):
            critic.accumulate_gradients(batch, 0, wanted)
        result["gradients"] = _pieces(critic, gradients=True)
        result["metrics"] = [critic.update(batch, index, wanted) for index in range(len(shares))]
        critic.gather_parameters()
        result["weights"] = _pieces(critic)
        if name == SAVED:
            save_checkpoint(str(saved), critic)
            critic.update(batch, 0, wanted)
            result["third"] = _pieces(critic)
        if name == RESUMED:
            resumed = _critic(rank, directories[model], parallel, tokens)
            load_checkpoint(str(saved), resumed)
            result["loaded"] = _pieces(resumed)
            resumed.update(batch, 0, wanted)
            result["third"] = _pieces(resumed)
    return found


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Run all cases; results of all ranks by case."""
    return launch_cases(_train, CASES, directories)


def _joined(ranks: list[dict[str, Any]], what: str) -> dict[str, torch.Tensor]:
    return policy_batch.assemble([rank[what] for rank in ranks])


def _worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    assert found.keys() == expected.keys()
    errors = {}
    for name, tensor in expected.items():
        errors[name] = float((found[name] - tensor).abs().max())
    # NaN marks an element that no rank holds: count it as the largest difference.
    worst = max(errors, key=lambda name: np.inf if np.isnan(errors[name]) else errors[name])
    return errors[worst], worst


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_critic_values_belong_to_predicting_positions(size: int, case: str, results: Any, references: Any) -> None:
    expected = references[CASES[size][case][0]]["values"]
    found: dict[int, list[np.ndarray]] = {}
    for rank in results[case]:
        for sample, values in rank["values"].items():
            found.setdefault(sample, []).append(values)
    assert sorted(found) == SAMPLES
    for sample, of_ranks in found.items():
        assert all(np.array_equal(values, of_ranks[0]) for values in of_ranks)  # every rank has whole responses
        assert of_ranks[0].dtype == np.float32
        assert np.abs(of_ranks[0] - expected[sample].numpy()).max() <= VALUE_TOLERANCE


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_critic_gradients_in_every_layout_equal_transformers(
    size: int, case: str, results: Any, references: Any
) -> None:
    expected = references[CASES[size][case][0]]["gradients"]
    assert "score.weight" in expected
    check_gradients([rank["gradients"] for rank in results[case]], expected)


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_critic_metrics_merge_over_ranks(size: int, case: str, results: Any, references: Any) -> None:
    metrics = merge_metrics([rank["metrics"][0] for rank in results[case]])
    for name, value in references[CASES[size][case][0]]["metrics"].items():
        assert metrics[name].value == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert metrics["critic/clip_fraction"].value > 0
    assert metrics["critic/lr"].value == pytest.approx(LR / 2)
    assert metrics["critic/trained_tokens"].value == sum(
        policy_batch.trained(sample).sum() for sample in policy_batch.UPDATES[0]
    )
    assert not [name for name in metrics if name.startswith("actor/")]


@pytest.mark.parametrize("case", [*CASES[2], "dense cut"])
def test_critic_updates_on_ranks_equal_one_rank(case: str, results: Any) -> None:
    model = case.split(maxsplit=1)[0]
    expected = _joined(results[model], "weights")
    error, name = _worst(_joined(results[case], "weights"), expected)
    assert error <= WEIGHT_TOLERANCE, f"{name}: {error:.1e}"
    norms = [
        merge_metrics([rank["metrics"][1] for rank in results[c]])["critic/grad_norm"].value for c in (model, case)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_critic_checkpoint_of_shards_resumes_in_pp2(results: Any) -> None:
    saved, loaded = _joined(results[SAVED], "weights"), _joined(results[RESUMED], "loaded")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    error, name = _worst(_joined(results[RESUMED], "third"), _joined(results[SAVED], "third"))
    assert error <= WEIGHT_TOLERANCE, name
    assert _worst(_joined(results[SAVED], "third"), saved)[0] > 1e-3  # it was an update


def _causal(rank: int, directories: dict[str, str], size: int) -> dict[str, Any]:
    """Build a critic from a causal model with tied embeddings, before any update."""
    critic = _critic(rank, directories["causal"], {"pp": size}, SMALL)
    values = dict(critic.values(policy_batch.shares(critic), policy_batch.chunks()).values)
    return {"values": values, "weights": _pieces(critic)}


def test_critic_from_causal_model_has_same_small_head_in_every_layout(directories: dict[str, str]) -> None:
    from transformers import AutoModel

    one, two = (launch(_causal, size, directories, size) for size in (1, 2))
    weights = _joined(one, "weights")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in _joined(two, "weights").items())
    head = weights["score.weight"]
    assert head.shape == (1, 32)
    assert 0.7 / 33 < head.std() < 1.3 / 33  # 1 / (h + 1)
    trunk = AutoModel.from_pretrained(directories["causal"], attn_implementation="eager").double()
    for sample, values in one[0]["values"].items():
        tokens = torch.from_numpy(policy_batch.sequence(sample).astype(np.int64))
        positions = policy_batch.PROMPTS[sample] + np.flatnonzero(policy_batch.trained(sample)) - 1
        with torch.no_grad():
            expected = trunk(tokens[None]).last_hidden_state[0, positions] @ head[0]
        assert np.abs(values - expected.numpy()).max() <= VALUE_TOLERANCE


LEARNING_STEPS = 40


def _learn(rank: int, directories: dict[str, str], size: int) -> list[dict[str, Any]]:
    """Return the metrics of steps on the same responses; all tokens of a response have the same return."""
    critic = _critic(rank, directories["causal"], {"pp": size}, ONE_MICROBATCH)
    wanted = {sample: np.full(len(returns(sample)), sample % 3 - 0.5, np.float32) for sample in SAMPLES}
    chunks, shares, found = policy_batch.chunks(), policy_batch.shares(critic), []
    for _ in range(LEARNING_STEPS):
        batch = critic.values(shares, chunks)
        found.append(merge_metrics([critic.update(batch, index, wanted) for index in range(len(shares))]))
    return found


def test_critic_learns_returns_determined_by_prompts(directories: dict[str, str]) -> None:
    found = launch(_learn, 1, directories, 1)[0]
    explained = [step["critic/explained_variance"].value for step in found]
    assert explained[0] < 0.05  # initial values are near 0 and similar
    assert explained[-1] > 0.9
    losses = [step["critic/loss"].value for step in found]
    assert losses[-1] < 0.1 * losses[0]


def _refusals(rank: int, directories: dict[str, str], root: str) -> dict[str, Any]:
    """Return the errors of invalid cases on one rank."""
    from mcore_rl.errors import McoreRLError
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from tests.distributed.saving import save_checkpoint

    def said(call: Any) -> str:
        try:
            call()
        except (McoreRLError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    found = {}
    save_checkpoint(root, policy_batch.build_actor(policy_batch.config(directories["policy"], {}, SMALL)))
    critic = _critic(rank, directories["dense"], {}, SMALL)
    found["policy's checkpoint"] = said(lambda: load_checkpoint(root, critic))
    wanted = {sample: returns(sample) for sample in SAMPLES}
    batch = critic.values(policy_batch.shares(critic), policy_batch.chunks())
    found["no values"] = said(lambda: critic.update(replace(batch, values={}), 0, wanted))
    found["short"] = said(lambda: critic.update(batch, 0, wanted | {2: wanted[2][1:]}))
    before = _pieces(critic)
    broken = wanted | {4: np.full_like(wanted[4], np.nan)}
    found["nan"] = said(lambda: critic.update(batch, 0, broken))
    found["kept"] = all(np.array_equal(a[-1], b[-1]) for a, b in zip(before, _pieces(critic), strict=True))
    found["layout"] = said(lambda: _critic(rank, directories["dense"], {"tp": 3}, SMALL))
    found["model"] = said(lambda: _critic(rank, root, {}, SMALL))
    return found


def test_critic_with_invalid_checkpoint_names_the_problem(directories: dict[str, str], tmp_path: Path) -> None:
    (found,) = launch(_refusals, 1, directories, str(tmp_path))
    # Padding is allowed for a vocabulary projection, so its first row could be loaded as a head.
    assert "CheckpointError" in found["policy's checkpoint"]
    assert "output_layer.weight has shape (96, 32), in the model (1, 32)" in found["policy's checkpoint"]
    assert "no old values" in found["no values"]
    assert found["short"].startswith("ValueError: sample 2")
    assert found["nan"].startswith("NonFiniteError")
    assert "sample 4 " in found["nan"]
    assert found["kept"]
    assert found["layout"].startswith("ConfigError: critic.parallel.tp")
    assert found["model"].startswith("ConfigError: critic.hf_path=")
