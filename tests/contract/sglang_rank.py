"""Updates of one SGLang rank without a trainer (runs in SGLang's environment).

    python sglang_rank.py SETTINGS TENSORS

SETTINGS: pickled RankSettings of an engine with one rank and dummy weights. TENSORS: safetensors of its model. Prints
one JSON object, which test_sglang_rank.py reads.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_rl.engines.sglang.devices import cpu_patches

cpu_patches.prepare()

import sglang.srt.managers.scheduler  # noqa: E402

cpu_patches.patch()

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE  # noqa: E402
from sglang.srt.runtime_context import get_exec  # noqa: E402

from mcore_rl.engines.sglang import weights  # noqa: E402
from mcore_rl.engines.sglang.devices.cpu import Cpu  # noqa: E402
from mcore_rl.engines.sglang.scheduler import SteppedScheduler  # noqa: E402
from mcore_rl.errors import ConfigError  # noqa: E402
from mcore_rl.weights.slices.shard_map import Boxes  # noqa: E402

Tensors = Mapping[str, torch.Tensor]


class Rank:
    """A rank of SGLang, and the HF tensors of its model."""

    def __init__(self, settings: Any, tensors: Tensors) -> None:
        scheduler = SteppedScheduler(settings, Cpu(settings))
        self.loader = scheduler._loader
        self.model: Any = scheduler._scheduler.tp_worker.model_runner.model
        self.tensors = tensors

    @property
    def whole(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to("meta") for name, tensor in self.tensors.items()}

    @property
    def experts(self) -> list[Any]:
        return [module for module in self.model.modules() if isinstance(module, FusedMoE)]

    @torch.no_grad()
    def differing(self, factor: float, loader: Any = None) -> list[str]:
        """Update with the tensors times `factor`. Returns the names of the tensors that the rank then has not."""
        loader = loader or self.loader
        sent = {name: tensor * factor for name, tensor in self.tensors.items()}
        loader.begin()
        for name, tensor in sent.items():
            loader.put(name, (0,) * tensor.dim(), tensor)
        loader.finish()
        boxes: dict[str, Boxes] = {name: (((0,) * tensor.dim(), tuple(tensor.shape)),) for name, tensor in sent.items()}
        held = list(loader.held(boxes))
        equal = {name for name, tensor in held if torch.equal(tensor, sent[name])}
        unequal = {name for name, tensor in held if not torch.equal(tensor, sent[name])}  # a name may occur twice
        return sorted(unequal | (sent.keys() - equal))


@contextmanager
def changed(target: Any, name: str, value: object) -> Iterator[None]:
    before = vars(target).get(name, changed)
    setattr(target, name, value)
    try:
        yield
    finally:
        delattr(target, name) if before is changed else setattr(target, name, before)


def connect_without_memory(rank: Rank) -> int:
    """Connect while no parameter has memory, as on a GPU during sleep. Returns the number of slices."""
    storages = [parameter.untyped_storage() for parameter in rank.model.parameters()]
    contents = [storage.clone() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    kept = rank.loader.record(rank.whole)
    rank.loader.keep(kept)
    assert not any(storage.nbytes() for storage in storages)
    for storage, content in zip(storages, contents, strict=True):
        storage.resize_(content.nbytes())
        storage.copy_(content)
    return len(kept)


def without_derived_weights(rank: Rank) -> list[str]:
    with changed(weights, "post_load_weights", lambda model: None):
        return rank.differing(2.0)


def refusal(rank: Rank) -> str:
    try:
        weights.require_updatable(rank.model)
    except ConfigError as error:
        return str(error)
    return ""


def refusals(rank: Rank) -> dict[str, str]:
    method = rank.experts[0].quant_method
    found = {"nothing": refusal(rank)}
    for name in ("use_triton_kernels", "w13_swiglu_interleaved"):
        with changed(method, name, True):
            found[name] = refusal(rank)
    for name, value in (("enable_eplb", True), ("ep_num_redundant_experts", 2)):
        with get_exec().moe.override(**{name: value}):
            found[name] = refusal(rank)
    with changed(rank.model, "_derived_weight_cache_error", "a cached split"):
        found["derived"] = refusal(rank)
    return found


def up_before_gate(rank: Rank) -> dict[str, Any]:
    """Load experts as for flashinfer_cutlass, whose kernels read up before gate."""
    for experts in rank.experts:
        experts.quant_method.use_flashinfer_cutlass = True
        experts.quant_method.process_weights_after_loading = lambda layer: None  # imports CUDA packages
    loader = weights.ParameterLoader(rank.model, torch.device("cpu"))
    loader.record(rank.whole)
    differing = rank.differing(4.0, loader)
    name = next(name for name, module in rank.model.named_modules() if module is rank.experts[0])
    up = rank.tensors[f"{name}.0.up_proj.weight"] * 4
    return {"differing": differing, "up first": torch.equal(rank.experts[0].w13_weight[0, : len(up)], up)}


def main(settings: Path, tensors: Path) -> None:
    rank = Rank(pickle.loads(settings.read_bytes()), load_file(tensors))
    checks: dict[str, Callable[[Rank], object]] = {
        "connect": connect_without_memory,
        "update": lambda rank: rank.differing(1.0),
        "without derived weights": without_derived_weights,
        "next update": lambda rank: rank.differing(3.0),
        "experts": lambda rank: [len(each.w13_weight) for each in rank.experts],
        "refusals": refusals,
        "up before gate": up_before_gate,
    }
    print(json.dumps({name: check(rank) for name, check in checks.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    sglang.srt.managers.scheduler.os._exit(0)  # SGLang's threads would keep the process alive
