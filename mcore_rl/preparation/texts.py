"""Loading of the pairs or conversations of a run, before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from mcore_rl.config import Config
from mcore_rl.config.objectives import DPO, REWARD_MODEL, SFT
from mcore_rl.data.columns import check_keys
from mcore_rl.data.prompts import LoadReport
from mcore_rl.data.supervised.encoder import ResponseEncoder
from mcore_rl.data.supervised.loading import load_texts
from mcore_rl.data.supervised.targets import TextSet
from mcore_rl.data.supervised.tokeniser import CONVERSATIONS, PAIRS, SCORED_PAIRS
from mcore_rl.data.tokenizer import eos_token_ids
from mcore_rl.trainer.validation import ValidationParts, validation_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMATS = {SFT: CONVERSATIONS, DPO: PAIRS, REWARD_MODEL: SCORED_PAIRS}
"""Format of the rows of each objective that trains on texts of the data set."""


class RunTexts(NamedTuple):
    """Conversations or pairs by split, train and, if data.val is set, val; `parts` are rows of the validation with
    metrics of their own."""

    splits: Mapping[str, TextSet]
    reports: list[LoadReport]
    parts: ValidationParts


def load_splits(config: Config, tokenizer: PreTrainedTokenizerBase) -> RunTexts:
    """Load the texts of data.train and data.val; all sets of data.val are joined into the split `val`.

    Raises: ConfigError, DataError for the first setting or row that cannot work.
    """
    data, format = config.data, FORMATS[config.trainer.objective]
    encoder = ResponseEncoder(tokenizer, data, eos_token_ids(tokenizer, config.model.hf_path))
    named = {"data.train": data.train, **data.validation}
    check_keys(data, named)
    loaded: dict[str, TextSet] = {}
    reports = []
    for key, files in named.items():
        limit = None if key == "data.train" else data.val_max_prompts
        loaded[key], report = load_texts(files, encoder, format, config.rollout, key, limit)
        reports.append(report)
    splits = {"train": loaded.pop("data.train")}
    if loaded:
        splits["val"] = TextSet.joined(list(loaded.values()))
    sets = {
        key.removeprefix("data.val").removeprefix("."): part.prompts.columns["data_source"]
        for key, part in loaded.items()
    }
    return RunTexts(splits, reports, validation_parts(sets))
