"""Multi-token-prediction layers in Megatron's model: named, loaded and exported bitwise, or left out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from model_converters.families import family_for
from model_converters.mapping.table import bind
from tests.distributed import policy_batch
from tests.distributed.built import build
from tests.distributed.launch import launch
from tests.tiny_models import add_mtp_layer, write_tiny_model


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe"])
def directory(request: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model saved by transformers, with an additional layer for multi-token prediction."""
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "mtp", request.param, num_hidden_layers=2)
    add_mtp_layer(path)
    return str(path)


def _through_the_model(rank: int, directory: str, sizes: dict[str, int]) -> tuple[list[str], list[Any]]:
    """Names of the rank's tensors, and the HF slices that it exports after loading."""
    from mcore_rl.megatron.model import loading
    from mcore_rl.megatron.model.names import canonical_tensors
    from model_converters.mapping.plan import export_pieces, export_plan

    hf_config = json.loads((Path(directory) / "config.json").read_text())
    chunks, layout = build(hf_config, sizes)
    loading.load_hf(chunks, directory, layout)
    tensors = canonical_tensors(chunks)
    plans = export_plan(bind(family_for(hf_config).rows(hf_config), hf_config, torch.float32), layout)
    return sorted(tensors), [
        (plan.hf_name, plan.shape, piece.dim, piece.start, piece.rows, view.numpy().copy())
        for plan, piece, view in export_pieces(plans, tensors, rank)
    ]


@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "ep": 2}, {"pp": 2}], ids=str)
def test_model_with_mtp_layers_loads_and_exports_bitwise(sizes: dict[str, int], directory: str) -> None:
    ranks = launch(_through_the_model, 2 if sizes else 1, directory, sizes)
    exported = policy_batch.assemble([pieces for _, pieces in ranks])
    stored = load_file(Path(directory) / "model.safetensors")
    assert exported.keys() == stored.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(exported[name].float().numpy(), tensor.numpy(), err_msg=name)
    last = ranks[-1][0]
    assert "mtp.layers.0.eh_proj.weight" in last
    assert "embedding.word_embeddings.weight" in last


def _train_and_export(rank: int, directory: str, target: str) -> tuple[list[str], list[str]]:
    from mcore_rl.megatron.roles.export import export_hf

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcore_rl.megatron.roles.actor").addHandler(handler)
    actor = policy_batch.build_actor(policy_batch.config(directory, {"tp": 2}, 24))
    policy_batch.update_once(actor)
    export_hf(actor, target, directory)
    return sorted(actor.tensors()), records


def test_trainer_without_mtp_skips_layers_and_logs_once(directory: str, tmp_path: Path) -> None:
    ranks = launch(_train_and_export, 2, directory, str(tmp_path / "exported"))
    assert not any(name.startswith("mtp.") for names, _ in ranks for name in names)
    first, second = (records for _, records in ranks)
    assert len(first) == 1
    assert "multi-token prediction (num_nextn_predict_layers 1) is not trained" in first[0]
    assert second == []
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert not any(name.startswith("model.layers.2.") for name in exported)
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    policy_batch.reference_model(tmp_path / "exported")


def _train_and_keep(rank: int, directory: str, root: str) -> list[bool]:
    """Return True if an update changed this rank's part of the layers and a checkpoint restored it."""
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from mcore_rl.megatron.roles.export import export_hf
    from tests.distributed.saving import save_checkpoint

    config = policy_batch.config(directory, {"pp": 2}, 24)
    config.actor.mtp_loss_coefficient, config.actor.optimizer.lr = 0.3, 1e-2
    actor = policy_batch.build_actor(config)
    held = {name: tensor for name, tensor in actor.tensors().items() if name.startswith("mtp.")}
    loaded = {name: tensor.clone() for name, tensor in held.items()}
    policy_batch.update_once(actor)
    updated = {name: tensor.clone() for name, tensor in held.items()}
    save_checkpoint(f"{root}/checkpoint", actor)
    for tensor in held.values():
        tensor.zero_()
    load_checkpoint(f"{root}/checkpoint", actor)
    export_hf(actor, f"{root}/exported", directory)
    same = [torch.equal(held[name], tensor) for name, tensor in updated.items()]
    return same + [not torch.equal(loaded[name], updated[name]) for name in held if not name.endswith("expert_bias")]


def test_trained_mtp_layers_are_in_checkpoints_and_exports(directory: str, tmp_path: Path) -> None:
    nothing, found = launch(_train_and_keep, 2, directory, str(tmp_path))
    assert not nothing
    assert len(found) > 20
    assert all(found)
    exported, stored = (load_file(path / "model.safetensors") for path in (tmp_path / "exported", Path(directory)))
    assert exported.keys() == stored.keys()
    assert not torch.equal(exported["model.layers.2.eh_proj.weight"], stored["model.layers.2.eh_proj.weight"])
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["num_nextn_predict_layers"] == 1
