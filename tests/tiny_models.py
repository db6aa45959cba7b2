"""Tiny random HF checkpoints, written by transformers: an oracle that we did not write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 96
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""rope_parameters of Llama 3.1, the only scaling of grouped-query attention that megatron-core 0.16.1 expresses."""
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


def tiny_fields(kind: str, **changes: Any) -> dict[str, Any]:
    """What config.json says of a tiny model, without importing transformers; kind is a model_type."""
    fields: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    if kind == "qwen3_moe":
        fields |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return fields | _MORE_FIELDS.get(kind, {}) | changes


_LATENT_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
}
_SIGMOID_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
_SOFTMAX_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.3,
    "first_k_dense_replace": 1,
}
_MORE_FIELDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24},
    "deepseek_v2": {**_LATENT_ATTENTION, "q_lora_rank": None, **_SOFTMAX_EXPERTS},
    "deepseek_v3": {**_LATENT_ATTENTION, **_SIGMOID_EXPERTS},
    "glm4_moe": {**_SIGMOID_EXPERTS, "attention_bias": True, "use_qk_norm": True},
}
GROUPS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
"""Group-limited routing as in DeepSeek V3: the two best groups, ranked by the sum of their two best scores."""


def tiny_config(kind: str, **changes: Any) -> Any:
    """The same as a transformers configuration."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**tiny_fields(kind, **changes))


def tiny_model(kind: str, *, seed: int = 0, std: float = 0.12, **changes: Any) -> Any:
    """A float32 model with peaky logits and norms away from 1, so that a weight in the wrong place shows."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, deviation = (1.0, 0.3) if "norm" in name else (0.0, std)
            if "embed_tokens" in name or "lm_head" in name:
                deviation = 0.4
            parameter.normal_(mean, deviation, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                # As wide as the scores themselves: many choices are others than without it.
                buffer.normal_(0.0, 0.3, generator=generator)
    return model


def write_tiny_model(directory: Path | str, kind: str, *, seed: int = 0, std: float = 0.12, **changes: Any) -> Path:
    """Saves tiny_model(...) as an HF directory (config.json, safetensors with one tensor per expert)."""
    directory = Path(directory)
    tiny_model(kind, seed=seed, std=std, **changes).save_pretrained(directory)
    return directory


def add_mtp_layer(directory: Path, *, seed: int = 4) -> None:
    """A multi-token-prediction layer beside what transformers saves, which has none: random, with the copies that
    published checkpoints have."""
    import json

    from safetensors.torch import load_file, save_file

    from model_converters.families import family_for

    config = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for row in family_for(config).rows(config):
        for name, shape in zip(row.hf, row.shapes, strict=True) if row.place == "mtp" else ():
            for bound in [name.replace("{e}", str(expert)) for expert in range(max(row.num_experts, 1))]:
                original = tensors.get(row.repeats)
                fresh = torch.randn(shape, generator=generator) if original is None else original.clone()
                tensors.setdefault(bound, fresh)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def checkpoint_tensors(model: Any, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights or gradients by the names of `model`'s modules -> by those of its checkpoint: transformers 5 fuses a
    layer's experts in memory, and takes them apart here as when it saves them."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, named))


def reference_logits(directory: Path | str, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Logits of transformers' own model, one [S, V] per sequence, float32, unpacked."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    with torch.no_grad():
        return [model(torch.tensor(sequence)[None]).logits[0] for sequence in sequences]
