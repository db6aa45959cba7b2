"""The converters can read the script's output for every family."""

from __future__ import annotations

import pytest
import tiny_checkpoint
import torch

from model_converters.families import FAMILIES
from model_converters.families.parts.mtp import resolve_mtp
from model_converters.hf.io import HFCheckpoint
from model_converters.mapping.completeness import check_complete
from model_converters.mapping.table import bind


def checked(directory, *, mtp=False):
    """Number of tensors of a directory that fits its family's table."""
    with HFCheckpoint(directory) as checkpoint:
        config, dropped = resolve_mtp(checkpoint.config, checkpoint.shapes)
        assert not dropped
        assert bool(config.get("num_nextn_predict_layers")) == mtp
        check_complete(bind(checkpoint.family.rows(config), config, torch.float32), checkpoint.shapes)
        return len(checkpoint.shapes)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_tiny_checkpoint_that_fits_its_table(family, tmp_path):
    assert tiny_checkpoint.main([family, str(tmp_path / "hf")]) == 0
    assert checked(tmp_path / "hf") > 30


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_multi_token_prediction_is_added_on_request(family, tmp_path):
    assert tiny_checkpoint.main([family, str(tmp_path / "hf"), "--mtp"]) == 0
    assert checked(tmp_path / "hf", mtp=True) > 30


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "hidden_act=gelu"], "hidden_act 'gelu' is not supported"),
        (["--set", "vocab_size"], "write KEY=VALUE"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(flags, message, tmp_path, capsys):
    assert tiny_checkpoint.main(["qwen3", str(tmp_path / "hf"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_what_exists_is_kept(tmp_path, capsys):
    assert tiny_checkpoint.main(["qwen3", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
