"""Check of data.template_kwargs against the variables that the chat template reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mcore_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "data.template_kwargs"
_OWN = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
"""Arguments of transformers' apply_chat_template that this project sets or does not use."""
_FUNCTIONS = frozenset({"raise_exception", "strftime_now"})


def check_template_arguments(kwargs: Mapping[str, object], tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Check that the chat template `source` reads every argument.

    Raises: ConfigError naming the argument and the variables that the template reads.
    """
    if not kwargs:
        return
    read = variables(source)
    known = sorted(read - _OWN - set(tokenizer.special_tokens_map))
    listed = f"it reads {', '.join(known)}" if known else "it reads none"
    for name in kwargs:
        if name in _OWN:
            raise ConfigError(f"{KEY}.{name} is set by the trainer; remove it")
        if name not in read:
            raise ConfigError(
                f"{KEY}.{name} has no effect: the tokenizer's chat template does not read it ({listed}); remove it"
            )


def variables(source: str) -> set[str]:
    """Return the names that a chat template reads and does not define."""
    from jinja2 import Environment, meta, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationBlocks(Extension):
        """The block tag {% generation %}, with which transformers marks the assistant's text."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=["jinja2.ext.loopcontrols", GenerationBlocks])
    return set(meta.find_undeclared_variables(environment.parse(source))) - _FUNCTIONS
