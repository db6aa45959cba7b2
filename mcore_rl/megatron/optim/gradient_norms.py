"""The gradient's norm by kind of module: where an update comes from, and where it goes wrong.

Every gradient is counted once over all ranks, by megatron's own rules for tied embeddings and for what tensor-parallel
ranks repeat, so the squares of all groups add up to the square of the norm that is clipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mcore_rl.megatron import cpu
from mcore_rl.megatron.optim.main_params import main_parameters, optimizer_parts
from mcore_rl.types import Root

cpu.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.optimizer import MegatronOptimizer  # noqa: E402
from megatron.core.transformer.module import param_is_not_shared  # noqa: E402

KINDS = ("embedding", "attention", "router", "experts", "mlp", "norm", "output", "mtp")
_PARTS = (
    ("mtp.", "mtp"),
    ("embedding.", "embedding"),
    ("output_layer.", "output"),
    ("router.", "router"),
    ("norm", "norm"),
    ("self_attention.", "attention"),
    ("experts.", "experts"),
    ("mlp.", "mlp"),
)
"""Part of a live parameter's name -> kind; the first that fits."""


def kind_of(name: str) -> str:
    """The kind of module that a live parameter belongs to. A norm that TransformerEngine fuses into a projection is a
    norm (`layer_norm_weight`); shared experts count as experts."""
    return next((kind for part, kind in _PARTS if part in name.replace("layer_norm", "norm")), "other")


def gradient_norms(chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> dict[str, Root]:
    """This rank's share of the norm of every kind that it holds, before clipping; merging those of all ranks is exact.
    Call it between the reduction of gradients and the optimizer's step. Not collective."""
    kinds = {id(parameter): kind_of(name) for chunk in chunks for name, parameter in chunk.named_parameters()}
    squares: dict[str, list[torch.Tensor]] = {}
    for part in optimizer_parts(optimizer):
        for gradient, parameter in _counted_here(part):
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            squares.setdefault(kinds[id(parameter)], []).append(norm.square())
    if not squares:
        return {}
    # One transfer for all kinds: each would wait for the device.
    sums = torch.stack([torch.stack(of_kind).sum(dtype=torch.float64) for of_kind in squares.values()]).tolist()
    return dict(zip(squares, map(Root, sums), strict=True))


def _counted_here(part: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(gradient of what this rank owns, parameter), without what another rank counts."""
    counted = []
    for owned in main_parameters(part):
        parameter = owned.model
        if not owned.sharded and not _is_first_replica(parameter):
            continue
        if not param_is_not_shared(parameter):
            continue
        if not tensor_parallel.param_is_not_tensor_parallel_duplicate(parameter, getattr(part, "tp_group", None)):
            continue
        stop = owned.start + owned.main.numel()
        counted.append((parameter.main_grad.view(-1)[owned.start : stop], parameter))
    return counted


def _is_first_replica(parameter: torch.Tensor) -> bool:
    if getattr(parameter, "allreduce", True):
        return int(parallel_state.get_data_parallel_rank(with_context_parallel=True)) == 0
    return int(parallel_state.get_expert_data_parallel_rank()) == 0
