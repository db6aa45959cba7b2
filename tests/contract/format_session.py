"""Sessions of the gateway with formats of replies on a real engine, inside the engine's process."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import openai

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.chat.conversation import Conversation
from mcore_rl.rollout.episodes.context import EpisodeContext
from mcore_rl.rollout.episodes.player import EpisodePlayer
from mcore_rl.rollout.episodes.single_turn import Attempt, AttemptBatch
from mcore_rl.rollout.gateway.episode import GatewayEpisode
from mcore_rl.rollout.gateway.link import GatewayLink
from mcore_rl.rollout.gateway.server import GatewayServer
from mcore_rl.rollout.loop import EngineLoop
from mcore_rl.types import Completion, EpisodeOutcome, GenerationRequest, Prompt, SamplingOptions
from mcore_rl.types.chat import ChatMessage
from tests.byte_tokenizer import EOS, TEMPLATE, byte_tokenizer
from tests.contract.format_schemas import SCHEMAS

QUESTION: ChatMessage = {"role": "user", "content": "3+4="}
NOT_SERVED: Any = None
"""All requests have sessions."""
OPEN_TEMPLATE = TEMPLATE.replace("assistant: ", "assistant: <think>")
"""Chat template that opens the reasoning."""
CHOICE = {"type": "json_schema", "json_schema": {"name": "choice", "schema": SCHEMAS["choice"], "strict": True}}
UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


@dataclass
class FormatSession:
    """Replies of a session by the name of their request, the engine's requests and results, and the outcome."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    reasoning: dict[str, list[str]] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    sampled: list[tuple[GenerationRequest, Completion]] = field(default_factory=list)
    outcome: EpisodeOutcome | None = None


def play(engine: Any, template: str = TEMPLATE, keep_mask: bool = True) -> FormatSession:
    """Play the session on an engine of test_json_formats.py. Runs in its process."""
    rollout = RolloutConfig(episode="gateway", max_prompt_tokens=64, max_response_tokens=64, max_turns=64)
    loop, tokenizer, episode = EngineLoop(engine), byte_tokenizer(template), GatewayEpisode(rollout)
    player, played = EpisodePlayer(episode, loop, rollout), FormatSession()
    conversation = Conversation(tokenizer, (), [EOS])
    player.context = EpisodeContext(
        tokenizer, conversation, stop_ids=frozenset([EOS]), prepare_format=loop.engine.prepare_format
    )
    generate = player.client.generate

    async def recorded(request: GenerationRequest, *rest: Any, **options: Any) -> Completion:
        completion = await generate(request, *rest, **options)
        played.sampled.append((request, completion))
        return completion

    player.client.generate = recorded  # type: ignore[method-assign]
    ids = np.array(conversation.encode(conversation.render([QUESTION])), np.int32)
    prompt = Prompt(0, ids, "", "", "", messages=[QUESTION])
    options = SamplingOptions(64, keep_mask=keep_mask)
    attempt = Attempt(GenerationRequest("train.0.0", ids, 11, options), prompt, trained=True)

    def run() -> None:
        try:
            with GatewayServer("any", "127.0.0.1", 0, "127.0.0.1") as server:
                episode.link = player.run(GatewayLink.connect(server.address, NOT_SERVED))
                program = threading.Thread(target=lambda: _program(server, played))
                program.start()
                outcomes: list[EpisodeOutcome | None] = []
                player.play(AttemptBatch([attempt], lambda: None, lambda place, outcome: outcomes.append(outcome)))
                program.join()
                player.run(episode.link.close())
                (played.outcome,) = outcomes
        finally:
            player.shutdown()
            loop.stop()

    thread = threading.Thread(target=run)
    thread.start()
    loop.serve()
    thread.join()
    return played


def play_thinking(engine: Any) -> FormatSession:
    """Play the session with a template that opens the reasoning."""
    return play(engine, OPEN_TEMPLATE)


def play_unrecorded(engine: Any) -> FormatSession:
    """Play the session in a run that records no sets."""
    return play(engine, keep_mask=False)


def _program(server: GatewayServer, played: FormatSession) -> None:
    """Take the session, play the program, and end the session."""
    url, token = server.address.url, server.address.token
    with httpx.Client(base_url=url, timeout=120) as http:
        taken = http.post("/sessions", json={"seconds": 30}, headers={"Authorization": f"Bearer {token}"}).json()
        base = f"/sessions/{taken['id']}"
        try:
            with openai.OpenAI(base_url=f"{url}{base}/v1", api_key=taken["key"], max_retries=0) as client:
                converse(client, played)
        finally:
            http.request("DELETE", base, headers={"Authorization": f"Bearer {taken['owner_key']}"})


def converse(client: openai.OpenAI, played: FormatSession) -> None:
    """Ask with OpenAI's client."""
    chat: Any = client.chat.completions
    asked: dict[str, Any] = {"model": "any", "messages": [QUESTION]}

    def ask(name: str, **fields: Any) -> None:
        try:
            choices = chat.create(**{**asked, **fields}).choices
        except openai.APIStatusError as error:
            played.refusals[name] = error.status_code, error.message
            return
        played.texts[name] = [each.message.content or "" for each in choices]
        played.reasoning[name] = [getattr(each.message, "reasoning_content", None) or "" for each in choices]
        played.reasons[name] = [each.finish_reason for each in choices]

    ask("chat", n=4, response_format=CHOICE)
    ask("object", max_tokens=9, response_format={"type": "json_object"})
    ask("stop", response_format=CHOICE, stop=["a"], n=4)
    ask("unique", response_format={"type": "json_schema", "json_schema": {"name": "u", "schema": UNIQUE}})
    ask("range", response_format=json.loads(json.dumps(CHOICE).replace(json.dumps(SCHEMAS["choice"]), IMPOSSIBLE)))
    texts, reasons = [""] * 4, [""] * 4
    try:
        for chunk in chat.create(**asked, n=4, response_format=CHOICE, stream=True, logprobs=True):
            for part in chunk.choices:
                texts[part.index] += part.delta.content or ""
                reasons[part.index] = part.finish_reason or reasons[part.index]
        played.texts["streamed"], played.reasons["streamed"] = texts, reasons
    except openai.APIStatusError as error:
        played.refusals["streamed"] = error.status_code, error.message
        return
    plain: Any = client.completions.create(model="any", prompt="x", extra_body={"response_format": CHOICE})
    played.texts["completions"] = [plain.choices[0].text]
    played.reasons["completions"] = [plain.choices[0].finish_reason]
    flat: Any = {"format": {"type": "json_schema", "name": "choice", "schema": SCHEMAS["choice"]}}
    answer = client.responses.create(model="any", input="3+4=", text=flat)
    played.texts["responses"] = [answer.output_text]
    played.reasons["responses"] = ["stop" if answer.status == "completed" else "length"]


IMPOSSIBLE = '{"type": "integer", "minimum": 5, "maximum": 4}'
