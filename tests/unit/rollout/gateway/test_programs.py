"""Programs that work on sessions of a scripted engine, through the whole gateway: server, hub, link and episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError, WorkerDiedError
from mcore_rl.rollout.gateway.episode import GatewayEpisode
from mcore_rl.rollout.gateway.harness.command import CommandHarness, check_command
from mcore_rl.rollout.gateway.harness.function import FunctionHarness
from mcore_rl.rollout.gateway.harness.interface import Harness
from mcore_rl.rollout.gateway.harness.worker import HarnessWorker
from mcore_rl.rollout.gateway.link import GatewayLink
from mcore_rl.rollout.gateway.server import GatewayServer
from mcore_rl.rollout.gateway.serving import ServedRequests
from mcore_rl.types import EpisodeOutcome
from tests.unit.data.chat import made
from tests.unit.rollout.episodes.conftest import SetUp, Stage
from tests.unit.rollout.episodes.scripted import END, Say, call

HERE = __name__
SCRIPT = """
import json, os, urllib.request
row = json.load(open("row.json"))
body = json.dumps({"model": "m", "messages": row["messages"]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
said = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
open("out.txt", "w").write(said)
try:
    urllib.request.urlopen("http://127.0.0.1:{PORT}/health", timeout=2)
    print("the host is reachable")
except OSError:
    print("no host")
raise SystemExit(3)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[GatewayServer]:
    with GatewayServer("tiny", "127.0.0.1", 0, "127.0.0.1", serves=True) as running:
        yield running


@pytest.fixture
def play(stage: SetUp, server: GatewayServer) -> Callable[..., tuple[Stage, EpisodeOutcome]]:
    """Play an episode whose session `harness` works on, which gets the keys of the run; None: nobody."""

    def run(
        say: Say, harness: Harness | None, *, extra_info: dict[str, Any] | None = None, **rollout: Any
    ) -> tuple[Stage, EpisodeOutcome]:
        episode = GatewayEpisode(RolloutConfig(**rollout))
        set_up = stage(say, episode, extra_info=extra_info, **rollout)
        serving = ServedRequests(set_up.player, episode, episode.rollout)
        episode.link = set_up.player.run(GatewayLink.connect(server.address, serving))
        with working(harness, server) if harness else contextlib.nullcontext():
            (outcome,) = set_up.play()
        set_up.player.run(episode.link.close())
        return set_up, outcome

    return run


@contextlib.contextmanager
def working(harness: Harness, server: GatewayServer) -> Iterator[None]:
    worker = HarnessWorker(harness, server.address.url, server.address.token, 4)
    stop = threading.Event()

    async def run() -> None:
        task = asyncio.create_task(worker.run())
        await asyncio.to_thread(stop.wait)
        task.cancel()
        await asyncio.wait({task})

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        yield
        deadline = time.monotonic() + 20
        while not worker.num_ended and time.monotonic() < deadline:
            time.sleep(0.01)
        assert worker.num_ended == 1
    finally:
        stop.set()
        thread.join()


def loops_with_a_tool(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, object]:
    """Use the model as any program with OpenAI's client does."""
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0)
    messages: list[Any] = list(row["messages"])
    tools: list[Any] = [made.LOOK]
    said = client.chat.completions.create(model="any", messages=messages, tools=tools).choices[0].message
    assert said.tool_calls
    (asked,) = said.tool_calls
    found = f"found {json.loads(asked.function.arguments)['q']}"  # type: ignore[union-attr]
    messages += [said.model_dump(), {"role": "tool", "tool_call_id": asked.id, "content": found}]
    last = client.chat.completions.create(model="any", messages=messages, tools=tools).choices[0].message
    return {"score": 0.5, "said": last.content}


def streams_two_turns(row: dict[str, Any], base_url: str, api_key: str, *, stream: bool) -> dict[str, object]:
    """Hold a conversation with events, or with whole replies."""
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0)
    messages: list[Any] = list(row["messages"])
    for _ in range(2):
        if stream:
            with client.chat.completions.stream(model="any", messages=messages) as events:
                for _event in events:
                    pass
                reply = events.get_final_completion()
        else:
            reply = client.chat.completions.create(model="any", messages=messages)  # type: ignore[assignment]
        messages += [{"role": "assistant", "content": reply.choices[0].message.content}, *row["messages"]]
    return {"rewards": {reply.id: 2.0}}


def fails(row: dict[str, Any], base_url: str, api_key: str) -> None:
    raise ValueError("no such thing")


def ends_the_process(row: dict[str, Any], base_url: str, api_key: str) -> None:
    raise SystemExit(3)


async def cancels_itself(row: dict[str, Any], base_url: str, api_key: str) -> None:
    raise asyncio.CancelledError


def returns_nan(row: dict[str, Any], base_url: str, api_key: str) -> float:
    return float("nan")


def returns_half_a_character(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, object]:
    return {"score": 1.0, "said": "\ud800"}


def returns_deep(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, object]:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    return {"deep": deep}


async def hangs(row: dict[str, Any], base_url: str, api_key: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key)
    await client.chat.completions.create(model="any", messages=row["messages"])
    await asyncio.sleep(1000)


async def rewards_a_branch(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, object]:
    client = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key)
    replies = [await client.chat.completions.create(model="any", messages=row["messages"]) for _ in range(3)]
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as http:
        refused = await http.post(f"{base_url}/reward", json={"reward": 9.0})
        assert refused.status_code == httpx.codes.UNAUTHORIZED, "the model's code could reward itself"
    return {"rewards": {replies[1].id: 2.0}}


def test_a_program_with_openais_client_is_trained(play: Callable[..., tuple[Stage, EpisodeOutcome]]) -> None:
    harness = FunctionHarness(f"{HERE}:loops_with_a_tool", {})
    say: Say = lambda text: f"done{END}" if "found a" in text else f"well {call('a')}{END}"  # noqa: E731
    stage, outcome = play(say, harness)
    assert outcome.error is None
    assert outcome.reward == 0.5
    assert stage.trained_text(outcome) == f"well {call('a')}{END}done{END}"
    assert outcome.extra["harness"] == {"said": "done"}
    assert outcome.turns == 2
    assert [message["role"] for message in outcome.messages] == ["user", "assistant", "tool", "assistant"]


def test_streamed_replies_are_trained_like_whole_ones(play: Callable[..., tuple[Stage, EpisodeOutcome]]) -> None:
    found = []
    for stream in (False, True):
        harness = FunctionHarness(f"{HERE}:streams_two_turns", {"stream": stream})
        _, outcome = play(lambda text: f"<think>hm</think>reply 😀 {text.count('user')}{END}", harness)
        assert outcome.error is None
        (trajectory,) = outcome.trajectories
        tokens = [getattr(trajectory, name).tolist() for name in ("prompt_ids", "token_ids", "logp", "trained")]
        found.append((tokens, outcome.turn_rewards, outcome.messages))
    assert found[0] == found[1]
    assert found[0][1] == 2.0


def test_requests_without_a_session_are_served(stage: SetUp, server: GatewayServer) -> None:
    """They sample as they ask, need the server's token, and leave nothing to train."""
    rollout = RolloutConfig(episode="a.py:b", max_prompt_tokens=200, max_response_tokens=600)
    episode = GatewayEpisode(rollout)
    set_up = stage(lambda text: f"so {text.count('user')}{END}", episode)
    serving = ServedRequests(set_up.player, episode, rollout)
    episode.link = set_up.player.run(GatewayLink.connect(server.address, serving))
    client = openai.OpenAI(base_url=f"{server.address.url}/v1", api_key=server.address.token, max_retries=0)
    messages: Any = [{"role": "user", "content": "a"}]
    first = client.chat.completions.create(model="any", messages=messages, temperature=0.3, top_p=0.5, n=2)
    assert [choice.message.content for choice in first.choices] == ["so 1"] * 2
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "b"}]
    with client.chat.completions.create(model="any", messages=messages, stream=True) as stream:
        assert "".join(part.choices[0].delta.content or "" for part in stream) == "so 2"
    assert client.models.list().data[0].id == "tiny"
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model="any", messages=messages)
    set_up.player.run(episode.link.close())
    with pytest.raises(openai.APITimeoutError):  # it waits for another engine
        client.with_options(timeout=0.3).chat.completions.create(model="any", messages=messages)


def test_an_error_of_a_program_fails_its_episode(play: Callable[..., tuple[Stage, EpisodeOutcome]]) -> None:
    _, outcome = play(lambda text: f"x{END}", FunctionHarness(f"{HERE}:fails", {}))
    assert outcome.error is not None
    assert "no such thing" in outcome.error


@pytest.mark.parametrize(
    ("function", "part"),
    [
        ("ends_the_process", "SystemExit"),
        ("cancels_itself", "CancelledError"),
        ("returns_nan", "no finite number"),
        ("returns_half_a_character", "was refused"),
        ("returns_deep", "was refused"),
    ],
)
def test_no_program_ends_the_worker(
    play: Callable[..., tuple[Stage, EpisodeOutcome]], function: str, part: str
) -> None:
    _, outcome = play(lambda text: f"x{END}", FunctionHarness(f"{HERE}:{function}", {}), max_episode_seconds=15.0)
    assert outcome.error is not None
    assert part in outcome.error


def test_an_error_after_a_limit_ends_the_episode_as_the_limit(
    play: Callable[..., tuple[Stage, EpisodeOutcome]],
) -> None:
    """Most programs do not handle the refusal of a request."""
    harness = FunctionHarness(f"{HERE}:loops_with_a_tool", {})
    stage, outcome = play(lambda text: f"well {call('a')}{END}", harness, max_turns=1)
    assert (outcome.error, outcome.finish_reason, outcome.reward) == (None, "turns", None)
    assert stage.trained_text(outcome) == f"well {call('a')}{END}"


def test_a_program_that_hangs_is_cut(play: Callable[..., tuple[Stage, EpisodeOutcome]]) -> None:
    harness = FunctionHarness(f"{HERE}:hangs", {})
    stage, outcome = play(lambda text: f"x{END}", harness, max_episode_seconds=2.0)
    assert outcome.finish_reason == "seconds"
    assert stage.trained_text(outcome) == f"x{END}"
    assert outcome.parts["gateway_requests"] == 1
    assert outcome.extra["harness"] == {}, "reward functions may read it"


def test_a_session_that_nobody_takes_fails_at_its_limit(play: Callable[..., tuple[Stage, EpisodeOutcome]]) -> None:
    _, outcome = play(lambda text: f"x{END}", None, max_episode_seconds=0.3)
    assert outcome.error is not None
    assert "before anything was sampled" in outcome.error


@pytest.mark.parametrize(("branches", "num_trained"), [("all", 3), ("last", 1), ("by_harness", 1)])
def test_branches_are_trained_by_the_key(
    play: Callable[..., tuple[Stage, EpisodeOutcome]], branches: str, num_trained: int
) -> None:
    harness = FunctionHarness(f"{HERE}:rewards_a_branch", {})
    _, outcome = play(lambda text: f"x{END}", harness, gateway_branches=branches)
    assert outcome.error is None
    assert outcome.reward is None, "graders give the reward of the session"
    assert len(outcome.trajectories) == num_trained
    # The rewarded reply is the second of three.
    assert outcome.turn_rewards == (0.0 if branches == "last" else 2.0)


def test_a_command_reaches_the_gateway_only(
    play: Callable[..., tuple[Stage, EpisodeOutcome]], server: GatewayServer
) -> None:
    port = server.address.url.rpartition(":")[2]
    harness = CommandHarness(
        f"{{python}} -c '{SCRIPT.replace('{PORT}', port)}'", ["out.txt"], SandboxConfig(), server.address.clients, 60, 2
    )
    stage, outcome = play(lambda text: f"hello{END}", harness)
    assert outcome.error is None, outcome.error
    ended: Any = outcome.extra["harness"]
    assert (ended["exit_code"], ended["files"], ended["stdout"]) == (3, {"out.txt": "hello"}, "no host\n"), ended
    assert stage.trained_text(outcome) == f"hello{END}"


def test_a_command_that_hangs_is_killed(
    play: Callable[..., tuple[Stage, EpisodeOutcome]], server: GatewayServer
) -> None:
    harness = CommandHarness("{python} -c 'while True: pass'", [], SandboxConfig(), server.address.clients, None, 2)
    _, outcome = play(lambda text: f"x{END}", harness, max_episode_seconds=1.5)
    assert outcome.error is not None
    assert "before anything was sampled" in outcome.error


ASKS = """
import json, os, urllib.request
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
messages = [{"role": "user", "content": "hello"}]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps({"messages": messages}).encode(), headers
)
urllib.request.urlopen(request).read()
"""


@pytest.mark.parametrize(
    ("ending", "why", "code"),
    [
        ("os.kill(os.getpid(), 9)", "exit", 137),
        ("while True: print(1000 * chr(120))", "output", None),
        ("held = bytearray(1 << 31)", "exit", 1),
    ],
    ids=["killed", "floods", "needs memory"],
)
def test_replies_of_a_command_that_ends_badly_are_trained(
    play: Callable[..., tuple[Stage, EpisodeOutcome]], server: GatewayServer, ending: str, why: str, code: int | None
) -> None:
    command = f"{{python}} -c '{ASKS}{ending}'"
    harness = CommandHarness(command, [], SandboxConfig(), server.address.clients, 60, 2)
    stage, outcome = play(lambda text: f"hello{END}", harness)
    assert outcome.error is None, outcome.error
    ended: Any = outcome.extra["harness"]
    assert (ended["why"], ended["exit_code"] if why == "exit" else None) == (why, code), ended
    assert stage.trained_text(outcome) == f"hello{END}"


def sends_ten_megabytes(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, object]:
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0)
    long: list[Any] = [*row["messages"], {"role": "user", "content": "long " * 2_000_000}]
    try:
        client.chat.completions.create(model="any", messages=long)
    except openai.BadRequestError as error:
        refused = error.code
    reply = client.chat.completions.create(model="any", messages=row["messages"])
    return {"refused": refused, "said": reply.choices[0].message.content}


def test_a_message_of_ten_megabytes_is_refused_and_the_session_goes_on(
    play: Callable[..., tuple[Stage, EpisodeOutcome]],
) -> None:
    stage, outcome = play(lambda text: f"hello{END}", FunctionHarness(f"{HERE}:sends_ten_megabytes", {}))
    assert outcome.error is None, outcome.error
    assert outcome.extra["harness"] == {"refused": "context_length_exceeded", "said": "hello"}
    assert stage.trained_text(outcome) == f"hello{END}"


@pytest.mark.parametrize(
    ("command", "sandbox", "part"),
    [
        ("agent --go", SandboxConfig(kind="landlock"), "sandbox.kind=bubblewrap"),
        ("'agent", SandboxConfig(), "is not a valid command"),
    ],
)
def test_commands_that_cannot_run_are_rejected(command: str, sandbox: SandboxConfig, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        check_command(command, sandbox)


def test_a_worker_ends_with_its_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.rollout.gateway.harness.worker.LOST_SECONDS", 0.2)
    worker = HarnessWorker(FunctionHarness(f"{HERE}:fails", {}), "http://127.0.0.1:9", "token", 1)
    with pytest.raises(WorkerDiedError, match="does not answer"):
        asyncio.run(worker.run())
