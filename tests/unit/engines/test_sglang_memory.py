"""Memory of SGLang's ranks on a GPU, with a stand-in for torch_memory_saver that overwrites what it releases."""

from __future__ import annotations

import torch

from mcore_rl.engines.sglang.memory import TaggedMemory


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
