"""Updates with weights.delta and rollout.quantization: engines receive the bits of a sync without deltas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from mcore_rl.weights.delta.copies import FrameBytes
from tests.unit.weights import test_int4_sync as int4
from tests.unit.weights import test_quantised_sync as quantised
from tests.unit.weights import transfer
from tests.unit.weights.transfer import connected, update

_generation = iter(range(10**6))


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return transfer.store()


@pytest.mark.parametrize("case", ["etp inside blocks", "heads on two engine ranks", "pp", "tp beyond groups"])
def test_delta_of_codes_and_scales_equals_whole_tensors(store: dist.TCPStore, case: str) -> None:
    plan = quantised.fp8_plan(case)
    plan = replace(plan, topology=replace(plan.topology, delta=True))
    checkpoint = quantised.checkpoint_of(plan)
    with connected(plan, store, next(_generation)) as processes:
        for scale in (1.0, 1.0, 1.0001, 3.0):
            for tensor in checkpoint.values():
                tensor.mul_(scale)
            expected = quantised.expected_tensors(plan, checkpoint)
            taken, *_ = update(processes, quantised.held_by(plan, checkpoint))
            quantised.check_bits(plan, taken, expected)
            if scale == 1.0001:
                counted = sum((sender.delta_bytes for sender in processes.senders), FrameBytes())
                assert 0 < counted.sent < counted.content // 2


@pytest.mark.parametrize("case", ["shared parameters", "mixtral, pp"])
def test_delta_of_int4_words_and_scales_equals_whole_tensors(store: dist.TCPStore, case: str) -> None:
    plan = int4.int4_plan(case)
    plan = replace(plan, topology=replace(plan.topology, delta=True))
    checkpoint = quantised.checkpoint_of(plan)
    with connected(plan, store, next(_generation)) as processes:
        for scale in (1.0, 1.0001, 3.0):
            for tensor in checkpoint.values():
                tensor.mul_(scale)
            taken, *_ = update(processes, quantised.held_by(plan, checkpoint))
            int4.check_bits(plan, taken, checkpoint)
            if scale == 1.0001:
                counted = sum((sender.delta_bytes for sender in processes.senders), FrameBytes())
                assert 0 < counted.sent < counted.content // 2
