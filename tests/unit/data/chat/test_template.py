"""What a chat template cannot do, or does to earlier turns, is known before a run."""

from __future__ import annotations

import pytest

from mcore_rl.data.chat.conversation import Conversation
from mcore_rl.data.chat.template import TemplateFacts, examine
from mcore_rl.errors import ConfigError
from tests.unit.data.chat import made


def facts(
    template: str | None, *, tools: bool = True, users: bool = False, stops: tuple[str, ...] = ()
) -> TemplateFacts:
    tokenizer = made.tokenizer(template)
    names = stops or (made.CLOSE, made.OTHER_STOP)
    talk = Conversation(tokenizer, [made.LOOK] if tools else [], made.stop_ids(tokenizer, names))
    return examine(talk, tools=tools, users=users)


@pytest.mark.parametrize(
    "template", [made.STABLE, made.TEXT_ARGUMENTS, made.NO_SYSTEM], ids=["stable", "text arguments", "no system"]
)
def test_templates_that_only_grow_are_taken_as_they_are(template: str) -> None:
    assert facts(template, users=True) == TemplateFacts()


def test_a_template_without_ends_of_turns_is_taken_with_the_roles_as_stops() -> None:
    assert facts(made.NEXT_ROLE_ENDS, users=True, stops=(made.TOOL_TURN, made.USER_TURN)) == TemplateFacts()


def test_what_is_rewritten_is_named_with_what_becomes_of_it() -> None:
    (once,) = facts(made.FORGETS_REASONING).rewrites
    assert "the answer of a tool follows a turn with reasoning, '<think>thought0</think>" in once
    assert "becomes '<tool_call>" in once
    assert len(facts(made.FORGETS_REASONING, users=True).rewrites) == 3


def test_one_call_at_a_time_and_dates_are_noticed() -> None:
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
def test_what_cannot_work_is_refused(template: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        facts(template)


def test_a_turn_that_ends_with_a_token_that_ends_no_response_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"add the template's token to eos_token_id in generation_config\.json"):
        facts(made.STABLE, stops=(made.OTHER_STOP,))


def test_without_a_template_users_can_answer() -> None:
    assert facts(None, tools=False, users=True) == TemplateFacts()
