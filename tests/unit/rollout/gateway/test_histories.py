"""Conversations that are continued by the id of a reply."""

from __future__ import annotations

import copy

from mcore_rl.rollout.gateway.histories import MAX_REPLIES, MIN_SESSIONS, Histories
from mcore_rl.types.chat import ChatMessage


def conversation(length: int) -> list[ChatMessage]:
    return [{"role": "user", "content": f"message {number}"} for number in range(length)]


def test_conversations_share_equal_messages() -> None:
    histories = Histories(lambda session: True)
    for length in range(1, 20):
        histories.keep("s", str(length), copy.deepcopy(conversation(length)))
    edited: list[ChatMessage] = [{"role": "user", "content": "edited"}, *copy.deepcopy(conversation(20)[1:])]
    histories.keep("s", "edited", edited)
    kept = [histories.find("s", str(length)) for length in range(1, 20)]
    assert [list(each or ()) for each in kept] == [conversation(length) for length in range(1, 20)]
    last = histories.find("s", "edited")
    assert list(last or ()) == edited
    assert len({id(message) for each in (*kept, last) for message in each or ()}) == 19 + 1 + 1


def test_oldest_replies_of_a_session_are_forgotten() -> None:
    histories = Histories(lambda session: True)
    for number in range(MAX_REPLIES + 1):
        histories.keep("s", str(number), conversation(1))
    histories.keep("t", "other", conversation(1))
    assert histories.find("s", "0") is None
    assert histories.find("s", "1") is not None
    assert histories.find("t", "1") is None


def test_conversations_of_ended_sessions_are_dropped() -> None:
    ended: set[str] = set()
    histories = Histories(lambda session: session not in ended)
    for number in range(100):
        histories.keep(f"s{number}", "r", conversation(1))
        ended.add(f"s{number}")
        assert len(histories) <= MIN_SESSIONS


def test_conversations_of_many_sessions_take_linear_time() -> None:
    looks = list[str]()
    histories = Histories(lambda session: not looks.append(session))  # type: ignore[func-returns-value]
    for number in range(1000):
        histories.keep(f"s{number}", "r", conversation(1))
    assert len(histories) == 1000
    assert len(looks) <= 1000 + 1000
