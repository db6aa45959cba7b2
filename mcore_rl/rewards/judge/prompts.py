"""Judge prompts: the template filled with a prompt and a response, as token ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mcore_rl.config.rules.judge import PLACEHOLDERS
from mcore_rl.config.schema import DataConfig
from mcore_rl.data.chat.messages import text_of
from mcore_rl.data.json_text import as_json_text
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.templates import PromptRenderer, encode
from mcore_rl.errors import ConfigError
from mcore_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Template:
    """The template of the question that requests a score.

    Control tokens of the judge are removed from prompts and responses. Otherwise a policy could learn to end the
    question and write the judge's answer itself. Placeholders in prompts and responses are not filled.
    """

    def __init__(self, text: str, control_tokens: Iterable[str] = ()) -> None:
        # Longest first, because a token may be a prefix of another one. `(?!)` matches nothing.
        longest_first = sorted(filter(str.strip, control_tokens), key=len, reverse=True)
        self._text, self._controls = text, re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def filled(self, prompt: Prompt, response: str) -> str:
        """Return the text of the question about a response."""
        question = "\n\n".join(map(text_of, prompt.messages))
        values = {"prompt": question, "response": response, "ground_truth": as_json_text(prompt.ground_truth)}
        # One pass, so that placeholders in the inserted texts stay as they are.
        return PLACEHOLDERS.sub(lambda match: self._without_controls(values[match[1]]), self._text)

    def _without_controls(self, text: str) -> str:
        # Repeat, because removing a token can join the text around it to another control token.
        while (shorter := self._controls.sub("", text)) != text:
            text = shorter
        return text


class JudgePrompts:
    """Renderer and encoder of questions: a user message in the judge's chat template, or plain text if it has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        self._renderer = PromptRenderer(tokenizer, DataConfig())
        # Control tokens are the special tokens and all other added tokens that the chat template writes.
        rendered, added = self._asked("?", "judge.template"), tokenizer.added_tokens_decoder.values()
        written = [str(token) for token in added if token.special or str(token) in rendered]
        self.template = Template(template, {*tokenizer.all_special_tokens, *written})

    def render(self, prompt: Prompt, response: str) -> str:
        """Return the text that the judge continues.

        Raises: DataError if the chat template rejects the question.
        """
        return self._asked(self.template.filled(prompt, response), f"judge.template, prompt {prompt.row}")

    def _asked(self, text: str, where: str) -> str:
        return self._renderer.render([{"role": "user", "content": text}], where)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of rendered questions, int32."""
        return encode(self._renderer.tokenizer, texts, self._renderer.leading_ids)


def check_room(questions: JudgePrompts, prompts: Mapping[str, PromptSet], limit: int) -> None:
    """Check that judge.max_prompt_tokens has room for the template with the longest prompt of each prompt set.

    Raises: ConfigError naming the limit and the required tokens.
    """
    for name, prompt_set in prompts.items():
        lengths = list(map(len, prompt_set.columns["text"]))
        (ids,) = questions.encode([questions.render(prompt_set[lengths.index(max(lengths))], "")])
        if len(ids) >= limit:
            raise ConfigError(
                f"judge.max_prompt_tokens={limit}: judge.template with the longest prompt of data.{name} takes "
                f"{len(ids)} tokens before any response; raise it"
            )
