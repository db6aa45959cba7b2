"""Converter commands with a wrong config.json, or one that a family reads differently from transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import converting
from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    hf = write_tiny_model(root / "hf", "qwen3_moe", num_hidden_layers=2, num_experts=4)
    converting.to_mcore(hf, root / "mcore", {"world_size": 1})
    return root


@pytest.fixture
def pair(originals: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Copies that a test may modify."""
    for name in ("hf", "mcore"):
        shutil.copytree(originals / name, tmp_path / name)
    return tmp_path / "hf", tmp_path / "mcore"


def test_verify_different_config_of_same_weights_fails(pair: tuple[Path, Path]) -> None:
    hf, mcore = pair
    config = json.loads((hf / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 100.0
    (hf / "config.json").write_text(json.dumps(config))
    code, output, _ = converting.cli("verify", "--hf", hf, "--ckpt", mcore, "--json")
    certificate = json.loads(output)
    assert (code, certificate["mismatched"], list(certificate["config"])) == (1, [], ["rope_parameters"])
    code, output, _ = converting.cli("verify", "--hf", hf, "--ckpt", mcore, "--logits")
    assert code == 1
    assert "config.json: rope_parameters is {" in output
    assert "logits differ by" in output


def _reset(hf: Path, **fields: Any) -> None:
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize("field", ["attention_dropout", "rms_norm_eps", "rope_parameters", "layer_types", "vocab_size"])
def test_convert_field_of_wrong_type_names_field_and_flag(field: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    hf, mcore = pair
    _reset(hf, **{field: {"vocab_size": True}.get(field, "x")})
    for verb in (("to-mcore", "--out", tmp_path / "out"), ("verify", "--ckpt", mcore)):
        code, _, errors = converting.cli(*verb, "--hf", hf)
        assert code == 2
        assert f"error: --hf {hf}: config.json: {field} is " in errors
    shutil.copyfile(hf / "config.json", mcore / "config_and_tokenizer" / "config.json")
    code, _, errors = converting.cli("to-hf", "--ckpt", mcore, "--out", tmp_path / "out")
    assert (code, f"error: --ckpt {mcore / 'config_and_tokenizer'}: config.json: {field} is " in errors) == (2, True)
    assert not (tmp_path / "out").exists()


def _disagreeing(hf: Path, out: Path, *flags: str) -> tuple[int, str, str]:
    """Convert with a family that reads one field of config.json differently from transformers."""
    return converting.alone(_convert_otherwise, str(hf), str(out), flags)  # type: ignore[no-any-return]


def _convert_otherwise(hf: str, out: str, flags: tuple[str, ...]) -> tuple[int, str, str]:
    from model_converters import families

    family = families.FAMILIES["qwen3_moe"]
    families.FAMILIES["qwen3_moe"] = replace(
        family, build_arguments=lambda config: family.build_arguments({**config, "norm_topk_prob": False})
    )
    return converting._cli(("to-mcore", "--hf", hf, "--out", out, *flags))


def test_to_mcore_logits_that_differ_from_transformers_fail(pair: tuple[Path, Path], tmp_path: Path) -> None:
    hf, _ = pair
    code, _, errors = _disagreeing(hf, tmp_path / "out")
    assert code == 2
    assert f"--hf {hf}: logits differ by" in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mcore"]
    assert _disagreeing(hf, tmp_path / "out", "--logits", "never")[0] == 0
    code, output, _ = converting.cli("to-mcore", "--hf", hf, "--out", tmp_path / "right")
    assert (code, "logits agree with transformers" in output) == (0, True)
