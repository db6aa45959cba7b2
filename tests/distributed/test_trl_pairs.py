"""Tokens, loss and gradient of a batch of pairs equal TRL's DPOTrainer, which has no label smoothing for DPO, and TRL's
RewardTrainer."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.config.objectives import PreferenceConfig
from mcore_rl.types import SequenceLogp
from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.e2e.runs import write_task
from tests.readme import ROOT
from tests.tiny_models import write_tiny_classifier, write_tiny_model

PYTHON = ROOT / ".venv-trl" / "bin" / "python"
PEER = ROOT / "tests" / "distributed" / "trl_pairs.py"
# TRL's float64 against our float32.
TOLERANCE = 1e-5
FORMS: dict[str, tuple[dict[str, Any], PreferenceConfig]] = {
    "sigmoid": ({"beta": 0.3}, PreferenceConfig(beta=0.3)),
    "normalized": (
        {"beta": 3.0, "loss_type": "sigmoid_norm"},
        PreferenceConfig(beta=3.0, length_normalized=True),
    ),
    "ipo": ({"beta": 0.4, "loss_type": "ipo"}, PreferenceConfig(loss="ipo", beta=0.4, length_normalized=True)),
    "hinge": ({"beta": 0.4, "loss_type": "hinge"}, PreferenceConfig(loss="hinge", beta=0.4)),
    "robust": (
        {"beta": 0.3, "loss_type": "robust", "label_smoothing": 0.2},
        PreferenceConfig(loss="robust", beta=0.3, label_smoothing=0.2),
    ),
    "reward model": ({"center_rewards_coefficient": 0.03}, PreferenceConfig(center_rewards_coefficient=0.03)),
}
SCORES = "reward model"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-trl: scripts/setup_trl.sh")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a policy and its tokenizer, a reference, and pairs of texts of different lengths."""
    directory = tmp_path_factory.mktemp("trl")
    write_task(directory, "qwen3")
    sizes = json.loads((directory / "model" / "config.json").read_text())
    same = {name: sizes[name] for name in ("vocab_size", "head_dim", "eos_token_id")}
    write_tiny_model(directory / "reference", "qwen3", seed=8, std=0.06, **same)
    write_tiny_classifier(directory / "classifier", "qwen3", **same)
    for file in (directory / "model").glob("*token*"):
        shutil.copy(file, directory / "classifier")
    rng = random.Random(7)

    def text(low: int, high: int) -> str:
        return "".join(rng.choices("0123456789+-", k=rng.randrange(low, high)))

    rows = [
        {"prompt": text(2, 9) + "=", "chosen": text(1, 8), "rejected": text(1, 8), "margin": number / 4}
        for number in range(6)
    ]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.fixture(scope="module")
def theirs(task: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of TRL by form."""
    from safetensors.torch import load_file

    folder = task / "trl"
    folder.mkdir()
    models = {"model": str(task / "model"), "reference": str(task / "reference")}
    scored = {"model": str(task / "classifier"), "reference": None}
    forms = {
        form: (scored if form == SCORES else models) | {"options": options} for form, (options, _) in FORMS.items()
    }
    settings = folder / "settings.json"
    settings.write_text(json.dumps({"folder": str(folder), "data": str(task / "pairs.jsonl"), "forms": forms}))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(PYTHON), str(PEER), str(settings)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return {form: load_file(folder / f"{form}.safetensors") for form in FORMS}


@pytest.fixture(scope="module")
def ours(task: Path) -> dict[str, dict[str, Any]]:
    """Our results by form."""
    (found,) = launch(measure_all, 1, str(task))
    return found


def measure_all(rank: int, task: str) -> dict[str, dict[str, Any]]:
    return {form: measure(task, form) for form in FORMS}


def measure(task: str, form: str) -> dict[str, Any]:
    """Train on the pairs as a run on one rank does."""
    from mcore_rl.config.schema import DataConfig, RolloutConfig
    from mcore_rl.data.batching import UpdateSchedule, build_batch, gather
    from mcore_rl.data.supervised.encoder import ResponseEncoder
    from mcore_rl.data.supervised.loading import load_texts
    from mcore_rl.data.supervised.targets import scored_chunk, text_chunk
    from mcore_rl.data.tokenizer import load_tokenizer
    from mcore_rl.preparation.texts import FORMATS
    from mcore_rl.text_objectives import mean_over_pairs
    from mcore_rl.trainer.preference import PairBatch, PairObjective

    section, scores = FORMS[form][1], form == SCORES
    objective = "reward_model" if scores else "dpo"
    encoder = ResponseEncoder(load_tokenizer(f"{task}/model"), DataConfig(template="plain"), stop_ids=(1,))
    pairs, _ = load_texts(f"{task}/pairs.jsonl", encoder, FORMATS[objective], RolloutConfig())
    rows = np.arange(len(pairs))
    buffers, scalars = scored_chunk(pairs, rows, padding_id=0) if scores else text_chunk(pairs, rows)
    batch = build_batch(
        [buffers],
        gather([scalars]),
        schedule=UpdateSchedule(len(pairs), num_dp_ranks=1),
        weights_of=mean_over_pairs,
    )
    config = policy_batch.config(f"{task}/{'classifier' if scores else 'model'}", {}, 64)
    config.algorithm.entropy_coefficient = 0.0
    config.algorithm.policy_loss = type(config.algorithm.policy_loss)(name=objective)
    config.trainer.objective, config.preference = objective, section
    config.reference.hf_path = None if scores else f"{task}/reference"
    actor = policy_batch.build_actor(config)
    trained = _Trained(actor, buffers)
    pair_batch = PairBatch(batch, pairs.margins)
    metrics = PairObjective(next_batch=lambda step: pair_batch, section=section, trains_scores=scores).train(
        trained,  # type: ignore[arg-type]
        1,
    )
    ends = -1 if scores else None  # a scored text has a dummy token at its end
    sequences = [buffers.tokens[a:b].tolist()[:ends] for a, b in itertools.pairwise(buffers.token_offsets)]
    return {
        "loss": metrics["actor/loss"].value,
        "sequences": sequences,
        "gradients": policy_batch.gradient_pieces(actor),
    }


class _Trained:
    """The driver's view of an actor on one rank, which accumulates gradients only."""

    def __init__(self, actor: Any, buffers: Any) -> None:
        self.actor, self.buffers = actor, buffers

    def _shares(self, batch: Any) -> Any:
        return batch.shares(1, np.arange(len(batch), dtype=np.int32))[0].by_update()

    def sequence_logp(self, batch: Any) -> SequenceLogp:
        sums = self.actor.sequence_logp(self._shares(batch), [self.buffers])
        found = [None if of is None else np.array([of[s] for s in range(len(batch))]) for of in vars(sums).values()]
        return SequenceLogp(*found)  # type: ignore[arg-type]

    def recompute_logp(self, batch: Any) -> Any:
        return self.actor.recompute_logp(self._shares(batch), [self.buffers])[0]

    def update(self, batch: Any) -> dict[str, Any]:
        with policy_batch.complete_gradients(self.actor):
            self.actor.accumulate_gradients(batch, 0)
        return {}


@pytest.mark.parametrize("form", FORMS)
def test_batch_of_pairs_equals_trl(form: str, ours: Any, theirs: Any) -> None:
    found, wanted = ours[form], theirs[form]
    # TRL pads with the tokenizer's padding token, 0, and has all chosen sequences first.
    longest = wanted["input_ids"].shape[1]
    padded = [row + [0] * (longest - len(row)) for row in found["sequences"]]
    assert sorted(padded) == sorted(wanted["input_ids"].tolist())
    assert found["loss"] == pytest.approx(float(wanted["loss"]), rel=TOLERANCE)
    gradients = policy_batch.assemble([found["gradients"]])
    assert gradients.keys() == wanted.keys() - {"loss", "input_ids"}
    for name, gradient in gradients.items():
        error = float((gradient - wanted[name]).abs().max() / wanted[name].abs().max())
        assert error <= TOLERANCE, (name, error)
