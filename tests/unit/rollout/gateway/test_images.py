"""Images in the messages of programs: one placeholder per feature in every later request, also in edited histories."""

from __future__ import annotations

import base64
from collections.abc import Callable
from io import BytesIO
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.rules.gateway import check_texts
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.episodes.images import ToolImages
from mcore_rl.rollout.episodes.session import EpisodePrompt, Session
from mcore_rl.rollout.gateway import digests
from mcore_rl.rollout.gateway.answers import Answers
from mcore_rl.rollout.gateway.dialects import chat_completions, messages, responses
from mcore_rl.rollout.gateway.exchange import ChatRequest, RefusedError
from mcore_rl.types import EpisodeOutcome
from mcore_rl.types.chat import ChatMessage
from tests.unit.data.chat import made
from tests.unit.rollout.episodes.conftest import SetUp, Stage
from tests.unit.rollout.episodes.test_tool_images import TOKEN, Reader
from tests.unit.rollout.gateway.test_answers import Client, ask, counts_up, said, user

Play = Callable[[Client], tuple[Stage, EpisodeOutcome]]


def png(width: int) -> bytes:
    from PIL import Image

    file = BytesIO()
    Image.new("RGB", (width, 2)).save(file, "PNG")
    return file.getvalue()


SMALL, LARGE = png(2), png(400)


class SmallReader(Reader):
    """Reads an image as 3 features if it is SMALL, and otherwise as 5."""

    def process_images(self, sources: Any, where: str) -> Any:
        self.read += sources
        return super().process_images([b"abc" if source == SMALL else b"abcde" for source in sources], where)


def shown(image: bytes, text: str = "see") -> ChatMessage:
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}


@pytest.fixture
def play(stage: SetUp) -> Play:
    def run(client: Client) -> tuple[Stage, EpisodeOutcome]:
        async def episode(session: Session, prompt: EpisodePrompt) -> float:
            await client(Answers(session, session.context.offering, obeys=False, keeps_history=True))
            return 1.0

        set_up = stage(counts_up, episode, template=made.SHOWS_IMAGES)
        set_up.player.context.images = ToolImages(SmallReader(), None)
        (outcome,) = set_up.play()
        assert outcome.error is None, outcome.traceback
        return set_up, outcome

    return run


def runs_of_placeholders(outcome: EpisodeOutcome, number: int) -> list[int]:
    """Return the number of placeholders at each image, which must be where the trajectory says."""
    trajectory = outcome.trajectories[number]
    assert trajectory.images is not None
    tokens = np.concatenate([trajectory.prompt_ids, trajectory.token_ids])
    counts = [image.num_features(2) for image in trajectory.images.images]
    for start, count in zip(trajectory.images.starts, counts, strict=True):
        assert (tokens[start : start + count] == TOKEN).all()
    assert (tokens == TOKEN).sum() == sum(counts)
    return counts


def test_images_are_in_first_and_later_messages(play: Play) -> None:
    """Oracle: the rendering of the conversation, with one placeholder per image."""

    async def client(answers: Answers) -> None:
        first = (await ask(answers, shown(SMALL))).choices[0]
        history = [shown(SMALL), said(first), shown(LARGE, "and this?")]
        second = (await ask(answers, *history)).choices[0]
        await ask(answers, *history, said(second), user("why?"))
        assert answers.counts.rewritten == 0

    on, outcome = play(client)
    assert len(outcome.trajectories) == 1
    assert runs_of_placeholders(outcome, 0) == [3, 5]
    collapsed = on.text(outcome)
    for count in (5, 3):
        collapsed = collapsed.replace(
            made.IMAGE * count + made.IMAGE_END, made.IMAGE_TEXT.removeprefix("<|vision_start|>")
        )
    assert f"{made.IMAGE_TEXT}see{made.CLOSE}" in collapsed
    assert f"{made.IMAGE_TEXT}and this?{made.CLOSE}" in collapsed
    trajectory = outcome.trajectories[0]
    assert trajectory.trained is not None
    assert not trajectory.trained[trajectory.token_ids == TOKEN].any()


def test_an_edited_history_keeps_its_other_images(play: Play) -> None:
    async def client(answers: Answers) -> None:
        first = (await ask(answers, shown(SMALL))).choices[0]
        await ask(answers, shown(LARGE), said(first), shown(SMALL))

    _, outcome = play(client)
    assert [runs_of_placeholders(outcome, number) for number in (0, 1)] == [[3], [5, 3]]


def test_each_image_of_a_session_is_hashed_once(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    monkeypatch.setattr(digests, "image_digest", lambda image: hashed.append(image) or str(len(image)))

    async def client(answers: Answers) -> None:
        first = (await ask(answers, shown(SMALL))).choices[0]
        # A client sends the whole conversation with each request.
        await ask(answers, shown(bytes(bytearray(SMALL))), said(first), shown(LARGE))
        assert answers.counts.rewritten == 0

    play(client)
    assert hashed == [SMALL, LARGE]


def test_unreadable_images_are_refused(play: Play) -> None:
    async def client(answers: Answers) -> None:
        with pytest.raises(RefusedError, match="damaged") as caught:
            await ask(answers, shown(b"no image"))
        assert caught.value.status == 400
        assert await answers.count(ChatRequest([shown(SMALL)])) > 3
        assert not answers.session.images._placed, "a counted prompt is not sampled"
        await ask(answers, user("without"))

    play(client)


def test_a_model_without_vision_refuses_images(stage: SetUp) -> None:
    async def episode(session: Session, prompt: EpisodePrompt) -> float:
        answers = Answers(session, session.context.offering, obeys=False, keeps_history=True)
        with pytest.raises(RefusedError, match="the model reads text only"):
            await ask(answers, shown(SMALL))
        await ask(answers, user("without"))
        return 1.0

    (outcome,) = stage(counts_up, episode, template=made.SHOWS_IMAGES).play()
    assert outcome.error is None, outcome.traceback


DATA = base64.b64encode(SMALL).decode()
URI = f"data:image/png;base64,{DATA}"
TEXT = {"type": "text", "text": "see"}


def messages_of(module: ModuleType, body: dict[str, Any]) -> list[ChatMessage]:
    return list(module.read(body, "tiny", lambda reply: None).request.messages)


def user_parts(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


@pytest.mark.parametrize(
    ("module", "body"),
    [
        (chat_completions, user_parts({"type": "image_url", "image_url": {"url": URI}}, TEXT)),
        (
            messages,
            user_parts({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}, TEXT),
        ),
        (
            responses,
            {
                "input": [
                    {
                        "role": "user",
                        "content": [{"type": "input_image", "image_url": URI}, TEXT | {"type": "input_text"}],
                    }
                ]
            },
        ),
    ],
)
def test_dialects_read_images_as_bytes(module: ModuleType, body: dict[str, Any]) -> None:
    assert messages_of(module, body) == [shown(SMALL)]


def test_results_of_tools_have_images_in_all_dialects() -> None:
    image, source = {"type": "image_url", "image_url": {"url": URI}}, {"type": "base64", "data": DATA}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": source}]}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": URI}]}
    for module, body in (
        (chat_completions, {"messages": [{"role": "tool", "tool_call_id": "c", "content": [image]}]}),
        (messages, user_parts(result)),
        (responses, {"input": [output]}),
    ):
        (found,) = messages_of(module, body)
        assert (found["role"], found["content"]) == ("tool", [{"type": "image", "image": SMALL}])


@pytest.mark.parametrize(
    ("module", "part", "problem"),
    [
        (chat_completions, {"type": "image_url", "image_url": {"url": "http://host/a.png"}}, "must be a `data:` URI"),
        (chat_completions, {"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}, "no valid base64"),
        (responses, {"type": "input_image", "file_id": "file-1"}, "must be a `data:` URI"),
        (messages, {"type": "image", "source": {"type": "url", "url": "http://host/a.png"}}, "must be of type base64"),
    ],
)
def test_addresses_of_images_are_refused(module: ModuleType, part: Any, problem: str) -> None:
    with pytest.raises(RefusedError, match=problem):
        messages_of(module, {"input": user_parts(part)["messages"], **user_parts(part)})


def test_rows_with_images_are_rejected_by_the_key_of_their_data() -> None:
    check_texts(RolloutConfig(episode="gateway"), {"data.train": False})
    check_texts(RolloutConfig(), {"data.train": True})
    with pytest.raises(ConfigError, match=r"rollout\.episode=gateway gives no images .* rows of data\.val"):
        check_texts(RolloutConfig(episode="gateway"), {"data.train": False, "data.val": True})
