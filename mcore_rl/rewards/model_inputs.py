"""Token ids of responses for a reward model: the policy's tokens, or new tokens from the reward model's tokenizer."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mcore_rl.config.models import ModelConfig, RewardModelConfig
from mcore_rl.config.rules.engine_support import exact_positions
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.chat.limits import check_limits
from mcore_rl.data.chat.messages import with_answer
from mcore_rl.data.chat.style import ChatStyle
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.templates import encode, leading_ids
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.data.transcripts import PromptSource, Transcript, trajectory_ids, transcripts
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.types import TrajectoryBuffers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase


class RewardInputs:
    """Builder of a reward model's input sequences.

    If the tokenizer and chat template of reward_model.hf_path equal the policy's, the inputs are the trajectories'
    tokens. Otherwise responses are `reencoded`: the response text becomes the assistant's message in the conversation
    that the reward model's chat template renders. Without a chat template, it follows the policy's prompt text.

    Raises: ConfigError for a missing tokenizer, a tokenizer with more tokens than the model's vocabulary, and length
    limits above the model's maximum.
    """

    def __init__(self, section: RewardModelConfig, policy: ModelConfig, rollout: RolloutConfig) -> None:
        path = str(section.hf_path)
        self._policy_tokenizer = load_tokenizer(policy.tokenizer_path or policy.hf_path)
        self._tokenizer = load_tokenizer(path, "reward_model.hf_path")
        self.reencoded = not same_encoding(self._tokenizer, self._policy_tokenizer)
        self._style: ChatStyle | None = None
        if self.reencoded and self._tokenizer.chat_template is not None:
            check_limits(partial(ChatStyle.of, self._tokenizer), "reward_model.hf_path", "")
            self._style = ChatStyle.of(self._tokenizer)
        hf_config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        self._limit = exact_positions(hf_config)
        self._stop = rollout.stop
        self._budget = section.tokens_per_microbatch
        # Fewer tokens than vocabulary rows are common: checkpoints pad the vocabulary.
        known, self._vocabulary = len(self._tokenizer), int(hf_config["vocab_size"])
        if known > self._vocabulary:
            raise ConfigError(
                f"reward_model.hf_path={path}: the tokenizer has {known} tokens but the model has vocab_size="
                f"{self._vocabulary}; set it to a checkpoint with the model's own tokenizer"
            )
        longest = rollout.max_prompt_tokens + rollout.max_response_tokens
        if not self.reencoded and self._limit and longest > self._limit[1]:
            field, limit = self._limit
            raise ConfigError(
                f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} exceeds {field}={limit} "
                f"of reward_model.hf_path={path}; lower them"
            )

    def check(self, prompts: PromptSet, key: str) -> None:
        """Check every prompt with an empty response if responses are `reencoded`.

        Raises: DataError, naming the row, for a prompt that is too long or that the chat template rejects.
        """
        if self.reencoded:
            self._encode([Transcript(prompts[row], "") for row in range(len(prompts))], key)

    def of(
        self, buffers: TrajectoryBuffers, prompt_rows: np.ndarray, prompts: PromptSource | None, key: str
    ) -> list[np.ndarray]:
        """Return the token ids of each trajectory. `key` names the prompt set in errors.

        `prompts` may be None unless responses are `reencoded`.

        Shapes: prompt_rows [B] as in RolloutScalars; result int32 [S] each.
        Raises: DataError, naming the prompt's row, for a response that is too long in the reward model's tokens or has
        a token outside the reward model's vocabulary.
        """
        if not self.reencoded:
            sequences = [trajectory_ids(buffers, row) for row in range(len(buffers.prompt_tokens))]
            for row, ids in zip(prompt_rows, sequences, strict=True):
                # The policy can generate ids above its tokenizer's, up to its padded vocabulary.
                if ids.max() >= self._vocabulary:
                    raise DataError(
                        f"{key}, row {row}: the response has token {ids.max()}, which the reward model with vocab_size="
                        f"{self._vocabulary} does not have; set reward_model.hf_path to a checkpoint with the policy's "
                        "vocabulary"
                    )
            return sequences
        assert prompts is not None
        read = transcripts(buffers, prompt_rows, prompts, self._policy_tokenizer, self._stop)
        return self._encode(read, key)

    def _encode(self, given: Sequence[Transcript], key: str) -> list[np.ndarray]:
        if self._style is None:
            texts = [each.prompt.text + each.response for each in given]
            sequences = encode(self._tokenizer, texts, leading_ids(self._tokenizer))
        else:
            texts = [self._conversation(self._style, each, key) for each in given]
            sequences = encode(self._tokenizer, texts)
        for each, ids in zip(given, sequences, strict=True):
            self._check_length(len(ids), f"{key}, row {each.prompt.row}")
        return sequences

    def _conversation(self, style: ChatStyle, transcript: Transcript, key: str) -> str:
        where = f"{key}, row {transcript.prompt.row}: reward_model"
        answered = with_answer(transcript.prompt.messages, {"role": "assistant", "content": transcript.response})
        return style.render(style.canonical(answered, where), where, opens_turn=False)

    def _check_length(self, length: int, where: str) -> None:
        if length == 0:
            raise DataError(f"{where}: neither prompt nor response has a token in the reward model's tokenizer")
        if length > self._budget:
            raise DataError(
                f"{where}: prompt and response take {length} tokens of the reward model's tokenizer, more than "
                f"reward_model.tokens_per_microbatch={self._budget}; raise it, or lower rollout.max_response_tokens"
            )
        if self._limit and length > self._limit[1]:
            field, limit = self._limit
            raise DataError(
                f"{where}: prompt and response take {length} tokens of the reward model's tokenizer, more than its "
                f"{field}={limit}; lower rollout.max_response_tokens"
            )


def same_encoding(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Return whether two tokenizers have the same chat template and split any text into the same tokens."""
    return one.chat_template == other.chat_template and _rules(one) == _rules(other)


def _rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    # truncation and padding are settings of the last caller, not properties of the tokenizer
    return {name: rule for name, rule in rules.items() if name not in ("truncation", "padding")}
