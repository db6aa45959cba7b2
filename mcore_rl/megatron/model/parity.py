"""Comparison of the logits of a distributed checkpoint with logits computed by transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject

from mcore_rl.config.models import ActorConfig, ModelConfig
from mcore_rl.config.roles import ModelRole
from mcore_rl.errors import CheckpointError
from mcore_rl.megatron.hf_logits import transformers_logits
from mcore_rl.megatron.model import parallel
from mcore_rl.megatron.model.attention.packed import pack_sequences
from mcore_rl.megatron.model.model import build_model
from mcore_rl.megatron.model.output import PolicyModel, logits_emitted
from mcore_rl.resolved.installed import Installed
from mcore_rl.resolved.layout import model_arguments
from mcore_rl.resolved.model import ResolvedModel
from model_converters.families.parts.mtp import without_mtp
from model_converters.mapping.layout import TrainLayout

_LENGTHS = (17, 5, 42)


def compare_logits(
    hf_directory: str | Path, checkpoint: str | Path, hf_config: dict[str, object], *, seed: int = 0
) -> tuple[float, float]:
    """Compare both models on random tokens in float32: Megatron's model of `hf_config` with weights read from
    `checkpoint` by Megatron, and transformers' model of `hf_directory`.

    Returns the largest absolute difference and the largest absolute logit.
    Raises: CheckpointError if the checkpoint does not fit the model or transformers cannot load the directory.
    """
    vocabulary = model_arguments(hf_config, "--hf").vocab_size
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(0, vocabulary, (length,), generator=generator) for length in _LENGTHS]
    logits = _megatron_logits(hf_config, checkpoint, sequences)[:, :vocabulary]
    expected = torch.cat(transformers_logits(hf_directory, sequences))
    return float((logits - expected).abs().max()), float(expected.abs().max())


def _megatron_logits(
    hf_config: dict[str, object], checkpoint: str | Path, sequences: list[torch.Tensor]
) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layout = TrainLayout(1)
    with tempfile.TemporaryDirectory() as store:
        parallel.initialize(layout, rank=0, init_method=f"file://{store}/store", timeout_seconds=60, seed=0)
        try:
            # The comparison covers next-token logits only, without MTP layers.
            role = ModelRole.policy(ActorConfig(), ModelConfig(hf_path="", dtype="float32"))
            # TransformerEngine has no attention for packed rows in float32.
            local = Installed(cuda=device == "cuda")
            (model,) = build_model(ResolvedModel(role, without_mtp(hf_config), layout), installed=local)
            _load(model, checkpoint)
            # All sequences in one packed row: this also tests the packing.
            tokens = torch.cat(sequences)[None].to(device)
            packed = pack_sequences([len(sequence) for sequence in sequences], device)
            with torch.no_grad(), logits_emitted([model]):
                return model(tokens, None, None, packed_seq_params=packed)[0].float().cpu()
        finally:
            parallel.destroy()


def _load(model: PolicyModel, checkpoint: str | Path) -> None:
    state = model.sharded_state_dict()
    # Skip objects: loading would unpickle them, and the logits do not depend on them.
    tensors = {name: entry for name, entry in state.items() if not isinstance(entry, ShardedObject)}
    try:
        loaded = dist_checkpointing.load({"model": tensors}, str(checkpoint))["model"]
    except (CheckpointingException, KeyError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} does not fit this model: {error}") from error
    absent = set(model.load_state_dict(loaded, strict=False).missing_keys) - (set(state) - set(tensors))
    assert not absent, f"megatron did not load {sorted(absent)}"
