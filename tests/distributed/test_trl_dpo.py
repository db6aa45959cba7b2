"""Tokens, loss and gradient of a batch of pairs equal DPOTrainer's in TRL, which has no label smoothing for DPO."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.preference import score_pairs
from mcore_rl.config.objectives import PreferenceConfig
from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.e2e.runs import write_task
from tests.readme import ROOT
from tests.tiny_models import write_tiny_model

PYTHON = ROOT / ".venv-trl" / "bin" / "python"
PEER = ROOT / "tests" / "distributed" / "trl_dpo.py"
# TRL's float64 against our float32.
TOLERANCE = 1e-5
FORMS: dict[str, tuple[dict[str, Any], PreferenceConfig]] = {
    "sigmoid": ({"beta": 0.3}, PreferenceConfig(beta=0.3)),
    "normalized": (
        {"beta": 3.0, "loss_type": "sigmoid_norm"},
        PreferenceConfig(beta=3.0, length_normalized=True),
    ),
}

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-trl: scripts/setup_trl.sh")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a policy and its tokenizer, a reference, and pairs of texts of different lengths."""
    directory = tmp_path_factory.mktemp("trl")
    write_task(directory, "qwen3")
    sizes = json.loads((directory / "model" / "config.json").read_text())
    same = {name: sizes[name] for name in ("vocab_size", "head_dim", "eos_token_id")}
    write_tiny_model(directory / "reference", "qwen3", seed=8, std=0.06, **same)
    rng = random.Random(7)

    def text(low: int, high: int) -> str:
        return "".join(rng.choices("0123456789+-", k=rng.randrange(low, high)))

    rows = [{"prompt": text(2, 9) + "=", "chosen": text(1, 8), "rejected": text(1, 8)} for _ in range(6)]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def peers(task: Path, options: dict[str, Any], output: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    names = {"model": "model", "reference": "reference", "data": "pairs.jsonl"}
    settings = {key: str(task / name) for key, name in names.items()} | {"output": str(output), "options": options}
    (output / "settings.json").write_text(json.dumps(settings))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(PYTHON), str(PEER), str(output / "settings.json"), str(output / "found.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(output / "found.safetensors")


def measure(rank: int, task: str, section: PreferenceConfig) -> dict[str, Any]:
    """Train on the pairs as a run on one rank does."""
    from mcore_rl.config.schema import DataConfig, RolloutConfig
    from mcore_rl.data.batching import UpdateSchedule, build_batch, gather
    from mcore_rl.data.supervised.loading import load_pairs
    from mcore_rl.data.supervised.targets import pair_chunk
    from mcore_rl.data.tokenizer import load_tokenizer
    from mcore_rl.text_objectives import mean_over_pairs

    data = DataConfig(template="plain")
    pairs, _ = load_pairs(f"{task}/pairs.jsonl", load_tokenizer(f"{task}/model"), data, RolloutConfig(), stop_ids=(1,))
    buffers, scalars = pair_chunk(pairs, np.arange(len(pairs)))
    batch = build_batch(
        [buffers],
        gather([scalars]),
        schedule=UpdateSchedule(len(pairs), num_dp_ranks=1),
        weights_of=mean_over_pairs,
    )
    config = policy_batch.config(f"{task}/model", {}, 64)
    config.algorithm.entropy_coefficient = 0.0
    config.algorithm.policy_loss = type(config.algorithm.policy_loss)(name="dpo")
    config.trainer.objective, config.preference = "dpo", section
    config.reference.hf_path = f"{task}/reference"
    actor = policy_batch.build_actor(config)
    places = np.arange(len(batch), dtype=np.int32)
    sums = actor.sequence_logp(batch.shares(1, places)[0].by_update(), [buffers])
    policy, reference = (
        torch.tensor([values[sample] for sample in range(len(batch))], dtype=torch.float64).view(-1, 2)
        for values in (sums.policy, sums.reference)
    )
    scored = score_pairs(policy, reference, torch.from_numpy(batch.trained_tokens.reshape(-1, 2)), section)
    batch.advantages[:] = scored.weights.reshape(-1).numpy()
    with policy_batch.complete_gradients(actor):
        actor.accumulate_gradients(actor.recompute_logp(batch.shares(1, places)[0].by_update(), [buffers])[0], 0)
    sequences = [buffers.tokens[a:b].tolist() for a, b in itertools.pairwise(buffers.token_offsets)]
    return {
        "loss": float(scored.loss.mean()),
        "sequences": sequences,
        "gradients": policy_batch.gradient_pieces(actor),
    }


@pytest.mark.parametrize("form", FORMS)
def test_dpo_batch_equals_trl(task: Path, form: str, tmp_path: Path) -> None:
    options, section = FORMS[form]
    theirs = peers(task, options, tmp_path)
    (ours,) = launch(measure, 1, str(task), section)
    # TRL pads with the tokenizer's padding token, 0, and has all chosen sequences first.
    longest = theirs["input_ids"].shape[1]
    padded = [row + [0] * (longest - len(row)) for row in ours["sequences"]]
    assert sorted(padded) == sorted(theirs["input_ids"].tolist())
    assert ours["loss"] == pytest.approx(float(theirs["loss"]), rel=TOLERANCE)
    gradients = policy_batch.assemble([ours["gradients"]])
    assert gradients.keys() == theirs.keys() - {"loss", "input_ids"}
    for name, gradient in gradients.items():
        error = float((gradient - theirs[name]).abs().max() / theirs[name].abs().max())
        assert error <= TOLERANCE, (name, error)
