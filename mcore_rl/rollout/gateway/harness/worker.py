"""Worker that takes sessions from a gateway over HTTP and runs a program for each.

The gateway of each host starts one for rollout.harness. `mcore-rl harness-worker` runs one anywhere, such as in a
container or on another machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

from mcore_rl.errors import WorkerDiedError
from mcore_rl.rollout.gateway.exchange import OpenedSession
from mcore_rl.rollout.gateway.harness.interface import Finished, Harness

POLL_SECONDS = 30.0
"""Time for which the gateway holds a request that waits."""
ANSWER_SECONDS = 60.0
"""Additional time for its answer."""
LOST_SECONDS = 20.0
"""Time after which a gateway that does not answer counts as ended."""
RETRY_SECONDS = 0.5


@dataclass
class HarnessWorker:
    """Runs up to `concurrent` programs at a time, for the gateway at `url`, with its token."""

    harness: Harness
    url: str
    token: str
    concurrent: int
    num_ended: int = field(default=0, init=False)
    """Number of programs that have ended."""

    async def run(self) -> None:
        """Take sessions until the gateway ends.

        Raises: WorkerDiedError when the gateway does not answer any more, or rejects the token.
        """
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.concurrent + 1)
        timeout = httpx.Timeout(POLL_SECONDS + ANSWER_SECONDS)
        slots, running = asyncio.Semaphore(self.concurrent), set[asyncio.Task[None]]()

        def end(task: asyncio.Task[None]) -> None:
            running.discard(task)
            slots.release()

        async with httpx.AsyncClient(base_url=self.url, limits=limits, timeout=timeout) as client:
            try:
                while True:
                    await slots.acquire()
                    task = asyncio.create_task(self._work(client, await self._take(client)))
                    running.add(task)
                    task.add_done_callback(end)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _take(self, client: httpx.AsyncClient) -> OpenedSession:
        """Wait for a session."""
        headers = {"Authorization": f"Bearer {self.token}"}
        while True:
            answer = await self._send(client, "POST", "/sessions", headers, {"seconds": POLL_SECONDS})
            if answer.status_code == httpx.codes.OK:
                fields = answer.json()
                return OpenedSession(fields["id"], fields["key"], fields["owner_key"], fields["row"])
            if answer.status_code != httpx.codes.NO_CONTENT:
                raise WorkerDiedError(f"the gateway at {self.url} gives no sessions: {answer.text[:200]}")

    async def _work(self, client: httpx.AsyncClient, session: OpenedSession) -> None:
        program = asyncio.create_task(self.harness.run(session, f"{self.url}/sessions/{session.id}"))
        closing = asyncio.create_task(self._closed(client, session))
        try:
            await asyncio.wait({program, closing}, return_when=asyncio.FIRST_COMPLETED)
            if program.done():
                # A lost gateway is reported by `run`.
                with contextlib.suppress(WorkerDiedError):
                    await self._report(client, session, _result_of(program))
        finally:
            for task in (program, closing):
                task.cancel()
            await asyncio.gather(program, closing, return_exceptions=True)
            self.num_ended += 1

    async def _closed(self, client: httpx.AsyncClient, session: OpenedSession) -> None:
        """Return when a session has ended, for example at its time limit."""
        while True:
            path = f"/sessions/{session.id}?seconds={POLL_SECONDS:g}"
            answer = await self._send(client, "GET", path, _headers(session))
            if answer.status_code != httpx.codes.OK or answer.json()["ended"]:
                return

    async def _report(self, client: httpx.AsyncClient, session: OpenedSession, finished: Finished) -> None:
        """Send the reward and the end of a session; one that has ended meanwhile needs none."""
        headers, path = _headers(session), f"/sessions/{session.id}"
        rewards: list[dict[str, object]] = [
            {"reward": value, "call": reply} for reply, value in finished.rewards.items()
        ]
        if finished.reward is not None:
            rewards.append({"reward": finished.reward})
        body = {"extra": {"harness": dict(finished.extra)}, "error": finished.error}
        requests = [("POST", f"{path}/reward", reward) for reward in rewards] + [("DELETE", path, body)]
        for method, where, content in requests:
            answer = await self._send(client, method, where, headers, content)
            if answer.status_code == httpx.codes.GONE or answer.status_code == httpx.codes.UNAUTHORIZED:
                return
            if answer.is_error:
                # Otherwise the session would stay open until its time limit.
                refused = f"its result was refused: {answer.text[:200]!a}"
                await self._send(client, "DELETE", path, headers, {"error": refused})
                return

    async def _send(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        headers: dict[str, str],
        body: Mapping[str, object] | None = None,
    ) -> httpx.Response:
        """Send a request, again while the gateway cannot be reached."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LOST_SECONDS
        while True:
            try:
                # Only ASCII: the result of a program may have half of a character, which the gateway refuses.
                content = None if body is None else json.dumps(body)
                return await client.request(method, path, headers=headers, content=content)
            except httpx.TransportError as error:
                if loop.time() > deadline:
                    raise WorkerDiedError(f"the gateway at {self.url} does not answer: {error!r}") from error
                await asyncio.sleep(RETRY_SECONDS)


def _result_of(program: asyncio.Task[Finished]) -> Finished:
    """Return the result of a program, or its error."""
    if program.cancelled():
        return Finished(error="the program was cancelled")
    error = program.exception()
    return program.result() if error is None else Finished(error=f"the program failed: {error!r}")


def _headers(session: OpenedSession) -> dict[str, str]:
    return {"Authorization": f"Bearer {session.owner_key}"}
