"""Gymnasium's environments as episodes, against the library itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cli import main
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import DataError
from mcore_rl.rollout.episodes.load import load_episode
from mcore_rl.rollout.episodes.session import EpisodePrompt
from tests.selection import needs_package
from tests.unit.rollout.connectors.written import rows
from tests.unit.rollout.episodes.conftest import SetUp
from tests.unit.rollout.episodes.scripted import END

pytestmark = needs_package("gymnasium", "scripts/setup_connectors.sh")

ENVIRONMENT = "mcore_rl.rollout.connectors.gymnasium:TextEnvironment"
LAKE = ("gymnasium", "FrozenLake-v1", "--arguments", '{"is_slippery": false, "render_mode": "ansi"}')
CART = ("gymnasium", "CartPole-v1", "--limit", "2")
MODEL_TURN = "<|im_start|>assistant"
NAMES = ("--actions", "left,down,right,up")
PATH = "down down right right down right".split()
"""Shortest path of the lake's 4 x 4 map."""
WORDS = """
import gymnasium
from gymnasium.spaces import Text


class Echo(gymnasium.Env):
    action_space = Text(8, charset="abc")
    observation_space = Text(8, charset="abcsy ")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "say a", {}

    def step(self, action):
        return action * 2, 0.5, action == "c", False, {}


gymnasium.register("Echo-v0", entry_point=Echo)
"""


def environment(row: dict[str, Any]) -> Any:
    """Construct the environment of a row."""
    from mcore_rl.rollout.connectors.gymnasium import TextEnvironment

    return TextEnvironment(EpisodePrompt([], "", row["prompt"], "src", "", row["extra_info"], 0))


def test_environment_gives_observations_and_rewards(stage: SetUp, tmp_path: Path) -> None:
    """A whole episode, against the environment played directly."""
    import gymnasium

    row = rows(tmp_path / "rows.jsonl", *LAKE, *NAMES, "--limit", "2")[1]
    (message,) = row["prompt"]
    instruction = "Answer each turn with one action: left, down, right, up."
    assert message["content"] == f"{instruction}\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    say = lambda text: f"not up but {PATH[text.count(MODEL_TURN) - 1]}{END}"  # noqa: E731
    set_up = stage(say, load_episode(RolloutConfig(environment=ENVIRONMENT)), extra_info=row["extra_info"])
    set_up.prompt = replace(set_up.prompt, messages=row["prompt"])
    (outcome,) = set_up.play()
    assert outcome.error is None
    assert (outcome.finish_reason, outcome.turns) == ("stop", len(PATH))
    assert outcome.turn_rewards == 1.0
    reference = gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi")
    reference.reset(seed=1)
    names = ["left", "down", "right", "up"]
    shown = [[reference.step(names.index(each)), reference.render()][1] for each in PATH]
    observations = [each["content"] for each in outcome.messages if each["role"] == "user"][1:]
    plain = [each.replace("\x1b[41m", "[").replace("\x1b[0m", "]").strip("\n") for each in shown]
    assert observations == plain[:-1]


def test_actions_are_read_from_texts(tmp_path: Path) -> None:
    named = environment(rows(tmp_path / "named.jsonl", *LAKE, *NAMES, "--limit", "1")[0])
    named.reset()
    assert "(Down)" in named.step("Not UP, rather DOWN.")[0]
    reminder = "No action was found. Answer each turn with one action: left, down, right, up."
    assert named.step("downwards") == (reminder, 0.0, False)
    assert "(Down)" in named.step("down")[0], "an unreadable action does not move"
    numbered = environment(rows(tmp_path / "numbered.jsonl", *LAKE, "--limit", "1")[0])
    numbered.reset()
    assert "(Right)" in numbered.step("1 or 2")[0]
    assert numbered.step("12 or -2")[0].startswith("No action was found.")


def test_letters_that_only_match_in_another_case_name_actions() -> None:
    from gymnasium.spaces import Discrete

    from mcore_rl.rollout.connectors.gymnasium import Actions

    actions = Actions(["stay", "stay here", "Kelvin"], 3, Discrete(3, start=3))
    found = [actions.read(text) for text in ("ſtay", "STAY HERE", "\u212aelvin", "staying")]
    assert found == [3, 4, 5, None]


def test_text_actions_and_seeds_reach_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_words.py").write_text(WORDS)
    monkeypatch.syspath_prepend(tmp_path)
    row = rows(tmp_path / "words.jsonl", "gymnasium", "echo_words:Echo-v0", "--limit", "1")[0]
    assert row["prompt"] == [{"role": "user", "content": "say a"}]
    words = environment(row)
    words.reset()
    assert words.step(" ab\n") == ("abab", 0.5, False)
    assert words.step("xyz")[1:] == (0.0, False)
    assert words.step("c") == ("cc", 0.5, True)
    carts = [rows(tmp_path / f"{each}.jsonl", *CART, "--split", each) for each in ("train", "eval")]
    texts = [row["prompt"][0]["content"] for part in carts for row in part]
    assert len(set(texts)) == 4


def test_observation_that_differs_from_the_row_is_an_error(tmp_path: Path) -> None:
    row = rows(tmp_path / "cart.jsonl", *CART)[0]
    environment(row).reset()
    row["extra_info"]["connector"]["seed"] = 7
    with pytest.raises(DataError, match="write the rows again"):
        environment(row).reset()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("Pendulum-v1",), "neither Discrete nor Text"),
        (("NoSuch-v0",), "install its package, name it as module:id"),
        (("FrozenLake-v1", "--actions", "left,right"), "--actions has 2 names, and the environment has 4 actions"),
        (("CartPole-v1", "--arguments", '{"render_mode": "human"}'), "CartPole-v1 cannot start with seed 0"),
        (("FrozenLake-v1", "--limit", "0"), "--limit=0 must be at least 1"),
    ],
)
def test_unusable_environments_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert main(["rows", "gymnasium", *words, "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert message in capsys.readouterr().err


def test_row_of_another_source_is_rejected() -> None:
    with pytest.raises(DataError, match="mcore-rl rows gymnasium"):
        environment({"prompt": [], "extra_info": {"connector": {"kind": "openenv"}}})
