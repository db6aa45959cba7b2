"""What an episode can do: sample, call tools, render what is said. It keeps account of all of it."""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from mcore_rl.data.chat.conversation import Conversation, Message, ToolSchema, with_answer_ids
from mcore_rl.data.chat.messages import with_answer
from mcore_rl.data.chat.style import opens_thought
from mcore_rl.data.seeds import turn_seed
from mcore_rl.data.sources.overrides import check_sampling, with_overrides
from mcore_rl.data.transcripts import TextDecoder, response_text
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.episodes import trace
from mcore_rl.rollout.episodes.history import turn_message
from mcore_rl.rollout.episodes.limits import EpisodeLimitError, EpisodeLimits
from mcore_rl.rollout.episodes.sequences import SequenceBook, TokenSequence
from mcore_rl.rollout.episodes.trace import EpisodeTrace
from mcore_rl.rollout.tools.interface import ToolAnswer
from mcore_rl.rollout.tools.parsers import ParsedMessage
from mcore_rl.rollout.tools.tool_process import ClosedEpisode
from mcore_rl.types import Completion, GenerationRequest, Prompt, SamplingOptions

GENERATING, TOOL_CALLING = "generating", "tool_calling"
THOUGHT = "<think>"
PROMPT_END = 16
"""Tokens before a turn that its parser sees: a prompt may have opened the reasoning."""


class TokenSource(Protocol):
    """An engine, for coroutines."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """The response; cancelled, it is aborted."""


class ToolCaller(Protocol):
    """The tools of an engine's episodes."""

    async def call(
        self, episode_id: str, name: str, arguments: dict[str, Any], tools_kwargs: Mapping[str, Any]
    ) -> ToolAnswer: ...

    async def close_episode(self, episode_id: str) -> ClosedEpisode: ...


class MessageParser(Protocol):
    """Reads turns of the model."""

    def parse(self, text: str, prompt: str = "") -> ParsedMessage: ...


@dataclass(frozen=True)
class EpisodePrompt:
    """A row of the data, for episodes. `token_ids` are its rendering, with which an episode mostly begins."""

    token_ids: list[int]
    text: str
    messages: list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    row: int

    @classmethod
    def of(cls, prompt: Prompt) -> EpisodePrompt:
        return cls(
            prompt.token_ids.tolist(),
            prompt.text,
            prompt.messages,
            prompt.data_source,
            prompt.ground_truth,
            dict(prompt.extra_info),
            prompt.row,
        )


@dataclass(frozen=True)
class Sampled:
    """What a call of Session.generate sampled. finish_reason: stop, or length where a limit cut it. Units: nats."""

    token_ids: list[int]
    logp: list[float]
    versions: list[int]
    finish_reason: str
    text: str
    """Without special tokens, and without the stop string that ended the turn."""
    sequence: TokenSequence = field(repr=False)
    prompt_end: list[int] = field(repr=False)


@dataclass(frozen=True)
class Surroundings:
    """What all episodes of an engine share. `history`: keep | new_sequence, as rollout.history; `drops_turns`: whether
    a history that grows too long loses its oldest turns."""

    decoder: TextDecoder
    conversation: Conversation
    tools: ToolCaller | None = None
    parser: MessageParser | None = None
    history: str = "keep"
    drops_turns: bool = False
    parallel_calls: bool = True
    """A template may show no more than one call of a turn."""
    stop_ids: frozenset[int] = frozenset()
    parser_of: Callable[[Sequence[ToolSchema]], MessageParser] | None = None
    """Makes a parser for the calls of other tools."""

    def offering(self, tools: Sequence[ToolSchema] | None) -> Surroundings:
        """The same with the tools that a row offers; None: those of the run."""
        if tools is None:
            return self
        parser = self.parser_of(tools) if tools and self.parser_of is not None else None
        return replace(self, conversation=self.conversation.with_tools(tools), parser=parser)


class Session:
    """Of one episode. `request` is the one of a single turn: its seed and id are those of the episode."""

    def __init__(
        self,
        around: Surroundings,
        source: TokenSource,
        request: GenerationRequest,
        prompt: Prompt,
        limits: EpisodeLimits,
        traced: EpisodeTrace | None = None,
        *,
        trained: bool = True,
    ) -> None:
        """`trained`: as Attempt has it."""
        self._trained = trained
        self.seed = request.seed
        self.id = request.request_id
        self.limits = limits
        self.book = SequenceBook()
        self.messages: list[Message] = list(prompt.messages)
        """What has been said, as far as it was rendered or parsed."""
        self.num_turns = self.num_tool_calls = self.num_tool_errors = 0
        self.tool_rewards: list[float] = []
        self.tool_figures: defaultdict[str, list[float]] = defaultdict(list)
        """What calls of tools said besides, by name, as far as it is numbers."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.limit: str | None = None
        """Why it could not go on."""
        self.truncated = False
        """Whether the turn that was sampled last was cut by a limit."""
        self._around, self._source, self._request, self._prompt, self._trace = around, source, request, prompt, traced
        self._tool_calls_under_way = 0
        self._last: Sampled | None = None
        self._texts: list[str] = []
        self._said: list[list[Message]] = []
        """Turn by turn: what the model said, and what others said after it."""
        self._calls_of_turn = 0
        self._asked: Counter[bytes] = Counter()
        last = prompt.messages[-1] if prompt.messages else {"role": "user"}
        self._begins_in_thought = last["role"] == "assistant" and opens_thought(last["content"])
        """Whether the row has begun the reasoning of the first turn."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """OpenAI schemas of the tools."""
        return self._around.conversation.tools

    @property
    def parallel_calls(self) -> bool:
        """Whether a turn may call more than one tool."""
        return self._around.parallel_calls

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingOptions | Mapping[str, Any] | None = None
    ) -> Sampled:
        """Samples what follows `token_ids`, the whole sequence so far. `sampling`: options that differ from the run's;
        max_response_tokens is of this turn.

        Raises: EpisodeLimitError where no turn or token is left, which ends the episode well; DataError for sampling
        options that a response cannot have.
        """
        ids = np.asarray(token_ids, np.int32)
        sequence = self.book.find(ids)
        num_prompt = len(ids) if sequence is None else len(sequence.prompt_ids)
        with self._noted_limit():
            room = self.limits.room(self.num_turns, num_prompt, len(ids))
        request = self._request_of(ids, self._options(sampling, room))
        self.num_turns += 1
        self._calls_of_turn = 0
        with self._spent(GENERATING):
            completion = await self._source.generate(request)
        sequence = self.book.add(ids, completion, request.sampling.temperature)
        self.truncated = completion.finish_reason == "length"
        found = completion.token_ids.tolist()
        self._last = Sampled(
            found,
            completion.logp.tolist(),
            completion.versions.tolist(),
            completion.finish_reason,
            response_text(self._around.decoder, found, request.sampling.stop),
            sequence,
            ids[-PROMPT_END:].tolist(),
        )
        self._said.append([])
        self._texts.append(self._last.text)
        return self._last

    async def call(self, tool_name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Calls a tool. Its errors are text for the model; they are counted.

        Raises: EpisodeLimitError where the turn has called as many as it may.
        """
        if self._around.tools is None:
            raise ConfigError("an episode calls a tool, and rollout.tools names none")
        with self._noted_limit():
            self.limits.check_calls(self._calls_of_turn)
        self._calls_of_turn += 1
        self.num_tool_calls += 1
        offered = [str(tool["function"]["name"]) for tool in self._prompt.tools or ()]
        if self._prompt.tools is not None and tool_name not in offered:
            self.num_tool_errors += 1
            reason = f"there is no tool {tool_name}; the tools are: {', '.join(offered) or 'none'}"
            return ToolAnswer(f"Error: {reason}", error=reason)
        kwargs = self._prompt.extra_info.get("tools_kwargs") or {}
        with self._spent(TOOL_CALLING), self._traced_call():
            answer = await self._around.tools.call(self.id, tool_name, dict(arguments), kwargs)
        self.num_tool_errors += answer.error is not None
        if answer.reward is not None:
            self.tool_rewards.append(answer.reward)
        for name, value in answer.metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self.tool_figures[name].append(float(value))
        return answer

    def count_malformed_call(self) -> None:
        """A call that the model wrote so that it cannot be executed."""
        self.num_tool_calls += 1
        self.num_tool_errors += 1

    def reward(self, value: float) -> None:
        """Adds to the reward of the turn that was sampled last."""
        if self._last is None:
            raise ValueError("a reward of a turn before anything was sampled")
        self._last.sequence.reward(float(value))

    def parse(self, sampled: Sampled) -> ParsedMessage:
        """What the model said: its content, its reasoning and its calls of tools, well formed or not."""
        if self._around.parser is None:
            return ParsedMessage(sampled.text, "", ())
        decode = self._around.decoder.decode
        prompt = decode(sampled.prompt_end, skip_special_tokens=False)
        if self._begins_in_thought and sampled.prompt_end == self._prompt.token_ids[-PROMPT_END:].tolist():
            prompt = THOUGHT
        return self._around.parser.parse(decode(self._without_stop(sampled), skip_special_tokens=False), prompt)

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of what is new: of a whole conversation before anything was sampled, else of what is said after
        the last turn. The caller puts them behind the sequence.

        Raises: DataError where the chat template cannot; ConfigError with rollout.history=new_sequence, which goes by
        `next_prompt`.
        """
        if self._last is None:
            self.messages = list(messages)
            return self._first(messages)
        if self._around.history == "new_sequence":
            raise ConfigError(
                "rollout.history=new_sequence renders whole conversations: an episode takes the tokens of its next "
                "turn from session.next_prompt(messages)"
            )
        self._note(messages)
        return self._around.conversation.after(with_answer_ids(messages), self._last.token_ids[-1])

    def next_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The whole tokens with which the next turn is sampled, after `messages` were said; as rollout.history and
        rollout.long_history want them."""
        assert self._last is not None, "nothing was sampled yet"
        self._note(messages)
        if self._around.history == "keep":
            ids = self._last.sequence.tokens.tolist()
            ids += self._around.conversation.after(with_answer_ids(messages), self._last.token_ids[-1])
        else:
            ids = self._around.conversation.whole(self.messages, continues=False)
        if self._around.drops_turns:
            ids = self._shortened(ids)
        return ids

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, in which special tokens are text."""
        return self._around.conversation.encode_plain(text)

    @property
    def response_text(self) -> str:
        """What the model said, turn by turn, for graders. What tools or users said is left out: an answer that a tool
        gave is none of the model's."""
        return "\n".join(self._texts)

    @property
    def prompt_ids(self) -> np.ndarray:
        """Of the row, int32 [P]."""
        return self._prompt.token_ids

    def transcript(self) -> list[Message]:
        """The conversation, with the turn that was sampled last."""
        if self._last is None or self._said[-1]:
            return list(self.messages)
        return [*with_answer(self.messages, {"role": "assistant", "content": self._last.text})]

    def _first(self, messages: Sequence[Message]) -> list[int]:
        if list(messages) == list(self._prompt.messages):
            return [int(i) for i in self._prompt.token_ids]
        return self._around.conversation.whole(messages)

    def _note(self, messages: Sequence[Message]) -> None:
        """What the model said last, and what is said now, join the conversation."""
        assert self._last is not None
        said, around = self.parse(self._last), self._around
        written = around.decoder.decode(self._without_stop(self._last), skip_special_tokens=around.parser is None)
        turn = turn_message(around.conversation, said, written, messages)
        if not any(self._said):  # the row may have begun the first turn
            *earlier, turn = with_answer(self.messages, turn)
            self.messages = [*earlier]
        self._said[-1] = [turn, *with_answer_ids(messages)]
        self.messages += self._said[-1]

    def _without_stop(self, sampled: Sampled) -> list[int]:
        ids = sampled.token_ids
        return ids[:-1] if ids and ids[-1] in self._around.stop_ids else ids

    def _shortened(self, ids: list[int]) -> list[int]:
        """Without the oldest turns, as many as it takes for another one to fit; at least the last stays."""
        wanted = self.limits.turn_tokens or 1
        kept = [turn for turn in self._said if turn]
        start = self.messages[: len(self.messages) - sum(map(len, kept))]
        while len(ids) + wanted > self.limits.context_tokens and len(kept) > 1:
            kept = kept[1:]
            shown = [*start, *(message for turn in kept for message in turn)]
            ids = self._around.conversation.whole(shown, continues=False)
        return ids

    def _options(self, given: SamplingOptions | Mapping[str, Any] | None, room: int) -> SamplingOptions:
        """Raises: DataError for options that no response can have, or none that is trained on."""
        options = self._request.sampling
        if given is not None:
            named = vars(given) if isinstance(given, SamplingOptions) else given
            wanted = check_sampling(named, "session.generate", trained=self._trained)
            options = with_overrides(options, wanted or {})
        return options if options.max_response_tokens <= room else replace(options, max_response_tokens=room)

    def _request_of(self, ids: np.ndarray, options: SamplingOptions) -> GenerationRequest:
        """The first turn's is that of a single turn. Later ones hang on what they follow: the same history gives the
        same tokens, and another one, of a tool that answered otherwise, draws anew."""
        key = ids.tobytes()
        again, self._asked[key] = self._asked[key], self._asked[key] + 1
        if not again and np.array_equal(ids, self._prompt.token_ids):
            unchanged = options is self._request.sampling
            return self._request if unchanged else replace(self._request, sampling=options)
        digest = zlib.crc32(key)
        name, seed = f"{self.id}/{digest:08x}.{again}", turn_seed(self.seed, digest, again)
        return GenerationRequest(name, ids, seed, options, tokens_per_version=self._request.tokens_per_version)

    @contextlib.contextmanager
    def _noted_limit(self) -> Iterator[None]:
        """An episode may catch the error, and return something: what ended it stays known."""
        try:
            yield
        except EpisodeLimitError as error:
            self.limit = error.reason
            raise

    @contextlib.contextmanager
    def _traced_call(self) -> Iterator[None]:
        self._tool_calls_under_way += 1
        if self._trace is not None:
            self._trace.enter(trace.TOOL_CALLING)
        try:
            yield
        finally:
            self._tool_calls_under_way -= 1
            if self._trace is not None and not self._tool_calls_under_way:
                self._trace.enter(trace.RUNNING)

    @contextlib.contextmanager
    def _spent(self, state: str) -> Iterator[None]:
        """Time in a state counts once, however many calls are under way."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[state] += time.perf_counter() - began
