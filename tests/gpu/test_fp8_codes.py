"""Quantising slices on a GPU gives the codes and scales of hf/quant.py on a CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.weights.quantization import Encoding, block_maxima, quantise_box
from model_converters.hf.quant import quantise

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_are_those_of_a_cpu(device: str, dtype: torch.dtype, powers: bool) -> None:
    """16 x 9 blocks of very different sizes in three boxes, which divide two rows of blocks."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(1984, 1088, generator=generator)
    whole *= torch.exp2(torch.linspace(-40, 40, 1984))[:, None]
    whole = whole.to(dtype)
    expected = quantise(whole, power_of_two=powers)
    on_device, encoding = whole.to(device), Encoding(dtype, quantization="fp8")
    maxima = block_maxima(on_device, (0, 0), dtype)
    found = [torch.zeros_like(each) for each in expected]
    for first, end in ((0, 480), (480, 1120), (1120, 1984)):
        boxes = encoding.boxes("w", (first, 0), (end - first, 1088))
        places = tuple(torch.zeros(box.shape, dtype=box.dtype, device=device) for box in boxes)
        quantise_box(on_device[first:end], places, boxes[0], dtype, maxima=maxima, power_of_two=powers)
        for whole_tensor, box, place in zip(found, boxes, places, strict=True):
            whole_tensor[box.first[0] : box.first[0] + box.shape[0]] = place.cpu()
    for ours, oracle in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), oracle.view(torch.uint8))
