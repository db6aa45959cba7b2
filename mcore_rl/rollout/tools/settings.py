"""Settings that tool processes receive from the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.tools.interface import ToolResult
from mcore_rl.rollout.tools.schemas import Schema

MARK = "\n... ({} characters left out) ...\n"


@dataclass(frozen=True)
class ToolSettings:
    """Settings of a tool process: keys of `rollout` (without `tool_`) and the section `sandbox`."""

    tools: str
    max_tool_seconds: float
    answer_characters: int
    answer_keep: str
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    schemas: tuple[Schema, ...] = ()
    """Schemas derived by an earlier process; with them, a replacement process need not import transformers."""

    @classmethod
    def of(cls, rollout: RolloutConfig, sandbox: SandboxConfig) -> ToolSettings:
        assert rollout.tools is not None
        return cls(
            rollout.tools,
            rollout.max_tool_seconds,
            rollout.tool_answer_characters,
            rollout.tool_answer_keep,
            sandbox,
        )

    def shortened(self, outcome: ToolResult) -> str:
        """Return the text for the model: valid UTF-8, with at most answer_characters characters plus a mark for the
        omitted part."""
        # A lone surrogate in a tool's result could neither be tokenized nor written to the records.
        text = outcome.text.encode("utf-8", "replace").decode("utf-8")
        limit = self.answer_characters
        if len(text) <= limit:
            return text
        mark = MARK.format(len(text) - limit)
        if self.answer_keep == "start":
            return text[:limit] + mark.rstrip("\n")
        if self.answer_keep == "end":
            return mark.lstrip("\n") + text[-limit:]
        first = (limit + 1) // 2
        return text[:first] + mark + text[len(text) - (limit - first) :]
