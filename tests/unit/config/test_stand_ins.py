"""Stand-ins for verl's modules: used if verl is not installed, and never mixed with an installed verl."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from mcore_rl.config.functions import load_function
from mcore_rl.config.stand_ins import MODULES, provide_verl_names


def test_stand_ins_every_name_can_be_imported() -> None:
    provide_verl_names()
    for module, names in MODULES.items():
        for name in names:
            assert callable(getattr(import_module(module), name))


def test_stand_ins_unknown_name_is_rejected() -> None:
    provide_verl_names()
    with pytest.raises(ModuleNotFoundError, match=r"verl\.trainer"):
        import_module("verl.trainer")


def test_stand_ins_verl_reward_example_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from verl.utils.reward_score import default_compute_score, math_dapo\n"
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return default_compute_score(data_source, solution_str, ground_truth, extra_info), math_dapo.__name__\n"
    )
    function = load_function("reward.function", f"{tmp_path}/mine.py:f")
    assert function("openai/gsm8k", "so #### 42", "42") == (1.0, "verl.utils.reward_score.math_dapo")


def test_stand_ins_installed_verl_takes_precedence(tmp_path: Path) -> None:
    """Run in a separate process, since imports persist."""
    (tmp_path / "verl" / "utils").mkdir(parents=True)
    for package in ("verl", "verl/utils"):
        (tmp_path / package / "__init__.py").write_text("real = True")
    program = (
        "from mcore_rl.config.stand_ins import provide_verl_names\n"
        "provide_verl_names()\n"
        "import verl.utils\n"
        "assert verl.real and verl.utils.real\n"
        "try:\n"
        "    import verl.utils.reward_score\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error.name)\n"
    )
    paths = f"{tmp_path}:{Path.cwd()}"
    said = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": paths}, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "verl.utils.reward_score"
