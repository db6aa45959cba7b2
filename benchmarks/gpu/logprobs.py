"""Log-probability and entropy from hidden states, forward pass only, compared with the matrix product of the logits."""

from __future__ import annotations

import torch

from benchmarks.gpu.clock import medians
from benchmarks.gpu.machine import require
from benchmarks.result import Result, compare
from benchmarks.sizes import size
from mcore_rl.megatron.step.logprobs import linear_logp_entropy

TOKENS, HIDDEN, VOCABULARY, CHUNK = size((16_384, 7168, 129_280, 1024), (256, 64, 1000, 256))
AIM = "<= 1.3"


def run(device: str = "cuda") -> list[Result]:
    require(device)
    generator = torch.Generator(device).manual_seed(0)
    states = torch.randn(TOKENS, HIDDEN, generator=generator, device=device).to(torch.bfloat16)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, device=device).mul_(0.05).to(torch.bfloat16)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator, device=device)
    # The product of all tokens at once would need 4 GB, which ours never allocates.
    logits = torch.empty(CHUNK, VOCABULARY, dtype=torch.bfloat16, device=device)

    def ours() -> None:
        with torch.no_grad():
            linear_logp_entropy(states, weight, targets, chunk_tokens=CHUNK)

    def product() -> None:
        for first in range(0, TOKENS, CHUNK):
            torch.mm(states[first : first + CHUNK], weight.t(), out=logits)

    seconds, alone = medians([ours, product], device)
    note = f"hidden {HIDDEN}, bfloat16; the peer is only hidden x weight^T, into an existing buffer"
    name = f"logp + entropy, {TOKENS:,} x {VOCABULARY:,}"
    return [compare(name, seconds * 1e3, alone * 1e3, "ms", AIM, note)]
