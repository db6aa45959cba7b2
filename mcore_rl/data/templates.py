"""Rendering of a row's prompt to text, tokenisation of the text, and the check of data.template_kwargs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mcore_rl.config.schema import DataConfig
from mcore_rl.data.chat.limits import TemplateLimitError, render_all
from mcore_rl.data.chat.messages import text_of
from mcore_rl.data.chat.presence import REASONING_NOTE, PresenceCheck
from mcore_rl.data.chat.style import ChatStyle
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.types import Prompt
from mcore_rl.types.chat import ChatMessage, ToolSchema, tool_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACEHOLDER = "{prompt}"
_DEVELOPER_NOTE = "have a developer message, rendered as a system message: the chat template has no developer"
_SYSTEM_ROLES = ("system", "developer")

RowPrompt = tuple[Sequence[ChatMessage], str] | tuple[Sequence[ChatMessage], str, Sequence[ToolSchema] | None]
"""(canonical messages, start of error messages, tools of the row); without tools, or None: the tools of the run."""


class PromptRenderer:
    """Renderer of prompts, with the tokenizer's chat template or with data.plain_template.

    The chat template shows `tools` (OpenAI schemas). The plain template receives the joined contents of the messages.
    If the last message is the assistant's, it is the beginning of the response and is left open.

    leading_ids: special tokens, such as BOS, that the tokenizer adds before plain text; a chat template writes its own.

    Raises: ConfigError for a template or template argument that cannot be used.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, data_config: DataConfig, tools: Sequence[ToolSchema] = ()
    ) -> None:
        has_chat_template = tokenizer.chat_template is not None
        if data_config.template == "chat" and not has_chat_template:
            raise ConfigError("data.template=chat, but the tokenizer has no chat template; set data.template=plain")
        self.tokenizer = tokenizer
        self._chat = has_chat_template and data_config.template != "plain"
        self._plain_template = data_config.plain_template
        self._noted: Counter[str] = Counter()
        if not self._chat and _PLACEHOLDER not in self._plain_template:
            raise ConfigError(f"data.plain_template has no {_PLACEHOLDER}; put it where the prompt goes")
        if not self._chat and data_config.template_kwargs:
            raise ConfigError(
                "data.template_kwargs has no effect: prompts are rendered by data.plain_template; remove it"
            )
        self.leading_ids = [] if self._chat else leading_ids(tokenizer)
        if self._chat:
            self._style = ChatStyle.of(tokenizer, tools, data_config.template_kwargs)
            check_template_arguments(data_config.template_kwargs, tokenizer, self._style.source)
            self._presence = PresenceCheck(self._style)
            # Checked before any row is read.
            if data_config.system_prompt:
                self._check_system(data_config.system_prompt)

    @property
    def style(self) -> ChatStyle | None:
        """Renderer of chat messages; None if prompts are rendered by data.plain_template."""
        return self._style if self._chat else None

    def canonical(self, messages: Sequence[ChatMessage], where: str) -> list[ChatMessage]:
        """Convert normalized messages to the form that the template needs; contents become strings.

        Raises: DataError for a tool message that answers no call.
        """
        if not self._chat:
            return [{**message, "content": text_of(message)} for message in messages]
        if self._style.developer == "system" and any(message["role"] == "developer" for message in messages):
            self._noted[_DEVELOPER_NOTE] += 1
        return self._style.canonical(messages, where)

    def render(self, messages: Sequence[ChatMessage], where: str, tools: Sequence[ToolSchema] | None = None) -> str:
        """Render canonical messages with `tools`, by default the tools of the run. `where` starts error messages.

        Raises: DataError if the chat template rejects the prompt, drops messages or tools, or cannot leave the last
        message open.
        """
        if self._chat:
            style = self._style if tools is None else replace(self._style, tools=tuple(tools))
            text = style.render(messages, where, opens_turn=True)
            # Templates without support for tools ignore them silently.
            hidden = [name for name in map(tool_name, tools or ()) if name not in text]
            if hidden:
                raise DataError(
                    f"{where}: the tokenizer's chat template does not show the tools of the row ({', '.join(hidden)} "
                    "not in the prompt); use a tokenizer whose template does, or remove the column"
                )
            return text
        if tools:
            raise DataError(
                f"{where} has tools, which need a chat template, but prompts are rendered by data.plain_template;"
                " set data.template=chat, or remove the column"
            )
        begun = ""
        if len(messages) > 1 and messages[-1]["role"] == "assistant":
            *messages, last = messages
            begun = text_of(last)
        joined = "\n\n".join(map(text_of, messages))
        return self._plain_template.replace(_PLACEHOLDER, joined) + begun

    def render_all(self, rows: Sequence[RowPrompt]) -> Iterator[str]:
        """Yield the text of every row.

        Chat templates run in a child process under the limits of `chat.limits` and must show every message.

        Raises: DataError.
        """
        if not self._chat:
            yield from (self.render(*row) for row in rows)
            return
        try:
            for text, whole in render_all([partial(self._checked, *row) for row in rows]):
                self._noted[REASONING_NOTE] += not whole
                yield text
        except TemplateLimitError as error:
            raise DataError(f"{rows[error.job][1]}: the tokenizer's chat template {error}") from None

    def _checked(
        self, messages: Sequence[ChatMessage], where: str, tools: Sequence[ToolSchema] | None = None
    ) -> tuple[str, bool]:
        text = self.render(messages, where, tools)
        return text, self._presence.check(messages, text, where)

    def check_conversation(self, messages: Sequence[ChatMessage], prompt: Prompt, where: str) -> bool:
        """Check that the chat template shows every message of a conversation that begins with a rendered prompt.

        Returns True if it drops reasoning that it shows in the prompt alone, or that follows the prompt. Notes nothing.

        Raises: DataError naming the message that the template drops or changes.
        """
        style = self._style if prompt.tools is None else replace(self._style, tools=tuple(prompt.tools))
        text = style.render(messages, where, opens_turn=False)
        whole = self._presence.check(messages, text, where, opens_turn=False)
        return not whole and self._presence.check(prompt.messages, prompt.text, where)

    def note_lost_reasoning(self, rows: int) -> None:
        """Count rows whose reasoning the chat template drops."""
        self._noted[REASONING_NOTE] += rows

    def check_image(self, text: str) -> None:
        """Check that the chat template writes `text` for a part of type image, if it writes anything.

        Raises: ConfigError.
        """
        if self._chat and (found := self._style.image_text()) not in ("", text):
            raise ConfigError(
                f"the chat template of model.tokenizer_path writes {found!r} for an image, but the model reads {text!r}"
                "; remove arguments such as add_vision_id from data.template_kwargs"
            )

    def take_notes(self) -> Counter[str]:
        """Return and reset the notes on rendered rows, with the number of rows."""
        # Unary plus drops counts of 0.
        noted, self._noted = +self._noted, Counter()
        return noted

    def _check_system(self, text: str) -> None:
        """Reject data.system_prompt if the template rejects or silently drops system messages."""
        messages = with_system([{"role": "user", "content": "a"}], text)
        try:
            rendered = self._style.render(messages, "data.system_prompt", opens_turn=True)
        except DataError as error:
            raise ConfigError(f"{error}; set data.system_prompt=null") from error
        if text.strip() not in rendered:
            raise ConfigError(
                "data.system_prompt: the tokenizer's chat template does not write it; set data.system_prompt=null, or "
                "use a tokenizer whose template has system messages"
            )


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], leading_ids: Sequence[int] = ()
) -> list[np.ndarray]:
    """Tokenise each text to int32 ids, preceded by `leading_ids`; no other special tokens are added."""
    if not texts:
        return []
    encoded = tokenizer(
        list(texts),
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        # No warning about long texts: the loader checks lengths.
        verbose=False,
    )
    lead = list(leading_ids)
    return [np.array(lead + ids if lead else ids, np.int32) for ids in encoded["input_ids"]]


def with_system(messages: list[ChatMessage], system_prompt: str | None) -> list[ChatMessage]:
    """Prepend a system message, unless system_prompt is None or the messages have one."""
    if system_prompt is None or any(message["role"] in _SYSTEM_ROLES for message in messages):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens, such as BOS, that the tokenizer adds before plain text."""
    # add_special_tokens=True would also append the EOS of some tokenizers, and a prompt must not end with it.
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    special = tokenizer("a", add_special_tokens=True)["input_ids"]
    starts = [start for start in range(len(special)) if special[start : start + len(plain)] == plain]
    return list(special[: starts[0]]) if starts else []


KEY = "data.template_kwargs"
_OWN = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
"""Arguments of transformers' apply_chat_template that this project sets or does not use."""


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
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    # The environment in which apply_chat_template renders: it has the block {% generation %}, loop controls, and
    # functions such as strftime_now, which are no variables.
    environment = _compile_jinja_template(source).environment
    return set(meta.find_undeclared_variables(environment.parse(source)))
