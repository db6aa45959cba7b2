"""Requests and replies of the gateway in one form, to which every dialect of its server is converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mcore_rl.rollout.gateway.progress import ProgressReceiver
from mcore_rl.types.chat import ChatCall, ChatMessage, ToolSchema

MAX_REWARD = 1e30
"""Limit of a reward: larger ones overflow the float32 sums of advantages."""
RESAMPLED = "the engine has sampled the reply again, with another text; try again"
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class ChatRequest:
    """Request for the next turn of a conversation.

    messages: as `data.chat.messages.normalized` returns them; empty if `prompt` is given.
    prompt: text or token ids to continue (`/v1/completions`), without a chat template.
    tools: OpenAI schemas; None: no tools.
    sampling: overrides by the names of `SamplingOptions`: temperature, top_p, top_k, min_p, stop, max_response_tokens.
    num_choices: number of independent replies.
    top_logprobs: None: log-probabilities are not returned; 0: of the sampled tokens.
    role: agent of the program that sends the request; see Session.generate.
    stream: send the text while it is sampled.
    schema: JSON schema of the content in the form for engines (formats.schemas); None: any text.
    """

    messages: Sequence[ChatMessage] = ()
    prompt: str | Sequence[int] | None = None
    tools: Sequence[ToolSchema] | None = None
    sampling: Mapping[str, object] = field(default_factory=dict)
    num_choices: int = 1
    top_logprobs: int | None = None
    role: str = ""
    stream: bool = False
    schema: str | None = None


@dataclass(frozen=True)
class Choice:
    """One reply of the model.

    content: text without special tokens, reasoning, and calls.
    calls: readable calls with ids and the model's arguments; a call that cannot be read is part of `content`.
    token_ids, logp: sampled tokens and their log-probabilities in nats.
    pieces: texts of the tokens; empty unless log-probabilities are requested.
    stop: stop string that ended the reply, None otherwise.
    """

    content: str
    reasoning: str
    calls: Sequence[ChatCall]
    finish_reason: FinishReason
    token_ids: Sequence[int]
    logp: Sequence[float]
    pieces: Sequence[str]
    stop: str | None = None


def answer_message(choice: Choice) -> ChatMessage:
    """Return a choice as a message of a conversation, which a client sends back."""
    message: ChatMessage = {"role": "assistant", "content": choice.content}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = list(choice.calls)
    return message


@dataclass(frozen=True)
class ChatReply:
    """Replies to one ChatRequest.

    id: identifies the call within its session, for rewards. created: Unix seconds.
    digest: of the sampled tokens. If a session is played again with other tokens, the hub notices it.
    """

    id: str
    choices: Sequence[Choice]
    num_prompt_tokens: int
    created: int
    digest: str = ""


class RefusedError(Exception):
    """A request that cannot be answered. Its text names what the client must change.

    status: HTTP status. code: OpenAI's name of the error, such as context_length_exceeded, which clients handle.
    """

    def __init__(self, status: int, text: str, code: str | None = None) -> None:
        super().__init__(text)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Reward:
    """Reward of a session; of one reply if `call` is its ChatReply.id (choice_of). A reward of a session replaces the
    earlier one, rewards of a reply are added."""

    value: float
    call: str | None = None


def choice_of(call: str) -> tuple[str, int]:
    """Split a call's name: the id of a reply, or `ID:NUMBER` for one of several choices. Raises: ValueError."""
    name, _, number = call.partition(":")
    return name, int(number or 0)


@dataclass(frozen=True)
class OpenedSession:
    """A session that a client works on.

    key: for requests to the model; the program of the session has it.
    owner_key: for the reward and the end. Who decides about the reward has it: with it, a model that runs code in its
    program could reward itself.
    row: the row's fields, without its answer.
    """

    id: str
    key: str
    owner_key: str
    row: Mapping[str, object]


@dataclass(frozen=True)
class HarnessEnd:
    """End of the program of a session. `extra` is added to the graders' extra_info: exit code, output, files.

    error: the program failed, so that nothing of the session is trained.
    """

    extra: Mapping[str, object] = field(default_factory=dict)
    error: str | None = None


class Sessions(Protocol):
    """Sessions behind the server. Every method raises RefusedError."""

    async def answer(
        self, session: str, request: ChatRequest, *, retried: bool = False, receiver: ProgressReceiver | None = None
    ) -> ChatReply:
        """Answer a request of a session. Cancelling the call aborts the sampling, or marks the reply as missed.

        A request that equals one whose client left gets its reply, and with `retried` any equal one that is among the
        last of the session. `receiver` receives the progress of a reply that is streamed.
        """

    async def missed(self, session: str, reply: str) -> None:
        """Note that the client left before a reply was sent. Unless an equal request gets it, it is not trained."""

    async def count(self, session: str | None, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt in a session; None: without a session."""

    async def serve(self, request: ChatRequest, *, receiver: ProgressReceiver | None = None) -> ChatReply:
        """Answer a request without a session. Cancelling the call aborts the sampling."""

    async def reward(self, session: str, reward: Reward) -> None:
        """Add a reward to a session."""

    async def end(self, session: str, end: HarnessEnd) -> None:
        """End a session; its reward is final."""

    async def take(self, seconds: float) -> OpenedSession | None:
        """Give a session to a program that asks for work. Waits up to `seconds`; None if there is no session."""

    async def closed(self, session: str, seconds: float) -> bool:
        """Wait up to `seconds` for the end of a session; return whether it has ended."""

    def key_of(self, session: str) -> str | None:
        """Return the key of a session, None if there is no such session."""

    def owner_key_of(self, session: str) -> str | None:
        """Return the owner's key of a session, None if there is no such session."""
