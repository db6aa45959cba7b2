"""Environments of an OpenEnv server, which runs in this process."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from mcore_rl.cli import main
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import DataError
from mcore_rl.rollout.episodes.load import load_episode
from tests.http_server import serving_application
from tests.selection import needs_package
from tests.unit.rollout.connectors.written import rows
from tests.unit.rollout.episodes.conftest import SetUp
from tests.unit.rollout.episodes.scripted import END

pytestmark = needs_package("openenv", "scripts/setup_connectors.sh")

ENVIRONMENT = "mcore_rl.rollout.connectors.openenv:ServerEnvironment"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve a game: the number is the seed modulo 10; a wrong guess costs 0.25."""
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):
        number: int

    class Hint(Observation):
        hint: str

    class Game(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True
        secret = 0

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
            self.secret = (seed or 0) % 10 + kwargs.get("offset", 0)
            return Hint(hint="guess")

        def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
            won = action.number == self.secret
            return Hint(hint="right" if won else "wrong", reward=1.0 if won else -0.25, done=won)

        @property
        def state(self) -> State:
            return State()

    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=4)
    with serving_application(app) as address:
        yield address


def test_episodes_play_on_the_server(stage: SetUp, url: str, tmp_path: Path) -> None:
    words = ("openenv", url, "--limit", "3", "--arguments", '{"offset": 1}')
    row = rows(tmp_path / "rows.jsonl", *words)[2]
    assert row["prompt"] == [{"role": "user", "content": "Answer each turn with one action: number (integer)."}]
    # Guesses 1, something unreadable, 2, 3: seed 2 with offset 1 is 3.
    guesses = ["1", "well", "perhaps 9, or 2", "3"]
    say = lambda text: f"{guesses[text.count('<|im_start|>assistant') - 1]}{END}"  # noqa: E731
    set_up = stage(say, load_episode(RolloutConfig(environment=ENVIRONMENT)), extra_info=row["extra_info"])
    set_up.prompt = replace(set_up.prompt, messages=row["prompt"])
    (outcome,) = set_up.play()
    assert outcome.error is None
    assert (outcome.finish_reason, outcome.turns) == ("stop", 4)
    assert outcome.turn_rewards == 1.0 - 0.25 - 0.25
    users = [each["content"] for each in outcome.messages if each["role"] == "user"]
    assert users[1:3] == ["guess", "wrong"]
    assert users[3].startswith("This action is invalid: it has no number.")


def test_concurrent_episodes_have_sessions_of_their_own(url: str, tmp_path: Path) -> None:
    from mcore_rl.rollout.connectors.openenv import ServerEnvironment
    from mcore_rl.rollout.episodes.session import EpisodePrompt

    written = rows(tmp_path / "rows.jsonl", "openenv", url, "--limit", "3")

    async def play() -> list[tuple[str, float, bool]]:
        made = [ServerEnvironment(EpisodePrompt([], "", [], "src", "", row["extra_info"], 0)) for row in written]
        await asyncio.gather(*(each.reset() for each in made))
        found = await asyncio.gather(*(each.step("1") for each in made))
        await asyncio.gather(*(each.close() for each in made))
        return list(found)

    assert asyncio.run(play()) == [("wrong", -0.25, False), ("right", 1.0, True), ("wrong", -0.25, False)]


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"properties": {"message": {"type": "string"}}}, " hi ", {"message": "hi"}),
        ({"properties": {"x": {"type": "number"}, "metadata": {"type": "object"}}}, "x = 1.5", {"x": 1.5}),
        (
            {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
            'so {"a": 1, "b": "c"}.',
            {"a": 1, "b": "c"},
        ),
        ({"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}, '{"a": "1"}', "not of type"),
        ({"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}, "1", "it has no JSON object"),
        ({"properties": {"n": {"type": "integer", "maximum": 3}}}, "4", "greater than the maximum"),
    ],
)
def test_actions_are_read_by_the_servers_schema(schema: Any, text: str, expected: object) -> None:
    from mcore_rl.rollout.connectors.openenv import ActionText

    actions = ActionText.of({"type": "object", **schema})
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            actions.read(text)
    else:
        assert actions.read(text) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("game",), "game must be the URL of an OpenEnv server"),
        (("http://127.0.0.1:1",), "start the OpenEnv server first"),
        (("http://127.0.0.1:1", "--actions", "a"), "--actions has no effect on openenv"),
    ],
)
def test_unusable_servers_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert main(["rows", "openenv", *words, "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (None, "the schema of actions is null instead of an object"),
        ({"type": "number?"}, "the schema of actions is invalid: 'number?' is not"),
    ],
)
def test_invalid_schemas_of_actions_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], schema: Any, message: str
) -> None:
    """Check both the command, with a server's schema, and the start of an episode, with a row's."""
    from mcore_rl.rollout.connectors.openenv import ServerEnvironment
    from mcore_rl.rollout.episodes.session import EpisodePrompt

    def get(url: str, timeout: float) -> httpx.Response:
        return httpx.Response(200, json={"action": schema}, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    assert main(["rows", "openenv", "http://127.0.0.1:1", "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert message in capsys.readouterr().err
    part = {"connector": {"kind": "openenv", "url": "http://127.0.0.1:1", "reset": {}, "schema": schema}}
    with pytest.raises(DataError, match=re.escape(message)):
        ServerEnvironment(EpisodePrompt([], "", [], "src", "", part, 0))
