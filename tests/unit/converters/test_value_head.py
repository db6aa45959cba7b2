"""Value heads: loaded if the checkpoint has one, otherwise only the trunk is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.value_head import VALUE_HEAD, resolve_value_head, value_model_config, with_value_head
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import export_plan
from model_converters.mapping.table import bind
from tests.unit.converters.hf_models import load_rank, write_hf


def _load(directory: Path, layout: TrainLayout, rank: int) -> dict[str, torch.Tensor]:
    """Return the rank's tensors after loading; the head only if the checkpoint has one."""
    with HFCheckpoint(directory) as checkpoint:
        rows, dropped = resolve_value_head(checkpoint)
        bound = bind(rows, value_model_config(checkpoint.config), torch.float32)
        held = load_rank(checkpoint, layout, rank, bound, dropped=dropped)
    assert not any(tensor.isnan().any() for tensor in held.values())
    return held


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_value_head_is_whole_on_last_stage_ranks(family, family_configs, random_hf, tmp_path):
    config = family_configs[family]
    tensors = {name: t for name, t in random_hf(config).items() if name != "lm_head.weight"}
    tensors["score.weight"] = torch.randn(1, config["hidden_size"])
    if family == "qwen3":
        tensors["score.bias"] = torch.zeros(1)  # accepted, because it changes nothing
    directory = write_hf(tmp_path / "hf", config, tensors)
    layout = TrainLayout(4, tp=2, pp=2, etp=2)
    for rank in range(4):
        held = _load(directory, layout, rank)
        assert (VALUE_HEAD in held) == (rank >= 2)
        if rank >= 2:
            assert torch.equal(held[VALUE_HEAD], tensors["score.weight"])


def test_value_head_causal_model_loads_trunk_only(family_configs, random_hf, tmp_path):
    config = family_configs["qwen2"]
    tensors = random_hf(config)
    for tied in (False, True):
        held = _load(write_hf(tmp_path / "hf", config | {"tie_word_embeddings": tied}, tensors), TrainLayout(1), 0)
        assert VALUE_HEAD not in held
        assert torch.equal(held["embedding.word_embeddings.weight"], tensors["model.embed_tokens.weight"])
        tensors.pop("lm_head.weight", None)


def test_value_head_model_drops_mtp_layers(family_configs, random_hf, tmp_path):
    config = family_configs["deepseek_v3"]
    assert config["num_nextn_predict_layers"]
    held = _load(write_hf(tmp_path / "hf", config, random_hf(config)), TrainLayout(1), 0)
    assert not [name for name in held if "mtp" in name]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"score.weight": torch.ones(3, 12)}, "score.weight has 3 labels; a value head has one"),
        ({"score.weight": torch.ones(1, 12), "score.bias": torch.ones(1)}, "score.bias is not zero"),
        ({"score.weight": torch.ones(1, 11)}, "of another shape: score.weight"),
        ({"v_head.summary.weight": torch.ones(1, 12)}, "unknown: v_head.summary.weight"),
    ],
)
def test_value_head_unsupported_head_is_rejected(extra, message, family_configs, random_hf, tmp_path):
    config = family_configs["qwen3"]
    directory = write_hf(tmp_path / "hf", config, random_hf(config) | extra)
    with pytest.raises(ConversionError, match=message.replace(".", r"\.")):
        _load(directory, TrainLayout(1), 0)


def test_value_head_table_exports_score_without_lm_head(family_configs):
    config = value_model_config(family_configs["qwen3"] | {"tie_word_embeddings": True})
    bound = bind(with_value_head(family_for(config).rows(config), config), config, torch.float32)
    names = [plan.hf_name for plan in export_plan(bound, TrainLayout(2, tp=2))]
    assert "score.weight" in names
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names))
