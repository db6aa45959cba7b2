"""Conversion of HF directories to distributed checkpoints and back, bit for bit, with Megatron's reader and writer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from model_converters.families import FAMILIES, missing_engine_fields
from model_converters.families.parts.hf_config import read_hf_config
from model_converters.hf.io import HFCheckpoint
from tests.distributed import converting, policy_batch
from tests.distributed.launch import launch
from tests.selection import EVERY_TEST
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
TP4: Sizes = {"world_size": 4, "tp": 4, "etp": 4}
MIXED = {"mlp_only_layers": [1], "num_experts": 4}
ODD = {"vocab_size": 97}  # a prime number: every tp > 1 needs padding


ROUND_TRIPS: list[tuple[str, Sizes, Sizes]] = [
    *(("qwen3_moe", {}, sizes) for sizes in (ONE, EP2, REPLICATED)),
    ("qwen3", {}, UNEVEN),
    ("qwen3_moe", MIXED, ALL),
    ("llama", {}, TP2),
    ("qwen2", {}, VPP2),
    ("qwen2", ODD | {"tie_word_embeddings": True}, TP4),
    ("deepseek_v3", {}, ETP2),
    ("glm4_moe", {}, ETP2),
    ("deepseek_v2", {}, TP2_EP2),
    ("deepseek_v32", {}, TP2_EP2),
    ("mixtral", {}, ALL),
    ("qwen3_next", {}, TP2_EP2),
    ("kimi_k2", {}, ALL),
]
"""Every family and every layout."""


def _name(case: tuple[str, Sizes, Sizes]) -> str:
    family, changes, sizes = case
    return "-".join([family, *changes, *(f"{key}{size}" for key, size in sizes.items())])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that writes a tiny model of a family with a changed configuration, once per module."""
    written: dict[str, Path] = {}

    def write(family: str, **changes: Any) -> Path:
        key = json.dumps([family, changes])
        if key not in written:
            written[key] = tmp_path_factory.mktemp(family) / "hf"
            tiny_checkpoint.write(family, written[key], changes=changes, seed=0, mtp=False)
        return written[key]

    return write


# ---- round trips ----


@pytest.mark.parametrize(("family", "changes", "sizes"), ROUND_TRIPS, ids=map(_name, ROUND_TRIPS))
def test_conversion_round_trip_restores_every_bit(
    family: str, changes: Sizes, sizes: Sizes, source: Any, tmp_path: Path
) -> None:
    hf = source(family, **changes)
    converting.there_and_back(hf, tmp_path / "mcore", tmp_path / "back", sizes)
    assert len(list((tmp_path / "mcore").glob("*.distcp"))) > sizes["world_size"]
    converting.assert_same_tensors(tmp_path / "back", hf)
    config = read_hf_config(hf)
    assert read_hf_config(tmp_path / "back") == config | missing_engine_fields(config)
    assert (tmp_path / "back" / "generation_config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "mcore"]


def test_conversion_keeps_dtype_of_each_tensor(source: Any, tmp_path: Path) -> None:
    """A float32 router in a bfloat16 model, which many checkpoints have."""
    hf = tmp_path / "hf"
    hf.mkdir()
    tensors = converting.hf_tensors(source("qwen3_moe"))
    tensors = {name: t if name.endswith("mlp.gate.weight") else t.bfloat16() for name, t in tensors.items()}
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    (hf / "config.json").write_text(json.dumps(read_hf_config(source("qwen3_moe")) | {"dtype": "bfloat16"}))
    converting.there_and_back(hf, tmp_path / "mcore", tmp_path / "back", TP2_EP2)
    converting.assert_same_tensors(tmp_path / "back", hf)
    assert converting.hf_tensors(tmp_path / "back")["model.layers.0.mlp.gate.weight"].dtype == torch.float32


def test_conversion_copies_tokenizer_and_templates(source: Any, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    shutil.copytree(source("qwen3"), hf)
    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tiktoken.model", "tokenization_own.py"]
    for name in names:
        (hf / name).write_text(f"this is {name}")
    (hf / "notes.txt").write_text("not of the model")
    converting.there_and_back(hf, tmp_path / "mcore", tmp_path / "back", ONE)
    for name in names:
        assert (tmp_path / "back" / name).read_text() == f"this is {name}"
    assert not (tmp_path / "back" / "notes.txt").exists()


def test_to_hf_removes_larger_vocabulary_padding(source: Any, tmp_path: Path) -> None:
    """Megatron-LM pads to a multiple of 128; config.json has the real size."""
    hf, cut = source("qwen3"), tmp_path / "cut"
    converting.to_mcore(hf, tmp_path / "mcore", TP2)
    cut.mkdir()
    (cut / "config.json").write_text(json.dumps(read_hf_config(hf) | {"vocab_size": 77}))
    converting.to_hf(tmp_path / "mcore", tmp_path / "back", hf=cut)
    found, wanted = converting.hf_tensors(tmp_path / "back"), converting.hf_tensors(hf)
    for name, tensor in wanted.items():
        vocabulary = name in ("lm_head.weight", "model.embed_tokens.weight")
        assert torch.equal(found[name], tensor[:77] if vocabulary else tensor)


# ---- multi-token prediction ----


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe"])
def mtp_source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_model(tmp_path_factory.mktemp("mtp"), request.param)
    add_mtp_layer(path)
    return path


def test_conversion_keeps_mtp_layers(mtp_source: Path, tmp_path: Path) -> None:
    converting.there_and_back(mtp_source, tmp_path / "mcore", tmp_path / "back", ALL)
    converting.assert_same_tensors(tmp_path / "back", mtp_source)
    assert read_hf_config(tmp_path / "back")["num_nextn_predict_layers"] == 1
    code, output, _ = converting.cli("verify", "--hf", mtp_source, "--ckpt", tmp_path / "mcore", "--logits", "--json")
    assert (code, json.loads(output)["mismatched"]) == (0, [])
    _check_loaded(mtp_source, tmp_path / "mcore", PP2)


def test_to_hf_checkpoint_without_mtp_lacks_layers(mtp_source: Path, tmp_path: Path) -> None:
    saved = tmp_path / "step_2"
    launch(_train_and_save, 2, str(mtp_source), str(saved), str(tmp_path / "exported"), {"ep": 2})
    converting.to_hf(saved, tmp_path / "back")
    converting.assert_same_tensors(tmp_path / "back", tmp_path / "exported")
    assert read_hf_config(tmp_path / "back")["num_nextn_predict_layers"] == 0
    code, output, _ = converting.cli("verify", "--hf", mtp_source, "--ckpt", saved, "--json")
    assert code == 1
    assert "model.layers.4.eh_proj.weight" in json.loads(output)["mismatched"]


# ---- changes during the conversion ----


def _read(directory: Path, lora: Path | None = None) -> dict[str, torch.Tensor]:
    with HFCheckpoint(directory, lora) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.shapes}


def test_conversion_to_fp8_and_back(source: Any, tmp_path: Path) -> None:
    """Shards end within a block. Sizes are multiples of 128, because transformers misreads others."""
    changes = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 384, "num_hidden_layers": 2}
    hf, mcore, fp8 = source("qwen3", **changes), tmp_path / "mcore", tmp_path / "fp8"
    converting.to_mcore(hf, mcore, TP2)
    assert converting.cli("to-hf", "--ckpt", mcore, "--out", fp8, "--fp8")[0] == 0
    assert read_hf_config(fp8)["quantization_config"]["quant_method"] == "fp8"
    certificate = json.loads(converting.cli("verify", "--hf", fp8, "--ckpt", mcore, "--json")[1])
    # q, k, v, o, gate, up and down of two layers.
    assert (certificate["mismatched"], certificate["quantised"]) == ([], 14)
    converting.there_and_back(fp8, tmp_path / "again", tmp_path / "back", TP2)
    found, wanted = converting.hf_tensors(tmp_path / "back"), _read(fp8)
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in wanted.items()}
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert "quantization_config" not in read_hf_config(tmp_path / "back")
    code, output, _ = converting.cli("verify", "--hf", fp8, "--ckpt", tmp_path / "again", "--logits", "--json")
    certificate = json.loads(output)
    assert (code, certificate["mismatched"], certificate["quantised"]) == (0, [], 0)
    assert certificate["max_abs_logit_diff"] < 1e-4


def test_verify_changed_fp8_code_is_found(source: Any, tmp_path: Path) -> None:
    mcore, fp8 = tmp_path / "mcore", tmp_path / "fp8"
    converting.to_mcore(source("qwen3"), mcore, ONE)
    assert converting.cli("to-hf", "--ckpt", mcore, "--out", fp8, "--fp8")[0] == 0
    tensors = converting.hf_tensors(fp8)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name].view(torch.uint8)[3, 5] ^= 1
    save_file(tensors, fp8 / "model.safetensors", metadata={"format": "pt"})
    code, output, _ = converting.cli("verify", "--hf", fp8, "--ckpt", mcore, "--json")
    assert (code, json.loads(output)["mismatched"]) == (1, [name])


def test_to_mcore_merges_lora_adapter(source: Any, tmp_path: Path) -> None:
    hf, lora, mcore = source("qwen3"), tmp_path / "lora", tmp_path / "mcore"
    lora.mkdir()
    targets = {"self_attn.q_proj": (64, 32), "mlp.down_proj": (32, 48)}
    pairs = {
        f"base_model.model.model.layers.2.{module}.lora_{side}.weight": torch.randn(shape)
        for module, (rows, columns) in targets.items()
        for side, shape in (("A", (3, columns)), ("B", (rows, 3)))
    }
    save_file(pairs, lora / "adapter_model.safetensors")
    (lora / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 6}))
    flags = ("--tp", "2", "--logits", "never")
    code, _, errors = converting.cli("to-mcore", "--hf", hf, "--lora", lora, "--out", mcore, *flags)
    assert (code, errors) == (0, "")
    converting.to_hf(mcore, tmp_path / "back")
    found, wanted, base = converting.hf_tensors(tmp_path / "back"), _read(hf, lora), _read(hf)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    changed = sorted(f"model.layers.2.{module}.weight" for module in targets)
    assert [name for name in sorted(base) if not torch.equal(found[name], base[name])] == changed
    assert converting.cli("verify", "--hf", hf, "--lora", lora, "--ckpt", mcore)[0] == 0
    code, output, _ = converting.cli("verify", "--hf", hf, "--ckpt", mcore, "--json")
    assert (code, json.loads(output)["mismatched"]) == (1, changed)


# ---- megatron's reader ----


def _loaded(_: int, hf: str, mcore: str, sizes: Sizes) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    from mcore_rl.megatron.model.loading import load_hf

    chunks, layout = converting.build(read_hf_config(hf), sizes)
    converting.load_distributed(mcore, chunks)
    from_checkpoint = converting.arrays(chunks)
    load_hf(chunks, hf, layout)
    return from_checkpoint, converting.arrays(chunks)


def _check_loaded(hf: Path, mcore: Path, sizes: Sizes) -> None:
    for found, wanted in launch(_loaded, sizes["world_size"], str(hf), str(mcore), sizes):
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not np.array_equal(found[name], wanted[name])] == []


@pytest.mark.parametrize(
    ("family", "changes", "saved", "loaded"),
    [
        ("qwen3_moe", {}, ALL, ONE),
        ("qwen3_moe", {}, EP2, VPP2),
        ("qwen3_moe", MIXED, PP2, TP2_EP2),
        ("llama", {}, TP2, UNEVEN),
        ("qwen2", {"tie_word_embeddings": True}, PP2, TP2),
        ("deepseek_v3", {}, ALL, EP2),
        ("qwen3_next", {}, TP2_EP2, VPP2),
        ("qwen3", ODD, TP2, TP4),
    ],
)
def test_converted_checkpoint_loads_in_other_layouts(
    family: str, changes: Sizes, saved: Sizes, loaded: Sizes, source: Any, tmp_path: Path
) -> None:
    hf = source(family, **changes)
    converting.to_mcore(hf, tmp_path / "mcore", saved)
    _check_loaded(hf, tmp_path / "mcore", loaded)


LOGITS = ("deepseek_v3", "gemma3_text", "glm4_moe", "glm_moe_dsa", "gpt_oss", "qwen2_moe", "qwen3_next", "qwen3_vl")
"""Families whose logits are always compared: each kind of layer once."""


def _logit_differences(pairs: dict[str, tuple[Path, Path]]) -> dict[str, float]:
    from model_converters.dcp.convert import verify

    certificates = {name: verify(hf, ckpt, logits=True) for name, (hf, ckpt) in pairs.items()}
    return {name: c.logits.max_abs_diff if c.holds and c.logits else -1.0 for name, c in certificates.items()}


def test_converted_families_match_transformers_logits(source: Any, tmp_path: Path) -> None:
    """Tolerance: 2e-5 in float32, for logits with a spread above 1; delta nets solve triangular systems: 2e-4."""
    pairs = {}
    for family in sorted(FAMILIES) if EVERY_TEST else LOGITS:
        pairs[family] = source(family), tmp_path / family
        sizes = TP2_EP2 if "experts" in str(read_hf_config(pairs[family][0])) else TP2
        converting.to_mcore(*pairs[family], sizes)
    found = converting.alone(_logit_differences, pairs)
    assert len(found) == len(pairs)
    nets = {name for name in found if name.startswith(("qwen3_next", "qwen3_5"))}
    allowed = {name: 2e-4 if name in nets else 2e-5 for name in found}
    assert {name: difference for name, difference in found.items() if not 0 <= difference < allowed[name]} == {}


def test_verify_logits_transformers_failure_is_one_message(source: Any, tmp_path: Path) -> None:
    """The converters accept this directory, but transformers does not know its attention implementation."""
    hf = tmp_path / "hf"
    shutil.copytree(source("qwen3"), hf)
    converting.to_mcore(hf, tmp_path / "mcore", ONE)
    (hf / "config.json").write_text(json.dumps(read_hf_config(hf) | {"num_hidden_layers": 4, "pad_token_id": "none"}))
    code, _, errors = converting.cli("verify", "--hf", hf, "--ckpt", tmp_path / "mcore", "--logits")
    assert (code, errors.count("error: ")) == (2, 1)
    assert f"transformers cannot load {hf}" in errors
    assert "Traceback" not in errors


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
    [("qwen3_moe", {}, TP2_EP2), ("qwen3_moe", MIXED, VPP2), ("llama", {}, REPLICATED)],
)
def test_to_mcore_metadata_equals_checkpoint_of_real_ranks(
    family: str, changes: Sizes, sizes: Sizes, source: Any, tmp_path: Path
) -> None:
    hf = source(family, **changes)
    converting.to_mcore(hf, tmp_path / "ours", sizes)
    launch(converting.save_distributed, sizes["world_size"], str(hf), str(tmp_path / "theirs"), sizes)
    assert _description(tmp_path / "ours") == _description(tmp_path / "theirs")
    for name in ("metadata.json", "common.pt"):
        assert (tmp_path / "ours" / name).is_file()
    assert (tmp_path / "ours" / "metadata.json").read_text() == (tmp_path / "theirs" / "metadata.json").read_text()


@pytest.mark.parametrize(
    ("family", "naming"),
    [
        ("qwen3", "default"),
        *(("qwen3_moe", naming) for naming in ("default", "by layer", "stacked layers", "by expert")),
    ],
)
def test_to_hf_reads_every_naming_of_layers_and_experts(family: str, naming: str, source: Any, tmp_path: Path) -> None:
    sizes = TP2_EP2 if family == "qwen3_moe" else TP2
    hf = source(family)
    launch(converting.save_distributed, sizes["world_size"], str(hf), str(tmp_path / "mcore"), sizes, naming)
    stacked = any(key.startswith("decoder.layers.mlp.") for key in _description(tmp_path / "mcore"))
    assert stacked == (naming == "stacked layers" or (naming == "default" and family == "qwen3"))
    converting.to_hf(tmp_path / "mcore", tmp_path / "back", hf=hf)
    converting.assert_same_tensors(tmp_path / "back", hf)


def _train_and_save(rank: int, hf: str, directory: str, exported: str, parallel: Sizes) -> None:
    from mcore_rl.megatron.roles.export import export_hf
    from tests.distributed.saving import save_checkpoint

    actor = policy_batch.build_actor(policy_batch.config(hf, parallel, 64))
    policy_batch.update_once(actor)
    save_checkpoint(directory, actor)
    export_hf(actor, exported, hf)


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}], ids=str)
def test_to_hf_of_trainer_checkpoint_equals_trainer_export(parallel: Sizes, source: Any, tmp_path: Path) -> None:
    hf = source("qwen3_moe")
    launch(_train_and_save, 2, str(hf), str(tmp_path / "step_2"), str(tmp_path / "exported"), parallel)
    converting.to_hf(tmp_path / "step_2", tmp_path / "back")
    converting.assert_same_tensors(tmp_path / "back", tmp_path / "exported")
    trained, before = converting.hf_tensors(tmp_path / "back"), converting.hf_tensors(hf)
    assert any(not trained[name].equal(before[name]) for name in before)
