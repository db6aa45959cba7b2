"""Training of a reward model: scores, and the gradient in every parameter and layout, equal
the Bradley-Terry loss on transformers' sequence classification in float64. With adapters, checkpoints contain the head.

One launch per number of ranks runs all its cases.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.preference import compare_scores
from mcore_rl.config.models import LoraConfig
from mcore_rl.config.objectives import PreferenceConfig
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.supervised.targets import Target, Targets, TextSet, scored_chunk
from mcore_rl.text_objectives import mean_over_pairs
from mcore_rl.types import RankShare
from model_converters.errors import ConversionError
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import ONE_MICROBATCH, SMALL, case_parameters, check_gradients, launch_cases
from tests.distributed.launch import launch
from tests.tiny_models import checkpoint_tensors, write_tiny_classifier, write_tiny_model

# As in test_reward_model and test_preference: float32 against float64.
SCORE_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 2e-5
PADDING = 7
PAIRS = [(0, 3), (2, 1), (4, 5), (6, 7)]
"""Chosen and rejected sequences; with SMALL micro-batches and several ranks, most pairs are in different ones."""
SECTION = PreferenceConfig(center_rewards_coefficient=0.02)
MARGINS = np.array([0.0, 0.5, 1.0, 0.2])
Case = tuple[str, dict[str, Any], int]
CASES: dict[int, dict[str, Case]] = {
    1: {
        "moe": ("moe", {}, ONE_MICROBATCH),
        "dense split": ("dense", {}, SMALL),
        "padded": ("padded", {}, SMALL),
        "full recomputation": ("dense", {"recompute": "full"}, SMALL),
        "offload": ("dense", {"offload": True}, SMALL),
    },
    2: {
        "dense dp2": ("dense", {}, SMALL),
        "dense tp2": ("dense", {"tp": 2}, SMALL),
        "dense pp2": ("dense", {"pp": 2}, SMALL),
        "padded cp2": ("padded", {"cp": 2}, SMALL),
        "dense sharded": ("dense", {"shard_parameters": True}, SMALL),
        "dense fsdp2": ("dense", {"strategy": "fsdp2"}, SMALL),
        "moe ep2": ("moe", {"ep": 2}, SMALL),
        "moe cp2 ep2": ("moe", {"cp": 2, "ep": 2}, SMALL),
    },
}

SAVED = "moe ep2"
"""Case whose model is saved with the weights of its HF directory."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("rewards")
    write_tiny_classifier(root / "dense", "qwen3")
    write_tiny_classifier(root / "moe", "qwen3_moe")
    write_tiny_classifier(root / "padded", "llama", pad_token_id=PADDING)
    write_tiny_model(root / "causal", "qwen3")
    return {path.name: str(path) for path in root.iterdir()} | {"saved": str(root / "saved")}


def _text(sequence: int) -> np.ndarray:
    """Return a text; every second one ends with padding tokens, of which the model named `padded` scores none."""
    tokens = policy_batch.sequence(sequence)
    tokens[-2:] = PADDING if sequence % 2 else tokens[-2:]
    return tokens


def _texts() -> TextSet:
    """Return the pairs; each text is divided into a prompt and a response."""
    prompts = [_text(chosen)[:1] for chosen, _ in PAIRS]
    # Both responses of a pair have the same prompt.
    responses = [[_text(pair[column])[1:] for pair in PAIRS] for column in (0, 1)]
    sets = tuple(Targets.of([Target(ids, np.ones(len(ids), np.uint8)) for ids in column]) for column in responses)
    offsets = np.arange(len(PAIRS) + 1, dtype=np.int64)
    return TextSet(PromptSet(np.concatenate(prompts), offsets, {}), sets, MARGINS)


def _sequences() -> list[np.ndarray]:
    texts = _texts()
    prompts = texts.prompts.tokens
    return [
        np.concatenate([prompts[row : row + 1], of[row].ids]) for row in range(len(PAIRS)) for of in texts.responses
    ]


class _Expected:
    """The loss by autograd through transformers' model in float64, one unpacked sequence at a time."""

    def __init__(self, directory: str) -> None:
        from transformers import AutoModelForSequenceClassification

        loops = {"attn_implementation": "eager", "experts_implementation": "eager", "local_files_only": True}
        model = AutoModelForSequenceClassification.from_pretrained(directory, **loops).double().eval()
        # transformers gives the padding token's embedding no gradient; in a packed row it is a token like others.
        model.model.embed_tokens.padding_idx = None
        scores = torch.stack(
            [model(torch.from_numpy(text.astype(np.int64))[None]).logits[0, 0] for text in _sequences()]
        )
        chosen, rejected = scores.view(-1, 2).unbind(1)
        h = chosen - rejected - torch.from_numpy(MARGINS)
        loss = (-torch.log(torch.sigmoid(h)) + SECTION.center_rewards_coefficient * (chosen + rejected) ** 2).mean()
        loss.backward()
        self.scores, self.loss = scores.detach().tolist(), float(loss.detach())
        self.gradients = checkpoint_tensors(model, {name: p.grad for name, p in model.named_parameters()})


@pytest.fixture(scope="module")
def expected(directories: dict[str, str]) -> dict[str, _Expected]:
    return {name: _Expected(directories[name]) for name in ("dense", "moe", "padded")}


def _actor(directory: str, options: dict[str, Any], tokens: int, lora: LoraConfig | None = None) -> Any:
    options = dict(options)
    recompute, offload = options.pop("recompute", "none"), options.pop("offload", False)
    config = policy_batch.config(directory, options, tokens)
    config.algorithm.entropy_coefficient = 0.0
    config.algorithm.policy_loss = type(config.algorithm.policy_loss)(name="reward_model")
    config.trainer.objective, config.preference = "reward_model", SECTION
    config.actor.recompute, config.actor.optimizer.lr = recompute, 1e-2
    config.actor.offload.params = config.actor.offload.optimizer = offload
    config.actor.lora = lora or LoraConfig()
    return policy_batch.build_actor(config)


def _share(actor: Any, buffers: Any) -> RankShare:
    """Divide the responses unevenly: the last data-parallel rank gets one, so it needs dummy micro-batches."""
    dp, place = actor.layout.dp, actor.layout.coordinates(actor.rank)
    mine = np.array([s for s in range(2 * len(PAIRS)) if min(s, dp - 1) == dp - 1 - place.dp])
    zeros = np.zeros(len(mine), np.float32)
    return RankShare(
        samples=mine,
        chunk_ids=np.zeros(len(mine), np.int32),
        rows=mine.astype(np.int32),
        origins=np.stack([np.zeros_like(mine), mine], 1).astype(np.int32),
        total_tokens=buffers.prompt_tokens[mine],
        rewards=zeros,
        advantages=zeros,
        loss_weights=np.full(len(mine), mean_over_pairs(np.ones(2 * len(PAIRS)))[0]),
    )


def _weighted(actor: Any) -> tuple[Any, dict[int, float], float]:
    """Return the batch of an update with the weights of its pairs, the scores, and the loss."""
    import torch.distributed as dist

    buffers, _ = scored_chunk(_texts(), np.arange(len(PAIRS)), actor.hf_config.get("pad_token_id"))
    share = _share(actor, buffers)
    # The driver joins the scores of one rank per data-parallel coordinate.
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, actor.sequence_logp([share], [buffers]))
    assert all(sums.reference is None for sums in gathered)
    scores = {sample: value for sums in gathered for sample, value in sums.policy.items()}
    table = torch.tensor([scores[sample] for sample in range(2 * len(PAIRS))]).view(-1, 2)
    pairs = compare_scores(table, torch.from_numpy(MARGINS), SECTION)
    advantages = pairs.weights.reshape(-1).numpy().astype(np.float32)
    batch, _ = actor.recompute_logp([replace(share, advantages=advantages[share.samples])], [buffers])
    return batch, scores, float(pairs.loss.mean())


def _measure(rank: int, directories: dict[str, str], cases: dict[str, Case]) -> dict[str, Any]:
    return {name: _measure_one(directories, name, *case) for name, case in cases.items()}


def _measure_one(
    directories: dict[str, str], name: str, model: str, options: dict[str, Any], tokens: int
) -> dict[str, Any]:
    from tests.distributed.saving import save_checkpoint

    actor = _actor(directories[model], options, tokens)
    batch, scores, loss = _weighted(actor)
    with policy_batch.complete_gradients(actor):
        _, reports = actor.accumulate_gradients(batch, 0)
    if name == SAVED:
        save_checkpoint(directories["saved"], actor)
    metrics = {name for report in reports for name in report.metrics}
    return {"scores": scores, "loss": loss, "gradients": policy_batch.gradient_pieces(actor), "metrics": metrics}


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Results of all ranks by case."""
    return launch_cases(_measure, CASES, directories)


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_scores_in_every_layout_equal_transformers(size: int, case: str, results: Any, expected: Any) -> None:
    wanted = dict(enumerate(expected[CASES[size][case][0]].scores))
    for rank in results[case]:
        assert rank["scores"] == pytest.approx(wanted, abs=SCORE_TOLERANCE)
        assert "actor/entropy" not in rank["metrics"]


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_gradient_in_every_layout_equals_autograd(size: int, case: str, results: Any, expected: Any) -> None:
    wanted = expected[CASES[size][case][0]]
    assert "score.weight" in wanted.gradients
    for rank in results[case]:
        assert rank["loss"] == pytest.approx(wanted.loss, rel=2e-5)
    check_gradients([rank["gradients"] for rank in results[case]], wanted.gradients, GRADIENT_TOLERANCE)


def test_saved_model_converts_to_the_classifier_it_was_read_from(
    directories: dict[str, str], results: Any, tmp_path: Path
) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForSequenceClassification

    from model_converters.dcp.convert import open_saved, to_hf, verify

    source, saved = Path(directories["moe"]), Path(directories["saved"])
    with pytest.raises(ConversionError, match="is a critic or a reward model"):
        open_saved(saved)
    to_hf(saved, tmp_path / "hf")
    (expected,), (found,) = (sorted(each.glob("*.safetensors")) for each in (source, tmp_path / "hf"))
    tensors = load_file(found)
    assert tensors.keys() == load_file(expected).keys()
    for name, tensor in load_file(expected).items():
        assert torch.equal(tensors[name], tensor), name
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert model.config.num_labels == 1
    assert verify(tmp_path / "hf", saved).holds


def _train_adapters(rank: int, directory: str, root: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """Update a causal model with adapters and a new head, save it, and load it again."""
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from tests.distributed.saving import save_checkpoint

    lora = LoraConfig(rank=4)
    actor = _actor(directory, parallel, SMALL, lora)
    before = policy_batch.hf_pieces(actor)
    losses = []
    for _ in range(3):
        batch, _, loss = _weighted(actor)
        losses.append(loss)
        actor.update(batch, 0)
    actor.gather_parameters()
    save_checkpoint(root, actor)
    again = _actor(directory, parallel, SMALL, lora)
    load_checkpoint(root, again)
    batch, scores, _ = _weighted(again)
    # The optimizer's state of the head is restored, too: the next updates are equal.
    for each in (actor, again):
        each.update(batch, 0)
        each.gather_parameters()
    return {
        "losses": losses,
        "scores": (_weighted(actor)[1], _weighted(again)[1]),
        "before": before,
        "after": policy_batch.hf_pieces(actor),
        "again": policy_batch.hf_pieces(again),
        "restored": scores,
    }


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"pp": 2}], ids=["dp2", "tp2", "pp2"])
def test_adapters_train_the_head_and_checkpoints_contain_it(
    directories: dict[str, str], parallel: dict[str, Any], tmp_path: Path
) -> None:
    ranks = launch(_train_adapters, 2, directories["causal"], str(tmp_path / "saved"), parallel)
    before, after, again = (
        policy_batch.assemble([rank[key] for rank in ranks]) for key in ("before", "after", "again")
    )
    assert ranks[0]["losses"][-1] < ranks[0]["losses"][0]
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert "score.weight" in changed
    assert not [name for name in changed if "embed" in name or "norm" in name]
    assert all(torch.equal(after[name], again[name]) for name in after)
    assert ranks[0]["scores"][0] == ranks[0]["scores"][1]
