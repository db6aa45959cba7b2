"""Objects and settings that all episodes of an engine share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mcore_rl.data.chat.conversation import Conversation
from mcore_rl.data.transcripts import TextDecoder
from mcore_rl.errors import DataError
from mcore_rl.rollout.episodes.images import ToolImages
from mcore_rl.rollout.tools.parsers import ToolCallParser
from mcore_rl.rollout.tools.toolbox import ToolBox
from mcore_rl.types.chat import ToolSchema
from mcore_rl.types.json_format import JsonFormat


def no_formats(form: JsonFormat) -> None:
    """Refuse a format, for episodes without an engine that enforces formats."""
    raise DataError("this engine does not enforce formats of replies; leave out the format")


@dataclass
class EpisodeContext:
    """Objects and settings shared by all episodes of an engine."""

    decoder: TextDecoder
    conversation: Conversation
    tools: ToolBox | None = None
    parallel_calls: bool = True
    """False if the chat template supports only one call per turn."""
    stop_ids: frozenset[int] = frozenset()
    parser_of: Callable[[Sequence[ToolSchema]], ToolCallParser] | None = None
    """Function that builds a parser for the calls of tools; None if the run has no tools."""
    images: ToolImages = field(default_factory=ToolImages)
    prepare_format: Callable[[JsonFormat], None] = no_formats
    """Engine.prepare_format of the engine."""
    parser: ToolCallParser | None = field(init=False)
    """Parser for the conversation's tools. Without tools, a turn that looks like a call is text."""

    def __post_init__(self) -> None:
        tools = self.conversation.tools
        self.parser = self.parser_of(tools) if tools and self.parser_of is not None else None

    def offering(self, tools: Sequence[ToolSchema] | None) -> EpisodeContext:
        """Return a context with the tools of a row; None: the run's tools."""
        return self if tools is None else replace(self, conversation=self.conversation.with_tools(tools))
