"""Session of an episode: sampling, tool calls and rendering of messages, with a record of all of them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np

from mcore_rl.data.chat.conversation import with_answer_ids
from mcore_rl.data.chat.messages import text_of, with_answer
from mcore_rl.data.chat.style import opens_thought
from mcore_rl.data.seeds import turn_seed
from mcore_rl.data.sources.row_options import changed_options, check_sampling, with_overrides
from mcore_rl.data.transcripts import response_text
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.rollout.episodes import trace as states
from mcore_rl.rollout.episodes.context import EpisodeContext
from mcore_rl.rollout.episodes.history import turn_message
from mcore_rl.rollout.episodes.images import EpisodeImages, image_digests
from mcore_rl.rollout.episodes.limits import EpisodeLimits
from mcore_rl.rollout.episodes.sampling import ReportOf, Sample, with_format
from mcore_rl.rollout.episodes.sequences import SequenceBook, TokenSequence
from mcore_rl.rollout.episodes.single_turn import Attempt
from mcore_rl.rollout.episodes.trace import EpisodeTrace
from mcore_rl.rollout.tools.interface import ToolResult
from mcore_rl.rollout.tools.parsers import ParsedMessage
from mcore_rl.types import GenerationRequest, Prompt, PromptImages, SamplingOptions
from mcore_rl.types.chat import ChatMessage, ToolSchema, tool_function
from mcore_rl.types.json_format import JsonFormat

GENERATING, TOOL_CALLING = "generating", "tool_calling"
THOUGHT = "<think>"
PROMPT_END = 16
"""Number of tokens before a turn that its parser sees, since the prompt may have opened the reasoning."""


@dataclass(frozen=True)
class EpisodePrompt:
    """Row of the data, for episodes. `token_ids` is its rendering, with which most episodes start."""

    token_ids: list[int]
    text: str
    messages: list[ChatMessage]
    data_source: str
    ground_truth: object
    extra_info: dict[str, object]
    row: int

    @classmethod
    def of(cls, prompt: Prompt) -> EpisodePrompt:
        ids, extra_info, source = prompt.token_ids.tolist(), dict(prompt.extra_info), prompt.data_source
        return cls(ids, prompt.text, prompt.messages, source, prompt.ground_truth, extra_info, prompt.row)


@dataclass(frozen=True)
class Sampled:
    """Result of Session.generate. finish_reason: stop, or length if a limit truncated the turn. Units: logp in nats."""

    token_ids: list[int]
    logp: list[float]
    versions: list[int]
    finish_reason: str
    text: str
    """Text without special tokens and without the stop string that ended the turn."""
    sequence: TokenSequence = field(repr=False)
    prompt_end: list[int] = field(repr=False)
    request_id: str = field(repr=False)
    """Id of the request, which depends on the history only."""
    end: int = field(repr=False)
    """Length of the sequence at the end of the turn; later turns extend it."""
    stops: Sequence[str] = field(repr=False)
    """Stop strings of the request."""
    messages: list[ChatMessage] = field(default_factory=list, repr=False)
    """Message of the model, followed by the answers; empty until the turn is answered."""


class Session:
    """State of one episode. The request of `attempt` has the seed and the id of the episode."""

    def __init__(
        self,
        context: EpisodeContext,
        sample: Sample,
        attempt: Attempt,
        limits: EpisodeLimits,
        trace: EpisodeTrace,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        request, prompt, self._trained = attempt.request, attempt.prompt, attempt.trained
        self.seed = request.seed
        self.id = request.request_id
        self.limits = limits
        self.tools: Sequence[ToolSchema] = context.conversation.tools
        """OpenAI schemas of the tools."""
        self.parallel_calls = context.parallel_calls
        """True if a turn may call more than one tool."""
        self.prompt_ids = np.asarray(prompt.token_ids, np.int32)
        """Tokens of the row's prompt, int32 [P]."""
        self.book = SequenceBook()
        self.first_messages: list[ChatMessage] = list(prompt.messages)
        """Messages of the row, whose tokens are `prompt_ids`."""
        self.messages: list[ChatMessage] = list(prompt.messages)
        """Conversation so far, as rendered or parsed."""
        self.num_turns = self.num_tool_calls = self.num_tool_errors = 0
        self.tool_rewards: list[float] = []
        self.tool_metrics: defaultdict[str, list[float]] = defaultdict(list)
        """Numeric metrics of tool calls, by name."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.truncated = False
        """True if a limit truncated the last turn."""
        self.context = context
        self.begin = begin
        """Marks the episode as started, after which no other engine takes it; the first turn does, too."""
        self.at_limit: Callable[[], object] = lambda: None
        """Result of the episode if a limit ends it, in place of its return value."""
        self.extra: dict[str, object] = {}
        """Fields that the episode adds to the graders' extra_info."""
        self._sample, self._request, self._prompt, self._trace = sample, request, prompt, trace
        self.images = EpisodeImages(context.images, prompt.token_ids, request.images)
        self._tool_calls_under_way = 0
        self._turns: list[Sampled] = []
        self._calls_of_turn = 0
        self._requests: Counter[bytes] = Counter()
        last = prompt.messages[-1] if prompt.messages else None
        self._begins_in_thought = last is not None and last["role"] == "assistant" and opens_thought(text_of(last))
        """True if the row opens the reasoning of the first turn."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingOptions | Mapping[str, object] | None = None,
        *,
        role: str = "",
        report_of: ReportOf | None = None,
        form: JsonFormat | None = None,
    ) -> Sampled:
        """Sample the continuation of `token_ids`, the whole sequence so far. `sampling` overrides the run's options;
        max_response_tokens applies to this turn. `role` names the agent that speaks, in episodes with several; agents
        do not share sequences. `report_of` is called with the request before it is sampled. `form`: its format.

        Raises: EpisodeLimitError if no turn or token is left (this ends the episode normally); DataError for options or
        a format that cannot be trained, if the row has images and the tokens do not begin with its prompt, or for
        images of tools at another place than where they were rendered.
        """
        ids = np.asarray(token_ids, np.int32)
        sequence = self.book.find(ids, role)
        # The limit counts from the prompt of the sequence; other tokens than its own start a new one.
        num_prompt = len(ids) if sequence is None else sequence.num_prompt
        room = self.limits.room(self.num_turns, num_prompt, len(ids))
        options = with_format(self._options(sampling, room), form, trained=self._trained)
        request = self._request_of(ids, options)
        self.num_turns += 1
        self._calls_of_turn = 0
        try:
            if form is not None:  # counted before: the order of calls must not depend on compilations
                await asyncio.to_thread(self.context.prepare_format, form)
            with self._spent(GENERATING):
                completion = await self._sample(request, report=None if report_of is None else report_of(request))
        except (asyncio.CancelledError, DataError):
            self.num_turns -= 1  # nothing of it is in the episode
            raise
        sequence = self.book.add(ids, completion, request.sampling.temperature, request.images, role=role)
        self.truncated = completion.finish_reason == "length"
        found = completion.token_ids.tolist()
        logp, versions, reason = completion.logp.tolist(), completion.versions.tolist(), completion.finish_reason
        text = response_text(self.context.decoder, found, request.sampling.stop)
        end, name = ids[-PROMPT_END:].tolist(), request.request_id
        length = len(ids) + len(found)
        stops = request.sampling.stop
        self._turns.append(Sampled(found, logp, versions, reason, text, sequence, end, name, length, stops))
        return self._turns[-1]

    def skip(self, token_ids: Sequence[int], form: JsonFormat | None = None) -> None:
        """Count a call of `generate` without making it: equal later calls then get the seeds that they got before, when
        that call was cancelled."""
        ids = np.asarray(token_ids, np.int32)
        self._requests[self._history_key(ids, self._images_in(ids), form)] += 1

    def drop(self, sampled: Sampled) -> None:
        """Remove a turn that nobody has seen: it is not trained. Equal later calls of `generate` get other seeds."""
        self.book.drop(sampled.sequence, sampled.end)
        self._turns = [turn for turn in self._turns if turn is not sampled]
        self.num_turns -= 1

    async def call(self, tool_name: str, arguments: Mapping[str, object]) -> ToolResult:
        """Call a tool. Errors of the tool are returned as text for the model and counted.

        Raises: EpisodeLimitError if the turn has reached its number of calls; DataError for images that the model or
        its chat template cannot read.
        """
        if self.context.tools is None:
            raise ConfigError("an episode calls a tool, but rollout.tools is not set")
        self.limits.check_calls(self._calls_of_turn)
        self._calls_of_turn += 1
        self.num_tool_calls += 1
        # A row may offer only some of the run's tools; others must fail as if they did not exist.
        offered = [str(tool_function(tool)["name"]) for tool in self._prompt.tools or ()]
        if self._prompt.tools is not None and tool_name not in offered:
            self.num_tool_errors += 1
            reason = f"there is no tool {tool_name}; the tools are: {', '.join(offered) or 'none'}"
            return ToolResult(f"Error: {reason}", error=reason)
        kwargs = self._prompt.extra_info.get("tools_kwargs")
        kwargs = kwargs if isinstance(kwargs, Mapping) else {}
        with self._spent(TOOL_CALLING), self._traced_call():
            answer = await self.context.tools.call(self.id, tool_name, dict(arguments), kwargs)
            if answer.images:
                answer = await self.images.read(tool_name, answer)
        self.num_tool_errors += answer.error is not None
        if answer.reward is not None:
            self.tool_rewards.append(answer.reward)
        for name, value in answer.metrics.items():
            # Metrics are means over calls, so other values of a tool cannot be used.
            if isinstance(value, int | float) and math.isfinite(value):
                self.tool_metrics[name].append(float(value))
        return answer

    def count_malformed_call(self) -> None:
        """Count a call that cannot be executed as written."""
        self.num_tool_calls += 1
        self.num_tool_errors += 1

    def reward(self, value: float) -> None:
        """Add to the reward of the last sampled turn."""
        if not self._turns:
            raise ValueError("session.reward was called before session.generate")
        self._turns[-1].sequence.reward(float(value))

    def parse(self, sampled: Sampled, context: EpisodeContext | None = None) -> ParsedMessage:
        """Parse a turn into content, reasoning and tool calls, well-formed or not. `context`: of other tools than the
        episode's."""
        parser = (context or self.context).parser
        if parser is None:
            return ParsedMessage(sampled.text, "", ())
        return parser.parse(self.written(sampled), self.text_before(sampled.prompt_end))

    def written(self, sampled: Sampled) -> str:
        """Return the text of a turn with special tokens, without its end token."""
        return self.context.decoder.decode(self._without_stop(sampled), skip_special_tokens=False)

    def text_before(self, prompt: Sequence[int]) -> str:
        """Return the end of the text before a turn, in which the reasoning may begin. `prompt`: its tokens, at least
        the last PROMPT_END."""
        end = list(prompt[-PROMPT_END:])
        # The row's message may have opened the reasoning more than PROMPT_END tokens before its end.
        if self._begins_in_thought and end == self.prompt_ids[-PROMPT_END:].tolist():
            return THOUGHT
        return self.context.decoder.decode(end, skip_special_tokens=False)

    def render(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the token ids of new messages: of a whole conversation before the first turn, later of the messages
        after the last turn. The caller appends them to the sequence.

        Raises: DataError if the chat template cannot render them; ConfigError with rollout.history=new_sequence, which
        needs `next_prompt`.
        """
        if not self._turns:
            self.messages = list(messages)
            if self.messages == list(self._prompt.messages):
                return self.prompt_ids.tolist()
            return self.context.conversation.history_ids(messages, self.num_row_messages(messages))
        if self.limits.config.history == "new_sequence":
            raise ConfigError(
                "rollout.history=new_sequence renders whole conversations: get the tokens of the next turn from "
                "session.next_prompt(messages) instead of session.render"
            )
        self._note(messages)
        return self._ids_after_turn(messages)

    def next_prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return all tokens for the next turn after `messages`, following rollout.history and rollout.long_history."""
        assert self._turns, "nothing was sampled yet"
        self._note(messages)
        if self.limits.config.history == "new_sequence":
            trusted = self.num_row_messages(self.messages)
            ids = self.context.conversation.history_ids(self.messages, trusted, continues=False)
        else:
            ids = self._turns[-1].sequence.tokens.tolist() + self._ids_after_turn(messages)
        return self._shortened(ids) if self.limits.config.long_history == "drop_turns" else ids

    def num_row_messages(self, messages: Sequence[ChatMessage]) -> int:
        """Return the number of leading messages that are the row's. Special tokens in texts of others stay text."""
        pairs = zip(messages, self.first_messages, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def encode(self, text: str) -> list[int]:
        """Tokenize plain text; special tokens are treated as text."""
        return self.context.conversation.encode_plain(text)

    @property
    def keeps_sets(self) -> bool:
        """True if responses contain the sets that their tokens were sampled from."""
        return self._request.sampling.keep_mask

    @property
    def response_text(self) -> str:
        """Text of all the model's turns, for graders. Messages of tools and users are excluded, so that a tool's result
        is not graded as the model's answer."""
        return "\n".join(turn.text for turn in self._turns)

    def transcript(self) -> list[ChatMessage]:
        """Return the conversation including the last sampled turn."""
        # Once messages followed the last turn, the conversation already contains it.
        if not self._turns or self._turns[-1].messages:
            return list(self.messages)
        return [*with_answer(self.messages, {"role": "assistant", "content": self._turns[-1].text})]

    def _ids_after_turn(self, messages: Sequence[ChatMessage]) -> list[int]:
        last, answered = self._turns[-1], with_answer_ids(messages)
        ids = self.context.conversation.ids_after_turn(answered, last.token_ids[-1])
        return self.images.place(last.sequence.tokens, ids, answered)

    def _note(self, messages: Sequence[ChatMessage]) -> None:
        """Append the last sampled turn and `messages` to the conversation."""
        last, context = self._turns[-1], self.context
        said = self.parse(last)
        written = context.decoder.decode(self._without_stop(last), skip_special_tokens=context.parser is None)
        turn = turn_message(context.conversation, said, written, messages)
        if not any(each.messages for each in self._turns):  # the row may have begun the first turn
            *earlier, turn = with_answer(self.messages, turn)
            self.messages = [*earlier]
        last.messages[:] = [turn, *with_answer_ids(messages)]
        self.messages += last.messages

    def _without_stop(self, sampled: Sampled) -> list[int]:
        ids = sampled.token_ids
        return ids[:-1] if ids and ids[-1] in self.context.stop_ids else ids

    def _shortened(self, ids: list[int]) -> list[int]:
        """Drop the oldest turns until another turn fits; the last turn always stays."""
        # The messages of the row (`start`) always stay; whole turns with their answers are dropped from the front.
        wanted = self.limits.config.max_turn_tokens or 1
        kept = [turn.messages for turn in self._turns if turn.messages]
        start = self.messages[: len(self.messages) - sum(map(len, kept))]
        while len(ids) + wanted > self.limits.context_tokens and len(kept) > 1:
            kept = kept[1:]
            shown = [*start, *(message for turn in kept for message in turn)]
            ids = self.context.conversation.history_ids(shown, self.num_row_messages(shown), continues=False)
        return ids

    def _options(self, given: SamplingOptions | Mapping[str, object] | None, room: int) -> SamplingOptions:
        """Apply overrides. Raises: DataError for invalid options, or options that cannot be trained."""
        options = self._request.sampling
        if given is not None:
            named = changed_options(given, options) if isinstance(given, SamplingOptions) else given
            keeps = options.keep_mask
            wanted = check_sampling(named, "session.generate", trained=self._trained, keeps_mask=keeps)
            options = with_overrides(options, wanted or {})
        return options if options.max_response_tokens <= room else replace(options, max_response_tokens=room)

    def _request_of(self, ids: np.ndarray, options: SamplingOptions) -> GenerationRequest:
        """Build the request of a turn. The first turn uses the single-turn request. The id and seed of later turns
        depend on the history: the same history gives the same tokens, a different one (such as another tool result) new
        ones."""
        # Counting repetitions gives repeated calls with the same history different seeds.
        key = self._history_key(ids, images := self._images_in(ids), options.format)
        again, self._requests[key] = self._requests[key], self._requests[key] + 1
        if not again and key == self.prompt_ids.tobytes():  # np.array_equal would take 5 us
            given = self._request
            return given if options is given.sampling else replace(given, sampling=options)
        digest = zlib.crc32(key)
        name, seed = f"{self.id}/{digest:08x}.{again}", turn_seed(self.seed, digest, again)
        per_version = self._request.tokens_per_version
        return GenerationRequest(name, ids, seed, options, tokens_per_version=per_version, images=images)

    def _images_in(self, ids: np.ndarray) -> PromptImages | None:
        return self.images.inside(ids, self.book.sequences)

    def _history_key(self, ids: np.ndarray, images: PromptImages | None, form: JsonFormat | None) -> bytes:
        # Other images of equal size have equal tokens, and a response does not continue in another format.
        other = b"" if images is self._request.images else image_digests(images)
        return ids.tobytes() + other + (repr(form).encode() if form else b"")

    @contextlib.contextmanager
    def _traced_call(self) -> Iterator[None]:
        self._tool_calls_under_way += 1
        self._trace.enter(states.TOOL_CALLING)
        try:
            yield
        finally:
            # Calls of a turn may run at the same time: the state ends with the last one.
            self._tool_calls_under_way -= 1
            if not self._tool_calls_under_way:
                self._trace.enter(states.RUNNING)

    @contextlib.contextmanager
    def _spent(self, state: str) -> Iterator[None]:
        """Measure the time spent in a state."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[state] += time.perf_counter() - began
