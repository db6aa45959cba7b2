"""A thousand programs at a time on one gateway and one engine."""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import httpx
import pytest

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.gateway.episode import GatewayEpisode
from mcore_rl.rollout.gateway.link import GatewayLink
from mcore_rl.rollout.gateway.server import GatewayServer
from tests.unit.rollout.episodes.conftest import SetUp
from tests.unit.rollout.gateway.test_answers import counts_up

SESSIONS, CONNECTIONS = 1000, 64
NOT_SERVED: Any = None
"""All requests have sessions."""


class Programs:
    """Programs that wait for each other between two calls, so that all sessions are open at the same time. All of them
    share a client."""

    def __init__(self, url: str, token: str, count: int) -> None:
        limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
        self._client, self._token = httpx.AsyncClient(base_url=url, limits=limits, timeout=120), token
        self._count = count
        # Without it, httpx looks at all waiting requests whenever one ends.
        self._free = asyncio.Semaphore(CONNECTIONS)
        self._all_open = asyncio.Event()
        self._num_open, self._texts = 0, list[str]()

    async def run(self) -> list[str]:
        """Return the texts of all replies."""
        async with self._client:
            taken = [await self._send("POST", "/sessions", self._token, {"seconds": 30}) for _ in range(self._count)]
            await asyncio.gather(*(self._play(session) for session in taken))
        return self._texts

    async def _send(self, method: str, path: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._free:
            reply = await self._client.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})
        content: dict[str, Any] = reply.raise_for_status().json()
        return content

    async def _play(self, session: dict[str, Any]) -> None:
        base, messages = f"/sessions/{session['id']}", list(session["row"]["messages"])
        for turn in range(2):
            path = f"{base}/v1/chat/completions"
            reply = await self._send("POST", path, session["key"], {"messages": messages})
            said = reply["choices"][0]["message"]["content"]
            self._texts.append(said)
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": f"more of {session['id']}"},
            ]
            if not turn:
                self._num_open += 1
                if self._num_open == self._count:
                    self._all_open.set()
                await self._all_open.wait()
        await self._send("DELETE", base, session["owner_key"], {})


def run_programs(url: str, token: str, count: int) -> list[str]:
    """Run the programs in this process."""

    async def run() -> list[str]:
        return await Programs(url, token, count).run()

    return asyncio.run(run())


@pytest.mark.on_demand  # a minute; the benchmark `gateway` measures time and memory with 1,000 sessions
def test_a_thousand_sessions_are_open_at_the_same_time(stage: SetUp) -> None:
    keys: dict[str, Any] = {"max_concurrent_episodes": SESSIONS, "max_turns": 2}
    episode = GatewayEpisode(RolloutConfig(**keys))
    set_up = stage(counts_up, episode, **keys)
    # As in a run, programs have a process of their own: threads of one process would wait for each other.
    spawn = multiprocessing.get_context("spawn")
    with (
        GatewayServer("tiny", "127.0.0.1", 0, "127.0.0.1") as server,
        ProcessPoolExecutor(1, mp_context=spawn) as processes,
    ):
        episode.link = set_up.player.run(GatewayLink.connect(server.address, NOT_SERVED))
        texts = processes.submit(run_programs, server.address.url, server.address.token, SESSIONS)
        outcomes = set_up.play(SESSIONS)
        assert sorted(texts.result()) == ["reply 0"] * SESSIONS + ["reply 1"] * SESSIONS
        set_up.player.run(episode.link.close())
    for number, outcome in enumerate(outcomes):
        assert outcome.error is None
        assert set_up.trained_text(outcome) == "reply 0<|im_end|>reply 1<|im_end|>"
        assert f"more of train.0.{number}<|im_end|>" in set_up.text(outcome), "no session has tokens of another"
