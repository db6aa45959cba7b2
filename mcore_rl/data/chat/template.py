"""Check of a chat template for multi-turn episodes, by rendering, before a run starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.data.chat.conversation import QUESTION, Conversation, SampledCall
from mcore_rl.data.chat.messages import answer_content, call_id
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.types.chat import ChatMessage, tool_name

TEMPLATE = "the chat template of model.tokenizer_path (or model.hf_path)"
SYSTEM: ChatMessage = {"role": "system", "content": "Answer."}
HISTORIES: tuple[tuple[ChatMessage, ...], ...] = (
    (QUESTION,),
    (SYSTEM, QUESTION),
    (SYSTEM, QUESTION, {"role": "assistant", "content": "Indeed."}, QUESTION),
)
THOUGHT = "thought0"
SHOWN_CHARACTERS = 60
TAG_CHARACTERS = 12


@dataclass(frozen=True)
class TemplateFacts:
    """Properties of a chat template.

    parallel_calls: whether a turn may call more than one tool.
    rewrites: sentences about earlier turns that are rendered differently when messages follow. A served model then
    reads other text than in training.
    dated: whether the template writes the current date.
    """

    parallel_calls: bool = True
    rewrites: tuple[str, ...] = ()
    dated: bool = False


def examine(conversation: Conversation, *, tools: bool, users: bool) -> TemplateFacts:
    """Check that answers of `tools` and further messages of `users` can follow a sampled turn.

    Raises: ConfigError naming the unsupported feature of the template.
    """
    if not conversation.has_template:
        if tools:
            raise ConfigError(
                "rollout.tools needs a chat template, which shows tools to the model, but the tokenizer of "
                "model.tokenizer_path has none; add a chat_template.jinja to its directory"
            )
        return TemplateFacts()
    parallel, rewrites = True, []
    if tools:
        parallel = _examine_tools(conversation)
        rewrites += _rewritten(conversation, [_answer(conversation, 0)], "the answer of a tool")
    if users:
        _examine_tail(conversation, [_user("answer0")], ["answer0"], "a further message of the user")
        rewrites += _rewritten(conversation, [_user("answer0")], "a further message of the user")
    if tools and users:
        answer = _answer(conversation, 0)
        call = conversation.turn("", calls=[_call(conversation)])
        rewrites += _rewritten(conversation, [_user("answer0")], "after tools, a message of the user", [call, answer])
    return TemplateFacts(parallel, tuple(rewrites), "strftime_now" in str(conversation.tokenizer.chat_template))


def image_fault(conversation: Conversation, image_text: str) -> str | None:
    """Return the reason why answers of tools cannot contain images; None if the template shows them.

    image_text: text of an image in the prompts of the model, with a single placeholder.
    """
    answer = _answer(conversation, 0)
    answer["content"] = answer_content("answer0", [b""])
    # Some templates can number the images of a conversation: then the text depends on earlier ones.
    with_image: ChatMessage = {"role": "user", "content": answer_content("?", [b""])}
    try:
        histories = [*_possible(conversation), (with_image,)]
        tails = {conversation.text_after_turn(before, [answer]) for before in histories}
    except DataError as error:
        return f"{TEMPLATE} cannot render an image in the answer of a tool: {error}"
    if len(tails) > 1 or f"{image_text}answer0" not in tails.pop():
        return (
            f"{TEMPLATE} does not write {image_text!r} for an image in the answer of a tool; use a template that shows "
            "the parts of such an answer, or a tool that answers with text"
        )
    return None


def _examine_tools(conversation: Conversation) -> bool:
    """Check calls of tools. Returns whether a turn may have two calls."""
    prompt = conversation.render([QUESTION])
    hidden = [name for name in map(tool_name, conversation.tools) if name not in prompt]
    if hidden:
        raise ConfigError(
            f"rollout.tools: {TEMPLATE} does not show tools to the model ({', '.join(hidden)} not in the prompt); use "
            "a model or a template that does"
        )
    _examine_tail(conversation, [_answer(conversation, 0)], ["answer0"], "the answer of a tool")
    two = [_answer(conversation, 0), _answer(conversation, 1)]
    try:
        _examine_tail(conversation, two, ["answer0", "answer1"], "the answers of two tools")
    except ConfigError:
        return False
    return True


def _examine_tail(conversation: Conversation, new: Sequence[ChatMessage], texts: Sequence[str], what: str) -> None:
    tails = set()
    try:
        # ids_after_turn renders one dummy history, so the text after a turn must not depend on what precedes it.
        for before in _possible(conversation):
            for reasoning in (None, THOUGHT):
                tails.add(conversation.text_after_turn(before, new, reasoning=reasoning))
    except DataError as error:
        raise ConfigError(f"{TEMPLATE} cannot render {what} after a turn of the model: {error}") from error
    if len(tails) > 1:
        raise ConfigError(f"{TEMPLATE} renders {what} in {len(tails)} ways, depending on the earlier messages")
    tail = tails.pop()
    lacking = [text for text in texts if text not in tail]
    if lacking:
        raise ConfigError(f"{TEMPLATE} drops {what}: it is not in the rendered text")
    if not conversation.ends_turn_before(tail, texts[0]):
        raise ConfigError(
            f"{TEMPLATE} ends the model's turn with a token that does not end a response (eos_token of the tokenizer, "
            "eos_token_id of generation_config.json): the model would continue and write the next turn itself; add the "
            "template's token to eos_token_id in generation_config.json"
        )


def _possible(conversation: Conversation) -> list[tuple[ChatMessage, ...]]:
    """Return the histories that the template accepts: some templates reject system messages."""
    try:
        conversation.render([SYSTEM, QUESTION])
    except DataError:
        # The first history, and the third without its system message.
        return [HISTORIES[0], (QUESTION, *HISTORIES[2][2:])]
    return list(HISTORIES)


def _rewritten(
    conversation: Conversation, new: Sequence[ChatMessage], what: str, between: Sequence[ChatMessage] = ()
) -> list[str]:
    """Describe the text of a model turn (after `between`) that changes when the messages `new` follow it."""
    found = {}
    calls = [_call(conversation) for message in new if message["role"] == "tool"]
    for reasoning, having in ((None, ""), (THOUGHT, " with reasoning")):
        turn = conversation.turn("" if calls else "said0", reasoning=reasoning, calls=calls)
        try:
            before = conversation.render([QUESTION, *between, turn], prompts=False)
            after = conversation.render([QUESTION, *between, turn, *new])
        except DataError:
            continue
        if not after.startswith(before):
            place = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
            begins = before.rfind("<", max(0, place - TAG_CHARACTERS), place + 1)
            place = place if begins < 0 else begins  # show the whole tag
            was, becomes = (repr(text[place : place + SHOWN_CHARACTERS]) for text in (before, after))
            found[having] = f"when {what} follows a turn{having}, {was} of it becomes {becomes}"
    return list(found.values())


def _user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def _call(conversation: Conversation) -> SampledCall:
    return {"name": conversation.some_tool(), "arguments": {"value": "?"}}


def _answer(conversation: Conversation, number: int) -> ChatMessage:
    name, content = conversation.some_tool(), f"answer{number}"
    return {"role": "tool", "name": name, "tool_call_id": call_id(number), "content": content}
