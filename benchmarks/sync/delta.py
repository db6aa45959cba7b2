"""Bytes of a message with weights.delta, relative to a whole message, after updates of a real Adam.

2 million weights with the standard deviation of released models, and gradients that consist of a constant part and
noise.
"""

from __future__ import annotations

import torch

from benchmarks.result import Result
from benchmarks.sizes import size
from benchmarks.sync.adam import Adam
from mcore_rl.config.quantization import FP8, UNQUANTIZED
from mcore_rl.weights.delta.copies import SentCopies
from mcore_rl.weights.slices.messages import Message, Slice, views
from model_converters.hf.quant import quantise

SHAPE = size((1024, 2048), (256, 256))
CASES = {(1e-6, 1): (0.03, 0.01), (1e-6, 8): (0.12, 0.03), (3e-6, 1): (0.06, 0.02), (3e-6, 8): (0.28, 0.06)}
"""Learning rate and updates between two syncs -> aims of the share of the bytes, in bfloat16 and float8."""


def run() -> list[Result]:
    torch.set_num_threads(1)
    return [_share(lr, updates, fp8=fp8) for fp8 in (False, True) for lr, updates in CASES]


def _share(lr: float, updates: int, *, fp8: bool) -> Result:
    """Compare the bytes of a message with and without a delta."""
    weights = {"w": torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()}
    adam, copies = Adam(weights, lr), SentCopies()
    for num_updates in (0, updates):
        adam.update(num_updates)
        contents = quantise(weights["w"]) if fp8 else (weights["w"],)
        whole = Slice("w", SHAPE, torch.bfloat16, 0, 0, SHAPE[0], "w", 0, 0, quantization=FP8 if fp8 else UNQUANTIZED)
        message = Message(0, 0, 0, (whole,))
        memory = torch.zeros(message.num_bytes, dtype=torch.uint8)
        [(_, places)] = views(message, memory)
        for place, content in zip(places, contents, strict=True):
            place.copy_(content)
        copies.reset()
        copies.frame(message, memory)
    sent, content_bytes = copies.bytes.sent, copies.bytes.content
    name = f"bytes, {'float8 codes and scales' if fp8 else 'bfloat16'}, lr {lr:.0e}, {updates} update(s)"
    aim = CASES[lr, updates][fp8]
    return Result(name, sent / 1e6, content_bytes / 1e6, "MB", sent / content_bytes, f"<= {aim}")
