"""Memory of SGLang's ranks on a GPU, with a stand-in for torch_memory_saver that overwrites what it releases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rl.engines.sglang.devices.memory import TaggedMemory, kv_caches, piece_sizes
from mcore_rl.errors import ConfigError


class Layer(torch.nn.Module):
    """A module with a parameter, a buffer, a derived weight and a reference to the KV cache."""

    def __init__(self, cache: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
        self.register_buffer("inverse", torch.ones(2))
        self.w_kc = self.weight.detach().clone().T.contiguous()
        self.view_of_w_kc = self.w_kc[1:]
        self.cache = cache


class FakeSaver:
    """Records SGLang's calls. Restored memory has the value NaN."""

    def __init__(self) -> None:
        self.cache, self.table = torch.ones(4, 2), torch.ones(3, dtype=torch.int32)
        self.model = torch.nn.Sequential(Layer(self.cache), torch.nn.Linear(2, 2))
        self.moves: list[str] = []
        self.free = 100
        self.memory = TaggedMemory(
            lambda tags: self.move("pause", tags, 7),
            lambda tags: self.move("resume", tags, -7),
            self.model,
            [self.cache, self.table],
            self.settle,
        )

    def settle(self) -> int:
        self.moves.append("settle")
        return self.free

    def move(self, what: str, tags: list[str], freed: int) -> None:
        self.moves.append(f"{what} {' '.join(tags)}")
        self.free += freed * len(tags)
        if what == "resume":
            layer = self.model[0]
            tensors = [self.cache] if tags == ["kv_cache"] else [*self.model.parameters(), layer.w_kc]
            for tensor in tensors:
                tensor.detach().fill_(float("nan"))
            if tags == ["kv_cache"]:
                self.table.fill_(1 << 30)


def test_release_and_restore_use_tags_and_clear_the_cache() -> None:
    saver = FakeSaver()
    assert saver.memory.release(["kv_cache", "weights"], keep_weights=False) == 14
    saver.memory.restore("weights")
    assert saver.model[0].weight.isnan().all()  # an update must follow
    saver.memory.restore("kv_cache")
    # Kernels may still use the memory before it is released.
    assert saver.moves == ["settle", "pause kv_cache weights", "settle", "resume weights", "resume kv_cache"]
    assert not saver.cache.any()
    assert not saver.table.any()  # slots of padded rows


def test_release_of_weights_alone_leaves_the_cache_released() -> None:
    saver = FakeSaver()
    saver.memory.release(["kv_cache", "weights"], keep_weights=False)
    saver.memory.restore("weights")
    assert saver.memory.release(["weights"], keep_weights=True) == 7
    saver.memory.restore("weights")
    assert saver.moves[-4:] == ["settle", "pause weights", "settle", "resume weights"]


MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "pieces"),
    [
        (0, []),
        (5, [5]),
        (MIB, [MIB]),
        (MIB + 3, [MIB, 3]),
        (130 * MIB + 7, [128 * MIB, 2 * MIB, 7]),
        (7 * MIB, [4 * MIB, 2 * MIB, MIB]),
    ],
)
def test_piece_sizes_are_powers_of_two_and_a_rest(size: int, pieces: list[int]) -> None:
    assert piece_sizes(size) == pieces


def test_kept_weights_of_several_pieces_return() -> None:
    saver = FakeSaver()
    weight = torch.nn.Parameter(torch.arange(3 * MIB // 4 + 5.0))
    saver.model.append(weight_holder := torch.nn.Module())
    weight_holder.weight = weight
    saver.memory.release(["kv_cache", "weights"], keep_weights=True)
    saver.memory.restore("weights")
    assert weight.equal(torch.arange(3 * MIB // 4 + 5.0))


def test_kept_weights_return_with_derived_weights() -> None:
    saver = FakeSaver()
    layer = saver.model[0]
    before = [tensor.detach().clone() for tensor in (*saver.model.parameters(), layer.w_kc)]
    addresses = [tensor.data_ptr() for tensor in (*saver.model.parameters(), layer.w_kc)]
    saver.memory.release(["kv_cache", "weights"], keep_weights=True)
    saver.memory.restore("weights")
    after = [*saver.model.parameters(), layer.w_kc]
    assert all(torch.equal(tensor, other) for tensor, other in zip(before, after, strict=True))
    assert [tensor.data_ptr() for tensor in after] == addresses  # CUDA graphs hold them
    assert layer.view_of_w_kc.equal(layer.w_kc[1:])
    saver.memory.release(["weights"], keep_weights=False)
    saver.memory.restore("weights")
    assert layer.weight.isnan().all()  # copies of an earlier sleep are not restored


def scheduler_with(pool: object) -> Any:
    return SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool))


@pytest.mark.parametrize("names", [("k_buffer", "v_buffer"), ("kv_buffer",)])
def test_kv_caches_are_the_tensors_of_all_layers(names: tuple[str, ...]) -> None:
    pool = SimpleNamespace(**{name: [torch.zeros(1), torch.ones(1)] for name in names})
    assert [float(tensor) for tensor in kv_caches(scheduler_with(pool))] == [0, 1] * len(names)


class SWAKVPool:
    """Cache of a model with sliding windows: two pools, and no tensors of its own."""


def test_kv_caches_of_unknown_kind_are_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match=r"in a SWAKVPool, which cannot be released .* set rollout\.engine"):
        kv_caches(scheduler_with(SWAKVPool()))
