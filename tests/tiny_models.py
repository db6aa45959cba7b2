"""Tiny random HF checkpoints of scripts/tiny_checkpoint.py, variants of their configurations, and what transformers
computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_checkpoint import VOCABULARY, add_mtp_layer, tiny_config, tiny_fields, tiny_model, write_tiny_model

__all__ = ["VOCABULARY", "add_mtp_layer", "tiny_config", "tiny_fields", "tiny_model", "write_tiny_model"]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""rope_parameters of Llama 3.1."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
"""rope_parameters of DeepSeek V3, small; the two scales differ, so that both places where they enter show."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + 0.1 * pair for pair in range(8)],
}
"""rope_parameters like those of Phi 3, for heads of 16 elements and sequences of up to 64 tokens."""
GROUPS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
"""Group-limited routing as in DeepSeek V3: the two best groups, ranked by the sum of their two best scores."""


def write_tiny_classifier(directory: Path | str, kind: str, **changes: Any) -> Path:
    """A sequence classification model with one label, as transformers saves it."""
    from transformers import AutoModelForSequenceClassification

    config = tiny_config(kind, num_labels=1, **changes)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        model.model.load_state_dict(tiny_model(kind, **changes).model.state_dict())
        model.score.weight.normal_(0, 0.2, generator=torch.Generator().manual_seed(5))
    model.save_pretrained(directory)
    return Path(directory)


def checkpoint_tensors(model: Any, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights or gradients by the names of `model`'s modules -> by those of its checkpoint: transformers 5 fuses a
    layer's experts in memory, and takes them apart here as when it saves them. Experts of families whose checkpoints
    stack them get the table's names of single experts."""
    from transformers.core_model_loading import revert_weight_conversion

    from model_converters.families import FAMILIES
    from model_converters.hf.stacked import oriented, rows_of
    from model_converters.mapping.table import bind, exported_parts
    from model_converters.vision_model import VISION_TYPES, flat_fields, tower_tensors

    tensors, config = dict(revert_weight_conversion(model, named)), flat_fields(model.config.to_dict())
    if config["model_type"] not in FAMILIES:
        return tensors
    if config["model_type"] in VISION_TYPES:
        tensors = tower_tensors(tensors)
    stacked = [
        oriented(part, tuple(tensors[part.name].shape))
        for bound in bind(FAMILIES[config["model_type"]].rows(config), config, torch.float32)
        for part in exported_parts(bound)
        if part is not None
    ]
    parts = {part.part: rows_of(tensors[part.name][part.expert], part).contiguous() for part in stacked}
    whole = {part.name for part in stacked}
    return {name: tensor for name, tensor in tensors.items() if name not in whole} | parts


def correction_biases(model: Any) -> dict[str, torch.Tensor]:
    """Correction biases of routers by name: buffers, in ERNIE 4.5 parameters without gradient."""
    named = (*model.named_buffers(), *model.named_parameters())
    return {name: bias.detach() for name, bias in named if name.endswith("correction_bias")}


def reference_logits(directory: Path | str, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Logits of transformers' own model, one [S, V] per sequence, float32, unpacked."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    with torch.no_grad():
        return [model(torch.tensor(sequence)[None]).logits[0] for sequence in sequences]
