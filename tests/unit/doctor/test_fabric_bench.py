"""Measurements of a rank detect wrong results of device and network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from mcore_rl.doctor.fabric import bench as module
from mcore_rl.doctor.fabric.bench import Bench, WrongResultError


@pytest.fixture
def bench() -> Bench:
    return Bench("cpu", 0)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_working_device_has_a_positive_speed(bench: Bench) -> None:
    bench.start()
    for speed in (bench.matrix_product(), bench.copy(), bench.copy_to_device(), bench.copy_to_host()):
        assert speed > 0


def test_checked_product_is_exact_in_bfloat16() -> None:
    sizes = module.SIZES["cuda"]
    assert sizes.dtype == torch.bfloat16  # which rounds integers beyond 256
    generator = torch.Generator().manual_seed(1)
    a, b = (module.sparse_signs(shape, generator) for shape in ((64, sizes.rows), (sizes.rows, 64)))
    assert 0 < (a.float() @ b.float()).abs().max() <= 256


def test_product_with_one_wrong_entry_raises(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.matmul

    def with_a_flipped_bit(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        multiply(a, b, out=out)[3, 5] += 1
        return out

    monkeypatch.setattr(torch, "matmul", with_a_flipped_bit)
    with pytest.raises(WrongResultError, match="1 rows of a product of 384"):
        bench.matrix_product()


def test_wrong_copy_raises(bench: Bench) -> None:
    class Target(torch.Tensor):
        def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            super().copy_(source)
            self[7] += 1
            return self

    source = torch.arange(64, dtype=torch.int32)
    with pytest.raises(WrongResultError, match="differs in 1 of 64"):
        bench._copy(source, torch.empty_like(source).as_subclass(Target))


@pytest.mark.parametrize(("call", "what"), [(0, "the sum over all ranks"), (-1, "the sum of zeros")])
@pytest.mark.usefixtures("group")
def test_wrong_sum_raises_in_first_and_timed_calls(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, call: int, what: str
) -> None:
    calls = range(2 + module.WARM_UPS + bench.sizes.repeats)
    pending = iter(calls)

    def reduce_wrongly(values: torch.Tensor) -> None:
        if next(pending) == calls[call]:
            values[-1] += 1

    monkeypatch.setattr(dist, "all_reduce", reduce_wrongly)
    with pytest.raises(WrongResultError, match=what):
        bench.all_reduce()
