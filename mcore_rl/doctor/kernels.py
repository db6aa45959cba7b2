"""A small call of each kernel that Megatron models use, on this machine's GPU.

A package that can be imported may still be compiled for another architecture or need a newer driver. `trials` runs
`python -m mcore_rl.doctor.kernels DEVICE NAME...` in a child process, because a broken kernel can crash its process.
The child prints one line of JSON per call.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mcore_rl.resolved.installed import has_module

if TYPE_CHECKING:
    import torch

SECONDS_PER_KERNEL = 180.0
"""Timeout of a child process, per kernel that it calls. The first call loads libraries and may compile the kernel."""
ROWS, WIDTH, HEADS, HEAD = 64, 64, 2, 64


Kernels = Mapping[str, tuple[str, Callable[[str], None]]]
"""Name -> top-level package of the kernel, and a function that runs it on a device and raises if it fails."""


def _rows(device: str, *shape: int) -> torch.Tensor:
    import torch

    return torch.ones(shape or (ROWS, WIDTH), dtype=torch.bfloat16, device=device, requires_grad=True)


def _product(device: str) -> None:
    rows = _rows(device)
    value = float((rows @ rows)[0, 0])
    if value != WIDTH:
        raise ArithmeticError(f"a sum of {WIDTH} ones is {value}")


def _layer(device: str) -> None:
    import torch
    from transformer_engine.pytorch import LayerNormLinear

    layer = LayerNormLinear(
        WIDTH, WIDTH, normalization="RMSNorm", bias=False, params_dtype=torch.bfloat16, device=device
    )
    layer(_rows(device)).sum().backward()


def _grouped(device: str) -> None:
    import torch
    from transformer_engine.pytorch import GroupedLinear

    layer = GroupedLinear(2, WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device=device)
    layer(_rows(device), [ROWS // 4, ROWS - ROWS // 4]).sum().backward()


def _permutation(device: str) -> None:
    import torch
    from transformer_engine.pytorch.permutation import moe_permute_with_probs

    routing = torch.ones(ROWS, 2, dtype=torch.bool, device=device)
    tokens, _, _ = moe_permute_with_probs(_rows(device), routing.float(), routing, num_out_tokens=2 * ROWS)
    tokens.sum().backward()


def _packed_attention(device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the offsets of two packed sequences, and query, key and value."""
    import torch

    offsets = torch.tensor([0, ROWS // 4, ROWS], dtype=torch.int32, device=device)
    return offsets, [_rows(device, ROWS, HEADS, HEAD) for _ in range(3)]


def _attention(device: str) -> None:
    from transformer_engine.pytorch import DotProductAttention

    attention = DotProductAttention(HEADS, HEAD, qkv_format="thd", attn_mask_type="padding_causal")
    offsets, inputs = _packed_attention(device)
    longest = {"max_seqlen_q": ROWS - ROWS // 4, "max_seqlen_kv": ROWS - ROWS // 4}
    attention(*inputs, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, **longest).sum().backward()


def _adam(device: str) -> None:
    import torch
    from transformer_engine.pytorch.optimizers import FusedAdam

    weight = torch.nn.Parameter(torch.ones(WIDTH, device=device))
    weight.grad = torch.ones_like(weight)
    FusedAdam([weight], lr=0.5).step()
    if not torch.allclose(weight, torch.full_like(weight, 0.5), atol=1e-3):
        raise ArithmeticError(f"the first step of Adam gave {float(weight[0])} and not 0.5")


def _flash(device: str) -> None:
    from flash_attn import flash_attn_varlen_func

    offsets, inputs = _packed_attention(device)
    flash_attn_varlen_func(*inputs, offsets, offsets, ROWS, ROWS, causal=True).sum().backward()


def _torch_flash(device: str) -> None:
    from torch.nn.attention.varlen import varlen_attn

    offsets, inputs = _packed_attention(device)
    varlen_attn(*inputs, offsets, offsets, ROWS, ROWS, window_size=(ROWS // 8, 0)).sum().backward()


def _gradient_accumulation(device: str) -> None:
    import fused_weight_gradient_mlp_cuda as apex
    import torch

    total = torch.zeros(WIDTH, WIDTH, device=device)
    apex.wgrad_gemm_accum_fp32(_rows(device).detach(), _rows(device).detach(), total)
    if float(total[0, 0]) != ROWS:
        raise ArithmeticError(f"a sum of {ROWS} ones is {float(total[0, 0])}")


KERNELS: Kernels = {
    "matrix product": ("torch", _product),
    "layer with its norm": ("transformer_engine", _layer),
    "attention of packed rows": ("transformer_engine", _attention),
    "grouped GEMM": ("transformer_engine", _grouped),
    "permutation of tokens": ("transformer_engine", _permutation),
    "fused Adam": ("transformer_engine", _adam),
    "flash-attn": ("flash_attn", _flash),
    "torch's flash, with a window": ("torch", _torch_flash),
    "fused gradient accumulation": ("fused_weight_gradient_mlp_cuda", _gradient_accumulation),
}


def present() -> list[str]:
    """Return the names of kernels whose package is installed."""
    return [name for name, (module, _) in KERNELS.items() if has_module(module)]


def trials(
    device: str, names: Sequence[str], *, module: str = __name__, seconds: float = SECONDS_PER_KERNEL
) -> Iterator[tuple[str, str]]:
    """Call kernels in a child process; yields (name, error message or "") in order.

    After a kernel that crashes or hangs the child, the remaining ones run in a new child.

    module: main module of the child. seconds: timeout of a child per kernel that it calls.
    """
    left = list(names)
    while left:
        command = [sys.executable, "-W", "ignore", "-m", module, device, *left]
        ended = "gave no answer"
        try:
            # Not multiprocessing: a kernel can corrupt the process that calls it, or hang in the driver.
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds * len(left), check=False)
            output, ended = done.stdout, f"ended its process with exit code {done.returncode}"
        except subprocess.TimeoutExpired as error:
            output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            ended = f"gave no answer within {seconds * len(left):g} s"
        for line in output.splitlines():  # libraries also print to stdout
            if line.startswith('{"kernel"'):
                answer = json.loads(line)
                left.remove(answer["kernel"])
                yield answer["kernel"], answer["error"]
        # The child calls kernels in order, so the first one without a line ended it.
        if left:
            yield left.pop(0), ended


def call_each(kernels: Kernels, device: str, names: Sequence[str]) -> None:
    """Call kernels and print the results for `trials`."""
    for name in names:
        _, call = kernels[name]
        try:
            call(device)
            error = ""
        except Exception as raised:  # any error of a broken library is a result
            lines = str(raised).strip().splitlines()
            error = f"{type(raised).__name__}: {lines[0] if lines else ''}"
        print(json.dumps({"kernel": name, "error": error}), flush=True)


if __name__ == "__main__":
    call_each(KERNELS, sys.argv[1], sys.argv[2:])
