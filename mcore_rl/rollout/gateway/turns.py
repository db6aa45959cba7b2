"""Sampled turns of a session as a tree of conversations, to find the tokens of a conversation that a client sends back.

A client sends a conversation whole with each request. Every message is a node; a node that the model sampled knows its
tokens. The deepest such node on the path of a request gives the tokens so far, and only the messages after it are
rendered. A client that edits a message, retries or continues several conversations creates branches.

    u1 - A - t1 - B        request u1 A t1 extends the sequence that ends with A
          \\ t2 - C        request u1 A t2 (another answer of a tool) starts a branch from the tokens of A
    u1' - D                request u1' (an edited message) shares nothing

A message of the model is recognized by its text and its calls: clients drop the reasoning, write JSON in other ways, or
give calls new ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mcore_rl.data.chat.messages import REASONING_FIELDS, text_of
from mcore_rl.rollout.episodes.session import Sampled
from mcore_rl.rollout.gateway.digests import ImageDigests, canonical, digest_of, hashed
from mcore_rl.types.chat import ChatMessage, ToolSchema

IGNORED = frozenset({"tool_call_id", "id", "refusal", "annotations", "audio", "prefix", *REASONING_FIELDS})
"""Fields that clients add, change or drop without changing the content of a message."""


@dataclass(eq=False)
class Turn:
    """Turn of the model. `message`: as it was sent to the client."""

    sampled: Sampled
    message: ChatMessage
    node: _Node | None = None
    """Place in the tree; None for a prompt without messages."""

    def conversation(self) -> list[ChatMessage]:
        """Return the messages up to the end of the turn."""
        messages, node = [self.message], None if self.node is None else self.node.parent
        while node is not None and node.message is not None:
            messages.append(node.message)
            node = node.parent
        return messages[::-1]

    @property
    def token_ids(self) -> np.ndarray:
        """All tokens up to the end of the turn, int32 [end]."""
        # From the sequence, which stores them once: a copy per turn would take quadratic memory.
        return self.sampled.sequence.first(self.sampled.end)


@dataclass(eq=False)
class _Node:
    """A message. The roots, one per set of tools, have none."""

    parent: _Node | None = None
    message: ChatMessage | None = None
    following: dict[bytes, _Node] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    """Turns that end at this node: several if equal messages were sampled from the same conversation."""


@dataclass(frozen=True)
class Path:
    """A conversation in the tree of a session: digest of its tools, messages, and their keys, which are computed once
    per request."""

    tools: bytes
    messages: Sequence[ChatMessage]
    keys: Sequence[bytes]


class TurnTree:
    """Turns of a session, by the conversations that they end."""

    def __init__(self) -> None:
        self._roots: dict[bytes, _Node] = {}
        self._images = ImageDigests()

    def path(self, tools: Sequence[ToolSchema], messages: Sequence[ChatMessage]) -> Path:
        """Return the path of a conversation. Another set of tools is another conversation, since the prompt shows
        tools."""
        return Path(digest_of(list(tools)), messages, [key_of(message, self._images) for message in messages])

    def find(self, path: Path) -> tuple[Turn, int] | None:
        """Return the last sampled turn on a path, and the number of messages up to it; None if there is none."""
        node, found = self._roots.get(path.tools), None
        for number, (key, message) in enumerate(zip(path.keys, path.messages, strict=True), start=1):
            node = None if node is None else node.following.get(key)
            if node is None:
                break
            if turn := _chosen(node.turns, message):
                found = turn, number
        return found

    def add(self, path: Path, turn: Turn) -> None:
        """Add the turn that answered a conversation."""
        node = self._roots.setdefault(path.tools, _Node())
        keys, messages = (*path.keys, key_of(turn.message, self._images)), (*path.messages, turn.message)
        for key, message in zip(keys, messages, strict=True):
            if key not in node.following:
                node.following[key] = _Node(node, message)
            node = node.following[key]
        node.turns.append(turn)
        turn.node = node


def key_of(message: ChatMessage, images: ImageDigests) -> bytes:
    """Return a key that is equal for messages with the same content."""
    if message["role"] != "assistant":
        said = {name: value for name, value in message.items() if name not in IGNORED}
        return hashed(canonical(said, images.of))
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return digest_of(["assistant", text_of(message).strip(), calls])


def _chosen(turns: Sequence[Turn], message: ChatMessage) -> Turn | None:
    """Return the turn that a client sent back: by the ids of its calls if several are equal, else the latest.

    A message with other reasoning than the turn's was edited.
    """
    same = [turn for turn in turns if _same_reasoning(turn.message, message)]
    ids = _ids(message)
    return next((turn for turn in reversed(same) if _ids(turn.message) == ids), same[-1] if same else None)


def _same_reasoning(sent: ChatMessage, returned: ChatMessage) -> bool:
    given = _reasoning(returned)
    return given is None or given == _reasoning(sent)


def _reasoning(message: Mapping[str, object]) -> str | None:
    texts = (message.get(name) for name in REASONING_FIELDS)
    return next((text.strip() for text in texts if isinstance(text, str) and text.strip()), None)


def _ids(message: ChatMessage) -> list[str | None]:
    return [call.get("id") for call in message.get("tool_calls", ())]
