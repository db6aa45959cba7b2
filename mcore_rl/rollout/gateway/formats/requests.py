"""Formats in requests of all dialects."""

from __future__ import annotations

from mcore_rl.rollout.gateway.dialects.fields import Fields
from mcore_rl.rollout.gateway.exchange import RefusedError
from mcore_rl.rollout.gateway.formats.schemas import engine_schema
from mcore_rl.types.json_format import ANY_OBJECT

KINDS = ("text", "json_object", "json_schema")


def requested_schema(form: Fields | None, *, nested: bool, has_tools: bool) -> str | None:
    """Return the JSON schema that a request's format asks for, None for any text.

    form: `response_format`, `text.format` of /v1/responses, or `output_config.format` of /v1/messages.
    nested: the schema is inside `json_schema`.
    `strict` is ignored: every schema is enforced.

    Raises: RefusedError, also for tools with a format: a call of a tool would not conform to it.
    """
    if form is None or (kind := form.text("type")) == "text":
        return None
    if kind not in KINDS:
        raise RefusedError(400, f"{form.path}.type is {kind[:40]!r}; types are: {', '.join(KINDS)}")
    if has_tools:
        raise RefusedError(400, f"`{form.path}` and `tools` cannot be combined here; leave out one of them")
    if kind == "json_object":
        return ANY_OBJECT
    named = form.mapping("json_schema") if nested else form
    if named is None or named.get("schema") is None:
        raise RefusedError(
            400, f"{(named or form).name('schema' if named else 'json_schema.schema')} is absent; send it"
        )
    named.flag("strict", True)
    return engine_schema(named.get("schema"), named.name("schema"))
