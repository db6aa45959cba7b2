"""Log-probability and entropy from hidden states, compared with the matrix product of the logits.

Forward over 8,192 tokens x 129,280 entries: at most 1.3 times the product (into an existing buffer), and at most 0.3 GB
above the inputs. Forward and backward over fewer tokens: compared with the three products that any such pass needs
(with recomputation, as in ours, four), and with torch's cross entropy.
"""

from __future__ import annotations

import torch

from benchmarks.result import Result
from benchmarks.sizes import size
from benchmarks.timing import alternating, peak_increase
from mcore_rl.megatron.step.logprobs import linear_logp_entropy

LIMIT_RATIO = 1.3
"""Limit for the time relative to the matrix product alone."""
LIMIT_GB = 0.3
"""Limit for memory in addition to the inputs."""
CHUNK_TOKENS = 1024
HIDDEN = 1024


def run() -> list[Result]:
    forward, backward = size(((8192, 129_280), (1024, 32_320)), ((64, 512), (64, 512)))
    return [*_forward(*forward), *_forward_backward(*backward)]


def _forward(tokens: int, vocabulary: int) -> list[Result]:
    states, weight, targets = _inputs(tokens, vocabulary)

    def ours() -> None:
        linear_logp_entropy(states, weight, targets, chunk_tokens=CHUNK_TOKENS)

    def product() -> None:
        for first in range(0, tokens, CHUNK_TOKENS):
            torch.mm(states[first : first + CHUNK_TOKENS], weight.t(), out=logits)

    # Before the peer's logits exist, whose memory would be reused.
    extra = peak_increase(ours) / 1e9
    logits = torch.empty(CHUNK_TOKENS, vocabulary).fill_(0)
    seconds, alone = map(min, alternating([ours, product], 1))
    size = f"{tokens:,} x {vocabulary:,}"
    note = f"hidden {HIDDEN}, {torch.get_num_threads()} threads; the peer is the product hidden x weight^T alone"
    aim = f"<= {LIMIT_RATIO}"
    return [
        Result(f"logp + entropy, {size}", seconds, alone, "s", seconds / alone, aim=aim, note=note),
        Result(f"  memory above the inputs, {size}", extra, LIMIT_GB, "GB", extra / LIMIT_GB, aim="<= 1"),
    ]


def _forward_backward(tokens: int, vocabulary: int) -> list[Result]:
    states, weight, targets = _inputs(tokens, vocabulary)
    states.requires_grad_()
    weight.requires_grad_()
    logits = torch.empty(tokens, vocabulary).fill_(0)

    def ours() -> None:
        logp, entropy = linear_logp_entropy(states, weight, targets, chunk_tokens=CHUNK_TOKENS)
        torch.autograd.grad((logp + 0.01 * entropy).sum(), (states, weight))

    def products() -> None:
        with torch.no_grad():
            # Logits, gradient of the states, gradient of the weight.
            torch.mm(states, weight.t(), out=logits)
            torch.mm(logits, weight)
            torch.mm(logits.t(), states)

    def cross_entropy() -> None:
        loss = torch.nn.functional.cross_entropy(states @ weight.t(), targets, reduction="sum")
        torch.autograd.grad(loss, (states, weight))

    seconds, *peers = map(min, alternating([ours, products, cross_entropy], 3))
    return [
        Result(f"forward + backward, {tokens:,} x {vocabulary:,}: {peer}", seconds, taken, "s", seconds / taken)
        for peer, taken in zip(("three products", "cross_entropy"), peers, strict=True)
    ]


def _inputs(tokens: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, HIDDEN, generator=generator)
    weight = torch.randn(vocabulary, HIDDEN, generator=generator).mul_(0.05)
    return states, weight, torch.randint(0, vocabulary, (tokens,), generator=generator)
