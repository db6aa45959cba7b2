"""Chat templates in the style of published ones, each with one peculiarity, and a tokenizer for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

OPEN, CLOSE, OTHER_STOP = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TOOL_TURN, USER_TURN, MODEL_TURN = "<|observation|>", "<|user|>", "<|assistant|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
IMAGE_START, IMAGE, IMAGE_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
IMAGE_TEXT = f"{IMAGE_START}{IMAGE}{IMAGE_END}"
SPECIAL = (
    *(OPEN, CLOSE, OTHER_STOP, TOOL_TURN, USER_TURN, MODEL_TURN, "<tool_call>", "</tool_call>"),
    *(CALL, ARGUMENTS, CALL_END),
    *(IMAGE_START, IMAGE, IMAGE_END),
)

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}

_TOOLS = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t.function.name }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
)
_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_TURN = "<|im_start|>{{ m.role }}\n"
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

STABLE = (
    _TOOLS
    + "{% for m in messages %}"
    + _TURN
    + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    + _CALLS
    + "<|im_end|>\n{% endfor %}"
    + _PROMPT
)
"""Turns do not depend on later messages."""
FORGETS_REASONING = STABLE.replace("{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.last %}")
HIDES_TOOLS = STABLE.removeprefix(_TOOLS)
DROPS_ANSWERS = STABLE.replace("{{ m.content }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}")
ONE_CALL = STABLE.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}",
)
TEXT_ARGUMENTS = STABLE.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments + '' }}")
BY_POSITION = STABLE.replace("{{ m.content }}", "{{ m.content }}{% if loop.last %} ({{ loop.index }}){% endif %}")
"""The text of a message depends on the number of messages."""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}" + STABLE
DATED = STABLE + "{% if false %}{{ strftime_now('%d') }}{% endif %}"
NAMED_CALLS = (
    _TOOLS
    + "{% for m in messages %}"
    + _TURN
    + "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    + f"{{% for c in m.tool_calls or [] %}}{CALL}{{{{ c.id }}}}{ARGUMENTS}"
    + f"{{{{ c.function.arguments | tojson }}}}{CALL_END}{{% endfor %}}"
    + "<|im_end|>\n{% endfor %}"
    + _PROMPT
)
"""The model writes ids of calls, and answers repeat them."""
KNOWN_ROLES = STABLE.replace("{% for m in messages %}", "{% for m in messages if m.role != 'developer' %}")
"""Drops developer messages."""
NO_NULLS = STABLE.replace("{{ m.content }}", "{{ m.content + '' }}")
CALLS_ONLY_IF_NULL = STABLE.replace(
    "{{ m.content }}", "{% if m.content is not none %}{{ m.content }}{% endif %}"
).replace("{% for c in m.tool_calls or [] %}", "{% for c in m.tool_calls or [] if m.content is none %}")
"""Shows calls only if the content of the turn is null."""
PARTS_ONLY = STABLE.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
STRINGS_OR_PARTS = STABLE.replace(
    "{{ m.content }}",
    "{{ m.content if m.content is string else m.content | map(attribute='text') | join('|') }}",
)
SHOWS_IMAGES = STABLE.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    f"{{% if p.type == 'image' %}}{IMAGE_TEXT}{{% else %}}{{{{ p.text }}}}{{% endif %}}{{% endfor %}}{{% endif %}}",
)
"""Shows the parts of any message, like the templates of Qwen3-VL and Qwen3.5."""
NUMBERS_IMAGES = "{% set n = namespace(images=0) %}" + SHOWS_IMAGES.replace(
    IMAGE_TEXT, "{% set n.images = n.images + 1 %}Picture {{ n.images }}: " + IMAGE_TEXT
)
SHORT_IDS = STABLE.replace(
    "{% for c in m.tool_calls or [] %}",
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}",
)
ONE_OF_EQUAL = STABLE.replace(
    "{{ m.content }}",
    "{% if loop.first or m.content != messages[loop.index0 - 1].content %}{{ m.content }}{% endif %}",
)
"""Drops the second of two equal consecutive messages."""
THINKS = (
    STABLE.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' and '</think>' in m.content and not loop.last %}"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}",
    )
    .replace(
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>",
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n",
    )
    .replace(
        _PROMPT,
        _PROMPT.replace(
            "{% endif %}",
            "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}",
        ),
    )
)
"""Drops the reasoning of earlier turns, and has an argument that disables reasoning."""
KEEPS_REASONING_OF_QUERY = (
    "{% set query = namespace(at=-1) %}{% for m in messages if m.role == 'user' and not (m.content.startswith("
    "'<tool_response>') and m.content.endswith('</tool_response>')) %}{% set query.at = messages.index(m) %}"
    "{% endfor %}"
    + STABLE.replace("{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.index0 > query.at %}")
)
"""Drops the reasoning before the last message of the user that is no answer of a tool, like the templates of Qwen3."""
NEXT_ROLE_ENDS = (
    "{% if tools %}{{ tools[0].function.name }}{% endif %}{% for m in messages %}"
    "<|{{ 'observation' if m.role == 'tool' else m.role }}|>{{ m.content }}" + _CALLS + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Turns have no end token; the role token of the next turn ends them."""


def byte_tokenizer(special: Sequence[str]) -> Tokenizer:
    """Build a tokenizer with one token per byte (a byte-level BPE without merges) and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend


def tokenizer(template: str | None) -> Any:
    made = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(SPECIAL), eos_token=CLOSE)
    made.chat_template = template
    return made


def stop_ids(of: Any, names: Sequence[str] = (CLOSE, OTHER_STOP)) -> list[int]:
    return [of.convert_tokens_to_ids(name) for name in names]


def save(template: str | None, directory: Path) -> Path:
    tokenizer(template).save_pretrained(str(directory))
    return directory
