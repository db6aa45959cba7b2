"""Answers of the model to a session's requests: from messages to tokens, and from sampled tokens to a message."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mcore_rl.data.chat.messages import text_of
from mcore_rl.errors import DataError
from mcore_rl.rollout.episodes.context import EpisodeContext
from mcore_rl.rollout.episodes.limits import EpisodeLimitError
from mcore_rl.rollout.episodes.sampling import ReportOf
from mcore_rl.rollout.episodes.session import Sampled, Session
from mcore_rl.rollout.gateway.exchange import ChatReply, ChatRequest, RefusedError, Reward, answer_message, choice_of
from mcore_rl.rollout.gateway.formats.texts import format_of
from mcore_rl.rollout.gateway.progress import ReplyStart, TextReceiver
from mcore_rl.rollout.gateway.reading import read_choice, stop_of
from mcore_rl.rollout.gateway.reply_stream import ReplyStream, choice_stream
from mcore_rl.rollout.gateway.turns import Path, Turn, TurnTree
from mcore_rl.rollout.reported_requests import Report
from mcore_rl.types import GenerationRequest
from mcore_rl.types.chat import ChatMessage, ToolSchema
from mcore_rl.types.json_format import JsonFormat

OBEYED = ("max_response_tokens", "stop")
"""Options of a request that are always obeyed: they do not change the distribution of a token."""
NOTHING = np.zeros(0, np.int32)
LENGTH = "length"
"""Reason of EpisodeLimitError for a sequence without room."""
MAX_CHARACTERS = 256
"""Characters per token of the context, above which a request is not tokenized: more than any token has."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's code, at which harnesses shorten their history."""

ContextOf = Callable[[Sequence[ToolSchema] | None], EpisodeContext]
"""Returns the context for a request's tools. Raises: RefusedError."""


@dataclass
class Counts:
    """Counts of a session's requests. rewritten: requests whose history has a message of the model that was not sampled
    in this session, or stands behind an edited message, so that their tokens are rendered from text. missed: complete
    replies that no client has received."""

    requests: int = 0
    rewritten: int = 0
    refused: int = 0
    missed: int = 0


@dataclass
class Answers:
    """Answers requests of one session.

    obeys: take temperature and truncation from requests, and not from the run.
    """

    session: Session
    context_of: ContextOf
    obeys: bool
    keeps_history: bool
    """False with rollout.history=new_sequence: every request is rendered whole."""
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    """Turns by the id of their reply, in the order of their ends."""
    last: Turn | None = None
    """Last reply."""
    session_reward: float | None = None
    """Last reward of the session."""
    rewarded: list[Turn] = field(default_factory=list)
    """Turns with a reward of their own."""
    counts: Counts = field(default_factory=Counts)
    _missed: set[str] = field(default_factory=set)
    """Ids of replies that no client has received."""
    _tree: TurnTree = field(default_factory=TurnTree)
    _texts: dict[tuple[int, bytes], tuple[Turn, str | None]] = field(default_factory=dict)
    """Turns of prompts without messages, with the stop string that ended them, by the length and the digest of prompt
    and reply."""

    async def answer(self, request: ChatRequest, receiver: TextReceiver | None = None) -> ChatReply:
        """Sample the replies to a request. Cancelling the call aborts them. `receiver` receives their texts meanwhile.

        Raises: RefusedError for a request that cannot be answered; errors of the engine.
        """
        self.counts.requests += 1
        try:
            return await self._answer(request, receiver)
        except EpisodeLimitError as limit:
            self.counts.refused += 1
            if limit.reason == "length":
                raise RefusedError(400, f"maximum context length: {limit}", TOO_LONG) from limit
            raise RefusedError(403, f"the session has ended: {limit}") from limit
        except DataError as error:
            self.counts.refused += 1
            raise RefusedError(400, str(error)) from error
        except RefusedError as error:
            if error.code == TOO_LONG:
                self.session.limits.reached = LENGTH
            raise

    async def count(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt.

        Raises: RefusedError for a request that cannot be rendered.
        """
        try:
            await self.session.images.read_messages(request.messages)
            # The prompt is not sampled: its images must not have a place in sequences.
            context = self.context_of(request.tools)
            path = self._tree.path(context.conversation.tools, request.messages)
            return len(self._prompt_ids(request, context, path, keeps_places=False)[0])
        except DataError as error:
            raise RefusedError(400, str(error)) from error

    async def skip(self, request: ChatRequest) -> None:
        """Count a request whose client left before the reply, when a session is played again."""
        with contextlib.suppress(DataError, EpisodeLimitError, RefusedError):
            await self.session.images.read_messages(request.messages)
            context = self.context_of(request.tools)
            path = self._tree.path(context.conversation.tools, request.messages)
            ids, is_rewritten = self._prompt_ids(request, context, path)
            self.counts.rewritten += is_rewritten
            form = self._format(request, context, ids)
            for _ in range(request.num_choices):
                self.session.skip(ids, form)

    def reward(self, reward: Reward) -> None:
        """Take a reward. The hub refuses rewards of unknown replies."""
        if reward.call is None:
            self.session_reward = reward.value
            return
        name, number = choice_of(reward.call)
        turn = self.turns[name][number]
        turn.sampled.sequence.reward(reward.value, turn.sampled.end)
        self.rewarded.append(turn)

    def mark(self, reply: str, *, is_seen: bool) -> None:
        """Note whether a client has received a reply."""
        if is_seen:
            self._missed.discard(reply)
        elif reply in self.turns:
            self._missed.add(reply)

    def drop_missed(self) -> None:
        """Remove the replies that no client has received from the episode, at its end."""
        self.counts.missed = len(self._missed)
        missed = [turn for reply, choices in self.turns.items() if reply in self._missed for turn in choices]
        self.turns = {reply: choices for reply, choices in self.turns.items() if reply not in self._missed}
        # The last one first: a turn that another one continues keeps its tokens.
        for turn in reversed(missed):
            self.session.drop(turn.sampled)
        seen = [turn for choices in self.turns.values() for turn in choices]
        self.last = seen[-1] if seen else None
        self.rewarded = [turn for turn in self.rewarded if turn not in missed]
        if self.last is not None:
            self.session.messages = self.last.conversation()

    async def _answer(self, request: ChatRequest, receiver: TextReceiver | None) -> ChatReply:
        context = self.context_of(request.tools)
        await self.session.images.read_messages(request.messages)
        path = self._tree.path(context.conversation.tools, request.messages)
        ids, is_rewritten = self._prompt_ids(request, context, path)
        self.counts.rewritten += is_rewritten
        sampling, form = self._sampling(request.sampling), self._format(request, context, ids)
        created = int(time.time())

        def start_of(first: GenerationRequest) -> ReplyStart:
            return ReplyStart(_reply_id(first.request_id, ids), len(ids), created)

        stream = None if receiver is None else ReplyStream(receiver, start_of)
        try:
            reports_of = self._reports_of(request, context, ids, stream)
            found = await self._sampled(ids, sampling, request, reports_of, form)
        finally:
            if stream is not None:
                stream.close()
        if self.session.limits.reached == LENGTH:
            self.session.limits.reached = None  # the program has shortened its history
        reply_id = _reply_id(found[0].request_id, ids)
        choices = []
        for number, sampled in enumerate(found):
            choice = read_choice(self.session, request, context, sampled, f"{reply_id}{number}", form)
            message = answer_message(choice)
            turn = Turn(sampled, message)
            self._keep(request, path, turn, choice.content)
            self.turns.setdefault(reply_id, []).append(turn)
            self.last = turn
            sampled.messages[:] = [message]  # the conversation is complete up to here
            choices.append(choice)
        return ChatReply(reply_id, choices, len(ids), created, _tokens_digest(found))

    def _reports_of(
        self, request: ChatRequest, context: EpisodeContext, ids: list[int], stream: ReplyStream | None
    ) -> list[ReportOf | None]:
        """Return the receivers of the tokens of a request's choices, which send their texts to `stream`."""
        if stream is None:
            return [None] * request.num_choices
        before = None if request.prompt is not None else self.session.text_before(ids)
        has_logps = request.top_logprobs is not None

        def report_of(number: int, sampled: GenerationRequest) -> Report | None:
            return stream.begin_choice(
                choice_stream(context, sampled, before, number=number, has_logps=has_logps), sampled
            )

        return [functools.partial(report_of, number) for number in range(request.num_choices)]

    def _format(self, request: ChatRequest, context: EpisodeContext, ids: list[int]) -> JsonFormat | None:
        """Return the format of a request. Raises: RefusedError for a chat template that does not support any."""
        if request.schema is None:
            return None
        before = None if request.prompt is not None else self.session.text_before(ids)
        return format_of(request.schema, context, before)

    async def _sampled(
        self,
        ids: list[int],
        sampling: dict[str, object],
        request: ChatRequest,
        reports_of: Sequence[ReportOf | None],
        form: JsonFormat | None,
    ) -> list[Sampled]:
        """Sample the continuations of a request. If one fails or the call is cancelled, the others are aborted."""
        session, count = self.session, request.num_choices
        if count > 1 and session.num_turns + count > session.limits.turns:
            left = max(session.limits.turns - session.num_turns, 0)
            raise RefusedError(400, f"{count} replies were requested, and rollout.max_turns leaves {left}")
        if count == 1:  # without a task: each pass of the event loop waits for the engine's thread
            (report_of,) = reports_of
            return [await session.generate(ids, sampling, role=request.role, report_of=report_of, form=form)]
        # Started in this order, which gives equal requests the same seeds if the session is played again.
        tasks = [
            asyncio.create_task(session.generate(ids, sampling, role=request.role, report_of=report_of, form=form))
            for report_of in reports_of
        ]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Sampled):  # nobody sees it
                    session.drop(result)
            raise

    def _keep(self, request: ChatRequest, path: Path, turn: Turn, text: str) -> None:
        """Keep a turn for requests that continue it."""
        if request.prompt is None:
            self._tree.add(path, turn)
        elif isinstance(request.prompt, str):
            whole, given = request.prompt + text, request.sampling.get("stop")
            stop = stop_of(self.session.context, turn.sampled, given) if isinstance(given, list | tuple) else None
            self._texts[len(whole), _digest(whole)] = turn, stop

    def _prompt_ids(
        self, request: ChatRequest, context: EpisodeContext, path: Path, *, keeps_places: bool = True
    ) -> tuple[list[int], bool]:
        """Return the tokens of a request: sampled tokens as they were sampled, and new messages rendered. True if it
        has a reply that is not recognized. keeps_places: note the places of images, for session.generate."""
        conversation, messages = context.conversation, request.messages
        self._check_length(request)
        if request.prompt is not None:
            return self._continued(request.prompt), False
        found = self._tree.find(path)
        new = messages[found[1] :] if found else messages
        unknown = any(message["role"] == "assistant" for message in new)
        if found is None or unknown or not new or not self.keeps_history:
            if list(messages) == self.session.first_messages and context is self.session.context:
                return self.session.prompt_ids.tolist(), unknown
            trusted = self.session.num_row_messages(messages)
            ids = conversation.history_ids(messages, trusted, continues=not found)
            return self.session.images.place(NOTHING, ids, messages, keep=keeps_places), unknown
        turn, _ = found
        tokens = turn.token_ids
        ids = conversation.ids_after_turn(_named(new, turn.message), int(tokens[-1]))
        return tokens.tolist() + self.session.images.place(tokens, ids, new, keep=keeps_places), False

    def _check_length(self, request: ChatRequest) -> None:
        """Refuse texts that are much too long, before they are tokenized on the thread of all episodes."""
        prompt = request.prompt or ""
        characters = len(prompt) + sum(len(text_of(message)) for message in request.messages)
        if characters > MAX_CHARACTERS * self.session.limits.context_tokens:
            tokens = self.session.limits.context_tokens
            raise RefusedError(400, f"maximum context length: {characters} characters, for {tokens} tokens", TOO_LONG)

    def _continued(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the tokens of a prompt without messages. A text that begins with an earlier prompt and its reply keeps
        their tokens."""
        conversation = self.session.context.conversation
        if not isinstance(prompt, str):
            if max(prompt, default=0) >= len(conversation.tokenizer) or min(prompt, default=0) < 0:
                raise RefusedError(400, f"the prompt has token ids outside of [0, {len(conversation.tokenizer)})")
            return list(prompt)
        for (length, digest), (turn, stop) in sorted(self._texts.items(), key=lambda item: -item[0][0]):
            if length <= len(prompt) and _digest(prompt[:length]) == digest:
                tokens, rest = turn.token_ids.tolist(), prompt[length:]
                # The text of a reply has neither its stop token nor its stop string.
                if tokens[-1] in self.session.context.stop_ids:
                    return tokens[:-1] + conversation.encode(rest)
                if stop is None or rest.startswith(stop):
                    return tokens + conversation.encode(rest.removeprefix(stop or ""))
        return conversation.encode(prompt)

    def _sampling(self, given: Mapping[str, object]) -> dict[str, object]:
        """Return the options for session.generate."""
        return {name: value for name, value in given.items() if self.obeys or name in OBEYED}


def _named(messages: Sequence[ChatMessage], turn: ChatMessage) -> list[ChatMessage]:
    """Add the names of the tools to their answers, which clients send with the id of the call only; some templates
    write them."""
    names = {call.get("id"): call["function"]["name"] for call in turn.get("tool_calls", ())}
    named: list[ChatMessage] = []
    for message in messages:
        name = names.get(message.get("tool_call_id"))
        named.append({**message, "name": name} if message["role"] == "tool" and name else message)
    return named


def _reply_id(request_id: str, prompt_ids: Sequence[int]) -> str:
    """Return the id of a reply from the first of its engine's requests. It depends on the session and on its history,
    and is known before the reply is sampled."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=12)
    digest.update(np.asarray(prompt_ids, np.int64).tobytes())
    return digest.hexdigest()


def _tokens_digest(choices: Sequence[Sampled]) -> str:
    """Return ChatReply.digest."""
    digest = hashlib.blake2b(digest_size=12)
    for sampled in choices:
        digest.update(np.asarray([len(sampled.token_ids), *sampled.token_ids], np.int64).tobytes())
    return digest.hexdigest()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
