"""Conversion and export of releases: an unchanged release has the same bytes again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model_converters.families.parts.hf_config import read_hf_config
from model_converters.hf.quant import quantise
from tests.distributed import converting
from tests.tiny_models import add_mtp_layer, write_tiny_model

COPIES = ("model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight")


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_model(tmp_path_factory.mktemp("mtp"), "deepseek_v3")
    add_mtp_layer(path)
    return path


def changed(source: Path, target: Path, tensors: dict[str, torch.Tensor], **fields: object) -> Path:
    """Copy a model with changed tensors and fields of config.json."""
    shutil.copytree(source, target)
    for file in target.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(config))
    return target


def assert_same_bytes(found: Path, wanted: Path) -> None:
    ours, theirs = converting.hf_tensors(found), converting.hf_tensors(wanted)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_to_hf_release_without_copies_comes_back_without_them(with_mtp: Path, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in converting.hf_tensors(with_mtp).items() if name not in COPIES}
    hf = changed(with_mtp, tmp_path / "hf", tensors)
    converting.there_and_back(hf, tmp_path / "mcore", tmp_path / "back", {"world_size": 2, "pp": 2})
    assert_same_bytes(tmp_path / "back", hf)
    code, output, _ = converting.cli("verify", "--hf", hf, "--ckpt", tmp_path / "mcore", "--json")
    assert (code, json.loads(output)["mismatched"]) == (0, [])


@pytest.mark.parametrize("how", ["flag", "field"])
def test_to_mcore_drops_mtp_by_flag_or_field(how: str, with_mtp: Path, tmp_path: Path) -> None:
    fields = {"num_nextn_predict_layers": 0} if how == "field" else {}
    hf = changed(with_mtp, tmp_path / "hf", converting.hf_tensors(with_mtp), **fields)
    flags = ["--drop-mtp"] if how == "flag" else []
    code, _, errors = converting.cli("to-mcore", "--hf", hf, "--out", tmp_path / "mcore", *flags)
    assert code == 0, errors
    assert "tensors of multi-token prediction are dropped" in errors
    code, output, _ = converting.cli("verify", "--hf", hf, "--ckpt", tmp_path / "mcore", "--json", *flags)
    assert (code, json.loads(output)["mismatched"]) == (0, [])
    assert converting.cli("to-hf", "--ckpt", tmp_path / "mcore", "--out", tmp_path / "back")[0] == 0
    assert read_hf_config(tmp_path / "back")["num_nextn_predict_layers"] == 0
    assert converting.hf_tensors(tmp_path / "back").keys() == {
        name for name in converting.hf_tensors(hf) if not name.startswith("model.layers.4.")
    }
    assert ("mtp." in converting.cli("show", "--config", hf, *flags)[1]) is False


def test_to_mcore_mtp_copies_main_uses_main_tensors(with_mtp: Path, tmp_path: Path) -> None:
    tensors = converting.hf_tensors(with_mtp)
    hf = changed(with_mtp, tmp_path / "hf", tensors | {name: tensors[name] + 1 for name in COPIES})
    command = ("to-mcore", "--hf", hf, "--out", tmp_path / "mcore", "--pp", 2)
    code, _, errors = converting.cli(*command)
    assert (code, (tmp_path / "mcore").exists()) == (2, False)
    assert "model.layers.4.embed_tokens.weight differs from model.embed_tokens.weight" in errors
    assert "--mtp-copies main" in errors
    assert "--drop-mtp" in errors
    code, _, errors = converting.cli(*command, "--mtp-copies", "main")
    assert code == 0, errors
    verify = ("verify", "--hf", hf, "--ckpt", tmp_path / "mcore")
    assert converting.cli(*verify)[0] == 1
    assert converting.cli(*verify, "--mtp-copies", "main")[0] == 0
    assert converting.cli("to-hf", "--ckpt", tmp_path / "mcore", "--out", tmp_path / "back")[0] == 0
    assert_same_bytes(tmp_path / "back", with_mtp)


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3"])
def test_to_hf_unchanged_ue8m0_release_has_the_same_bytes(kind: str, tmp_path: Path) -> None:
    """Some blocks have 224 as largest code, for which two scales are possible."""
    source = write_tiny_model(tmp_path / "bf16", kind)
    block, tensors = [16, 16], converting.hf_tensors(source)
    released = {name: tensor.bfloat16() for name, tensor in tensors.items() if "correction_bias" not in name}
    released |= {name: tensor for name, tensor in tensors.items() if "correction_bias" in name}
    for name in [name for name in released if name.endswith("_proj.weight")]:
        codes, scales = quantise(released[name], (16, 16), power_of_two=True)
        low = codes.float().clamp(-224, 224).to(codes.dtype)
        released |= {name: low, f"{name}_scale_inv": scales}
        assert low.float().abs().max() == 224
    described = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
    hf = changed(
        source,
        tmp_path / "hf",
        released,
        torch_dtype="bfloat16",
        dtype="bfloat16",
        quantization_config={**described, "weight_block_size": block},
    )
    flags = ("--tp", 2) if kind == "qwen3" else ("--ep", 2)
    code, _, errors = converting.cli("to-mcore", "--hf", hf, "--out", tmp_path / "mcore", *flags)
    assert code == 0, errors
    assert converting.cli("to-hf", "--ckpt", tmp_path / "mcore", "--out", tmp_path / "back", "--fp8")[0] == 0
    assert_same_bytes(tmp_path / "back", hf)
    exported = read_hf_config(tmp_path / "back")["quantization_config"]
    assert {key: exported[key] for key in described} == described
    assert exported["weight_block_size"] == block
    assert converting.cli("verify", "--hf", tmp_path / "back", "--ckpt", tmp_path / "mcore")[0] == 0
