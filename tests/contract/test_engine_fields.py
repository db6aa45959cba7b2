"""Every field of config.json that an engine reads is classified.

Either transformers uses it too, or the engine gets a neutral value, or the field is rejected by name, or it does not
change the model.
"""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path

import pytest
import transformers
from transformers import AutoConfig, PreTrainedConfig

from model_converters.families import FAMILIES
from model_converters.families.parts.engine_fields import NEUTRAL, SUBMODELS
from model_converters.families.parts.engine_rotation import ROTATION_INSIDE
from model_converters.vision_model import VISION_TYPES
from tests.contract.engine_sources import CONFIGS, fields_of_all_models, fields_of_model, reads, root
from tests.contract.engines import MARKS

REJECTED = {
    *("dual_chunk_attention_config", "is_causal", "compression_config", "per_layer_config", "is_heterogeneous"),
    *("index_topk", "index_n_heads", "index_head_dim", "compress_ratios", "rope_interleave", "attention_bias"),
    *("attn_output_gate", "layer_scale", "output_gate_type"),
}
"""Rejected by every family, or by the families whose engine code reads them."""
SPARSE_ATTENTION = {
    *("index_topk_freq", "index_topk_pattern", "index_skip_topk_offset", "index_kpool", "index_kpool_compress"),
    *("indexer_rope_interleave", "indexer_types", "num_indexer_layers", "cli_factor", "sparse_attention_config"),
}
OTHER_MODELS = {
    *("attn_config", "attn_type_list", "backbone_hidden_size", "attention_head_dim", "transf_decoder", "num_layers"),
    *("layers_block_type", "mamba_chunk_size", "chunk_size", "new_decoder_architecture", "language_config", "model"),
    *("encoder", "encoder_config", "vision_n_layers", "engram_layer_ids", "ngram_embedding_n", "learnable_sink"),
    *("add_full_attention_sink_bias", "add_swa_attention_sink_bias", "attention_mode", "attention_other_setting"),
    *("attention_projection_layout", "attn_res_block_size", "decoder_layers", "encoder_layers", "format_version"),
    *("full_attention_interval", "hybrid_override_pattern", "local_layer_ids", "mhc", "swa_kv_lora_rank"),
    *("swa_qk_rope_head_dim", "swa_num_key_value_heads", "use_mla", "use_mla_nope", "eoa_token_id"),
    *("eoa_token_index", "vision_vocab_size", "linear_attn_config", "linear_head_dim", "linear_num_heads"),
    *("language_model_only", "max_source_positions", "image_token_id", "image_token_index", "im_patch_id"),
    *("mm_prefix_clamp_sliding_window", "mm_prefix_span_leading_pad_modulus", "spatial_conv_size"),
    *("temporal_conv_size", "video_end_token_id", "video_start_token_id", "video_token_id", "vision_end_token_id"),
    *("vision_start_token_id", "sub_configs", "pooling", "moe_num_experts", "multi_query_group_num"),
    *("max_window_layers", "num_attention_groups", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k"),
    # Set by arguments of SGLang's server, which runs the two parts of a model with images on two servers.
    *("encoder_only", "language_only"),
    # Read by DeepSeek's layers, from which SGLang's ERNIE imports others.
    *("routed_scaling_factor", "norm_topk_prob", "topk_group"),
}
"""Read only for other architectures or model types, or if another field that is neutral or rejected is set."""
POOLING = {
    *("embedding_size", "projection_dim", "projection_size", "is_matryoshka", "matryoshka_dimensions"),
    *("position_embedding_type", "seq_pooling_type", "tok_pooling_type", "use_pad_token", "use_sep_token"),
}
SPECULATION = {
    *("mtp_num_hidden_layers", "mtp_num_experts", "mtp_num_experts_per_tok", "mtp_local_extent"),
    *("mtp_local_layer_ids", "mtp_hybrid_override_pattern", "n_predict", "num_nextn_predict_layers"),
    *("sample_from_anchor", "dflash_config", "eagle_config", "eagle_aux_hidden_state_layer_ids"),
    *("num_mtp_modules", "target_layer_count", "target_hidden_size", "configure_draft_model", "mla_nope"),
}
"""Read for draft models. target_layer_count counts layers of one kind; models with several kinds are rejected."""
LENGTHS = {
    *(
        "max_model_len",
        "max_seq_len",
        "max_seq_length",
        "max_sequence_length",
        "max_target_positions",
        "model_max_length",
    ),
    *("n_positions", "seq_len", "seq_length"),
}
"""Limits of the context: an engine refuses to start beyond them."""
SAME = {
    # Rejected unless all layers are of one kind (families.parts.hf_config).
    "layer_types",
    # transformers moves these into rope_parameters, and both engines read its configuration.
    *("rope_theta", "rope_scaling", "original_max_position_embeddings", "partial_rotary_factor"),
    # Given by families.engine_overrides.
    *("architectures", "scoring_func", "topk_method", "moe_layer_freq", "quantization_config"),
    *("rotary_dim", "use_routing_bias", "use_qk_norm", "qk_norm_type"),
    # Selects the family.
    "model_type",
    # Stop tokens are arguments of each request.
    "eos_token_id",
    # Precision of the router's scores in vLLM; transformers and megatron compute them in float32.
    "moe_router_dtype",
    # Selects code to load; none is loaded without trust_remote_code.
    "auto_map",
    # The engine gets its dtype as an argument, and names of directories.
    *("torch_dtype", "name_or_path"),
    # Sizes that transformers also reads in the families that use them; other families do not reach the code.
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "n_shared_experts", "n_routed_experts"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group"),
    "first_k_dense_replace",
    # Methods.
    *("get_text_config", "get", "items", "keys", "update", "to_dict", "standardize_rope_params", "validate_rope"),
}
KNOWN = {
    *(*NEUTRAL, *SUBMODELS, *REJECTED, *SPARSE_ATTENTION, *OTHER_MODELS, *POOLING, *SPECULATION, *LENGTHS, *SAME),
}
WITHOUT_ENGINE_CLASS = {"seed_oss"}
"""Families for which both engines run transformers' own class, which reads the fields of transformers."""
REJECTED_BESIDE = {
    "vllm": {"deepseek_v32", "glm_moe_dsa"},
    "sglang": {
        *("deepseek_v32", "glm_moe_dsa", "gemma3_text", "gpt_oss", "qwen3_next", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_vl_moe"),
    },
}
"""Engine -> families that runs reject (resolved.model, Family.refused_by_engines,
config.rules.linear_attention)."""
CASES = [
    pytest.param(engine, name, id=f"{engine}-{name}", marks=MARKS[engine])
    for engine in MARKS
    for name in FAMILIES
    if name not in WITHOUT_ENGINE_CLASS | REJECTED_BESIDE[engine]
]


@cache
def used_by_transformers(name: str) -> frozenset[str]:
    """Return the fields of the family's configuration class and the fields that its modeling code reads."""
    kind = FAMILIES[name].transformers_type or name
    config = AutoConfig.for_model(kind)
    # The configuration of a text model may be in the folder of the model that contains it.
    configuration = Path(inspect.getfile(type(config)))
    model = configuration.with_name(configuration.name.replace("configuration_", "modeling_"))
    declared = {key for part in _parts(config) for key in inspect.signature(type(part).__init__).parameters}
    declared |= {key for part in _parts(config) for key in part.attribute_map}
    return frozenset(declared | {field for field, _ in reads(model, frozenset(CONFIGS))})


def _parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a configuration and that of the text model in it."""
    return [config, *([config.text_config] if hasattr(config, "text_config") else [])]


@pytest.mark.parametrize(("engine", "name"), CASES)
def test_fields_read_by_engine_model_are_known(engine: str, name: str) -> None:
    assert root(engine) is not None
    found = fields_of_model(engine, FAMILIES[name].architecture)
    # Classes of models with a vision tower may start the text model's class by its name.
    sizes = {"hidden_size", "num_hidden_layers", "num_attention_heads"}
    assert sizes <= found.keys() or (name in VISION_TYPES and "vision_config" in found)
    unknown = {field: places for field, places in found.items() if field not in KNOWN | used_by_transformers(name)}
    assert not unknown


@pytest.mark.parametrize("engine", [pytest.param(engine, marks=marks) for engine, marks in MARKS.items()])
def test_fields_read_for_all_engine_models_are_known(engine: str) -> None:
    found = fields_of_all_models(engine)
    assert {"architectures", "sliding_window", "num_hidden_layers", "head_dim"} <= found.keys()
    everywhere = frozenset.intersection(*map(used_by_transformers, FAMILIES))
    unknown = {field: places for field, places in found.items() if field not in KNOWN | everywhere}
    assert not unknown


@pytest.mark.parametrize("name", FAMILIES)
def test_own_fields_equal_fields_of_transformers_class(name: str) -> None:
    config = AutoConfig.for_model(FAMILIES[name].transformers_type or name)
    base = inspect.signature(transformers.PreTrainedConfig.__init__).parameters
    declared = {key for part in _parts(config) for key in inspect.signature(type(part).__init__).parameters} - set(base)
    assert FAMILIES[name].own_fields - {*ROTATION_INSIDE, *SUBMODELS} == declared & NEUTRAL.keys()
