"""A model of transformers with the interface of a Megatron model chunk (strategy fsdp2).

The rank holds all layers; its parameters are sharded over data-parallel ranks (model/shards.py), and the experts of a
layer are stacked (stacked_experts.py). Like a PolicyModel, it returns hidden states, and the loss projects them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig, AutoModelForCausalLM

from mcore_rl.megatron.huggingface.attention import PACKED, positions
from mcore_rl.megatron.huggingface.checkpoint_keys import hf_chunks, parameter_chunks, sharded_state
from mcore_rl.megatron.huggingface.routers import TransformersRouter
from mcore_rl.megatron.huggingface.stacked_experts import hf_parts, views
from mcore_rl.megatron.model.attention.packed import PackedRow
from mcore_rl.megatron.model.names import named_weights
from mcore_rl.megatron.model.output import ModelChunk
from mcore_rl.megatron.model.value_model import ValueHead
from mcore_rl.resolved.implementation import TRANSFORMERS_EXPERTS
from mcore_rl.resolved.model import ResolvedModel
from model_converters.dcp.blocks import CheckpointChunk
from model_converters.families import family_for
from model_converters.hf.value_head import model_rows
from model_converters.mapping.table import BoundRow, bind

StoredChunks = Callable[[], Sequence[CheckpointChunk]]


class TransformersModel(ModelChunk):
    """Decoder of transformers with the output projection `lm_head` (none if it is tied to the embedding), or the value
    head `score`.

    stored: returns the blocks of Megatron's model in a checkpoint. Called for checkpoints only.
    """

    has_hf_names = post_process = pre_process = True
    model_type = ModelType.encoder_or_decoder

    def __init__(
        self, config: TransformerConfig, spec: ResolvedModel, stored: StoredChunks, *, predicts_values: bool
    ) -> None:
        super().__init__(config)
        self._stored = stored
        self._bound = _family_rows(spec, config.params_dtype, predicts_values=predicts_values)
        self._parts = hf_parts(self._bound)
        self._chunks: Mapping[str, Sequence[CheckpointChunk]] | None = None
        # Without initial values a whole model never needs memory: the rank then creates only its rows (model/rows.py).
        with nullcontext() if spec.role.model.random_init else torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(
                _hf_config(spec), dtype=config.params_dtype, attn_implementation=PACKED, **_experts(config)
            )
        # Its frequencies are computed, not loaded.
        causal.model.rotary_emb = type(causal.model.rotary_emb)(causal.config)
        if "embedding_scale" in spec.arguments.transformer:
            # Computed, too. Without initial values, this buffer is on meta.
            embedding = causal.model.embed_tokens
            embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, device="cpu")
        if spec.role.section.recompute == "full":
            causal.gradient_checkpointing_enable({"use_reentrant": False})
        self.model = causal.model
        for number, layer in enumerate(self.layers(), 1):
            if hasattr(layer.mlp, "experts"):
                layer.mlp.gate = TransformersRouter(config, layer.mlp.gate, number)
        self.share_embeddings_and_output_weights = spec.arguments.tied_embeddings
        self.unpadded_vocab_size = spec.arguments.vocab_size
        if predicts_values:
            self.score = ValueHead(config)
        elif not self.share_embeddings_and_output_weights:
            self.lm_head = causal.lm_head
        differing = dict(named_weights(self)).keys() ^ self._parts.keys()
        assert not differing, f"transformers' model and the family's table differ in {sorted(differing)}"

    def forward(
        self, tokens: torch.Tensor, position_ids: None, attention_mask: None, *, packed_seq_params: PackedRow
    ) -> torch.Tensor:
        """Compute hidden states [T, h], or values, float32 [T].

        Shapes: tokens int64 [1, T]. Positions and masks follow from the lengths of the sequences.
        """
        hidden = self.model(
            input_ids=tokens,
            position_ids=positions(packed_seq_params.lengths, tokens.device),
            use_cache=False,
            packed_seq_params=packed_seq_params,
        ).last_hidden_state[0]
        return self.score(hidden) if hasattr(self, "score") else hidden

    def set_input_tensor(self, tensor: torch.Tensor | None) -> None:
        """Accept the input of a pipeline stage, which Megatron's schedules set; the only stage has none."""

    @property
    def embedding(self) -> torch.nn.Module:
        """Embedding of the tokens."""
        return self.model.embed_tokens

    @property
    def output_layer(self) -> torch.nn.Module:
        """Value head or output projection; the embedding if the model is tied."""
        if hasattr(self, "score"):
            return self.score
        return self.embedding if self.share_embeddings_and_output_weights else self.lm_head

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter:
        return self.model.embed_tokens.weight

    def layers(self) -> list[torch.nn.Module]:
        return [*self.model.layers]

    def sharded_state_dict(self, *args: object, **kwargs: object) -> dict[str, ShardedTensorFactory]:
        """Describe the parameters, as whole tensors, by their places in a checkpoint of Megatron's model. Adapters are
        not part of it; checkpoint/blocks.py stores them under PEFT's names."""
        if self._chunks is None:
            self._chunks = parameter_chunks(self._parts, hf_chunks(self._bound, self._stored()))
        data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        weights = {name: weight for name, weight in named_weights(self) if ".adapter." not in name}
        return sharded_state(weights, self._chunks, data_rank)

    def hf_tensors(self, name: str, tensor: torch.Tensor, first: int) -> Mapping[str, torch.Tensor]:
        return views(self._parts[name], tensor, first)


def _family_rows(spec: ResolvedModel, dtype: torch.dtype, *, predicts_values: bool) -> list[BoundRow]:
    return bind(model_rows(spec.hf_config, has_value_head=predicts_values), spec.hf_config, dtype)


def _experts(config: TransformerConfig) -> dict[str, str]:
    """Return the implementation of experts; transformers rejects one for dense models."""
    return {"experts_implementation": TRANSFORMERS_EXPERTS} if config.num_moe_experts else {}


def _hf_config(spec: ResolvedModel) -> object:
    model_type = family_for(spec.hf_config).transformers_type or spec.hf_config["model_type"]
    # Like Megatron's models (model/model.py): sampled log-probabilities must be reproducible.
    random = dict.fromkeys(("attention_dropout", "residual_dropout", "router_jitter_noise"), 0.0)
    fields = spec.hf_config | {"model_type": model_type} | random
    # transformers gives the embedding of pad_token_id no gradient and initializes it with zeros. Packed rows have no
    # padding, so it is a real token, maybe the end token. Some published files have one outside of the vocabulary.
    return AutoConfig.for_model(**(fields | {"pad_token_id": None}))
