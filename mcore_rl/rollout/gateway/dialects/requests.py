"""Parts of requests that several dialects have: sampling parameters, tools, and messages."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache

from mcore_rl.data.chat.messages import normalized
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.rollout.gateway.dialects.fields import Fields, Refused
from mcore_rl.rollout.gateway.exchange import RefusedError
from mcore_rl.rollout.tools.schemas import checked_schema
from mcore_rl.types.chat import ChatMessage, ContentPart, ToolSchema
from mcore_rl.types.json import JsonObject, JsonValue

IMAGE = "image"
MAX_CHOICES = 128
MAX_TOKENS = 2**31 - 1
MAX_TEMPERATURE = 2.0
MAX_ROLE = 64
"""Maximum number of characters of a role."""

COMMON_FIELDS = frozenset({"temperature", "top_p", "top_k", "min_p", "metadata"})
"""Fields of every dialect; OpenAI's clients send top_k and min_p by `extra_body`."""

REFUSED_SAMPLING: Mapping[str, Refused] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens"), Refused((0,))),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), Refused((1,))),
    **dict.fromkeys(("logit_bias", "vllm_xargs"), Refused(({},))),
    **dict.fromkeys(("bad_words", "stop_token_ids", "allowed_token_ids"), Refused(([],))),
    **dict.fromkeys(("ignore_eos", "use_beam_search"), Refused((False,))),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        Refused(remedy="leave it out, or send `response_format`"),
    ),
}
"""Sampling parameters of inference engines that change the distribution or cannot be trained on."""


def role(fields: Fields) -> str:
    """Return the agent that sends a request: `metadata.role`, "" without one. Raises: RefusedError."""
    metadata = fields.mapping("metadata")
    found = "" if metadata is None else metadata.text("role", "")
    if len(found) > MAX_ROLE:
        raise RefusedError(400, f"metadata.role has {len(found)} characters; use at most {MAX_ROLE}")
    return found


def sampling(fields: Fields, *, limits: Sequence[str], stop: str | None) -> dict[str, object]:
    """Return the overrides of SamplingOptions in a request.

    limits: names of the maximum number of sampled tokens; two different values are refused.
    stop: name of the stop strings.

    Raises: RefusedError.
    """
    found: dict[str, object] = {
        "temperature": fields.number("temperature", 0.0, MAX_TEMPERATURE),
        "top_p": fields.number("top_p", 0.0, 1.0),
        "top_k": fields.integer("top_k", -1, MAX_TOKENS),
        "min_p": fields.number("min_p", 0.0, 1.0),
    }
    if found["top_p"] == 0:
        raise fields.wrong("top_p", "a number above 0")
    if found["top_k"] == 0:
        found["top_k"] = -1  # both mean no limit
    given = {name: value for name in limits if (value := fields.integer(name, 1, MAX_TOKENS)) is not None}
    if len(set(given.values())) > 1:
        raise RefusedError(400, f"{' and '.join(given)} differ; send one of them")
    found["max_response_tokens"] = next(iter(given.values()), None)
    found["stop"] = fields.texts(stop) if stop else None
    return {name: value for name, value in found.items() if value is not None}


def tool_schema(fields: Fields, parameters: str) -> ToolSchema:
    """Return the OpenAI schema of a function; `parameters` is the name of the field with its JSON schema.

    `strict` is dropped, since the model's arguments are not constrained, and so are fields for the vendor's servers:
    chat templates would show them to the model.

    Raises: RefusedError for an invalid schema.
    """
    function: JsonObject = {
        "name": fields.text("name"),
        "description": fields.text("description", ""),
        "parameters": fields.get(parameters),
    }
    try:
        return _checked(json.dumps(function))
    except ConfigError as error:
        raise RefusedError(400, f"{fields.path}: {error}") from None


@lru_cache(maxsize=1024)
def _checked(function: str) -> ToolSchema:
    # Clients send the same tools with every request, and checking a JSON schema takes milliseconds.
    return checked_schema("the schema", {"type": "function", "function": json.loads(function)})


def check_tool_choice(choice: JsonValue, name: str, *, accepted: Sequence[JsonValue]) -> None:
    """Raise RefusedError unless the choice is accepted: sampling cannot be forced to a call."""
    if choice is not None and choice not in accepted:
        raise RefusedError(400, f"{name} cannot force a call here; set it to auto or none")


def messages_of(messages: Sequence[JsonObject], where: str) -> list[ChatMessage]:
    """Return messages in the form of ChatRequest. Raises: RefusedError; `where` starts its text."""
    if not messages:
        raise RefusedError(400, f"{where} has no messages; send at least one")
    try:
        made = normalized([*map(_without_images, messages)], where)
    except DataError as error:
        raise RefusedError(400, str(error)) from None
    return [_with_images(each, sent) for each, sent in zip(made, messages, strict=True)]


def _without_images(message: JsonObject) -> JsonObject:
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    return {**message, "content": [part for part in parts if isinstance(part, dict) and "text" in part]}


def _with_images(message: ChatMessage, sent: JsonObject) -> ChatMessage:
    """Return the message with the images of its content as it was sent."""
    parts = sent.get("content")
    if not isinstance(parts, list) or not any(isinstance(part, dict) and IMAGE in part for part in parts):
        return message
    content: list[ContentPart] = [
        {"type": "text", "text": str(part["text"])}
        if "text" in part
        else {"type": IMAGE, "image": base64.b64decode(str(part[IMAGE]))}
        for part in parts
        if isinstance(part, dict)
    ]
    return {**message, "content": content}


def image_part(part: Fields, kind: str) -> JsonObject:
    """Return the part of a content with an image, in base64. `kind`: type of the part.

    Raises: RefusedError for an address, which would have to be downloaded, and for a file of the vendor.
    """
    if kind == "image":  # Anthropic
        source = part.mapping("source")
        if source is None or source.text("type") != "base64":
            raise RefusedError(400, f"{part.path}.source must be of type base64; send the bytes of the image")
        data = source.text("data")
    else:
        fields = part.mapping("image_url") if isinstance(part.get("image_url"), dict) else None
        start, separator, data = (part.text("image_url", "") if fields is None else fields.text("url", "")).partition(
            ","
        )
        if not (start.startswith("data:") and start.endswith(";base64") and separator):
            raise RefusedError(400, f"{part.path}.image_url must be a `data:` URI with base64; send the image's bytes")
    try:
        base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise RefusedError(400, f"{part.path} has no valid base64 data: {error}") from None
    return {"type": IMAGE, IMAGE: data}


def text_parts(fields: Fields, name: str, kinds: Mapping[str, str], *, images: Sequence[str] = ()) -> JsonValue:
    """Return a content: None, a string, or a list of parts.

    kinds: accepted types of parts and the names of their texts. images: accepted types of images.

    Raises: RefusedError for other images, files and sound.
    """
    content = fields.get(name)
    if content is None or isinstance(content, str):
        return content
    parts: list[JsonValue] = []
    for part in fields.objects(name):
        kind = part.text("type")
        if kind in images:
            parts.append(image_part(part, kind))
            continue
        if kind not in kinds:
            allowed = "text and images are" if images else "text is"
            raise RefusedError(400, f"{part.path} is of type {kind[:40]!r}; only {allowed} supported, remove it")
        parts.append({"type": "text", "text": part.text(kinds[kind])})
    return parts


def joined(content: JsonValue) -> str:
    """Join text parts without a separator: parts of a reply were one text when the model sampled them."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "".join(str(part["text"]) for part in content if isinstance(part, dict))
