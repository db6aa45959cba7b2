"""What vLLM 0.32 does slowly on this platform: norms in eager torch, and a call of torch per request to draw a number;
and what it can not do: take back the number of a row whose prompt is computed in pieces.

Importing this module registers its own compiled norms, which the engine argument IR_OP_PRIORITY chooses, and draws the
numbers of seeded requests many at a time. Tokens stay those that vLLM would draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from vllm import ir
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

PROVIDER = "mcore_rl_cpu"
IR_OP_PRIORITY = {"rms_norm": [PROVIDER, "native"], "fused_add_rms_norm": [PROVIDER, "native"]}
"""vLLM registers its compiled norms for GPUs alone, though its CPU build contains them."""


_LANES = 8
"""Elements that the kernels take at a time; they refuse rows of another multiple."""


def _plain(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype and x.shape[-1] % _LANES == 0


def _plain_norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return _plain(x, weight, variance_size)


def _plain_fused_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _plain(x, weight, variance_size)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    x = x.contiguous()  # the kernel reads rows one after the other, whatever the strides say
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, x_residual = x.contiguous(), x_residual.contiguous()
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


_DRAWS = 64
"""Numbers that a request's generator gives at once; most responses are longer."""


@dataclass
class _Drawn:
    numbers: list[int]
    used: int = 0


_drawn: WeakKeyDictionary[torch.Generator, _Drawn] = WeakKeyDictionary()


def row_seeds(rows: int, generators: Mapping[int, torch.Generator]) -> torch.Tensor:
    """The next number of every row, int64 [rows]: of its own generator, or of torch's where it has none."""
    seeds = torch.randint(0, 2**31, (rows,)).tolist()
    for row, generator in generators.items():
        drawn = _drawn.get(generator)
        if drawn is None or drawn.used == _DRAWS:
            drawn = _drawn[generator] = _Drawn(torch.randint(0, 2**31, (_DRAWS,), generator=generator).tolist())
        seeds[row] = drawn.numbers[drawn.used]
        drawn.used += 1
    return torch.tensor(seeds, dtype=torch.int64)


def take_back(generators: Iterable[torch.Generator]) -> None:
    """The last number of each is drawn again."""
    for generator in generators:
        _drawn[generator].used -= 1


_upstream_sample = TopKTopPSampler.forward_cpu


def sample(
    self: TopKTopPSampler,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """TopKTopPSampler.forward_cpu. Shapes: logits [rows, V] -> tokens [rows], and what logprobs_mode asks for."""
    if self.use_fp64_gumbel or self.logprobs_mode != "processed_logprobs":
        return _upstream_sample(self, logits, generators, k, p)
    logits = apply_top_k_top_p(logits, k, p).to(torch.float32)
    logp = logits.log_softmax(dim=-1)
    return torch.ops._C.fused_gumbel_argmax(logits, row_seeds(len(logits), generators)), logp


_upstream_bookkeeping = CPUModelRunner._bookkeeping_sync


def _bookkeeping_sync(self: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    """CPUModelRunner._bookkeeping_sync, which would rewind generators by their offset; those of the CPU have none."""
    generators = self.input_batch.generators
    unfinished = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0].tolist()
    hidden = {row: generators.pop(row) for row in unfinished if row in generators}
    take_back(hidden.values())
    try:
        return _upstream_bookkeeping(self, *args, **kwargs)
    finally:
        generators.update(hidden)


if current_platform.is_cpu():
    TopKTopPSampler.forward_cpu = sample
    CPUModelRunner._bookkeeping_sync = _bookkeeping_sync
    current_platform.import_kernels()
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_plain_norm)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_plain_fused_norm, inplace=True)(fused_add_rms_norm)
