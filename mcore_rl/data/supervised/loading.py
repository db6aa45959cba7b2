"""Loading of sets of pairs and of conversations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.columns import format_notes
from mcore_rl.data.prompts import LoadReport, prompt_set
from mcore_rl.data.sources.paths import Names, find_files, format_files
from mcore_rl.data.supervised.encoder import ResponseEncoder
from mcore_rl.data.supervised.targets import Targets, Texts, TextSet
from mcore_rl.data.supervised.tokeniser import Format, TargetTokeniser
from mcore_rl.data.tokenised.reader import tokenised_blocks
from mcore_rl.errors import DataError
from mcore_rl.types import Prompt


def load_texts(
    names: Names,
    encoder: ResponseEncoder,
    format: Format,
    rollout_config: RolloutConfig,
    key: str = "data.train",
    max_rows: int | None = None,
) -> tuple[TextSet, LoadReport]:
    """Read the rows of all files in `names`, in order.

    Pairs with a prompt above rollout.max_prompt_tokens, or a response (with the token that ends it) above
    rollout.max_response_tokens, are dropped and counted; so are conversations above both together.

    max_rows: stop reading after this number of kept rows.

    Raises: DataError naming file and row for a malformed row, or `key` for files without a usable row.
    """
    files, tokeniser = find_files(names, key), TargetTokeniser(encoder, format, rollout_config, key)
    path = format_files(files)
    kept: list[tuple[Prompt, Texts]] = []
    read = longest = longest_target = 0
    noted: Counter[str] = Counter()
    ignored: dict[str, None] = {}
    of_files = [0] * len(files)
    for block in tokenised_blocks(files, tokeniser):
        noted += block.notes
        ignored |= dict.fromkeys(block.ignored)
        read += len(block.prompts)
        rows = list(zip(block.prompts, block.texts, strict=True))
        longest = max([longest, *(len(prompt.token_ids) for prompt, _ in rows)])
        longest_target = max([longest_target, *(len(target.ids) for _, texts in rows for target in texts.targets)])
        fitting = [row for row in rows if _fits(*row, rollout_config, format)]
        fitting = fitting if max_rows is None else fitting[: max_rows - len(kept)]
        kept += fitting
        of_files[block.file] += len(fitting)
        if len(kept) == max_rows:
            break
    limits = _limits(rollout_config, format)
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
    return _text_set(kept), report


def _text_set(rows: Sequence[tuple[Prompt, Texts]]) -> TextSet:
    columns = zip(*(texts.targets for _, texts in rows), strict=True)
    return TextSet(
        prompt_set([prompt for prompt, _ in rows]),
        tuple(Targets.of(column) for column in columns),
        np.array([texts.margin for _, texts in rows]),
    )


def _fits(prompt: Prompt, texts: Texts, limits: RolloutConfig, format: Format) -> bool:
    longest = max(len(target.ids) for target in texts.targets)
    if format.needs_sum:
        return len(prompt.token_ids) + longest <= limits.max_prompt_tokens + limits.max_response_tokens
    return len(prompt.token_ids) <= limits.max_prompt_tokens and longest <= limits.max_response_tokens


def _limits(limits: RolloutConfig, format: Format) -> str:
    prompt, response = limits.max_prompt_tokens, limits.max_response_tokens
    if format.needs_sum:
        return f"longer than rollout.max_prompt_tokens + rollout.max_response_tokens = {prompt + response}"
    return f"longer than rollout.max_prompt_tokens={prompt} or rollout.max_response_tokens={response}"
