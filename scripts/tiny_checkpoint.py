"""Write a tiny random HF checkpoint of any supported family, for tests and to try a conversion.

    python scripts/tiny_checkpoint.py deepseek_v3 /tmp/tiny --mtp
    python scripts/tiny_checkpoint.py qwen3 /tmp/tiny --set tie_word_embeddings=true --set vocab_size=97

transformers' save_pretrained writes it, so names and layout are an independent reference.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mcore_rl.types.json import JsonObject, JsonValue
from model_converters.errors import ConversionError
from model_converters.families import FAMILIES, family_for
from model_converters.vision_model import VISION_TYPES, nested_fields

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY = 96

_LATENT_ATTENTION: JsonObject = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
}
_SIGMOID_EXPERTS: JsonObject = {
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
_CHOSEN_TOKENS: JsonObject = {
    **_LATENT_ATTENTION,
    **_SIGMOID_EXPERTS,
    "mlp_layer_types": None,
    # Several heads: a pair of tokens with the score 0 in each would tie with others.
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 5,
    "pad_token_id": None,
}
_SOFTMAX_EXPERTS: JsonObject = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.3,
    "first_k_dense_replace": 1,
}
_GATED_SHARED_EXPERTS: JsonObject = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_DELTA_NETS: JsonObject = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_SECTIONED: JsonObject = {
    **_DELTA_NETS,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_SPARSE_LAYERS: JsonObject = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
IMAGE_TOKEN = 90
_VISION: JsonObject = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "in_channels": 3,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_IMAGE_TOKENS: JsonObject = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "pad_token_id": None,
}


def _qwen3_vision(model_type: str, **changes: JsonValue) -> JsonObject:
    return {**_VISION, "model_type": model_type, "num_position_embeddings": 64, **changes}


def _sections(sections: list[JsonValue], **changes: JsonValue) -> JsonObject:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **changes}


_MORE_FIELDS: dict[str, JsonObject] = {
    "qwen3_vl": {
        **_IMAGE_TOKENS,
        "vision_config": _qwen3_vision("qwen3_vl_vision", deepstack_visual_indexes=[0, 1]),
        "rope_parameters": _sections([4, 2, 2], mrope_interleaved=True),
    },
    "qwen3_5": {**_SECTIONED, **_IMAGE_TOKENS, "vision_config": _qwen3_vision("qwen3_5_vision")},
    "qwen3_5_moe": {
        **_SECTIONED,
        **_GATED_SHARED_EXPERTS,
        **_IMAGE_TOKENS,
        "vision_config": _qwen3_vision("qwen3_5_moe_vision"),
    },
    "qwen3_vl_moe": {
        **_IMAGE_TOKENS,
        **_SPARSE_LAYERS,
        "vision_config": _qwen3_vision("qwen3_vl_moe_vision", deepstack_visual_indexes=[2, 0]),
        "rope_parameters": _sections([4, 2, 2], mrope_interleaved=True),
    },
    "qwen2_5_vl": {
        **_IMAGE_TOKENS,
        "vision_config": {
            **_VISION,
            "model_type": "qwen2_5_vl_vision",
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "head_dim": 8,
        "rope_parameters": _sections([1, 1, 2]),
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24},
    "deepseek_v2": {**_LATENT_ATTENTION, "q_lora_rank": None, **_SOFTMAX_EXPERTS},
    "deepseek_v3": {**_LATENT_ATTENTION, **_SIGMOID_EXPERTS},
    "deepseek_v32": _CHOSEN_TOKENS,
    "glm_moe_dsa": _CHOSEN_TOKENS,
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "pad_token_id": None,
    },
    "minimax_m2": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "rotary_dim": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen3_next": {**_DELTA_NETS, **_GATED_SHARED_EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "qwen3_5_text": _SECTIONED,
    "qwen3_5_moe_text": {**_SECTIONED, **_GATED_SHARED_EXPERTS},
    # Square experts, as in the releases: shapes do not show their orientation.
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "sliding_window": 8,
        "swiglu_limit": 1.0,
        "attention_bias": True,
    },
    # Windows in layers 0, 1 and 3. transformers zeroes the gradient of the padding token's embedding.
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": None,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
        },
        "sliding_window": 8,
        "sliding_window_pattern": 3,
    },
    "glm4_moe": {**_SIGMOID_EXPERTS, "attention_bias": True, "use_qk_norm": True},
    "glm4_moe_lite": {
        **_LATENT_ATTENTION,
        **_SIGMOID_EXPERTS,
        "first_k_dense_replace": 2,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    },
    "qwen2_moe": {
        **_SPARSE_LAYERS,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": _SPARSE_LAYERS,
    # transformers zeroes the gradient of the padding token's embedding, which is token 1 by default.
    "seed_oss": {"attention_bias": True, "pad_token_id": None},
}


def tiny_fields(kind: str, **changes: JsonValue) -> JsonObject:
    """Return the fields of config.json of a tiny model without importing transformers. kind: model_type."""
    fields: JsonObject = {
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
    return fields | _MORE_FIELDS.get(kind, {}) | changes


def tiny_config(kind: str, **changes: JsonValue) -> PretrainedConfig:
    """Return the transformers configuration with the fields of `tiny_fields`."""
    from transformers import AutoConfig

    # transformers adds fields to the objects that it gets.
    return AutoConfig.for_model(**deepcopy(nested_fields(tiny_fields(kind, **changes))))


def tiny_model(kind: str, *, seed: int = 0, std: float = 0.12, **changes: JsonValue) -> PreTrainedModel:
    """Create a float32 model with peaked logits and norms away from 1, so that a misplaced weight changes the
    output."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    generator = torch.Generator().manual_seed(seed)
    loader = AutoModelForImageTextToText if kind in VISION_TYPES else AutoModelForCausalLM
    model = loader.from_config(tiny_config(kind, **changes), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms start at 1, or at 0 if their factor is 1 + weight.
            mean, deviation = (float(parameter.mean()), 0.3) if "norm" in name else (0.0, std)
            if name.endswith(("A_log", "dt_bias")):
                deviation = 0.5
            # A larger deviation makes the logits of tokens differ clearly.
            if "embed_tokens" in name or "lm_head" in name:
                deviation = 0.4
            parameter.normal_(mean, deviation, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                # A deviation as large as the scores', so that the bias changes many choices of experts.
                buffer.normal_(0.0, 0.3, generator=generator)
    return model


def write_tiny_model(
    directory: Path | str, kind: str, *, seed: int = 0, std: float = 0.12, **changes: JsonValue
) -> Path:
    """Save tiny_model(...) as an HF directory (config.json, safetensors with one tensor per expert)."""
    directory = Path(directory)
    tiny_model(kind, seed=seed, std=std, **changes).save_pretrained(directory)
    return directory


def add_mtp_layer(directory: Path, *, seed: int = 4, num_layers: int = 1) -> None:
    """Add random multi-token-prediction layers, which transformers does not save, including the copies of embedding and
    output projection that published checkpoints have."""
    from safetensors.torch import load_file, save_file

    config = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": num_layers}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for row in family_for(config).rows(config):
        for name, shape in zip(row.hf, row.shapes, strict=True) if row.place == "mtp" else ():
            for bound in [name.replace("{e}", str(expert)) for expert in range(max(row.num_experts, 1))]:
                # A copy in published checkpoints: the same values as its original.
                original = tensors.get(row.repeats)
                mean, deviation = (1.0, 0.3) if "norm" in bound else (0.0, 0.3 if len(shape) == 1 else 0.12)
                fresh = mean + deviation * torch.randn(shape, generator=generator)
                tensors.setdefault(bound, fresh if original is None else original.clone())
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 for invalid input."""
    parser = argparse.ArgumentParser(description="Write a tiny random HF checkpoint.")
    parser.add_argument("family", choices=sorted(FAMILIES), metavar="FAMILY", help=", ".join(sorted(FAMILIES)))
    parser.add_argument("out", type=Path, metavar="DIR", help="must not exist")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="a field of config.json")
    parser.add_argument("--mtp", action="store_true", help="add a multi-token-prediction layer")
    parsed = parser.parse_args(arguments)
    try:
        write(parsed.family, parsed.out, changes=_changes(parsed.set), seed=parsed.seed, mtp=parsed.mtp)
    except ConversionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {parsed.out}")
    return 0


def write(family: str, out: Path, *, changes: JsonObject, seed: int, mtp: bool) -> None:
    """Write the checkpoint. Raises: ConversionError if `out` exists, or the family rejects the changed
    configuration."""
    if out.exists():
        raise ConversionError(f"{out} exists already; remove it or choose another directory")
    # Kimi K2 has the layers of DeepSeek-V3 under another model_type, which transformers does not know.
    known_to_transformers = "deepseek_v3" if family == "kimi_k2" else family
    fields = tiny_fields(known_to_transformers, **changes) | {"model_type": family}
    family_for(fields).model_arguments(fields)  # raises for a field that the family does not support
    write_tiny_model(out, known_to_transformers, seed=seed, **changes)  # type: ignore[arg-type]  # no `std` in config.json
    if family != known_to_transformers:
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(config | {"model_type": family}, indent=2))
    if mtp:
        add_mtp_layer(out)


def _changes(settings: Sequence[str]) -> JsonObject:
    changes = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        try:
            changes[key] = json.loads(value) if equals else None
        except ValueError:
            changes[key] = value
        if not equals:
            raise ConversionError(f"--set {setting}: write KEY=VALUE")
    return changes


if __name__ == "__main__":
    sys.exit(main())
