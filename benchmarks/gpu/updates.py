"""Updates of a dense and of a mixture-of-experts model that fill the device.

Model FLOPs (mcore_rl/planner/workload.py: without recomputation and padding) per second are compared with a large
bfloat16 matrix product on the same device. For long-tailed responses, tokens per second with packing are compared with
padding to the longest response.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.gpu.clock import medians, product_flops
from benchmarks.gpu.machine import require, stated_flops
from benchmarks.gpu.models import DENSE, LOADS, ModelLoad, one_actor, size_of
from benchmarks.result import Result, compare
from benchmarks.training.actor_task import PROMPT, trajectories
from mcore_rl.planner.workload import forward_flops
from mcore_rl.resolved.layout import model_arguments
from mcore_rl.types.json import JsonObject

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.actor import MegatronActor

REPEATS = 3
AIM = ">= 0.4"
"""Minimum fraction of the matrix product's rate, for the dense model."""


def run(device: str = "cuda") -> list[Result]:
    require(device)
    product = product_flops(device)
    return [row for load in LOADS for row in _measure(load, device, product)]


def _measure(load: ModelLoad, device: str, product: float) -> list[Result]:
    with one_actor(load, device) as (actor, fields):
        equal = np.full(load.responses, load.longest)
        tailed = long_tailed(load)
        # The padded variant has the same number of sequences, all as long as the longest one.
        seconds, packed, padded = medians(
            [_update(actor, equal), _update(actor, tailed), _update(actor, np.full(len(tailed), tailed.max()))],
            device,
            REPEATS,
        )
    rate = update_flops(fields, equal) / seconds
    parameters = size_of(fields).total / 1e9
    layers = fields["num_hidden_layers"]
    stated = stated_flops(device)
    note = f"{layers} layers; {int(equal.sum()) + PROMPT * len(equal)} tokens in rows of {load.budget}"
    note += "" if stated is None else f"; {rate / stated:.1%} of the specified {stated / 1e12:.0f} TFLOPS"
    tokens = int(tailed.sum()) + PROMPT * len(tailed)
    drawn = f"{len(tailed)} responses of {tailed.min()} to {tailed.max()} tokens, {tailed.mean():.0f} on average"
    aim, name = AIM if load.name == DENSE.name else "", f"update, {load.name}"
    return [
        compare(f"{name}, {parameters:.2f}B parameters", rate / 1e12, product / 1e12, "TFLOPS", aim, note),
        compare(f"{name}, packed beside padded", tokens / packed, tokens / padded, "tokens/s", note=drawn),
    ]


def long_tailed(load: ModelLoad) -> np.ndarray:
    """Return lognormal lengths, as of reasoning models, up to the longest of `load`."""
    lengths = np.random.default_rng(0).lognormal(np.log(load.longest / 8), 0.9, load.responses)
    return np.clip(lengths, 8, load.longest).astype(np.int64)


def update_flops(fields: JsonObject, responses: np.ndarray) -> float:
    """Return the FLOP of a forward pass and a backward pass (twice as much), with causal attention."""
    lengths = responses + PROMPT
    # A token attends to the tokens of its own sequence, so long sequences count by their squares.
    attended = float((lengths**2).sum() / lengths.sum())
    predicted = float(responses.sum() / lengths.sum())
    forward = forward_flops(model_arguments(fields), size_of(fields), attended, predicted)
    return 3 * forward * float(lengths.sum())


def _update(actor: MegatronActor, responses: np.ndarray) -> Callable[[], object]:
    share, buffers = trajectories(responses)

    def update() -> None:
        batch, _ = actor.recompute_logp([share], [buffers])
        actor.update(batch, 0)

    return update
