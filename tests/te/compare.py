"""Comparison of models built from simulated TransformerEngine layers and from local layers."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.te.everywhere import ENGINE  # first, before any import of megatron

# isort: split
import torch

from mcore_rl.config.models import ActorConfig, ParallelConfig
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.schema import ModelConfig
from mcore_rl.megatron.model import parallel
from mcore_rl.megatron.model.attention.packed import pack_sequences
from mcore_rl.megatron.model.loading import load_hf
from mcore_rl.megatron.model.model import build_model
from mcore_rl.megatron.model.names import canonical_name
from mcore_rl.megatron.model.output import PolicyModel, logits_emitted
from mcore_rl.resolved.installed import Installed
from mcore_rl.resolved.layout import train_layout
from mcore_rl.resolved.model import ResolvedModel
from model_converters.families.parts.hf_config import read_hf_config
from tests.tiny_models import write_tiny_model

LOCAL = Installed()
LENGTHS = [5, 12, 1, 6]


@dataclass(frozen=True)
class Computed:
    """Results of one model. keys: checkpoint keys. divided: undivided projections that are marked as divided, which a
    gradient norm would count once per tensor-parallel rank."""

    logits: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    keys: set[str]
    layers: set[str]
    divided: list[str]


def compute(directory: str, installed: Installed) -> Computed:
    hf_config = read_hf_config(directory)
    layout = train_layout(ParallelConfig(), 1, hf_config)
    with tempfile.TemporaryDirectory() as store:
        method = f"file://{store}/store"
        parallel.initialize(layout, rank=0, init_method=method, timeout_seconds=30, seed=0)
        try:
            role = ModelRole.policy(ActorConfig(), ModelConfig(hf_path="", dtype="float32"))
            (model,) = build_model(ResolvedModel(role, hf_config, layout), installed=installed)
            load_hf([model], directory, layout)
            return _measured(model)
        finally:
            parallel.destroy()


def _measured(model: PolicyModel) -> Computed:
    tokens = torch.randint(0, 90, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    with logits_emitted([model]):
        logits = model(tokens, None, None, packed_seq_params=pack_sequences(LENGTHS))
    logits.float().log_softmax(-1)[..., 7].sum().backward()
    named = {canonical_name(model, name): parameter for name, parameter in model.named_parameters()}
    return Computed(
        logits.detach(),
        {name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in named.items()},
        # Only TransformerEngine has extra states; they are empty without FP8.
        {entry.key for entry in model.sharded_state_dict().values() if not entry.key.endswith("_extra_state")},
        {type(module).__name__ for module in model.modules()},
        [
            name
            for name, parameter in named.items()
            if "_down_proj" in name and getattr(parameter, "tensor_model_parallel", False)
        ],
    )


def compare(family: str) -> dict[str, Any]:
    """Return the differences of the two models. Differences of gradients are relative to a tensor's largest entry."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(Path(directory), family, seed=3)
        local, engine = compute(directory, LOCAL), compute(directory, ENGINE)
    gradients = {name: _relative(local.gradients[name], engine.gradients[name]) for name in local.gradients}
    return {
        "family": family,
        "version": metadata.version("transformer-engine"),
        "logits": float((local.logits - engine.logits).abs().max()),
        "gradients": max(gradients.values()),
        "parameters": sorted(local.gradients.keys() ^ engine.gradients.keys()),
        "keys": sorted(local.keys ^ engine.keys),
        "layers": sorted(name for name in engine.layers if name.startswith("TE")),
        "divided": engine.divided,
    }


def _relative(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return float((one - other).abs().max() / (one.abs().max() + 1e-9))
