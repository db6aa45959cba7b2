"""Loading of the pairs of a run, before any process starts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mcore_rl.config import Config
from mcore_rl.data.columns import check_keys
from mcore_rl.data.prompts import LoadReport, prompt_set
from mcore_rl.data.supervised.loading import load_pairs
from mcore_rl.data.supervised.targets import PairSet, Targets
from mcore_rl.data.tokenizer import eos_token_ids
from mcore_rl.trainer.validation import ValidationParts, validation_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase


class RunPairs(NamedTuple):
    """Pairs by split, train and, if data.val is set, val; `parts` are validation pairs with metrics of their own."""

    pairs: dict[str, PairSet]
    reports: list[LoadReport]
    parts: ValidationParts


def load_run_pairs(config: Config, tokenizer: PreTrainedTokenizerBase) -> RunPairs:
    """Load the pairs of data.train and data.val; all sets of data.val are joined into the split `val`.

    Raises: ConfigError, DataError for the first setting or row that cannot work.
    """
    data = config.data
    named = {"data.train": data.train, **data.validation}
    check_keys(data, named)
    load = partial(load_pairs, stop_ids=eos_token_ids(tokenizer, config.model.hf_path))
    loaded, reports = {}, []
    for key, files in named.items():
        limit = None if key == "data.train" else data.val_max_prompts
        loaded[key], report = load(files, tokenizer, data, config.rollout, key, max_rows=limit)
        reports.append(report)
    pairs = {"train": loaded.pop("data.train")}
    if loaded:
        pairs["val"] = joined_pairs(list(loaded.values()))
    sets = {
        key.removeprefix("data.val").removeprefix("."): part.prompts.columns["data_source"]
        for key, part in loaded.items()
    }
    return RunPairs(pairs, reports, validation_parts(sets))


def joined_pairs(sets: Sequence[PairSet]) -> PairSet:
    """Concatenate several sets."""
    if len(sets) == 1:
        return sets[0]
    rows = [(each, row) for each in sets for row in range(len(each))]
    return PairSet(
        prompt_set([each.prompts[row] for each, row in rows]),
        Targets.of([each.chosen[row] for each, row in rows]),
        Targets.of([each.rejected[row] for each, row in rows]),
    )
