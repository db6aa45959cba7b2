"""Tiny models that read images, with their tokenizers and processors."""

from __future__ import annotations

from typing import Any

import numpy as np
from tiny_checkpoint import IMAGE_TOKEN, VOCABULARY, tiny_fields
from tiny_processor import END, IMAGE, START, VIDEO

SPECIAL = {IMAGE: IMAGE_TOKEN, VIDEO: 91, START: 92, END: 93}
SGLANG_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"patch_size": 14, "window_size": 56},
}
"""Sizes of towers that are constants of SGLang (Family.check_sglang)."""
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    f"{{% if p.type == 'image' %}}{START}{IMAGE}{END}{{% else %}}{{{{ p.text }}}}{{% endif %}}"
    "{% endfor %}{% endif %} {% endfor %}"
)
"""Shows parts like the templates of the Qwen-VL families: without a separator."""


def engine_sizes(model_type: str) -> dict[str, Any]:
    """Sizes that vLLM's CPU attention, and its kernels of gated delta nets, support."""
    fields = tiny_fields(model_type)
    has_nets = "linear_key_head_dim" in fields
    rotation = fields["rope_parameters"] | {"mrope_section": [4, 2, 2] if has_nets else [8, 4, 4]}
    tower = fields["vision_config"] | {"out_hidden_size": 128}
    nets = {"linear_key_head_dim": 128, "linear_value_head_dim": 128} if has_nets else {}
    return nets | {
        "hidden_size": 128,
        "head_dim": 32,
        # A layer for each deepstack feature. In bfloat16, errors of more layers would change the choice of experts.
        "num_hidden_layers": 2 if has_nets else 4,
        "rope_parameters": rotation,
        "vision_config": tower,
    }


def vision_tokenizer() -> Any:
    """A tokenizer of words: "w17" is token 17, any other word token 0."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY) if number not in SPECIAL.values()} | SPECIAL
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="w0",
        pad_token="w0",
        eos_token="w1",
        additional_special_tokens=list(SPECIAL),
    )
    made.chat_template = TEMPLATE
    return made


def png(height: int, width: int, seed: int = 0) -> bytes:
    """A picture of noise as a PNG file."""
    from io import BytesIO

    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()
