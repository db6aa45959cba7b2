"""Tokens, loss and gradient of a batch of pairs equal TRL's DPOTrainer, which has no label smoothing for DPO, and TRL's
RewardTrainer; of a batch of conversations, its SFTTrainer."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.config.objectives import PreferenceConfig
from mcore_rl.types import Mean, SequenceLogp
from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.e2e.runs import write_task
from tests.readme import ROOT
from tests.tiny_models import write_tiny_classifier, write_tiny_model

PYTHON = ROOT / ".venv-trl" / "bin" / "python"
PEER = ROOT / "tests" / "distributed" / "trl_peer.py"
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
    "conversations": ({"assistant_only_loss": True}, PreferenceConfig()),
}
"""TRL's options and ours, by form."""
OBJECTIVES = {"reward model": "reward_model", "conversations": "sft"}
"""Objectives of forms other than DPO's."""
MODELS = {"dpo": "model", "reward_model": "classifier", "sft": "chat"}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}={% endif %}{% endfor %}"
)

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-trl: scripts/setup_trl.sh")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a policy and its tokenizer, a reference, and pairs and conversations of different lengths."""
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
    write_rows(directory / "pairs.jsonl", rows)
    shutil.copytree(directory / "model", directory / "chat")
    (directory / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    turns = [[text(1, 8) for _ in range(2 * number)] for number in (1, 2, 3, 1)]
    roles = itertools.cycle(("user", "assistant"))
    conversations = [[{"role": next(roles), "content": turn} for turn in each] for each in turns]
    write_rows(directory / "conversations.jsonl", [{"messages": each} for each in conversations])
    return directory


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def data_of(task: str | Path, objective: str) -> str:
    return f"{task}/{'conversations' if objective == 'sft' else 'pairs'}.jsonl"


@pytest.fixture(scope="module")
def theirs(task: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of TRL by form."""
    from safetensors.torch import load_file

    folder = task / "trl"
    folder.mkdir()
    forms = {}
    for form, (options, _) in FORMS.items():
        objective = OBJECTIVES.get(form, "dpo")
        paths = {"data": data_of(task, objective), "model": f"{task}/{MODELS[objective]}"}
        forms[form] = paths | {"reference": f"{task}/reference", "objective": objective, "options": options}
    settings = folder / "settings.json"
    settings.write_text(json.dumps({"folder": str(folder), "forms": forms}))
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
    """Train on the pairs or conversations as a run on one rank does."""
    from mcore_rl.algorithms import loss_weights
    from mcore_rl.config.schema import DataConfig, RolloutConfig
    from mcore_rl.data.batching import UpdateSchedule, build_batch, gather
    from mcore_rl.data.supervised.encoder import ResponseEncoder
    from mcore_rl.data.supervised.loading import load_texts
    from mcore_rl.data.supervised.targets import scored_chunk, text_chunk
    from mcore_rl.data.tokenizer import load_tokenizer
    from mcore_rl.preparation.texts import FORMATS
    from mcore_rl.text_objectives import mean_over_pairs
    from mcore_rl.trainer.preference import PairBatch, PairObjective
    from mcore_rl.trainer.supervised import TargetObjective

    section, objective = FORMS[form][1], OBJECTIVES.get(form, "dpo")
    scores, model = objective == "reward_model", f"{task}/{MODELS[objective]}"
    template = "chat" if objective == "sft" else "plain"
    encoder = ResponseEncoder(load_tokenizer(model), DataConfig(template=template), stop_ids=(1,))
    texts, _ = load_texts(data_of(task, objective), encoder, FORMATS[objective], RolloutConfig())
    rows = np.arange(len(texts))
    buffers, scalars = scored_chunk(texts, rows, padding_id=0) if scores else text_chunk(texts, rows)
    weights_of = partial(loss_weights, "token-mean") if objective == "sft" else mean_over_pairs
    schedule = UpdateSchedule(len(texts), num_dp_ranks=1)
    batch = build_batch([buffers], gather([scalars]), schedule=schedule, weights_of=weights_of)
    config = policy_batch.config(model, {}, 64)
    config.algorithm.entropy_coefficient = 0.0
    config.algorithm.policy_loss = type(config.algorithm.policy_loss)(name=objective)
    config.trainer.objective, config.preference = objective, section
    config.reference.hf_path = f"{task}/reference" if objective == "dpo" else None
    actor = policy_batch.build_actor(config)
    trained: Any = _Trained(actor, buffers)
    if objective == "sft":
        metrics = TargetObjective(next_batch=lambda step: batch).train(trained, 1)
    else:
        pair_batch = PairBatch(batch, texts.margins)
        metrics = PairObjective(next_batch=lambda step: pair_batch, section=section, trains_scores=scores).train(
            trained, 1
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
            _, reports = self.actor.accumulate_gradients(batch, 0)
        # PairObjective replaces the loss by its own.
        return {"actor/loss": Mean(sum(report.loss for report in reports), 1)}


@pytest.mark.parametrize("form", FORMS)
def test_batch_equals_trl(form: str, ours: Any, theirs: Any) -> None:
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
