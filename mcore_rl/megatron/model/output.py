"""Deferred output projection: the last stage returns hidden states, and the loss projects them in chunks.

GPTModel would compute the logits of all tokens, [T, V]: by far the largest activation for a long row and a large
vocabulary. PolicyModel stops before output_layer; `logprobs.linear_logp_entropy` takes hidden states and weight.

Usage on the last stage:

    hidden = chunk(tokens, None, None, packed_seq_params=sequences)      # [T, h], whole sequence on every TP rank
    logp, entropy = linear_logp_entropy(
        hidden, output_weight(chunk), targets, group=tp_group, vocab_size=unwrap(chunk).unpadded_vocab_size
    )

- If the chunk is wrapped in Float16Module, call it with `fp32_output=False`; otherwise it copies hidden to float32.
- Each TP rank differentiates its own vocabulary shard, so its gradient of `hidden` is a partial sum. The backward pass
  of `chunk` sums it: a reduce-scatter with sequence parallelism, otherwise an all-reduce. The loss must not reduce it.
- The gradient of the weight needs no reduction over TP ranks: it reaches .grad through autograd and DDP's hook. With
  tied embeddings on one stage it adds to the embedding's gradient; on several stages finalize_model_grads adds the
  gradients of the first and last stage.
- With tp > 1 and sequence parallelism, T must be a multiple of tp: pad the row with tokens that form another sequence.
- If multi-token-prediction layers are trained and gradients are recorded, the D * T hidden states of their depths
  follow the T hidden states of the policy (see mtp.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer

_MTP_INPUTS = (
    "input_ids",
    "position_ids",
    "attention_mask",
    "rotary_pos_emb",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "packed_seq_params",
    "sequence_len_offset",
)


class ModelChunk(MegatronModule):
    """Model that Megatron's wrappers contain, with the attributes of GPTModel that passes and checkpoints use.

    unpadded_vocab_size: vocabulary without the padding that makes tensor-parallel shards equal; None: no padding.
        Log-probabilities ignore the padding.
    has_adapters: all parameters except adapters (lora/adapters.py) are frozen; a chunk may have no adapters.
    has_hf_names: weights have the names of HF checkpoints (hf_tensors), instead of Megatron's.
    """

    has_adapters = has_hf_names = False
    unpadded_vocab_size: int | None = None

    def layers(self) -> list[torch.nn.Module]:
        """Return the transformer layers, whose parameters are gathered together if parameters are sharded."""
        raise NotImplementedError

    def hf_tensors(self, name: str, tensor: torch.Tensor, first: int) -> Mapping[str, torch.Tensor]:
        """Return the tensors of HF checkpoints, by name, as views of `tensor`: the rows from `first` on of parameter or
        router bias `name`. Only for a model with has_hf_names."""
        raise NotImplementedError


class PolicyModel(GPTModel, ModelChunk):
    """A GPTModel whose last stage returns hidden states; parameters, names and sharded state dict are unchanged.

    emit_logits: return logits [B, S, V / tp], including padding, like GPTModel.
    """

    emit_logits = False

    def layers(self) -> list[torch.nn.Module]:
        return [module for module in self.modules() if isinstance(module, TransformerLayer)]

    def _postprocess(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Return hidden states on the last stage instead of logits.

        Shapes: [S, B, h] (S / tp with sequence parallelism) -> [B * S, h] on the last stage; [(1 + D) * B * S, h] with
        D multi-token-prediction layers if gradients are recorded.
        """
        if self.emit_logits:
            return super()._postprocess(hidden_states, *args, **kwargs)
        # Only the MTP loss reads the states of the depths, and only updates compute it.
        depths = (self.config.mtp_num_layers or 0) if torch.is_grad_enabled() else 0
        if depths and self.mtp_process:
            hidden_states = torch.cat((hidden_states, self._predict_ahead(hidden_states, **kwargs)))
        if not self.post_process:
            return hidden_states
        rows = [self._gather_sequence(part).transpose(0, 1).flatten(0, 1) for part in hidden_states.chunk(1 + depths)]
        return torch.cat(rows) if depths else rows[0]

    def _predict_ahead(self, hidden_states: torch.Tensor, **inputs: object) -> torch.Tensor:
        """Return the concatenated hidden states of all depths. Their gradient stays within the MTP layers."""
        # Activation recomputation records gradients only if an input requires them.
        detached = hidden_states.detach().requires_grad_()
        given = {name: inputs.get(name) for name in _MTP_INPUTS}
        all_states = self.mtp(hidden_states=detached, embedding=self.embedding, **given)
        # Megatron returns its input, followed by the states of all depths.
        return all_states[len(hidden_states) :]

    def _gather_sequence(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Gather the whole sequence on every tensor-parallel rank; the backward pass sums its gradient over them."""
        if self.config.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=True, group=self.pg_collection.tp
            )
        return tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states, group=self.pg_collection.tp)


def unwrap(module: torch.nn.Module) -> ModelChunk:
    """Return the model inside DistributedDataParallel and Float16Module."""
    while not isinstance(module, ModelChunk):
        module = module.module  # type: ignore[assignment]
    return module


def output_weight(chunk: torch.nn.Module) -> torch.nn.Parameter:
    """Return this rank's rows of the output projection, [V / tp, h]; the embedding if the two are tied.

    Raises: ValueError if the chunk is not on the last stage.
    """
    model = unwrap(chunk)
    if not model.post_process:
        raise ValueError("only the last pipeline stage's last chunk has an output projection")
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


@contextmanager
def logits_emitted(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Return a context in which the last stage returns vocabulary-parallel logits [B, S, V / tp], like GPTModel."""
    models = [unwrap(chunk) for chunk in chunks]
    for model in models:
        model.emit_logits = True
    try:
        yield
    finally:
        for model in models:
            model.emit_logits = False
