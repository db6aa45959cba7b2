"""Converter commands with damaged, wrong and malicious input: message, exit code, and no output files."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from tests.distributed import converting
from tests.tiny_models import write_tiny_model

LAYER = "model.layers.0."
SQUARE = f"{LAYER}self_attn.k_proj.weight"
EXPERT = f"{LAYER}mlp.experts.1.gate_proj.weight"
EXPERT_KEY = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with `hf` and `mcore` (tp 2, ep 2) of one model."""
    root = tmp_path_factory.mktemp("originals")
    hf = write_tiny_model(root / "hf", "qwen3_moe", num_hidden_layers=2, num_experts=4)
    converting.to_mcore(hf, root / "mcore", {"world_size": 2, "tp": 2, "ep": 2}, max_file_bytes=10**9)
    return root


@pytest.fixture
def pair(originals: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Copies that a test may modify."""
    for name in ("hf", "mcore"):
        shutil.copytree(originals / name, tmp_path / name)
    return tmp_path / "hf", tmp_path / "mcore"


def verify(hf: Path, mcore: Path) -> tuple[int, dict[str, Any]]:
    code, output, _ = converting.cli("verify", "--hf", hf, "--ckpt", mcore, "--json")
    return code, json.loads(output)


# ---- equal sides ----


def test_verify_equal_pair_certifies_all_tensors(pair: tuple[Path, Path]) -> None:
    hf, mcore = pair
    code, output, _ = converting.cli("verify", "--hf", hf, "--ckpt", mcore, "--logits", "--json")
    certificate = json.loads(output)
    names = set(converting.hf_tensors(hf))
    assert (code, certificate["tensors"], certificate["mismatched"]) == (0, len(names), [])
    assert set(certificate["checksums"]) == names
    assert 0 < certificate["max_abs_logit_diff"] < 2e-5
    code, output, _ = converting.cli("verify", "--hf", hf, "--ckpt", mcore)
    assert code == 0
    assert f"{len(names)} of {len(names)} tensors are equal bit for bit" in output


# ---- changed HF tensors ----


def _rewrite(hf: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = converting.hf_tensors(hf)
    change(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})


def _swap_experts(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("gate", "up", "down"):
        one, two = (f"{LAYER}mlp.experts.{expert}.{part}_proj.weight" for expert in (1, 2))
        tensors[one], tensors[two] = tensors[two], tensors[one]


def _transpose(tensors: dict[str, torch.Tensor]) -> None:
    tensors[SQUARE] = tensors[SQUARE].t()


def _one_bit(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"].view(torch.int32)[3] ^= 1


def _negative_zero(tensors: dict[str, torch.Tensor]) -> None:
    """Set an element to -0.0, which compares equal to 0.0."""
    tensors["model.norm.weight"][0] = -0.0


def _other_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()


def _lose(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[EXPERT]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.7.surplus.weight"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_swap_experts, [f"{LAYER}mlp.experts.{e}.{p}_proj.weight" for e in (1, 2) for p in ("down", "gate", "up")]),
        (_transpose, [SQUARE]),
        (_one_bit, ["model.norm.weight"]),
        (_other_dtype, ["model.norm.weight"]),
        (_lose, [EXPERT]),
        (_add, ["model.layers.7.surplus.weight"]),
    ],
)
def test_verify_names_exactly_the_changed_tensors(
    change: Callable[[dict[str, torch.Tensor]], None], names: list[str], pair: tuple[Path, Path]
) -> None:
    hf, mcore = pair
    _rewrite(hf, change)
    code, certificate = verify(hf, mcore)
    assert (code, certificate["mismatched"]) == (1, names)
    code, output, _ = converting.cli("verify", "--hf", hf, "--ckpt", mcore)
    assert code == 1
    assert all(name in output for name in names)


def test_verify_distinguishes_signed_zeros(pair: tuple[Path, Path], tmp_path: Path) -> None:
    hf, _ = pair
    _rewrite(hf, lambda tensors: tensors["model.norm.weight"].zero_())
    converting.to_mcore(hf, tmp_path / "again", {"world_size": 1})
    assert verify(hf, tmp_path / "again")[0] == 0
    _rewrite(hf, _negative_zero)
    assert verify(hf, tmp_path / "again")[1]["mismatched"] == ["model.norm.weight"]


# ---- HF directories that cannot be converted ----


def _truncate(hf: Path) -> None:
    file = hf / "model.safetensors"
    os.truncate(file, file.stat().st_size - 5)


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (lambda hf: _rewrite(hf, _lose), EXPERT),
        (lambda hf: _rewrite(hf, _add), "model.layers.7.surplus.weight"),
        (_truncate, "model.safetensors is truncated: model.norm.weight ends at"),
        (lambda hf: (hf / "config.json").unlink(), "config.json does not exist"),
        (lambda hf: (hf / "model.safetensors").unlink(), "has neither model.safetensors.index.json nor"),
    ],
    ids=["missing", "surplus", "truncated", "no configuration", "no weights"],
)
def test_to_mcore_bad_input_leaves_no_files(
    spoil: Callable[[Path], Any], part: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    hf, _ = pair
    spoil(hf)
    code, _, errors = converting.cli("to-mcore", "--hf", hf, "--out", tmp_path / "out")
    assert code == 2
    assert part in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mcore"]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--tp", "3"], "not a multiple of tp 3"),
        (["--ep", "3"], "not a multiple of ep 3"),
        (["--tp", "8"], "--tp=8 does not divide the model's 4 attention heads"),
        (["--pp", "3"], "cannot be divided evenly over 3 pipeline stages"),
        (["--vpp", "2"], "vpp 2 needs more than one pipeline stage"),
    ],
    ids=str,
)
def test_to_mcore_layout_that_does_not_fit_is_rejected(
    flags: list[str], part: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    code, _, errors = converting.cli("to-mcore", "--hf", pair[0], "--out", tmp_path / "out", *flags)
    assert code == 2
    assert part in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mcore"]


def test_convert_existing_target_is_not_overwritten(pair: tuple[Path, Path]) -> None:
    hf, mcore = pair
    for arguments in (("to-mcore", "--hf", hf, "--out", mcore), ("to-hf", "--ckpt", mcore, "--out", hf)):
        code, _, errors = converting.cli(*arguments)
        assert code == 2
        assert "exists already" in errors
    assert verify(hf, mcore)[0] == 0


# ---- damaged checkpoints ----


def _metadata(mcore: Path) -> Metadata:
    return FileSystemReader(mcore).read_metadata()


def _write_metadata(mcore: Path, metadata: Any) -> None:
    (mcore / ".metadata").write_bytes(pickle.dumps(metadata))


def _chunk_place(mcore: Path, key: str) -> tuple[Path, int, int]:
    (index, place), *_ = [item for item in _metadata(mcore).storage_data.items() if item[0].fqn == key]
    assert index.offset is not None
    return mcore / place.relative_path, place.offset, place.length


def _flip_stored_bit(mcore: Path) -> None:
    file, offset, length = _chunk_place(mcore, EXPERT_KEY)
    content = bytearray(file.read_bytes())
    content[offset + length // 2] ^= 1
    file.write_bytes(content)


def _truncate_stored(mcore: Path) -> None:
    file, offset, length = _chunk_place(mcore, EXPERT_KEY)
    os.truncate(file, offset + length - 1)


def _remove_stored_file(mcore: Path) -> None:
    _chunk_place(mcore, EXPERT_KEY)[0].unlink()


def _garble_stored(mcore: Path) -> None:
    file, offset, length = _chunk_place(mcore, EXPERT_KEY)
    content = bytearray(file.read_bytes())
    content[offset : offset + length] = bytes(length)
    file.write_bytes(content)


def _lose_key(mcore: Path) -> None:
    metadata = _metadata(mcore)
    del metadata.state_dict_metadata[EXPERT_KEY]
    _write_metadata(mcore, metadata)


def _lose_chunk(mcore: Path) -> None:
    metadata = _metadata(mcore)
    metadata.state_dict_metadata[EXPERT_KEY].chunks.pop()
    _write_metadata(mcore, metadata)


def _lose_place(mcore: Path) -> None:
    metadata = _metadata(mcore)
    chunk = metadata.state_dict_metadata[EXPERT_KEY].chunks[0]
    del metadata.storage_data[MetadataIndex(EXPERT_KEY, chunk.offsets)]
    _write_metadata(mcore, metadata)


def _grow(mcore: Path) -> None:
    """Add an expert to the stacked tensor, one more than the model has."""
    metadata = _metadata(mcore)
    stored = metadata.state_dict_metadata[EXPERT_KEY]
    stored.size = torch.Size((5, *stored.size[1:]))
    _write_metadata(mcore, metadata)


@pytest.mark.parametrize(
    "spoil",
    [_truncate_stored, _remove_stored_file, _garble_stored, _lose_key, _lose_chunk, _lose_place, _grow],
)
def test_to_hf_damaged_checkpoint_names_tensor(
    spoil: Callable[[Path], None], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    hf, mcore = pair
    spoil(mcore)
    code, _, errors = converting.cli("to-hf", "--ckpt", mcore, "--out", tmp_path / "out")
    assert code == 2
    assert f"{LAYER}mlp.experts." in errors
    assert EXPERT_KEY in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mcore"]
    code, certificate = verify(hf, mcore)
    assert code == 1
    assert any(name.startswith(f"{LAYER}mlp.experts.") for name in certificate["mismatched"])


def test_verify_flipped_bit_in_checkpoint_is_found(pair: tuple[Path, Path]) -> None:
    hf, mcore = pair
    _flip_stored_bit(mcore)
    code, certificate = verify(hf, mcore)
    assert code == 1
    assert len(certificate["mismatched"]) == 1
    assert certificate["mismatched"][0].startswith(f"{LAYER}mlp.experts.")


def test_to_hf_tensor_without_row_is_rejected(pair: tuple[Path, Path], tmp_path: Path) -> None:
    hf, mcore = pair
    metadata = _metadata(mcore)
    metadata.state_dict_metadata["decoder.adapter.weight"] = metadata.state_dict_metadata["output_layer.weight"]
    metadata.state_dict_metadata["optimizer.state.exp_avg.x"] = metadata.state_dict_metadata["output_layer.weight"]
    metadata.state_dict_metadata["rng/shard_0_1"] = BytesStorageMetadata()
    _write_metadata(mcore, metadata)
    code, _, errors = converting.cli("to-hf", "--ckpt", mcore, "--out", tmp_path / "out")
    assert code == 2
    assert "decoder.adapter.weight has no row" in errors
    assert "exp_avg" not in errors
    assert "rng" not in errors
    assert verify(hf, mcore)[1]["mismatched"] == ["decoder.adapter.weight"]


# ---- malicious checkpoints ----


class _Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class _HostileShell(_Hostile):
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def _refused(mcore: Path, tmp_path: Path) -> str:
    before = sorted(path.name for path in tmp_path.iterdir())
    for arguments in (
        ("to-hf", "--ckpt", mcore, "--out", tmp_path / "out"),
        ("verify", "--hf", tmp_path / "hf", "--ckpt", mcore),
    ):
        code, _, errors = converting.cli(*arguments)
        assert code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    return errors


def test_metadata_malicious_pickle_is_not_executed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    _, mcore = pair
    metadata = _metadata(mcore)
    metadata.planner_data = _HostileShell(tmp_path / "executed")
    _write_metadata(mcore, metadata)
    assert "system, which is not part of checkpoint metadata" in _refused(mcore, tmp_path)
    _write_metadata(mcore, [_Hostile(tmp_path / "executed")])
    assert "which is not part of checkpoint metadata" in _refused(mcore, tmp_path)
    (mcore / ".metadata").write_bytes(b"no pickle at all")
    assert "is not the metadata of a distributed checkpoint" in _refused(mcore, tmp_path)


def test_reader_malicious_tensor_pickle_is_not_executed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    hf, mcore = pair
    torch.save(_HostileShell(tmp_path / "executed"), mcore / "__9_0.distcp")
    metadata = _metadata(mcore)
    for index, place in metadata.storage_data.items():
        if index.fqn == "decoder.final_layernorm.weight":
            place.relative_path, place.offset = "__9_0.distcp", 0
            place.length = (mcore / "__9_0.distcp").stat().st_size
    _write_metadata(mcore, metadata)
    code, _, errors = converting.cli("to-hf", "--ckpt", mcore, "--out", tmp_path / "out")
    assert code == 2
    assert "model.norm.weight" in errors
    assert verify(hf, mcore)[1]["mismatched"] == ["model.norm.weight"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mcore"]


@pytest.mark.parametrize("place", ["../hf/model.safetensors", "/etc/passwd", "..", "a/b.distcp"])
def test_metadata_path_outside_checkpoint_is_rejected(place: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    _, mcore = pair
    metadata = _metadata(mcore)
    next(iter(metadata.storage_data.values())).relative_path = place
    _write_metadata(mcore, metadata)
    assert f"is stored in {place!r}" in _refused(mcore, tmp_path)


def test_to_hf_parent_directory_names_checkpoint_inside(pair: tuple[Path, Path], tmp_path: Path) -> None:
    code, _, errors = converting.cli("to-hf", "--ckpt", tmp_path, "--out", tmp_path / "out")
    assert code == 2
    assert "it has no .metadata; these subdirectories have one: mcore" in errors
