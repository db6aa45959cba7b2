"""Built-in graders on cases with answers of GSM8K and MATH-500, whose scores follow the data sets' published rules.

grader_cases.jsonl has one case per line: grader, deciding rule, response, ground truth, score and accuracy.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.config.reward import GRADERS, RewardConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rewards.graders.catalogue import SOURCES, grader_of
from mcore_rl.rewards.graders.data_sets import grade_search_qa
from mcore_rl.rewards.graders.loading import check_data_sources
from tests.unit.rewards.managers import graded_here

CASES = [json.loads(line) for line in (Path(__file__).parent / "grader_cases.jsonl").read_text("utf-8").splitlines()]
RUN_CODE = {"code_outputs", "code_asserts"}
BY_SOURCE = RewardConfig(function="by_data_source")


@pytest.mark.parametrize("grader", [name for name in GRADERS if name not in RUN_CODE])
def test_verdicts_are_those_of_the_published_rule(grader):
    cases = [case for case in CASES if case["grader"] == grader]
    assert len(cases) >= 16
    differ = [
        f"{case['rule']}: {case['response'][-80:]!r} for {case['truth']!r}: {score}"
        for case in cases
        if (score := graded_here(RewardConfig(function=grader), case["response"], case["truth"]))
        and (score.error or score.reward != pytest.approx(case["score"]) or score.accuracy != case["acc"])
    ]
    assert differ == []


def test_both_verdicts_of_every_grader_are_held():
    verdicts = Counter((case["grader"], case["acc"]) for case in CASES)
    assert {grader for grader, _ in verdicts} == set(GRADERS) - RUN_CODE
    assert min(verdicts.values()) >= 8
    assert len(CASES) >= 400


def test_boxes_are_judged_as_math_verify_judges_them():
    """The verdicts are equal for all cases that math-verify can parse, except that it ignores a numeral's base."""
    from math_verify import LatexExtractionConfig, parse, verify

    def parsed(text):
        return parse(text, [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)

    rules = {"equivalent notation", "different value", "identical to the reference"}
    differ, compared = set(), 0
    for case in CASES:
        if case["grader"] != "math_boxed" or case["rule"] not in rules:
            continue
        gold, answer = parsed(f"${case['truth']}$"), parsed(case["response"])
        if gold and answer:
            compared += 1
            if bool(verify(gold, answer, timeout_seconds=None)) != bool(case["acc"]):
                differ.add((case["response"], case["truth"]))
    assert compared > 70
    assert differ == {(r"Put together: \boxed{52}", "52_8")}


@pytest.mark.parametrize(
    ("source", "grader"),
    [
        *(("openai/gsm8k", "gsm8k"), ("lighteval/MATH", "math_boxed")),
        *(("DigitalLearningGmbH/MATH-lighteval", "math_boxed"), ("HuggingFaceH4/MATH-500", "math_boxed")),
        *(("math_dapo", "math_dapo"), ("math", "math_dapo"), ("math_dapo_reasoning", "math_dapo")),
        *(("aime_2024", "math_dapo"), ("aime25", "math_dapo"), ("numina_aops_forum", "prime_math")),
        *(("numina_olympiads", "prime_math"), ("codecontests", "code_outputs"), ("apps", "code_outputs")),
        *(("codeforces", "code_outputs"), ("taco", "code_outputs"), ("openai/openai_humaneval", "code_asserts")),
        *(("google-research-datasets/mbpp", "code_asserts"), ("hiyouga/geometry3k", "geometry3k")),
        *(("searchR1_2wikimultihopqa", "search_qa"), ("AIME", None), ("gsm8k", None), ("unknown", None)),
    ],
)
def test_data_sources_have_the_graders_that_verl_gives_them(source, grader):
    assert grader_of(source, {}) == grader
    assert set(SOURCES.values()) <= set(GRADERS)


def test_a_users_map_comes_first_and_a_whole_name_before_a_pattern():
    mine = {"open*": "math", "openai/gsm8k": "mine.py:f", "*": "prime_math", "openai/x": "gsm8k"}
    sources = ("openai/gsm8k", "openai/other", "openai/x", "aime24")
    assert [grader_of(source, mine) for source in sources] == ["mine.py:f", "math", "gsm8k", "prime_math"]


def test_each_row_is_graded_by_its_own_rule(tmp_path):
    (tmp_path / "mine.py").write_text("def f(data_source, solution_str, **_): return {'score': 7, 'of': data_source}\n")
    config = RewardConfig(function="by_data_source", functions={"own_*": f"{tmp_path}/mine.py:f", "plain": "math"})
    assert graded_here(config, "#### 18", "18", "openai/gsm8k").reward == 1.0
    assert graded_here(config, "\\boxed{18}", "18", "aime24").reward == -1.0
    assert graded_here(config, "it is 18", "18", "plain").reward == 1.0
    own = graded_here(config, "anything", None, "own_data")
    assert (own.reward, own.parts) == (7.0, {"of": "own_data"})


def test_an_unknown_data_source_is_refused_before_the_run():
    check_data_sources(BY_SOURCE, "data.train", "t.parquet", ["openai/gsm8k", "aime25"])
    check_data_sources(RewardConfig(), "data.train", "t.parquet", ["anything"])
    with pytest.raises(ConfigError) as caught:
        check_data_sources(BY_SOURCE, "data.val", "v.parquet", ["aime25", "gsm9k", "gsm9k"])
    assert str(caught.value).startswith(
        "data.val=v.parquet: the data_source 'gsm9k' of 2 rows has no grader with reward.function=by_data_source; "
        "set reward.functions to {gsm9k: module_or_file.py:function}, or to one of math, "
    )
    mapped = RewardConfig(function="by_data_source", functions={"gsm*": "math"})
    check_data_sources(mapped, "data.val", "v.parquet", ["gsm9k"])


def test_references_of_a_parquet_file_are_arrays():
    truth = {"target": np.array(["Rome", "Roma"], dtype=object)}
    assert grade_search_qa("<answer>roma</answer>", truth).reward == 1.0
