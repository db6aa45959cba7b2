"""Arguments of a chat template (data.template_kwargs), checked against the variables that the template reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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


def check_template_arguments(kwargs: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Check that the chat template `source` reads every argument.

    Raises: ConfigError naming the argument and those that the template reads.
    """
    if not kwargs:
        return
    read = variables(source)
    known = sorted(read - _OWN - set(tokenizer.special_tokens_map))
    listed = f"it reads {', '.join(known)}" if known else "it reads none"
    for name in kwargs:
        if name in _OWN:
            raise ConfigError(f"{KEY}.{name} is set by the trainer; leave it out")
        if name not in read:
            raise ConfigError(
                f"{KEY}.{name} has no effect: the tokenizer's chat template does not read it ({listed}); leave it out"
            )


def variables(source: str) -> set[str]:
    """Names that a chat template reads and does not define."""
    from jinja2 import Environment, meta, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationBlocks(Extension):
        """The block tag by which transformers marks what the model wrote."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=["jinja2.ext.loopcontrols", GenerationBlocks])
    return set(meta.find_undeclared_variables(environment.parse(source))) - _FUNCTIONS
