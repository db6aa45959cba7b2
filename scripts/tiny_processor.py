"""Tokenizer tokens and processor files of small models that read images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
"""Tokens of the Qwen-VL families."""


def write_processor(
    directory: Path | str,
    tokenizer: PreTrainedTokenizerFast,
    model_type: str,
    *,
    patch_size: int = 4,
    max_pixels: int = 64 * 64,
) -> None:
    """Write the tokenizer and processors of a model of the Qwen-VL families.

    The tokenizer has the four tokens above. patch_size: edge of a patch, in pixels; 2 x 2 of them form a feature, the
    smallest image. max_pixels: larger images are reduced to it.
    """
    import transformers

    is_qwen3 = model_type.startswith("qwen3")
    sizes = {"patch_size": patch_size, "merge_size": 2, "temporal_patch_size": 2}
    limits = {"shortest_edge": (2 * patch_size) ** 2, "longest_edge": max_pixels}
    images = transformers.Qwen2VLImageProcessor(**sizes, size=limits)
    video_class = transformers.Qwen3VLVideoProcessor if is_qwen3 else transformers.Qwen2VLVideoProcessor
    processor_class = transformers.Qwen3VLProcessor if is_qwen3 else transformers.Qwen2_5_VLProcessor
    tokenizer.image_token, tokenizer.video_token = IMAGE, VIDEO
    processor = processor_class(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=video_class(**sizes),
        chat_template=tokenizer.chat_template,
    )
    processor.save_pretrained(directory)
