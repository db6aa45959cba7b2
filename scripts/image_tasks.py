"""Task of the demo with images, `see`: read the digit in a noisy picture of 28 x 28 pixels.

The prompt is one picture and `?`; the response is the digit. Four features of 14 x 14 pixels form a picture.
"""

from __future__ import annotations

import base64
import random
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from episode_tasks import Problem, word_tokenizer
from tiny_processor import END, IMAGE, START, VIDEO

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3VLConfig

EDGE = 28
SHIFT = 3
"""Largest distance in pixels of a digit from the centre of its picture, in both directions."""
PATCH_SIZE = 7
GLYPHS = (
    *("0110100110011001100110010110", "0010011000100010001000100111", "0110100100010010010010001111"),
    *("1110000100010110000100011110", "0010011010101010111100100010", "1111100011100001000110010110"),
    *("0110100010001110100110010110", "1111000100100010010001000100", "0110100110010110100110010110"),
    "0110100110010111000100010110",
)
"""Digits 0 to 9 in 7 rows of 4 points."""


def picture(digit: int, rng: random.Random) -> bytes:
    """Draw a digit near the centre, of random brightness, on a noisy ground; returns a PNG file."""
    from PIL import Image

    noise = np.random.default_rng(rng.getrandbits(32))
    points = np.array(list(GLYPHS[digit]), np.int64).reshape(7, 4)
    glyph = np.kron(points, np.ones((3, 4), np.int64))
    ground = noise.integers(0, 90, (EDGE, EDGE))
    top, left = ((EDGE - size) // 2 + rng.randint(-SHIFT, SHIFT) for size in glyph.shape)
    ground[top : top + glyph.shape[0], left : left + glyph.shape[1]] += glyph * rng.randrange(100, 160)
    file = BytesIO()
    Image.fromarray(ground.clip(0, 255).astype(np.uint8)).convert("RGB").save(file, "png")
    return file.getvalue()


def see_rows(seed: int, sizes: dict[str, int]) -> dict[str, list[Problem]]:
    """Return rows by split. Two pictures are equal with negligible probability."""
    rng = random.Random(f"see/{seed}")
    splits: dict[str, list[Problem]] = {}
    for split, size in sizes.items():
        digits = [rng.randrange(10) for _ in range(size)]
        splits[split] = [Problem("<image>?", str(d), str(d), picture(d, rng)) for d in digits]
    return splits


def image_uri(image: bytes) -> str:
    """Return a PNG file as a URI with its data, for jsonl files."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def see_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character, and the tokens of images as the last four."""
    return word_tokenizer("0123456789?", whole=(IMAGE, VIDEO, START, END))


def qwen3_vl_config(vocabulary: int) -> Qwen3VLConfig:
    """Return a Qwen3-VL configuration of 0.8 M parameters with the tokenizer above."""
    from transformers import Qwen3VLConfig

    image, video, start, end = range(vocabulary - 4, vocabulary)
    text = {
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "in_channels": 3,
        "out_hidden_size": 128,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
