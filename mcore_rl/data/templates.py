"""Turns a row's prompt into the text, and the text into the token ids, that the model continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_rl.config.schema import DataConfig
from mcore_rl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACEHOLDER = "{prompt}"
_SYSTEM_ROLES = ("system", "developer")


class PromptRenderer:
    """Renders prompts by the tokenizer's chat template, which shows `tools` (OpenAI schemas), or by
    data.plain_template.

    A plain string becomes one user message for a chat template; chat messages become their contents, one after the
    other, for the plain template. `leading_ids` are the special tokens (such as a BOS) that the tokenizer puts before
    plain text; a chat template writes its own.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, data_config: DataConfig, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        has_chat_template = tokenizer.chat_template is not None
        if data_config.template not in ("auto", "chat", "plain"):
            raise ConfigError(f"data.template is {data_config.template!r}; set it to auto, chat or plain")
        if data_config.template == "chat" and not has_chat_template:
            raise ConfigError("data.template=chat, but the tokenizer has no chat template; set data.template=plain")
        self.tokenizer = tokenizer
        self._chat = has_chat_template and data_config.template != "plain"
        self._plain_template = data_config.plain_template
        self._tools = tools
        if not self._chat and _PLACEHOLDER not in self._plain_template:
            raise ConfigError(f"data.plain_template has no {_PLACEHOLDER}; put it where the prompt goes")
        self.leading_ids = [] if self._chat else leading_ids(tokenizer)
        if self._chat and data_config.system_prompt:
            self._check_system(data_config.system_prompt)

    def render(self, prompt: Any, where: str) -> str:
        """The text of a prompt, a string or a list of chat messages. `where` starts error messages.

        Raises: DataError for an empty prompt, one of another type, or one that the chat template refuses.
        """
        messages = chat_messages(prompt, where)
        if self._chat:
            return render_chat(self.tokenizer, messages, where, add_generation_prompt=True, tools=self._tools)
        return self._plain_template.replace(_PLACEHOLDER, "\n\n".join(message["content"] for message in messages))

    def _check_system(self, text: str) -> None:
        """A template that knows no system message refuses one, or leaves it out without a word."""
        messages = with_system([{"role": "user", "content": "a"}], text)
        try:
            rendered = render_chat(self.tokenizer, messages, "data.system_prompt", add_generation_prompt=True)
        except DataError as error:
            raise ConfigError(f"{error}; set data.system_prompt=null") from error
        if text.strip() not in rendered:
            raise ConfigError(
                "data.system_prompt: the tokenizer's chat template does not write it; set data.system_prompt=null, or "
                "use a tokenizer whose template has system messages"
            )


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    where: str,
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The text of chat messages; `tools` are OpenAI schemas.

    Raises: DataError for messages that the chat template refuses.
    """
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise DataError(f"{where}: the tokenizer's chat template refuses the prompt: {error}") from error
    return str(text)


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], leading_ids: Sequence[int] = ()
) -> list[np.ndarray]:
    """Token ids of each text, int32, after `leading_ids`; no other special tokens are added."""
    if not texts:
        return []
    encoded = tokenizer(
        list(texts),
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    lead = list(leading_ids)
    return [np.array(lead + ids if lead else ids, np.int32) for ids in encoded["input_ids"]]


def chat_messages(prompt: Any, where: str) -> list[dict[str, Any]]:
    """Chat messages with a non-empty content somewhere, of a list of them or of a string, which becomes one of the
    user's; keys that a parquet struct leaves null are gone.

    Raises: DataError for an empty prompt or one of another type.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise DataError(f"{where}: the prompt is {type(prompt).__name__}, not a string or a list of chat messages")
    messages = []
    for message in prompt:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(f"{where}: a chat message needs `role` and `content`, both strings")
        messages.append({key: value for key, value in message.items() if value is not None})
    if not any(message["content"].strip() for message in messages):
        raise DataError(f"{where}: the prompt is empty")
    return messages


def with_system(messages: list[dict[str, Any]], system_prompt: str | None) -> list[dict[str, Any]]:
    """The messages behind a system message, if they have none of their own; as they are where system_prompt is None."""
    if system_prompt is None or any(message["role"] in _SYSTEM_ROLES for message in messages):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens, such as a BOS, that the tokenizer puts before plain text."""
    # Asking for special tokens outright would also append the EOS that some tokenizers end a text with, and a prompt
    # must not end.
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    special = tokenizer("a", add_special_tokens=True)["input_ids"]
    starts = [start for start in range(len(special)) if special[start : start + len(plain)] == plain]
    return list(special[: starts[0]]) if starts else []
