"""Environments of Verifiers against the gateway, with a scripted engine."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cli import main
from mcore_rl.rollout.connectors.registry import load_suite
from mcore_rl.rollout.gateway.harness.function import FunctionHarness
from mcore_rl.types import EpisodeOutcome
from tests.readme import ROOT
from tests.selection import needs_package
from tests.unit.rollout.connectors.written import SOLVE, rows
from tests.unit.rollout.episodes.conftest import Stage
from tests.unit.rollout.episodes.scripted import END

pytestmark = needs_package("verifiers", "scripts/setup_connectors.sh")

PRODUCTS = str(ROOT / "configs" / "demos" / "products.py")
GAME = """
import verifiers as vf
from datasets import Dataset


class Game(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "warmer"}]


def good(completion):
    return float("right" in completion[-1]["content"])


def long(completion):
    return float(len(completion))


def together(completions):
    return [0.0 for _ in completions]


def load_environment(group=False, turns=2, only_eval=False):
    rows = Dataset.from_list([{"question": "guess", "answer": "x", "info": {"n": i}} for i in range(3)])
    rubric = vf.Rubric(funcs=[together] if group else [good, long], weights=[1.0] if group else [1.0, 0.5])
    given = {"eval_dataset": rows} if only_eval else {"dataset": rows}
    return Game(**given, system_prompt="Play.", rubric=rubric, max_turns=turns)
"""

Play = Callable[..., tuple[Stage, EpisodeOutcome]]


@pytest.fixture
def game(tmp_path: Path) -> str:
    (tmp_path / "game.py").write_text(GAME)
    return str(tmp_path / "game.py")


def loaded(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row's extra_info, with its environment loaded: the library's constructor needs the main thread, and
    the test's worker runs in another one."""
    part = row["extra_info"]["connector"]
    load_suite("verifiers").load(part["name"], part["arguments"])  # type: ignore[attr-defined]
    return row["extra_info"]


def test_tool_environment_is_trained_with_its_reward(play: Play, tmp_path: Path) -> None:
    row, _ = rows(tmp_path / "rows.jsonl", "verifiers", PRODUCTS, "--limit", "2")
    answer = row["reward_model"]["ground_truth"]
    question = row["prompt"][0]["content"]
    asked = (
        f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{question[:-1]}"}}}}\n</tool_call>{END}'
    )
    say = lambda text: f"#{answer}{END}" if answer in text else asked  # noqa: E731
    stage, outcome = play(say, FunctionHarness(SOLVE, {}), extra_info=loaded(row))
    assert outcome.error is None
    assert outcome.reward == 1.0
    assert outcome.parts["has_product"] == 1.0
    assert stage.trained_text(outcome) == f"{asked}#{answer}{END}"


def test_rubric_of_a_multi_turn_environment_is_the_reward(play: Play, game: str, tmp_path: Path) -> None:
    words = ("verifiers", game, "--arguments", '{"turns": 3}', "--split", "eval")
    row = rows(tmp_path / "rows.jsonl", *words)[2]
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["extra_info"]["connector"]["input"]["info"] == {"n": 2}
    say = lambda text: f"{'right' if text.count('warmer') == 2 else 'no'}{END}"  # noqa: E731
    _, outcome = play(say, FunctionHarness(SOLVE, {}), extra_info=loaded(row))
    assert outcome.error is None
    assert outcome.turns == 3
    assert outcome.reward == 1.0 + 0.5 * 5
    assert outcome.parts["long"] == 5.0
    assert outcome.extra["harness"]["stop_condition"] == "max_turns_reached"


def test_empty_reply_ends_an_environment_with_its_reward(play: Play, game: str, tmp_path: Path) -> None:
    """The library stops there with an error, but it is no fault of the run."""
    row = rows(tmp_path / "rows.jsonl", "verifiers", game, "--limit", "1")[0]
    stage, outcome = play(lambda text: END, FunctionHarness(SOLVE, {}), extra_info=loaded(row))
    assert outcome.error is None
    assert outcome.reward == 0.0
    assert stage.trained_text(outcome) == END


def test_limit_of_the_run_ends_an_environment(play: Play, game: str, tmp_path: Path) -> None:
    row = rows(tmp_path / "rows.jsonl", "verifiers", game, "--limit", "1")[0]
    stage, outcome = play(lambda text: f"no{END}", FunctionHarness(SOLVE, {}), extra_info=loaded(row), max_turns=1)
    assert outcome.finish_reason == "turns"
    assert outcome.error is None
    assert stage.trained_text(outcome) == f"no{END}"


def test_environments_keep_the_handlers_of_signals(game: str, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    rows(tmp_path / "rows.jsonl", "verifiers", game)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("no-such-environment", "{}", "install its package, or name a file.py"),
        ("GAME", '{"group": true}', "reward functions of a whole group"),
        ("GAME", '{"size": 3}', "unexpected keyword argument 'size'"),
        ("GAME", '{"only_eval": true}', "has no data set for --split train"),
        ("GAME", "[3]", "must be a JSON object"),
    ],
)
def test_unusable_environments_are_rejected(
    game: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, arguments: str, message: str
) -> None:
    name = game if name == "GAME" else name
    assert main(["rows", "verifiers", name, "--arguments", arguments, "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()
