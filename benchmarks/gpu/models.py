"""Models that fill a device, and actors that train them."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.sizes import size
from benchmarks.training.actor_task import MODEL, actor_config, write_model
from mcore_rl.config.schema import Config
from mcore_rl.planner.model_size import ModelSize, bound_rows, model_size
from mcore_rl.types.json import JsonObject

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.actor import MegatronActor

BYTES_PER_PARAMETER = 18
"""Bytes per parameter in bfloat16 training: weight, gradient, main parameter, two moments."""
STATE_SHARE = 0.6
"""Fraction of the device's memory for parameters and optimizer; the rest is for activations and logits."""


@dataclass(frozen=True)
class ModelLoad:
    """Model and its load. `layers`: None: as many as fill the device. `fields`: changes of config.json.

    Units: budget in tokens per micro-batch, longest in tokens.
    """

    name: str
    fields: JsonObject = field(default_factory=dict)
    layers: int | None = None
    budget: int = 8192
    responses: int = 64
    longest: int = 4096
    recompute: str = "none"


_WIDE: JsonObject = {"vocab_size": 32_768, "max_position_embeddings": 8192, "head_dim": 128}
DENSE = ModelLoad(
    "dense",
    _WIDE | {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32, "num_key_value_heads": 8},
)
MOE = ModelLoad(
    "mixture of experts",
    _WIDE
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 64}
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4}
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    | {"decoder_sparse_step": 1, "mlp_only_layers": []},
)
_SMALL: JsonObject = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY = ModelLoad("dense", _SMALL, layers=2, budget=512, responses=4, longest=96)
TINY_MOE = ModelLoad(
    "mixture of experts",
    MOE.fields | _SMALL | {"vocab_size": 8192, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    layers=2,
    budget=512,
    responses=4,
    longest=96,
)


LOADS = size((DENSE, MOE), (TINY, TINY_MOE))


def size_of(fields: JsonObject) -> ModelSize:
    """Count the parameters of the model with these fields of config.json."""
    return model_size(fields, bound_rows(fields, torch.bfloat16))


def filled(load: ModelLoad, device: str) -> JsonObject:
    """Return the fields of config.json of `load` on this device."""
    fields = MODEL | load.fields
    if load.layers is not None:
        return fields | {"num_hidden_layers": load.layers}
    assert device == "cuda", "only a GPU is filled with layers: set ModelLoad.layers for a CPU"
    room = STATE_SHARE * torch.cuda.get_device_properties(0).total_memory / BYTES_PER_PARAMETER
    # Layers have equal sizes, so two models show the size of a layer and of everything else.
    one, two = (size_of(fields | {"num_hidden_layers": layers}).total for layers in (1, 2))
    return fields | {"num_hidden_layers": max(int((room - one) // (two - one)) + 1, 1)}


def configure(directory: Path, load: ModelLoad) -> Config:
    """Return the configuration of a bfloat16 actor of the model in `directory`."""
    config = actor_config(directory, tokens_per_microbatch=load.budget)
    config.model.dtype = "bfloat16"
    config.actor.recompute = load.recompute
    config.actor.logprob_chunk_tokens = min(1024, load.budget)
    return config


@contextmanager
def one_actor(load: ModelLoad, device: str, *, cpu_offload: bool = False) -> Iterator[tuple[MegatronActor, JsonObject]]:
    """Create an actor of one rank with random weights; yields it with the fields of its config.json. cpu_offload: the
    optimizer state is in host memory."""
    from mcore_rl.megatron.model import parallel
    from mcore_rl.megatron.roles.actor import MegatronActor

    gc.collect()  # the previous actor may still hold most of the device's memory
    if device == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(prefix="mcore_rl_gpu_") as root:
        fields = filled(load, device)
        config = configure(write_model(Path(root) / "model", **fields), load)
        config.actor.optimizer.cpu_offload = cpu_offload
        try:
            # No checkpoint is read: model.random_init of actor_config.
            yield MegatronActor(config, 0, 1, f"file://{root}/store"), fields
        finally:
            parallel.destroy()
