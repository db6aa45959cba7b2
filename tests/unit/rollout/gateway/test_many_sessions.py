"""A hundred programs at a time on one gateway and one engine."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.gateway.episode import GatewayEpisode
from mcore_rl.rollout.gateway.link import GatewayLink
from mcore_rl.rollout.gateway.server import GatewayServer
from tests.unit.rollout.episodes.conftest import SetUp
from tests.unit.rollout.gateway.test_answers import counts_up

SESSIONS, CONNECTIONS = 100, 64
NOT_SERVED: Any = None
"""All requests have sessions."""


class Programs:
    """Programs that wait for each other between two calls, so that all sessions are open at the same time."""

    def __init__(self, server: GatewayServer) -> None:
        self._server = server
        self.open, self.texts = 0, list[str]()

    async def run(self) -> None:
        self._all_open = asyncio.Event()
        # The time that httpx needs for a request grows with its connections.
        limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
        async with httpx.AsyncClient(base_url=self._server.address.url, limits=limits, timeout=120) as client:
            headers = {"Authorization": f"Bearer {self._server.address.token}"}
            sessions = [await client.post("/sessions", json={"seconds": 30}, headers=headers) for _ in range(SESSIONS)]
            await asyncio.gather(*(self._play(client, session.json()) for session in sessions))

    async def _play(self, client: httpx.AsyncClient, session: dict[str, Any]) -> None:
        base, headers = f"/sessions/{session['id']}", {"Authorization": f"Bearer {session['key']}"}
        messages = list(session["row"]["messages"])
        for turn in range(2):
            reply = await client.post(f"{base}/v1/chat/completions", json={"messages": messages}, headers=headers)
            said = reply.raise_for_status().json()["choices"][0]["message"]["content"]
            self.texts.append(said)
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": f"more of {session['id']}"},
            ]
            if not turn:
                self.open += 1
                if self.open == SESSIONS:
                    self._all_open.set()
                await self._all_open.wait()
        await client.delete(base, headers={"Authorization": f"Bearer {session['owner_key']}"})


@pytest.mark.on_demand  # 8 s; the benchmark `gateway` measures time and memory with 1,000 sessions
def test_a_hundred_sessions_are_open_at_the_same_time(stage: SetUp) -> None:
    keys: dict[str, Any] = {"max_concurrent_episodes": SESSIONS, "max_turns": 2}
    episode = GatewayEpisode(RolloutConfig(**keys))
    set_up = stage(counts_up, episode, **keys)
    with GatewayServer("tiny", "127.0.0.1", 0, "127.0.0.1") as server:
        episode.link = set_up.player.run(GatewayLink.connect(server.address, NOT_SERVED))
        programs = Programs(server)
        thread = threading.Thread(target=asyncio.run, args=(programs.run(),))
        thread.start()
        outcomes = set_up.play(SESSIONS)
        thread.join()
        set_up.player.run(episode.link.close())
    assert sorted(programs.texts) == ["reply 0"] * SESSIONS + ["reply 1"] * SESSIONS
    for number, outcome in enumerate(outcomes):
        assert outcome.error is None
        assert set_up.trained_text(outcome) == "reply 0<|im_end|>reply 1<|im_end|>"
        assert f"more of train.0.{number}<|im_end|>" in set_up.text(outcome), "no session has tokens of another"
