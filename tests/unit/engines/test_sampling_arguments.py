"""Sampling arguments that the drivers of both engines pass on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.data.sources.row_options import check_sampling, with_overrides
from mcore_rl.engines.sglang.arguments import sampling_arguments as sglang_arguments
from mcore_rl.engines.vllm.arguments import sampling_arguments as vllm_arguments
from mcore_rl.errors import DataError
from mcore_rl.types import GenerationRequest, SamplingOptions

OPTIONS = SamplingOptions(8, 0.7, 0.9, 20, ("stop",), min_p=0.05, repetition_penalty=1.2)
SHARED = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.2}


def test_sampling_arguments_vllm_has_all_options() -> None:
    given = vllm_arguments(OPTIONS, (3, 4))
    assert given == {**SHARED, "max_tokens": 8, "stop_token_ids": [3, 4], "logprobs": 0, "detokenize": False}


@pytest.mark.parametrize(("eos", "ignores"), [((3,), False), ((), True)])
def test_sampling_arguments_sglang_has_all_options(eos: tuple[int, ...], ignores: bool) -> None:
    request = GenerationRequest("0", np.array([5], np.int32), 9, OPTIONS)
    given = sglang_arguments(request, 3, eos)
    rest = {"max_new_tokens": 5, "stop_token_ids": list(eos), "ignore_eos": ignores, "sampling_seed": 9}
    assert given == {**SHARED, **rest}


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_row_without_truncation_overrides_a_run_that_truncates(name: str) -> None:
    run = SamplingOptions(8, top_p=0.9, top_k=20, min_p=0.1, keep_mask=True)
    neutral = getattr(SamplingOptions(8), name)
    wanted = check_sampling({name: neutral}, "row", trained=True, keeps_mask=True)
    assert wanted is not None
    assert with_overrides(run, wanted) == replace(run, **{name: neutral})


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 5), ("min_p", 0.1)])
def test_truncated_row_needs_sampling_sets_and_a_truncated_run(name: str, value: float) -> None:
    """The message names all keys: the configuration rejects sampling sets of a run that samples from all tokens."""
    assert check_sampling({name: value}, "row", trained=True, keeps_mask=True) == {name: value}
    with pytest.raises(DataError, match=rf"^row: sampling\.{name} is {value}, which .*, or remove it") as caught:
        check_sampling({name: value}, "row", trained=True)
    assert f"rollout.keep_sampling_mask=true and rollout.{name} " in str(caught.value)


def test_row_that_leaves_one_token_is_rejected_for_training() -> None:
    """SGLang samples such rows without its sampler, which records the sets."""
    with pytest.raises(DataError, match=r"^row: sampling\.top_k is 1, which leaves one token, .* at least 2, or to -1"):
        check_sampling({"top_k": 1}, "row", trained=True, keeps_mask=True)
    assert check_sampling({"top_k": 1}, "row", trained=False, keeps_mask=True) == {"top_k": 1}


def test_with_overrides_keeps_options_that_rows_cannot_set() -> None:
    assert with_overrides(OPTIONS, {"top_k": 3}) == replace(OPTIONS, top_k=3)
