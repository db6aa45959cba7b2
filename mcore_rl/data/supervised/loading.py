"""Loading of sets of pairs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.columns import format_notes
from mcore_rl.data.prompts import LoadReport, prompt_set
from mcore_rl.data.sources.paths import Names, find_files, format_files
from mcore_rl.data.supervised.targets import PairSet, Target, Targets
from mcore_rl.data.supervised.tokeniser import PairTokeniser
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
    max_pairs: int | None = None,
) -> tuple[PairSet, LoadReport]:
    """Read the pairs of all files in `names`, in order.

    Pairs with a prompt above rollout.max_prompt_tokens, or a response (with the token that ends it) above
    rollout.max_response_tokens, are dropped and counted.

    max_pairs: stop reading after this number of kept pairs. stop_ids: tokens that end a response.

    Raises: DataError naming file and row for a malformed row, or `key` for files without a usable pair; ConfigError for
    a template that the tokenizer cannot apply.
    """
    files, path = find_files(names, key), format_files(find_files(names, key))
    tokeniser = PairTokeniser(tokenizer, data_config, rollout_config, key, stop_ids)
    longest_prompt, longest_response = rollout_config.max_prompt_tokens, rollout_config.max_response_tokens
    kept: list[tuple[Prompt, Target, Target]] = []
    read = longest = longest_target = 0
    noted: Counter[str] = Counter()
    ignored: dict[str, None] = {}
    of_files = [0] * len(files)
    for block in tokenised_blocks(files, tokeniser):
        noted += block.notes
        ignored |= dict.fromkeys(block.ignored)
        read += len(block.prompts)
        rows = list(zip(block.prompts, block.chosen, block.rejected, strict=True))
        longest = max([longest, *(len(prompt.token_ids) for prompt, _, _ in rows)])
        longest_target = max([longest_target, *(len(t.ids) for _, *both in rows for t in both)])
        fitting = [
            row
            for row in rows
            if len(row[0].token_ids) <= longest_prompt and max(len(t.ids) for t in row[1:]) <= longest_response
        ]
        fitting = fitting if max_pairs is None else fitting[: max_pairs - len(kept)]
        kept += fitting
        of_files[block.file] += len(fitting)
        if len(kept) == max_pairs:
            break
    limits = f"longer than rollout.max_prompt_tokens={longest_prompt} or rollout.max_response_tokens={longest_response}"
    if not kept:
        raise DataError(
            f"{key}: all {read} pairs of {path} are {limits} (the longest prompt has {longest} tokens, the longest "
            f"response {longest_target}); raise the limits"
            if read
            else f"{key}: {path} has no rows; set {key} to a file with pairs"
        )
    report = LoadReport(
        key,
        path,
        kept=len(kept),
        dropped=0 if len(kept) == max_pairs else read - len(kept),
        longest_tokens=longest,
        limits=limits,
        notes=format_notes(noted, ignored),
        of_files=tuple(of_files),
    )
    prompts, chosen, rejected = zip(*kept, strict=True)
    return PairSet(prompt_set(prompts), Targets.of(chosen), Targets.of(rejected)), report
