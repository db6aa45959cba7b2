"""Format of a response that is JSON of a schema."""

from __future__ import annotations

from dataclasses import dataclass

ANY_OBJECT = '{"type": "object"}'
"""Schema of any JSON object."""


@dataclass(frozen=True)
class JsonFormat:
    """Format of a response: JSON of a schema, behind the model's reasoning if the chat format has any.

    Example: schema='{"type": "integer"}', thought=("<think>", "</think>"), in_thought=True allows the response
    `I count them.</think>12`.

    schema: JSON schema as text. Engines enforce every keyword of the schemas that rollout.gateway.formats accepts.
    thought: tags around reasoning that may precede the JSON; None: the response has only the JSON.
    in_thought: the prompt has opened the reasoning.
    """

    schema: str = ANY_OBJECT
    thought: tuple[str, str] | None = None
    in_thought: bool = False
