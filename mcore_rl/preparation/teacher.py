"""Checks of the teachers of a distillation run before they are built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mcore_rl.algorithms import Estimator
from mcore_rl.algorithms.configured import configured_loss, require_samples
from mcore_rl.config.models import OTHERS, TeacherConfig, TeacherSourceConfig
from mcore_rl.config.roles import EngineRole, ModelRole
from mcore_rl.config.rules.teacher import (
    has_own_ranks,
    is_on_engines,
    is_served,
    replaces_rewards,
    server_key,
    uses_teacher,
)
from mcore_rl.config.rules.validation import check_engine_sizes, check_positions
from mcore_rl.config.schema import Config
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.engines.server.client import ServerScorer, connect, token_limit, try_server
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.preparation.models import check_implementation, check_weights
from mcore_rl.resolved.layout import conversion_errors, model_arguments
from mcore_rl.resolved.model import ResolvedModel, check_engine_model, policy_config
from mcore_rl.resolved.teacher import (
    check_vocabulary_sizes,
    reject_images,
    resolved_teacher,
    teacher_on_engines,
    teacher_on_own_ranks,
    teacher_sequences,
)
from mcore_rl.types import TokenSequence
from model_converters.mapping.layout import TrainLayout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBED_TOKENS = 256
"""Number of tokens whose texts are compared with a server's, at most."""
SHOWN_CHARACTERS = 60
"""Length of the part of a prompt that an error shows."""


def check_teacher(config: Config, policy: ResolvedModel, estimator: Estimator) -> tuple[TrainLayout, ...]:
    """Check layouts, sizes, weights and losses of the run's teachers, if it has any. Reads headers of weight files.
    Returns the layouts of teachers on ranks of their own.

    Raises: ConfigError.
    """
    teacher, advantage = config.teacher, config.algorithm.advantage
    if not uses_teacher(teacher):
        return ()
    if teacher.by_source:
        require_samples("teacher.by_source", config.algorithm, configured_loss(config.algorithm))
    if replaces_rewards(teacher) and estimator.needs.values:
        raise ConfigError(
            f"teacher.alone=true drops the advantages of algorithm.advantage={advantage}, whose critic would be "
            "trained for nothing; set algorithm.advantage to an estimator without a critic, such as grpo"
        )
    layouts = []
    for entry in teacher.entries:
        if entry.url is not None:
            _check_served(config, policy, entry)
        elif is_on_engines(teacher):
            _check_engines(config, policy, entry)
        elif has_own_ranks(teacher):
            spec = teacher_on_own_ranks(config, entry)
            reject_images(entry, spec.arguments, policy.arguments)
            check_vocabulary_sizes(teacher, entry, spec.arguments.vocab_size, policy.arguments.vocab_size)
            _check_ranks(config, entry, spec)
            layouts.append(spec.layout)
        else:
            _check_ranks(config, entry, resolved_teacher(teacher, entry, policy))
    return tuple(layouts)


def _check_ranks(config: Config, entry: TeacherSourceConfig, spec: ResolvedModel) -> None:
    """Check a teacher on Megatron ranks: its components, positions and weights."""
    check_implementation(config.cluster, spec)
    rollout = EngineRole.rollout(teacher_sequences(config), config.model)
    check_positions(rollout, spec.hf_config, f"{entry.chosen}'s{_with_hint(config)}")
    if entry.hf_path is not None:
        check_weights(spec.role)
    elif entry.checkpoint is not None:
        # Reads with torch.distributed.checkpoint, a slow import that other runs do not need.
        from model_converters.dcp.convert import open_saved

        with conversion_errors(f"{entry.given}: "):
            open_saved(Path(entry.checkpoint))


def _check_engines(config: Config, policy: ResolvedModel, entry: TeacherSourceConfig) -> None:
    _check_served(config, policy, entry)
    role = teacher_on_engines(config, entry)
    weights = ModelRole.on_engines(role)
    hf_config, _ = policy_config(weights)
    sizes = model_arguments(hf_config, role.checkpoint)
    if sizes.vision is not None:
        raise ConfigError(
            f"{entry.given}: the teacher has a vision tower, and teachers read texts only; set it to null"
        )
    check_vocabulary_sizes(config.teacher, entry, sizes.vocab_size, policy.arguments.vocab_size)
    # Before check_engine_sizes, which would name keys of the section teacher.
    longer = replace(teacher_sequences(config), max_response_tokens=config.rollout.max_response_tokens + 1)
    whose = f"{role.checkpoint}'s{_with_hint(config)} (vLLM samples one more token)"
    check_positions(EngineRole.rollout(longer, config.model), hf_config, whose)
    check_engine_sizes(role, hf_config, cuda=config.cluster.uses_cuda)
    check_engine_model(role, config.algorithm, hf_config)
    check_weights(weights)


def _with_hint(config: Config) -> str:
    """Return the addition to a message about lengths that names the key of prompts with hints."""
    return "" if config.data.hint_key is None else " (prompts with hints: data.max_hinted_tokens)"


def _check_served(config: Config, policy: ResolvedModel, entry: TeacherSourceConfig) -> None:
    if policy.arguments.vision is not None:
        raise ConfigError(
            f"{entry.given}: model.hf_path has a vision tower, and teachers read texts only; set it to null"
        )
    if config.teacher.top_k >= policy.arguments.vocab_size:
        raise ConfigError(
            f"teacher.top_k={config.teacher.top_k} must be below the {policy.arguments.vocab_size} tokens of the "
            "vocabulary; lower it"
        )


def check_row_temperatures(teacher: TeacherConfig, train: PromptSet) -> None:
    """Require temperature 1 of training rows whose teachers are on engines or servers.

    Raises: DataError naming the first other row.
    """
    if not is_served(teacher):
        return
    named = {entry.source for entry in teacher.entries}
    columns = zip(train.columns["sampling"], train.columns["data_source"], strict=True)
    for row, (sampling, source) in enumerate(columns):
        temperature = (sampling or {}).get("temperature", 1.0)
        if temperature != 1 and (OTHERS in named or source in named):
            raise DataError(
                f"data.train: row {row} of the loaded rows, counted from 0 ({train[row].text[:SHOWN_CHARACTERS]!r}): "
                f"sampling.temperature is {temperature:g}, and teachers on engines or servers compute "
                "log-probabilities at temperature 1; remove it, or load the teacher on Megatron ranks"
            )


def check_vocabulary(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Require that the teachers, if the run has any, have the tokens of the policy's tokenizer with the same ids.

    Chat templates may differ: the teachers read the policy's tokens. A server is asked for log-probabilities of some
    tokens; without teacher.tokenizer_path, its texts of them are compared with the policy's.

    Raises: ConfigError naming the first different token, or the server that does not answer.
    """
    ours = tokenizer.get_vocab()
    for entry in config.teacher.entries:
        if entry.url is None and not entry.averages:
            _compare(ours, entry.directory, entry.chosen)
    if (path := config.teacher.tokenizer_path) is not None:
        _compare(ours, path, "teacher.tokenizer_path")
    for entry in config.teacher.entries:
        if entry.url is not None:
            _check_server(config, entry, tokenizer)


def _compare(ours: dict[str, int], path: str, key: str) -> None:
    theirs = load_tokenizer(path, key).get_vocab()
    if ours == theirs:
        return
    different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    first = different[0]
    numbers = [f"id {ids[first]}" if first in ids else "no id" for ids in (ours, theirs)]
    raise ConfigError(
        f"{key}={path} has another vocabulary than the policy: {len(different)} tokens differ, such as {first!r} with "
        f"{numbers[0]} for the policy and {numbers[1]} for the teacher; set it to a model with the policy's tokenizer"
    )


def _check_server(config: Config, entry: TeacherSourceConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a server computes sequences as long as the run's, and knows the policy's tokens."""
    teacher, rollout = config.teacher, teacher_sequences(config)
    scorer = connect(teacher, entry, server_key(teacher))
    # Servers sample a token after the sequence.
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens + 1
    limit = token_limit(scorer)
    if limit is not None and limit < longest:
        raise ConfigError(
            f"{entry.given}: the server's model reads sequences of up to {limit} tokens, and rollout.max_prompt_tokens "
            f"+ rollout.max_response_tokens + 1 = {longest}{_with_hint(config)}; lower them, or start the server "
            "with a larger limit"
        )
    _compare_texts(scorer, tokenizer, min(longest - 1, limit or longest), compare=teacher.tokenizer_path is None)


def _compare_texts(scorer: ServerScorer, tokenizer: PreTrainedTokenizerBase, longest: int, *, compare: bool) -> None:
    """Send tokens from the whole vocabulary, in pieces of `longest`, and with `compare` compare the server's text of
    each with the policy's."""
    ids = np.unique(np.linspace(0, len(tokenizer) - 1, PROBED_TOKENS).astype(np.int32))
    compared = 0
    for piece in np.array_split(ids, -(-len(ids) // (longest - 1))):
        # The first token has no log-probability.
        sequence = TokenSequence(np.concatenate([ids[:1], piece]), 1)
        answer = try_server(scorer, sequence, scorer.config.top_k)
        if not np.isfinite(answer.scores.logp).all():
            raise ConfigError(
                f"{scorer.entry.given} returned log-probabilities of tokens {piece[0]} to {piece[-1]} that are not "
                "finite; set it to a server with the policy's vocabulary"
            )
        if not compare:
            continue
        for token, theirs in zip(piece.tolist(), answer.texts, strict=True):
            text = tokenizer.decode([token])
            # Servers write incomplete characters and special tokens in their own ways.
            if theirs is None or token in tokenizer.all_special_ids or not text.strip() or not text.isascii():
                continue
            compared += 1
            if theirs.strip() != text.strip():
                raise ConfigError(
                    f"{scorer.entry.given} has another vocabulary than the policy: token {token} is {text!r} for the "
                    f"policy and {theirs!r} for the teacher; set it to a server with the policy's tokenizer"
                )
    if compare and not compared:
        raise ConfigError(
            f"{scorer.entry.given} returns no texts of tokens, so its vocabulary is unknown; set "
            "teacher.tokenizer_path to the tokenizer of the server's model"
        )
