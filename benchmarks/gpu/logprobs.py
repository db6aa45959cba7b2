"""Log-probability and entropy from hidden states, forward pass only, compared with the matrix product of the logits."""

from __future__ import annotations

import torch

from benchmarks.gpu.clock import medians
from benchmarks.gpu.machine import require
from benchmarks.result import Result
from mcore_rl.megatron.step.logprobs import linear_logp_entropy

TOKENS, HIDDEN, VOCABULARY, CHUNK = 16_384, 7168, 129_280, 1024
AIM = "<= 1.3"


def run(device: str = "cuda", tokens: int = TOKENS, hidden: int = HIDDEN, vocabulary: int = VOCABULARY) -> list[Result]:
    require(device)
    generator = torch.Generator(device).manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator, device=device).to(torch.bfloat16)
    weight = torch.randn(vocabulary, hidden, generator=generator, device=device).mul_(0.05).to(torch.bfloat16)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator, device=device)
    chunk = min(CHUNK, tokens)
    logits = torch.empty(chunk, vocabulary, dtype=torch.bfloat16, device=device)

    def ours() -> None:
        with torch.no_grad():
            linear_logp_entropy(states, weight, targets, chunk_tokens=chunk)

    def product() -> None:
        for first in range(0, tokens, chunk):
            torch.mm(states[first : first + chunk], weight.t(), out=logits[: min(chunk, tokens - first)])

    seconds, alone = medians([ours, product], device)
    note = f"hidden {hidden}, bfloat16; the peer is only hidden x weight^T, into an existing buffer"
    name = f"logp + entropy, {tokens:,} x {vocabulary:,}"
    return [Result(name, seconds * 1e3, alone * 1e3, "ms", seconds / alone, aim=AIM, note=note)]
