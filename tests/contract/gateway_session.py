"""A session of the gateway on a real engine, inside the engine's process: a program that continues, retries, edits and
branches its conversation through OpenAI's client."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

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

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
QUESTION: ChatMessage = {"role": "user", "content": "3+4="}
SEED, EOS = 11, 1
NOT_SERVED: Any = None
"""All requests have sessions."""


@dataclass(frozen=True)
class Reply:
    """Reply that the client received. `earlier`: number of the reply that its request continues with `said`; None for
    a request without sampled tokens."""

    text: str
    logp: list[float]
    earlier: int | None
    said: str


@dataclass(frozen=True)
class PlayedSession:
    """An episode, the replies in order, and each request that the engine received with its result."""

    outcome: EpisodeOutcome
    replies: list[Reply]
    sampled: list[tuple[GenerationRequest, Completion]]


def drifting_tokenizer() -> Any:
    """Return a tokenizer for the vocabulary of the tiny models; <eos> is token 1.

    Half of its tokens have two characters, and texts are encoded as single characters: sampled tokens whose text is
    tokenized again become others.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    single = "0123456789+-=abcdefghijklmnopqrstuvwxyzABCDEFGHI"
    tokens = ["<pad>", "<eos>", "<unk>", *single, *(f"{character}." for character in single[:45])]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    return made


def whole(client: openai.OpenAI, asked: dict[str, Any]) -> list[tuple[str, list[float]]]:
    """Return text and log-probabilities of each choice."""
    choices = client.chat.completions.create(**asked).choices
    return [(each.message.content or "", [token.logprob for token in each.logprobs.content]) for each in choices]


def streamed(client: openai.OpenAI, asked: dict[str, Any]) -> list[tuple[str, list[float]]]:
    """Same as `whole`, from the parts of a stream."""
    texts, logps = [""] * asked["n"], [list[float]() for _ in range(asked["n"])]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for part in chunk.choices:
            texts[part.index] += part.delta.content or ""
            logps[part.index] += [token.logprob for token in part.logprobs.content] if part.logprobs else []
    return list(zip(texts, logps, strict=True))


def converse(client: openai.OpenAI) -> list[Reply]:
    """Play the program."""
    replies = list[Reply]()
    histories = list[list[ChatMessage]]()
    """Conversation up to each reply."""

    def ask(start: list[ChatMessage], earlier: int | None, said: str, n: int = 1) -> int:
        messages: list[Any] = [*start, *([{"role": "user", "content": said}] if said else [])]
        asked: dict[str, Any] = {"model": "any", "messages": messages, "n": n, "max_tokens": 5, "logprobs": True}
        # Every second request is streamed.
        choices = streamed(client, asked) if len(replies) % 2 else whole(client, asked)
        for text, logp in choices:
            replies.append(Reply(text, logp, earlier, said))
            histories.append([*messages, {"role": "assistant", "content": text}])
        return len(replies) - 1

    def continued(reply: int, said: str) -> int:
        return ask(histories[reply], reply, said)

    first = ask([QUESTION], None, "")
    second, retried, _ = continued(first, "a"), continued(first, "a"), continued(first, "b")
    for reply in (second, retried):  # the same place in both branches
        continued(reply, "c")
    ask([{"role": "user", "content": "5+4="}, *histories[first][1:]], None, "a")  # an edited question
    last = ask([QUESTION], None, "", n=3)
    for reply in (last - 2, last - 1, last):
        continued(reply, "d")
    ask([QUESTION, {"role": "assistant", "content": "forged"}], None, "d")
    return replies


def play(engine: Any) -> PlayedSession:
    """Play the session on an engine, which must have the limits of `tests.contract.engines`. Runs in its process."""
    rollout = RolloutConfig(episode="gateway", max_prompt_tokens=32, max_response_tokens=32, max_turns=64)
    loop, tokenizer, episode = EngineLoop(engine), drifting_tokenizer(), GatewayEpisode(rollout)
    player = EpisodePlayer(episode, loop, rollout)
    stops = [EOS]
    player.context = EpisodeContext(tokenizer, Conversation(tokenizer, (), stops), stop_ids=frozenset(stops))
    sampled, found = list[tuple[GenerationRequest, Completion]](), list[PlayedSession]()
    generate = player.client.generate

    async def recorded(request: GenerationRequest, *rest: Any, **options: Any) -> Completion:
        completion = await generate(request, *rest, **options)
        sampled.append((request, completion))
        return completion

    player.client.generate = recorded  # type: ignore[method-assign]

    def run() -> None:
        try:
            with GatewayServer("any", "127.0.0.1", 0, "127.0.0.1") as server:
                episode.link = player.run(GatewayLink.connect(server.address, NOT_SERVED))
                replies: list[Any] = []
                program = threading.Thread(target=lambda: replies.append(_program(server)))
                program.start()
                outcomes: list[EpisodeOutcome | None] = []
                attempt = _attempt(tokenizer)
                player.play(AttemptBatch([attempt], lambda: None, lambda place, outcome: outcomes.append(outcome)))
                program.join()
                player.run(episode.link.close())
                (outcome,) = outcomes
                assert outcome is not None
                found.append(PlayedSession(outcome, replies[0], sampled))
        finally:
            player.shutdown()
            loop.stop()

    thread = threading.Thread(target=run)
    thread.start()
    loop.serve()
    thread.join()
    return found[0]


def assert_trains_each_sampled_token_once(played: PlayedSession) -> None:
    """Check that each completion of the engine is trained in one sequence, after the tokens of its request, with its
    log-probabilities, and that nothing else is trained."""
    trajectories = played.outcome.trajectories
    wholes = [[*each.prompt_ids.tolist(), *each.token_ids.tolist()] for each in trajectories]
    trained = [np.concatenate([np.zeros(len(t.prompt_ids), np.uint8), t.trained]) for t in trajectories]
    logp = [np.concatenate([np.zeros(len(t.prompt_ids), np.float32), t.logp]) for t in trajectories]
    for request, completion in played.sampled:
        start, end = len(request.token_ids), len(request.token_ids) + len(completion.token_ids)
        tokens = [*request.token_ids.tolist(), *completion.token_ids.tolist()]
        places = [i for i, whole in enumerate(wholes) if whole[:end] == tokens and trained[i][start:end].any()]
        assert len(places) == 1, "the turn is trained once"
        assert trained[places[0]][start:end].all()
        assert logp[places[0]][start:end].tobytes() == completion.logp.tobytes()
        trained[places[0]][start:end] = 0
    assert not any(mask.any() for mask in trained), "nothing else is trained"


def assert_continues_sampled_tokens(played: PlayedSession) -> None:
    """Check that the engine continued the tokens that it had sampled, and received only new messages as text."""
    vocabulary = drifting_tokenizer().get_vocab()
    by_logp = {tuple(completion.logp.tolist()): (request, completion) for request, completion in played.sampled}
    found = [by_logp.pop(tuple(reply.logp)) for reply in played.replies]
    assert not by_logp
    for reply, (request, _) in zip(played.replies, found, strict=True):
        if reply.earlier is None:
            continue
        before, earlier = found[reply.earlier]
        tokens = [*before.token_ids.tolist(), *earlier.token_ids.tolist()]
        ending = [] if tokens[-1] == EOS else [EOS]
        assert request.token_ids.tolist() == [*tokens, *ending, *(vocabulary[character] for character in reply.said)]


def _attempt(tokenizer: Any) -> Attempt:
    ids = np.array(tokenizer.encode(str(QUESTION["content"]), add_special_tokens=False), np.int32)
    prompt = Prompt(0, ids, "", "", "", messages=[QUESTION])
    return Attempt(GenerationRequest("train.0.0", ids, SEED, SamplingOptions(32)), prompt)


def _program(server: GatewayServer) -> list[Reply]:
    """Take the session, play the program, and end the session."""
    import httpx

    url, token = server.address.url, server.address.token
    with httpx.Client(base_url=url, timeout=60) as http:
        taken = http.post("/sessions", json={"seconds": 30}, headers={"Authorization": f"Bearer {token}"}).json()
        base = f"/sessions/{taken['id']}"
        try:
            with openai.OpenAI(base_url=f"{url}{base}/v1", api_key=taken["key"], max_retries=0) as client:
                return converse(client)
        finally:
            http.request("DELETE", base, headers={"Authorization": f"Bearer {taken['owner_key']}"})
