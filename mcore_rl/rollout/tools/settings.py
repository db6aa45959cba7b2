"""What the processes of tools have to know of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.tools.interface import Outcome
from mcore_rl.rollout.tools.schemas import Schema

MARK = "\n... ({} characters left out) ...\n"


@dataclass(frozen=True)
class ToolSettings:
    """As the keys of `rollout` without `tool_`, and the section `sandbox`."""

    tools: str
    max_tool_seconds: float
    answer_characters: int
    answer_keep: str
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    schemas: tuple[Schema, ...] = ()
    """Those that an earlier process has derived: a replacement need not load transformers for them."""

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

    def shortened(self, outcome: Outcome) -> str:
        """The text for the model: valid as UTF-8, of answer_characters at most beside the mark of what is left out."""
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
