"""Loading of the pairs or conversations of a run, before any process starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mcore_rl.config import Config
from mcore_rl.config.objectives import DPO
from mcore_rl.data.columns import check_keys
from mcore_rl.data.prompts import LoadReport, PromptSet, joined
from mcore_rl.data.supervised.loading import load_conversations, load_pairs
from mcore_rl.data.supervised.targets import ConversationSet, PairSet, Targets
from mcore_rl.data.tokenizer import eos_token_ids
from mcore_rl.trainer.validation import ValidationParts, validation_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

S = TypeVar("S", PairSet, ConversationSet)


class RunTexts(NamedTuple):
    """Pairs or conversations by split, train and, if data.val is set, val; `parts` are rows of the validation with
    metrics of their own."""

    pairs: Mapping[str, PairSet]
    conversations: Mapping[str, ConversationSet]
    reports: list[LoadReport]
    parts: ValidationParts


def load_texts(config: Config, tokenizer: PreTrainedTokenizerBase) -> RunTexts:
    """Load the texts of data.train and data.val; all sets of data.val are joined into the split `val`.

    Raises: ConfigError, DataError for the first setting or row that cannot work.
    """
    stops = eos_token_ids(tokenizer, config.model.hf_path)
    limits, data = config.rollout, config.data
    if config.trainer.objective == DPO:
        load = partial(load_pairs, tokenizer=tokenizer, data_config=data, rollout_config=limits, stop_ids=stops)
        pairs, reports, parts = _load_splits(config, load, _joined_pairs)
        return RunTexts(pairs, {}, reports, parts)
    read = partial(load_conversations, tokenizer=tokenizer, data_config=data, rollout_config=limits, stop_ids=stops)
    conversations, reports, parts = _load_splits(config, read, _joined_conversations)
    return RunTexts({}, conversations, reports, parts)


def _load_splits(
    config: Config, load: Callable[..., tuple[S, LoadReport]], join: Callable[[Sequence[S]], S]
) -> tuple[dict[str, S], list[LoadReport], ValidationParts]:
    data = config.data
    named = {"data.train": data.train, **data.validation}
    check_keys(data, named)
    loaded: dict[str, S] = {}
    reports = []
    for key, files in named.items():
        limit = None if key == "data.train" else data.val_max_prompts
        loaded[key], report = load(files, key=key, max_rows=limit)
        reports.append(report)
    splits = {"train": loaded.pop("data.train")}
    if loaded:
        splits["val"] = join(list(loaded.values()))
    sets = {
        key.removeprefix("data.val").removeprefix("."): part.prompts.columns["data_source"]
        for key, part in loaded.items()
    }
    return splits, reports, validation_parts(sets)


def _joined_pairs(sets: Sequence[PairSet]) -> PairSet:
    chosen, rejected = ([getattr(each, name) for each in sets] for name in ("chosen", "rejected"))
    return PairSet(_prompts(sets), Targets.joined(chosen), Targets.joined(rejected))


def _joined_conversations(sets: Sequence[ConversationSet]) -> ConversationSet:
    return ConversationSet(_prompts(sets), Targets.joined([each.targets for each in sets]))


def _prompts(sets: Sequence[PairSet] | Sequence[ConversationSet]) -> PromptSet:
    return joined([each.prompts for each in sets])
