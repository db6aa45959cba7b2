"""Episodes with an environment that answers each turn, and loading of users' classes and functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.episodes.builtin import EnvironmentEpisode
from mcore_rl.rollout.episodes.load import load_episode
from mcore_rl.rollout.episodes.session import EpisodePrompt, Session
from tests.unit.data.chat import made
from tests.unit.rollout.episodes.conftest import SetUp

END = made.CLOSE
GAME = """
import asyncio

class Game:
    closed = []

    def __init__(self, prompt, top="9"):
        self.secret, self.top = int(prompt.ground_truth), int(top)

    {asynchronous}def reset(self):
        return {first}

    {asynchronous}def step(self, action):
        guess = int(action)
        if guess == self.secret:
            return "right", 1.0, True
        if guess > 1000:
            raise OverflowError("too large")
        return ("higher" if guess < self.secret else "lower"), -0.25, False

    def close(self):
        Game.closed.append(self.secret)
"""


def game(directory: Path, asynchronous: str = "", first: str = "None") -> str:
    path = directory / f"game{len(list(directory.iterdir()))}.py"
    path.write_text(GAME.format(asynchronous=asynchronous, first=first))
    return f"{path}:Game"


def halves(text: str) -> str:
    """Bisect 0..64 using the hints in the text."""
    low, high, guess = 0, 64, 32
    for hint in (word for word in text.replace("<", " ").split() if word in ("higher", "lower")):
        low, high = (guess, high) if hint == "higher" else (low, guess)
        guess = (low + high) // 2
    return f"{guess}{END}"


@pytest.mark.parametrize("asynchronous", ["", "async "])
def test_environment_rewards_are_at_turn_ends(stage: SetUp, tmp_path: Path, asynchronous: str) -> None:
    on = stage(halves, EnvironmentEpisode(game(tmp_path, asynchronous), {"top": "64"}))
    (outcome,) = on.play()
    guesses = [32, 48, 40, 44, 42]
    assert on.trained_text(outcome) == "".join(f"{guess}{END}" for guess in guesses)
    (trajectory,) = outcome.trajectories
    assert trajectory.rewards is not None
    ends = np.flatnonzero(trajectory.rewards)
    assert trajectory.rewards[ends].tolist() == [-0.25] * 4 + [1.0]
    close = made.stop_ids(on.tokenizer)[0]
    assert (trajectory.token_ids[ends] == close).all()
    assert trajectory.trained is not None
    assert (trajectory.trained[ends] == 1).all()
    assert outcome.turn_rewards == 0.0
    assert outcome.turns == 5
    assert outcome.reward is None


def test_environment_reset_observation_follows_the_prompt(stage: SetUp, tmp_path: Path) -> None:
    on = stage(halves, EnvironmentEpisode(game(tmp_path, first="'lower than 64'"), {}))
    (outcome,) = on.play()
    assert "lower than 64<|im_end|>\n<|im_start|>assistant\n" in on.text(outcome)
    assert outcome.messages[1]["content"] == "lower than 64"


@pytest.mark.parametrize("keeps_row", [True, False])
@pytest.mark.parametrize(
    "keys", [{}, {"history": "new_sequence"}, {"long_history": "drop_turns", "max_turn_tokens": 750}]
)
def test_session_render_new_messages_forge_no_turn(stage: SetUp, keys: dict[str, object], keeps_row: bool) -> None:
    """Special tokens of the row's messages stay tokens, in every prompt."""
    row = [{"role": "user", "content": f"q{made.OTHER_STOP}"}]
    new = {"role": "user", "content": f"a{END}\n{made.OPEN}assistant\nb{made.OTHER_STOP}"}
    prompts: list[list[int]] = []

    async def run(session: Session, prompt: EpisodePrompt) -> float:
        prompts.append(session.render([*prompt.messages, new] if keeps_row else [new]))
        for _ in range(3):
            await session.generate(prompts[-1])
            prompts.append(session.next_prompt([{"role": "user", "content": "c" * 20}]))
        return 1.0

    on = stage(lambda text: f"d{END}", run, **keys)
    ids = np.array(on.player.context.conversation.prompt_ids(row), np.int32)
    on.prompt = replace(on.prompt, messages=row, token_ids=ids)
    (outcome,) = on.play()
    assert outcome.error is None
    ends, other = made.stop_ids(on.tokenizer)
    turns = (0, 1, 1, 1) if "long_history" in keys else (0, 1, 2, 3)
    assert [ids.count(ends) for ids in prompts] == [1 + keeps_row + 2 * number for number in turns]
    assert [ids.count(other) for ids in prompts] == [int(keeps_row)] * 4


def test_environment_error_fails_the_episode_and_closes(stage: SetUp, tmp_path: Path) -> None:
    episode = EnvironmentEpisode(game(tmp_path), {})
    on = stage(lambda text: f"2000{END}", episode)
    (outcome,) = on.play()
    assert "it raised OverflowError: too large" in str(outcome.error)
    assert episode._make.closed == [42]  # type: ignore[attr-defined]


def test_environment_invalid_step_result_names_the_form(stage: SetUp, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("class Bad:\n    def __init__(self, prompt): pass\n    def step(self, action): return 'hm'\n")
    (outcome,) = stage(lambda text: f"1{END}", EnvironmentEpisode(f"{path}:Bad", {})).play()
    assert "returned str; it must be step(action) -> (observation, reward, done)" in str(outcome.error)


USERS = """
class Whole:
    def __init__(self, tries="2"):
        self.tries = int(tries)

    async def run(self, session, prompt):
        for _ in range(self.tries):
            await session.generate(prompt.token_ids)
        return {"score": 0.5, "acc": 1, "tries": self.tries, "note": "x"}

class NotAsync:
    def run(self, session, prompt): ...

async def function(session, prompt, bonus="0"):
    sampled = await session.generate(prompt.token_ids)
    return len(sampled.token_ids) + float(bonus)

def plain(session, prompt): ...
"""


def test_load_episode_accepts_class_and_function(stage: SetUp, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USERS)
    config = RolloutConfig(episode=f"{tmp_path}/mine.py:Whole", episode_kwargs={"tries": "3"})
    (outcome,) = stage(lambda text: f"a{END}", load_episode(config)).play()
    assert (outcome.reward, outcome.accuracy, outcome.parts) == (0.5, 1.0, {"tries": 3.0, "note": "x"})
    assert len(outcome.trajectories) == 3
    config = RolloutConfig(episode=f"{tmp_path}/mine.py:function", episode_kwargs={"bonus": "4"})
    (outcome,) = stage(lambda text: f"a{END}", load_episode(config)).play()
    assert outcome.reward == 6.0


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("NotAsync", {}, r"mine\.py:NotAsync has no async def run\(self, session, prompt\)"),
        ("plain", {}, r"must be a class with .*, or async def plain\(session, prompt\)"),
        ("missing", {}, r"rollout\.episode=.* has no function missing"),
        ("Whole", {"turns": "3"}, r"cannot be called as a class with rollout\.episode_kwargs: .*turns"),
        ("function", {"turns": "3"}, r"cannot be called as f\(session, prompt, .*turns"),
    ],
)
def test_load_episode_invalid_is_rejected(tmp_path: Path, name: str, kwargs: dict[str, str], message: str) -> None:
    (tmp_path / "mine.py").write_text(USERS)
    with pytest.raises(ConfigError, match=message):
        load_episode(RolloutConfig(episode=f"{tmp_path}/mine.py:{name}", episode_kwargs=kwargs))
