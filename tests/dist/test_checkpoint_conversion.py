"""HF directories to distributed checkpoints and back: every bit, in any layout, for megatron's own reader and writer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from model_converters.families import missing_engine_fields
from model_converters.hf_config import read_hf_config
from tests.dist import converting, policy_batch
from tests.dist.launch import launch
from tests.tiny_models import add_mtp_layer, write_tiny_model

Sizes = dict[str, Any]

ONE: Sizes = {"world_size": 1}
TP2: Sizes = {"world_size": 2, "tp": 2, "etp": 2}
PP2: Sizes = {"world_size": 2, "pp": 2}
VPP2: Sizes = {"world_size": 2, "pp": 2, "vpp": 2}
UNEVEN: Sizes = {"world_size": 4, "tp": 2, "pp": 2, "etp": 2, "first_stage_layers": 1}
EP2: Sizes = {"world_size": 2, "ep": 2}
TP2_EP2: Sizes = {"world_size": 2, "tp": 2, "ep": 2}
ETP2: Sizes = {"world_size": 4, "tp": 2, "ep": 2, "etp": 2}
ALL: Sizes = {"world_size": 8, "tp": 2, "pp": 2, "vpp": 2, "ep": 2, "etp": 2}
REPLICATED: Sizes = {"world_size": 4, "tp": 2, "etp": 2}
DENSE_LAYOUTS = (ONE, TP2, VPP2, UNEVEN)
EXPERT_LAYOUTS = (ONE, TP2, PP2, VPP2, UNEVEN, EP2, TP2_EP2, ETP2, ALL, REPLICATED)
MTP = {"num_nextn_predict_layers": 1}
MIXED = {"mlp_only_layers": [1], "num_experts": 4}


def cases() -> list[Any]:
    found = [("qwen3_moe", {}, sizes) for sizes in EXPERT_LAYOUTS]
    found += [("qwen3_moe", MIXED, sizes) for sizes in (ONE, ALL)]
    found += [(family, {}, sizes) for family in ("qwen3", "llama", "qwen2") for sizes in DENSE_LAYOUTS]
    found += [("qwen2", {"tie_word_embeddings": True}, sizes) for sizes in (ONE, TP2, PP2)]
    found += [("deepseek_v3", MTP, sizes) for sizes in (ONE, PP2, ALL)]
    found += [("glm4_moe", MTP, sizes) for sizes in (TP2, UNEVEN, ETP2)]
    found += [("deepseek_v2", {}, sizes) for sizes in (VPP2, TP2_EP2)]
    return [pytest.param(*case, id=_name(case)) for case in found]


def _name(case: tuple[str, Sizes, Sizes]) -> str:
    family, changes, sizes = case
    return "-".join([family, *changes, *(f"{key}{size}" for key, size in sizes.items())])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory):
    """A tiny model of a family with changes to its configuration, written once by transformers."""
    written: dict[str, Path] = {}

    def write(family: str, **changes: Any) -> Path:
        key = json.dumps([family, changes])
        if key not in written:
            written[key] = write_tiny_model(tmp_path_factory.mktemp(family), family, **changes)
            if changes.get("num_nextn_predict_layers"):
                add_mtp_layer(written[key])
        return written[key]

    return write


# ---- there and back ----


@pytest.mark.parametrize(("family", "changes", "sizes"), cases())
def test_every_bit_comes_back(family: str, changes: Sizes, sizes: Sizes, source: Any, tmp_path: Path) -> None:
    hf = source(family, **changes)
    converting.there_and_back(hf, tmp_path / "mcore", tmp_path / "back", sizes)
    assert len(list((tmp_path / "mcore").glob("*.distcp"))) > sizes["world_size"]
    converting.assert_same_tensors(tmp_path / "back", hf)
    config = read_hf_config(hf)
    assert read_hf_config(tmp_path / "back") == config | missing_engine_fields(config)
    assert (tmp_path / "back" / "generation_config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "mcore"]


def test_dtypes_stay_as_they_are_tensor_by_tensor(source: Any, tmp_path: Path) -> None:
    """A float32 router in a bfloat16 model, as many checkpoints have it."""
    import torch
    from safetensors.torch import save_file

    hf = tmp_path / "hf"
    hf.mkdir()
    tensors = converting.hf_tensors(source("qwen3_moe"))
    tensors = {name: t if name.endswith("mlp.gate.weight") else t.bfloat16() for name, t in tensors.items()}
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    (hf / "config.json").write_text(json.dumps(read_hf_config(source("qwen3_moe")) | {"dtype": "bfloat16"}))
    converting.there_and_back(hf, tmp_path / "mcore", tmp_path / "back", TP2_EP2)
    converting.assert_same_tensors(tmp_path / "back", hf)
    assert converting.hf_tensors(tmp_path / "back")["model.layers.0.mlp.gate.weight"].dtype == torch.float32


# ---- megatron's reader ----


def _loaded(_: int, hf: str, mcore: str, sizes: Sizes) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    from mcore_rl.megatron.loading import load_hf

    chunks, layout = converting.build(read_hf_config(hf), sizes)
    converting.load_distributed(mcore, chunks)
    from_checkpoint = converting.arrays(chunks)
    load_hf(chunks, hf, layout)
    return from_checkpoint, converting.arrays(chunks)


@pytest.mark.parametrize(
    ("family", "changes", "saved", "loaded"),
    [
        ("qwen3_moe", {}, ALL, ONE),
        ("qwen3_moe", {}, TP2, EP2),
        ("qwen3_moe", {}, EP2, VPP2),
        ("qwen3_moe", {}, ONE, ETP2),
        ("qwen3_moe", MIXED, PP2, TP2_EP2),
        ("qwen3", {}, UNEVEN, VPP2),
        ("qwen3", {}, VPP2, TP2),
        ("llama", {}, TP2, UNEVEN),
        ("qwen2", {"tie_word_embeddings": True}, PP2, TP2),
        ("qwen2", {"tie_word_embeddings": True}, TP2, PP2),
    ],
)
def test_a_real_model_in_any_other_layout_loads_it(
    family: str, changes: Sizes, saved: Sizes, loaded: Sizes, source: Any, tmp_path: Path
) -> None:
    hf = source(family, **changes)
    converting.to_mcore(hf, tmp_path / "mcore", saved)
    for found, wanted in launch(_loaded, loaded["world_size"], str(hf), str(tmp_path / "mcore"), loaded):
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not np.array_equal(found[name], wanted[name])] == []


# ---- megatron's writer ----


def _description(directory: Path) -> dict[str, Any]:
    metadata = FileSystemReader(directory).read_metadata()
    return {
        key: (v.size, v.properties, sorted((tuple(c.offsets), tuple(c.sizes)) for c in v.chunks))
        if isinstance(v, TensorStorageMetadata)
        else "object"
        for key, v in metadata.state_dict_metadata.items()
    }


@pytest.mark.parametrize(
    ("family", "changes", "sizes"),
    [("qwen3_moe", {}, TP2_EP2), ("qwen3_moe", MIXED, VPP2), ("qwen3", {}, PP2), ("llama", {}, REPLICATED)],
)
def test_it_describes_what_real_ranks_of_that_layout_save(
    family: str, changes: Sizes, sizes: Sizes, source: Any, tmp_path: Path
) -> None:
    hf = source(family, **changes)
    converting.to_mcore(hf, tmp_path / "ours", sizes)
    launch(converting.save_distributed, sizes["world_size"], str(hf), str(tmp_path / "theirs"), sizes)
    assert _description(tmp_path / "ours") == _description(tmp_path / "theirs")
    for name in ("metadata.json", "common.pt"):
        assert (tmp_path / "ours" / name).is_file()
    assert (tmp_path / "ours" / "metadata.json").read_text() == (tmp_path / "theirs" / "metadata.json").read_text()


@pytest.mark.parametrize("naming", ["default", "by layer", "stacked layers", "by expert"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_every_naming_of_layers_and_experts_is_read(family: str, naming: str, source: Any, tmp_path: Path) -> None:
    sizes = TP2_EP2 if family == "qwen3_moe" else TP2
    hf = source(family)
    launch(converting.save_distributed, sizes["world_size"], str(hf), str(tmp_path / "mcore"), sizes, naming)
    stacked = any(key.startswith("decoder.layers.mlp.") for key in _description(tmp_path / "mcore"))
    assert stacked == (naming == "stacked layers" or (naming == "default" and family == "qwen3"))
    converting.to_hf(tmp_path / "mcore", tmp_path / "back", hf=hf)
    converting.assert_same_tensors(tmp_path / "back", hf)


def _train_and_save(rank: int, hf: str, directory: str, exported: str, parallel: Sizes) -> None:
    from mcore_rl.megatron.actor import MegatronActor
    from mcore_rl.megatron.checkpoint import save_checkpoint
    from mcore_rl.megatron.export import export_hf

    actor = MegatronActor(policy_batch.config(hf, parallel, 64), rank, dist.get_world_size(), None)
    for index, samples in enumerate(policy_batch.UPDATES):
        share = policy_batch.share(samples, actor.layout.coordinates(rank).dp, actor.layout.dp)
        actor.annotate([share], policy_batch.chunks())
        actor.update(share, policy_batch.chunks(), index)
    if rank == 0:
        os.makedirs(directory)
    dist.barrier()
    save_checkpoint(directory, actor)
    export_hf(actor, exported, hf)


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"ep": 2}, {"pp": 2}], ids=str)
def test_a_trainers_checkpoint_is_what_the_trainer_exports(parallel: Sizes, source: Any, tmp_path: Path) -> None:
    hf = source("qwen3_moe")
    launch(_train_and_save, 2, str(hf), str(tmp_path / "step_2"), str(tmp_path / "exported"), parallel)
    converting.to_hf(tmp_path / "step_2", tmp_path / "back")
    converting.assert_same_tensors(tmp_path / "back", tmp_path / "exported")
    trained, before = converting.hf_tensors(tmp_path / "back"), converting.hf_tensors(hf)
    assert any(not trained[name].equal(before[name]) for name in before)
