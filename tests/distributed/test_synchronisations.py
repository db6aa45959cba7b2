"""A step waits for its device only in known places, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.distributed.synchronisations import Wait, WaitCounter
from tests.distributed.two_updates import make_actor
from tests.tiny_models import write_tiny_model

LAYERS_WITH_EXPERTS = {"qwen3": 0, "qwen3_moe": 4, "deepseek_v3": 3}
EXEMPT = (
    # Kernels used only on CPUs; TransformerEngine replaces them on a GPU.
    ("mcore_rl/megatron/cpu/", ""),
    # Operates on host tensors, once per row: grouping of sequences for torch's attention.
    ("mcore_rl/megatron/model/attention/packed.py", "_plan"),
)
"""Waits in Megatron are ignored as well: the number of tokens per expert, the norm used for clipping."""
_STEP, _BUILD = "mcore_rl/megatron/step", "mcore_rl/megatron/model"
AN_UPDATE = {
    # Number of tokens on all ranks: the losses of MTP layers and routers are means over them.
    Wait("mcore_rl/megatron/roles/rank_model.py", "RankModel.token_weights", "tensor"): 1,
    Wait("mcore_rl/megatron/roles/rank_model.py", "RankModel.token_weights", "tolist"): 1,
    # Check for finite gradients before the step, one wait for all of them.
    Wait(f"{_STEP}/finite_check.py", "_are_finite", "_local_scalar_dense"): 1,
    Wait(f"{_STEP}/finite_check.py", "require_finite", "tensor"): 1,
    Wait(f"{_STEP}/finite_check.py", "require_finite", "_local_scalar_dense"): 1,
    # Metrics of all kinds of modules together.
    Wait("mcore_rl/megatron/optim/gradient_norms.py", "gradient_norms", "tolist"): 1,
}
AN_UPDATE_OF_EXPERTS = {
    # Metrics of all layers, after the step.
    Wait(f"{_BUILD}/routers.py", "Routers.finish_update", "_local_scalar_dense"): 1,
    Wait(f"{_BUILD}/routers.py", "Routers.finish_update", "tolist"): 1,
}
A_MICROBATCH = {
    # Metrics and the check for finite values, between forward and backward pass.
    Wait(f"{_STEP}/objective.py", "_report", "tolist"): 1,
    Wait("mcore_rl/algorithms/losses/surrogate.py", "ratio_metrics", "tolist"): 1,
}
A_MICROBATCH_OF_THE_OLD_POLICY = {Wait(f"{_STEP}/mismatch.py", "mismatch", "tolist"): 1}
A_MICROBATCH_WITH_TOKEN_VALUES = {
    Wait(f"{_STEP}/loss/trained_tokens.py", "whole_by_sample", "cpu"): 1,
    Wait(f"{_STEP}/loss/trained_tokens.py", "whole_by_sample", "numpy"): 1,
}
"""Micro-batches with the first observe.token_responses responses of a step; here all of them."""
A_MICROBATCH_WITH_EXPERTS = {
    # Routing data of a row, before the first forward pass.
    Wait(f"{_STEP}/replay.py", "RoutingStore._token_places", "repeat_interleave"): 1,
    Wait(f"{_STEP}/replay.py", "RoutingStore._token_places", "tensor"): 1,
    Wait(f"{_BUILD}/attention/context.py", "ContextPart.positions", "repeat_interleave"): 2,
    Wait(f"{_STEP}/replay.py", "RoutingStore.row", "tensor"): 1,
}
A_LAYER_WITH_EXPERTS = {
    # Waits in the first micro-batch of an update; afterwards the counts are on the device.
    Wait(f"{_BUILD}/routers.py", "PolicyRouter._apply_expert_bias", "to"): 1,
}


@pytest.mark.parametrize("kind", LAYERS_WITH_EXPERTS)
def test_update_waits_for_device_only_in_known_places(kind: str, tmp_path: Path) -> None:
    """Exact counts: an additional wait stalls the host once more; a missing one must be removed from the tables."""
    directory = str(write_tiny_model(tmp_path / kind, kind))
    [updates] = launch(count_waits, 1, directory)
    layers = LAYERS_WITH_EXPERTS[kind]
    for index, (microbatches, counts) in enumerate(updates):
        assert microbatches > 1
        expected = times(1, AN_UPDATE) | times(microbatches, A_MICROBATCH)
        if index == 0:
            expected |= times(microbatches, A_MICROBATCH_OF_THE_OLD_POLICY | A_MICROBATCH_WITH_TOKEN_VALUES)
        if layers:
            expected |= times(1, AN_UPDATE_OF_EXPERTS) | times(microbatches, A_MICROBATCH_WITH_EXPERTS)
            expected |= times(microbatches * layers, A_LAYER_WITH_EXPERTS)
        assert counts == expected


def times(factor: int, table: dict[Wait, int]) -> dict[Wait, int]:
    return {wait: factor * count for wait, count in table.items()}


def count_waits(rank: int, directory: str) -> list[tuple[int, dict[Wait, int]]]:
    """Per update: number of micro-batches, and waits in our code."""
    actor, shares = make_actor(directory, {})
    batch, _ = actor.recompute_logp(shares, policy_batch.chunks())
    updates = []
    for index, share in enumerate(shares):
        microbatches = len(actor.microbatches(share, batch.chunks))
        with WaitCounter(EXEMPT) as counter:
            actor.update(batch, index)
        ours = {wait: count for wait, count in counter.counts.items() if not wait.file.startswith("megatron/")}
        updates.append((microbatches, ours))
    return updates


class _ReadsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        gradient.sum().item()
        return gradient


VALUES = torch.tensor([1.0, -2.0, 3.0])
COUNTS = torch.tensor([1, 2, 3])
WAITS: dict[str, tuple[Callable[[], object], str]] = {
    "item": (lambda: VALUES[0].item(), "_local_scalar_dense"),
    "float": (lambda: float(VALUES.sum()), "_local_scalar_dense"),
    "if": (lambda: 1 if VALUES.sum() > 0 else 0, "_local_scalar_dense"),
    "in a backward pass": (
        lambda: _ReadsBackward.apply(VALUES.clone().requires_grad_()).sum().backward(),
        "_local_scalar_dense",
    ),
    "tolist": (VALUES.tolist, "tolist"),
    "numpy": (VALUES.numpy, "numpy"),
    "cpu": (VALUES.cpu, "cpu"),
    "to a device": (lambda: VALUES.to("cpu"), "to"),
    "to a device by name": (lambda: VALUES.to(device=torch.device("cpu")), "to"),
    "a tensor of numbers": (lambda: torch.tensor([1, 2], device="cpu"), "tensor"),
    "nonzero": (VALUES.nonzero, "nonzero"),
    "where": (lambda: torch.where(VALUES > 0), "nonzero"),
    "a mask as index": (lambda: VALUES[VALUES > 0], "mask"),
    "written through a mask": (lambda: VALUES.clone().__setitem__(VALUES > 0, VALUES[:2]), "mask"),
    "masked_select": (lambda: VALUES.masked_select(VALUES > 0), "masked_select"),
    "unique": (lambda: COUNTS.unique(), "_unique2"),
    "equal": (lambda: torch.equal(VALUES, VALUES + 0), "equal"),
    "repeat_interleave": (lambda: VALUES.repeat_interleave(COUNTS), "repeat_interleave"),
}
GOES_ON: dict[str, Callable[[], object]] = {
    "arithmetic": lambda: (VALUES * 2).sum(),
    "to a dtype": lambda: VALUES.to(torch.float64),
    "to a device, later": lambda: VALUES.to("cpu", non_blocking=True),
    "an index of numbers": lambda: VALUES[COUNTS - 1],
    "a mask as factor": lambda: torch.where(VALUES > 0, VALUES, 0.0),
    "repeat_interleave to a known size": lambda: VALUES.repeat_interleave(COUNTS, output_size=6),
}


@pytest.mark.parametrize("name", WAITS)
def test_wait_counter_detects_every_kind_of_wait(name: str) -> None:
    call, kind = WAITS[name]
    with WaitCounter() as counter:
        call()
    assert counter.counts == {Wait("", "", kind): 1}


@pytest.mark.parametrize("name", GOES_ON)
def test_wait_counter_ignores_asynchronous_operations(name: str) -> None:
    with WaitCounter() as counter:
        GOES_ON[name]()
    assert counter.counts == {}
