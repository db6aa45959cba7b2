"""Helpers of verl's scoring modules, compared with their documented results, and published files that call them."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from mcore_rl.config.functions import load_function
from mcore_rl.config.stand_ins import MissingVerlName, provide_verl_names
from mcore_rl.errors import ConfigError
from mcore_rl.rewards.functions import Sample, user_rule

PUBLISHED = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    try:
        from verl.utils.reward_score import {module}

        box = {module}.last_boxed_only_string(solution_str)
        if box is None:
            return 0
        answer = {module}.remove_boxed(box)
        return 1 if {equal} else 0
    except Exception:
        return 0
"""


def hidden_by_except(module: ModuleType) -> float:
    try:
        return float(module.gone(1))
    except Exception:
        return 0.0


def verl(name: str) -> ModuleType:
    provide_verl_names()
    return import_module(f"verl.utils.reward_score.{name}")


@pytest.mark.parametrize(
    ("module", "equal"),
    [
        ("math_reward", "math_reward.is_equiv(answer, ground_truth)"),
        ("math", "math.strip_string(answer) == math.strip_string(ground_truth)"),
        ("math_reward", "math_reward.normalize_final_answer(answer) == ground_truth"),
        ("math_dapo", "math_dapo.normalize_final_answer(answer) == ground_truth"),
    ],
)
def test_a_published_file_scores_right_and_wrong_answers(tmp_path: Path, module: str, equal: str) -> None:
    (tmp_path / "mine.py").write_text(PUBLISHED.format(module=module, equal=equal))
    rule = user_rule("reward.function", f"{tmp_path}/mine.py:compute_score", {})
    scores = [
        rule.grade(Sample("d", text, r"\frac{1}{2}", {})).reward for text in (r"so \boxed{\frac12}", r"\boxed{3}")
    ]
    assert scores == [1.0, 0.0]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        *(("0.5", r"\dfrac12", True), ("1/2", r"\frac{1}{2}", True), (r"x = \sqrt3", r"\sqrt{3}", True)),
        *((r"5\text{ cm}", "5", True), (r"\left( 1, .5 \right)", "(1,0.5)", True), (r"90^\circ", "90", True)),
        *((r"10\%", "10", True), ("3", "4", False), (None, None, True), (None, "3", False)),
        (r"1\text{ a}\text{ b}", "1", False),
    ],
)
def test_is_equiv_compares_normal_forms(one: str | None, other: str | None, same: bool) -> None:
    assert verl("math_reward").is_equiv(one, other) is same


def test_boxes_keep_their_command_until_it_is_removed() -> None:
    math = verl("math_reward")
    assert math.last_boxed_only_string(r"\boxed{1} \boxed{\frac{1}{2}} end") == r"\boxed{\frac{1}{2}}"
    assert math.last_boxed_only_string(r"so \fbox{3}") == r"\fbox{3}"
    assert math.last_boxed_only_string(r"$\boxed 5$ end") == r"\boxed 5"
    assert math.last_boxed_only_string(r"\boxed{1") is None
    assert math.last_boxed_only_string("none") is None
    assert [math.remove_boxed(text) for text in (r"\boxed{a{b}}", r"\boxed 5")] == ["a{b}", "5"]
    with pytest.raises(AssertionError, match="not a box: 5"):
        math.remove_boxed("5")
    assert verl("prime_math").remove_boxed("5") is None


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        *((r"x = $\frac12$ dollars", r"\frac{1}{2}"), ("1,000,000", "1000000"), (r"\text{a} and \text{b}", "aandb")),
        *((r"\sqrt2", r"\sqrt{2}"), (r"42\text{m}", "42"), ("35 square meters", "35"), (r"\boxed{7}", "7")),
    ],
)
def test_minervas_normal_form_has_no_words_and_units(text: str, normal: str) -> None:
    assert verl("math_dapo").normalize_final_answer(text) == normal


def test_minervas_checks_give_a_verdict_and_a_prediction() -> None:
    dapo = verl("math_dapo")
    assert dapo.is_correct_minerva("Answer: 1\nAnswer: $42$", "42") == (True, "42")
    assert dapo.is_correct_minerva("no", "42") == (False, "[INVALID]")
    assert dapo.is_correct_minerva("Answer: 42", r"so \boxed{42}", gt_need_extract=True) == (True, "42")
    assert dapo.is_correct_strict_box(r"\boxed{42}" + " " * 200, "42") == (False, "[INVALID]")
    assert dapo.verify(r"\boxed{42}", "42", strict_box_verify=True) == (True, "42")


def test_search_checks_compare_normal_forms() -> None:
    search = verl("search_r1_like_qa_em")
    assert (search.em_check("The Paris!", "paris"), search.em_check("Rome", ["Paris"])) == (1, 0)
    assert (search.subem_check("in Paris now", ["Paris"]), search.subem_check("Rome", ["Paris"])) == (1, 0)
    assert search.extract_solution("<answer>a</answer> <answer> b </answer>") == "b"
    assert search.extract_solution("b") is None
    assert search.normalize_answer("An  Apple.") == "apple"
    assert search.count_answer_tags("<answer></answer></answer>") == (1, 2)
    assert search.compute_score_subem("<answer>in Paris</answer>", {"target": "paris"}) == 1.0


def test_other_modules_score_by_this_projects_graders() -> None:
    assert verl("math_verify").compute_score(r"so \boxed{\frac{2}{4}}", "0.5") == 1.0
    assert verl("math_batch").compute_score(["d"] * 2, [r"\boxed{1}", "1"], ["1", "1"], [None] * 2) == [1.0, 0.0]
    prime = verl("prime_math")
    assert prime.grade_answer(r"\frac{2}{4}", "0.5")
    assert not prime.grade_answer(None, "0.5")
    assert prime.match_answer("The answer is 3.") == (True, "3")
    assert verl("prime_math.grader").math_equal("3.14160", "3.1416")
    assert verl("geo3k").acc_reward(r"\boxed{3}", "3") == 1.0
    assert verl("geo3k").format_reward(r"<think>a</think> \boxed{3}") == 1.0


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("from verl.utils.reward_score import math_reward\n        return math_reward.gone(1)", "math_reward.gone"),
        ("from verl.utils.reward_score import prime_code\n        return prime_code.compute_score()", "prime_code"),
        ("from verl.utils.reward_score import sandbox_fusion\n        return 1", "sandbox_fusion"),
        ("from verl.utils.reward_score.math_dapo import gone\n        return gone()", "math_dapo.gone"),
        ("import verl.utils.reward_score as rs\n        return rs.gone()", "reward_score.gone"),
        ("import verl.trainer\n        return 1", "verl.trainer"),
        ("import verl.utils.reward_score.gsm8k\n        return verl.utils.reward_score.gsm8k.gone", "gsm8k.gone"),
    ],
)
def test_a_missing_name_in_a_function_is_refused_at_load(tmp_path: Path, body: str, name: str) -> None:
    lines = f"def f(**_):\n    try:\n        {body}\n    except Exception:\n        return 0\n"
    (tmp_path / "mine.py").write_text(lines)
    with pytest.raises(
        ConfigError, match=r"mine\.py:[34] uses verl.*not provide.*verl is not installed; install"
    ) as error:
        load_function("reward.function", f"{tmp_path}/mine.py:f")
    assert name in str(error.value)


def test_a_missing_name_in_a_file_beside_is_refused_at_load(tmp_path: Path) -> None:
    (tmp_path / "beside_of_mine.py").write_text("def g():\n    from verl.utils.reward_score import gone\n")
    (tmp_path / "mine.py").write_text("import beside_of_mine\ndef f(**_): return beside_of_mine.g()\n")
    with pytest.raises(ConfigError, match=r"beside_of_mine\.py:2 uses verl\.utils\.reward_score\.gone"):
        load_function("reward.function", f"{tmp_path}/mine.py:f")


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    from verl.gone import x\nexcept ImportError:\n    x = None\n",
        "try:\n    from verl.gone import x\nexcept Exception:\n    x = None\n",
        "import math\ndef g():\n    from verl.utils.reward_score import math\n    return math\ny = math.sqrt(4)\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from verl import DataProto\n",
    ],
)
def test_optional_imports_of_verl_load(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(text + "def f(**_): return 1.0\n")
    assert load_function("reward.function", f"{tmp_path}/mine.py:f")() == 1.0


def test_a_missing_attribute_at_run_time_passes_except_exception() -> None:
    module = verl("math_reward")
    with pytest.raises(MissingVerlName, match=r"test_verl_helpers\.py:\d+: .*math_reward\.gone is not provided"):
        hidden_by_except(module)
    assert not hasattr(module, "gone")
    assert getattr(module, "gone", 3) == 3


@pytest.mark.parametrize(("is_package", "score"), [(False, "1.0"), (True, "7")])
def test_stand_ins_yield_to_a_verl_package_and_not_to_a_folder(tmp_path: Path, is_package: bool, score: str) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "utils.py").write_text("reward = 7\n")
    if is_package:
        (tmp_path / "verl" / "__init__.py").touch()
    file = tmp_path / "mine.py"
    code = "from verl.utils import reward" if is_package else "from verl.utils.reward_score import gsm8k"
    value = "reward" if is_package else "gsm8k.compute_score('#### 3', '3')"
    file.write_text(f"{code}\nprint({value})\n")
    lines = [
        f"import sys; sys.path.append({str(tmp_path)!r})",
        f"from mcore_rl.config.functions import load_module; load_module('f', {str(file)!r})",
    ]
    script = "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == score, done.stderr
