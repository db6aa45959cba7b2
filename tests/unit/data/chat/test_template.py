"""Unsupported features of a chat template, and changes of earlier turns, are found before a run."""

from __future__ import annotations

import pytest

from mcore_rl.data.chat.conversation import Conversation
from mcore_rl.data.chat.template import TemplateFacts, examine, image_fault
from mcore_rl.errors import ConfigError
from tests.unit.data.chat import made


def facts(
    template: str | None, *, tools: bool = True, users: bool = False, stops: tuple[str, ...] = ()
) -> TemplateFacts:
    tokenizer = made.tokenizer(template)
    names = stops or (made.CLOSE, made.OTHER_STOP)
    talk = Conversation(tokenizer, [made.LOOK] if tools else [], made.stop_ids(tokenizer, names))
    return examine(talk, tools=tools, users=users)


def test_examine_append_only_templates_have_no_rewrites() -> None:
    for template in (made.STABLE, made.TEXT_ARGUMENTS, made.NO_SYSTEM):
        assert facts(template, users=True) == TemplateFacts()
    assert facts(made.NEXT_ROLE_ENDS, users=True, stops=(made.TOOL_TURN, made.USER_TURN)) == TemplateFacts()
    assert facts(None, tools=False, users=True) == TemplateFacts()


def test_examine_rewritten_turns_are_described() -> None:
    (once,) = facts(made.FORGETS_REASONING).rewrites
    assert "the answer of a tool follows a turn with reasoning, '<think>thought0</think>" in once
    assert "becomes '<tool_call>" in once
    assert len(facts(made.FORGETS_REASONING, users=True).rewrites) == 3


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (made.SHOWS_IMAGES, None),
        (made.NUMBERS_IMAGES, "does not write '<|vision_start|><|image_pad|><|vision_end|>' for an image"),
        (made.STABLE, "does not write"),  # it prints the list
        (made.STRINGS_OR_PARTS, "does not write"),
        (made.NO_NULLS, "cannot render an image in the answer of a tool: "),
    ],
)
def test_image_fault_names_templates_without_images(template: str, fault: str | None) -> None:
    tokenizer = made.tokenizer(template)
    found = image_fault(Conversation(tokenizer, [made.LOOK], made.stop_ids(tokenizer)), made.IMAGE_TEXT)
    assert found is None if fault is None else fault in str(found)


def test_examine_detects_single_calls_and_dates() -> None:
    assert not facts(made.ONE_CALL).parallel_calls
    assert facts(made.DATED).dated
    assert not facts(made.STABLE).dated


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (made.HIDES_TOOLS, r"rollout\.tools: .* does not show tools to the model \(look"),
        (made.DROPS_ANSWERS, "drops the answer of a tool"),
        (made.BY_POSITION, "renders the answer of a tool in 2 ways|in 3 ways"),
        (None, r"rollout\.tools needs a chat template"),
    ],
    ids=["hides tools", "drops answers", "by position", "none"],
)
def test_examine_unusable_template_is_rejected(template: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        facts(template)


def test_examine_turn_end_that_is_no_stop_token_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"add the template's token to eos_token_id in generation_config\.json"):
        facts(made.STABLE, stops=(made.OTHER_STOP,))
