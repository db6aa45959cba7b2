"""Loading of sets of pairs and of conversations."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.columns import format_notes
from mcore_rl.data.prompts import LoadReport, PromptSet, prompt_set
from mcore_rl.data.sources.paths import Names, find_files, format_files
from mcore_rl.data.supervised.encoder import ResponseEncoder
from mcore_rl.data.supervised.targets import ConversationSet, PairSet, Target, Targets
from mcore_rl.data.supervised.tokeniser import CONVERSATIONS, PAIRS, Format, TargetTokeniser
from mcore_rl.data.tokenised.reader import tokenised_blocks
from mcore_rl.errors import DataError
from mcore_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_pairs(
    names: Names,
    tokenizer: PreTrainedTokenizerBase,
    data_config: DataConfig,
    rollout_config: RolloutConfig,
    key: str = "data.train",
    *,
    stop_ids: tuple[int, ...],
    max_rows: int | None = None,
) -> tuple[PairSet, LoadReport]:
    """Read the pairs of all files in `names`, in order.

    Pairs with a prompt above rollout.max_prompt_tokens, or a response (with the token that ends it) above
    rollout.max_response_tokens, are dropped and counted.

    max_rows: stop reading after this number of kept pairs. stop_ids: tokens that end a response.

    Raises: DataError naming file and row for a malformed row, or `key` for files without a usable pair; ConfigError for
    a template that the tokenizer cannot apply.
    """
    encoder = ResponseEncoder(tokenizer, data_config, stop_ids)
    prompts, (chosen, rejected), report = _load(names, TargetTokeniser(encoder, PAIRS, rollout_config, key), max_rows)
    return PairSet(prompts, chosen, rejected), report


def load_conversations(
    names: Names,
    tokenizer: PreTrainedTokenizerBase,
    data_config: DataConfig,
    rollout_config: RolloutConfig,
    key: str = "data.train",
    *,
    stop_ids: tuple[int, ...],
    max_rows: int | None = None,
) -> tuple[ConversationSet, LoadReport]:
    """Read the conversations of all files in `names`, like load_pairs.

    Rows above rollout.max_prompt_tokens + rollout.max_response_tokens in total are dropped and counted.
    """
    encoder = ResponseEncoder(tokenizer, data_config, stop_ids)
    tokeniser = TargetTokeniser(encoder, CONVERSATIONS, rollout_config, key)
    prompts, (targets,), report = _load(names, tokeniser, max_rows)
    return ConversationSet(prompts, targets), report


def _load(
    names: Names, tokeniser: TargetTokeniser, max_rows: int | None
) -> tuple[PromptSet, list[Targets], LoadReport]:
    """Return prompts, the targets by response, and the report."""
    files = find_files(names, tokeniser.key)
    path, key, format = format_files(files), tokeniser.key, tokeniser.format
    kept: list[tuple[Prompt, tuple[Target, ...]]] = []
    read = longest = longest_target = 0
    noted: Counter[str] = Counter()
    ignored: dict[str, None] = {}
    of_files = [0] * len(files)
    for block in tokenised_blocks(files, tokeniser):
        noted += block.notes
        ignored |= dict.fromkeys(block.ignored)
        read += len(block.prompts)
        rows = list(zip(block.prompts, block.responses, strict=True))
        longest = max([longest, *(len(prompt.token_ids) for prompt, _ in rows)])
        longest_target = max([longest_target, *(len(target.ids) for _, targets in rows for target in targets)])
        fitting = [row for row in rows if _fits(*row, tokeniser.rollout_config, format)]
        fitting = fitting if max_rows is None else fitting[: max_rows - len(kept)]
        kept += fitting
        of_files[block.file] += len(fitting)
        if len(kept) == max_rows:
            break
    limits = _limits(tokeniser.rollout_config, format)
    if not kept:
        raise DataError(
            f"{key}: all {read} {format.kind} of {path} are {limits} (the longest prompt has {longest} tokens, the "
            f"longest response {longest_target}); raise the limits"
            if read
            else f"{key}: {path} has no rows; set {key} to a file with {format.kind}"
        )
    report = LoadReport(
        key,
        path,
        kept=len(kept),
        dropped=0 if len(kept) == max_rows else read - len(kept),
        longest_tokens=longest,
        limits=limits,
        notes=format_notes(noted, ignored),
        of_files=tuple(of_files),
    )
    prompts, responses = zip(*kept, strict=True)
    return prompt_set(prompts), [Targets.of(column) for column in zip(*responses, strict=True)], report


def _fits(prompt: Prompt, targets: tuple[Target, ...], limits: RolloutConfig, format: Format) -> bool:
    longest = max(len(target.ids) for target in targets)
    if format.needs_sum:
        return len(prompt.token_ids) + longest <= limits.max_prompt_tokens + limits.max_response_tokens
    return len(prompt.token_ids) <= limits.max_prompt_tokens and longest <= limits.max_response_tokens


def _limits(limits: RolloutConfig, format: Format) -> str:
    prompt, response = limits.max_prompt_tokens, limits.max_response_tokens
    if format.needs_sum:
        return f"longer than rollout.max_prompt_tokens + rollout.max_response_tokens = {prompt + response}"
    return f"longer than rollout.max_prompt_tokens={prompt} or rollout.max_response_tokens={response}"
