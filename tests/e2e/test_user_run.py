"""A run of LoRA adapters with a user's functions: reward, filter, loss, and advantage. One source has another loss.

Engines use merged weights, the base model is the reference, and PEFT reads the export.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.e2e.runs import ONE_RANK, metrics, records_of, train
from tests.tiny_models import reference_logits

pytestmark = pytest.mark.slow

FUNCTIONS = """
import asyncio

import numpy as np
import torch

async def reward(data_source, solution_str, ground_truth, extra_info=None, *, bonus):
    await asyncio.sleep(0)
    digits = sum(c.isdigit() for c in solution_str)
    found = {"score": digits + float(bonus), "acc": digits > 4, "digits": digits, "first": solution_str[:1]}
    return found if digits % 2 else found | {"even": 1}

def every_second(*, rewards, accuracies, group_ids, lengths, clipped):
    return np.arange(len(rewards)) % 2 == 0

def loss(logp, old_logp, advantages, mask, rollout_logp, *, margin):
    return -advantages * logp, {"margin": margin}

def in_groups(token_rewards, mask, group_ids, values, baseline_rewards, *, scale):
    rewards = token_rewards.sum(-1)
    _, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    assert (sizes == 4).all()
    return scale * (rewards - (torch.zeros(len(sizes)).index_add(0, group, rewards) / sizes)[group])
"""
LORA = (
    "actor.lora.rank=4",
    "actor.lora.alpha=16",
    "actor.optimizer.lr=1e-2",
    "actor.offload.params=true",
    "algorithm.kl.in_loss=0.01",
    "weights.verify_every=1",
)
TOKENS = [5, 8, 12, 4, 9]


@pytest.fixture(scope="module")
def user_run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of two steps; its exports are beside it."""
    directory = tmp_path_factory.mktemp("user")
    path = directory / "mine.py"
    path.write_text(FUNCTIONS)
    rows = map(json.loads, (task.parent / "train.jsonl").read_text().splitlines())
    named = [row | {"data_source": ("sums", "others")[number % 2]} for number, row in enumerate(rows)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    train(
        task,
        directory / "run",
        *ONE_RANK,
        *LORA,
        f"reward.function={path}:reward",
        "reward.kwargs.bonus=0.25",
        "reward.overlong.enable=false",
        f"algorithm.filter={path}:every_second",
        f"algorithm.policy_loss.name={path}:loss",
        "algorithm.policy_loss.kwargs.margin=0.125",
        "algorithm.policy_loss.clip_high=null",
        f"algorithm.advantage={path}:in_groups",
        "algorithm.advantage_kwargs.scale=2",
        "algorithm.dynamic_sampling.enable=false",
        "algorithm.per_source=[{source: sums, policy_loss: {name: gspo}, kl_in_loss: 0.02}]",
        f"data.train={directory / 'train.jsonl'}",
        "data.val=null",
        "trainer.steps=2",
        f"trainer.export_hf={directory / 'merged'}",
        f"trainer.export_adapter={directory / 'adapter'}",
    )
    return directory / "run"


def test_functions_of_a_user_make_a_run(user_run: Path) -> None:
    first, records = metrics(user_run)[1], records_of(user_run, "step_1")
    assert len(records) == 32
    for record in records:
        digits = sum(c.isdigit() for c in record["response"])
        assert (record["reward"], record["accuracy"]) == (digits + 0.25, float(digits > 4))
        assert (record["digits"], record["first"]) == (digits, record["response"][:1])
        assert record.get("even") == (None if digits % 2 else 1)
    assert first["reward/digits"] == pytest.approx(sum(record["digits"] for record in records) / 32)
    assert first["reward/even"] == 1  # mean over the responses with this part
    assert first["reward/errors"] == 0
    assert first["groups/untrained_responses"] == 0.5
    assert first["actor/margin"] == 0.125
    assert first["advantages/max"] == pytest.approx(2 * max(deviations(records)), rel=1e-5)


def test_a_source_has_its_own_loss_and_metrics(user_run: Path) -> None:
    rows = [metrics(user_run)[step] for step in (1, 2)]
    assert all(row["actor/margin"] == 0.125 and "actor/margin/sums" not in row for row in rows)
    assert all(row["actor/ratio_mean/sums"] > 0 and "actor/ratio_mean" not in row for row in rows)
    assert 0 < rows[1]["actor/kl_reference/sums"] != rows[1]["actor/kl_reference"] > 0


def test_engines_have_the_merged_weights_and_the_reference_stays(user_run: Path) -> None:
    rows = metrics(user_run)
    with safe_open(user_run.parent / "merged" / "model.safetensors", "pt") as merged:
        num_tensors = len(merged.keys())
    for step in (1, 2):
        assert rows[step]["rollout/logp_diff_max"] < 1e-4  # float32 on both sides
        assert rows[step]["weights/tensors_verified"] == num_tensors
        assert rows[step]["actor/grad_norm"] > 0
    assert 0 < rows[1]["actor/kl_reference"] < rows[2]["actor/kl_reference"]


def test_peft_reads_the_adapter_and_computes_what_was_merged(user_run: Path, task: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    paths = (user_run.parent / "merged", task.parent / "model")
    base = AutoModelForCausalLM.from_pretrained(paths[1], dtype=torch.float32, attn_implementation="eager")
    (merged,), (plain,) = (reference_logits(path, [TOKENS]) for path in paths)
    adapter = peft.PeftModel.from_pretrained(base, user_run.parent / "adapter").eval()
    with torch.no_grad():
        adapted = adapter(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(adapted, merged, rtol=1e-5, atol=1e-5)
    assert (adapted - plain).abs().max() > 1e-3


def test_a_checkpoint_holds_adapters_only(user_run: Path, task: Path) -> None:
    """Compare sizes: the whole model would take at least as many bytes as model.safetensors."""
    tensors = sum(file.stat().st_size for file in (user_run / "checkpoints" / "step_2").rglob("*.distcp"))
    assert 0 < tensors < (task.parent / "model" / "model.safetensors").stat().st_size


def deviations(records: list[dict[str, float]]) -> list[float]:
    """Return each reward minus the mean of its group."""
    groups: dict[float, list[float]] = {}
    for record in records:
        groups.setdefault(record["group"], []).append(record["reward"])
    return [reward - sum(of_group) / len(of_group) for of_group in groups.values() for reward in of_group]
