"""Images in answers of tools: the template's placeholders, one image per run of them, in every later request."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mcore_rl.errors import DataError
from mcore_rl.rollout.episodes.builtin import ToolEpisode
from mcore_rl.rollout.episodes.images import EpisodeImages, ToolImages
from mcore_rl.rollout.episodes.sequences import SequenceBook
from mcore_rl.rollout.episodes.session import EpisodePrompt, Session
from mcore_rl.rollout.tools.interface import ToolResult
from mcore_rl.types import Completion, ImageSource, ProcessedImage, PromptImages
from tests.unit.data.chat import made
from tests.unit.rollout.episodes.conftest import FakeTools, SetUp, Stage
from tests.unit.rollout.episodes.scripted import call, once

TOKEN = made.tokenizer(None).convert_tokens_to_ids(made.IMAGE)
ROW = PromptImages.of(np.zeros((4, 6), np.float32), np.array([[1, 2, 2]], np.int32), np.array([0], np.int32))


class Reader:
    """Reads an image of n bytes as n features, with the first byte as its pixels."""

    image_token = TOKEN

    def __init__(self) -> None:
        self.read: list[ImageSource] = []

    def process_images(self, sources: Any, where: str) -> tuple[ProcessedImage, ...]:
        if b"narrow" in sources:
            raise DataError(f"{where}: the image processor rejects an image")
        self.read += sources
        grids = [np.array([1, 2, 2 * len(source)], np.int32) for source in sources]
        return tuple(
            ProcessedImage.of(np.full((grid.prod(), 6), source[0], np.float32), grid)
            for source, grid in zip(sources, grids, strict=True)
        )

    def num_placeholders(self, image: ProcessedImage) -> int:
        return image.num_features(2)


def staged(stage: SetUp, say: Any, episode: Any, *results: ToolResult, **keys: Any) -> tuple[Stage, Reader]:
    answers, reader = iter(results), Reader()
    on = stage(say, episode, tools=FakeTools(lambda _: next(answers)), template=made.SHOWS_IMAGES, **keys)
    on.player.context.images = ToolImages(reader, None)
    return on, reader


def test_tool_images_are_in_the_sequence_of_the_template(stage: SetUp) -> None:
    """Oracle: the rendering of the conversation, with one placeholder per image."""
    results = ToolResult("found", images=(b"abc", b"de")), ToolResult("again", images=(b"abc",))

    def say(text: str) -> str:
        seen = text.count("<|im_start|>tool")
        return f"{call(str(seen)) if seen < 2 else 'done'}{made.CLOSE}"

    on, reader = staged(stage, say, ToolEpisode(), *results)
    (outcome,) = on.play()
    assert outcome.error is None
    assert reader.read == [b"abc", b"de"]  # each once
    (trajectory,) = outcome.trajectories
    tokens = np.concatenate([trajectory.prompt_ids, trajectory.token_ids])
    assert trajectory.images is not None
    assert [image.grid.tolist() for image in trajectory.images.images] == [[1, 2, 6], [1, 2, 4], [1, 2, 6]]
    runs = [tokens[start : start + count] for start, count in zip(trajectory.images.starts, (3, 2, 3), strict=True)]
    assert all((run == TOKEN).all() for run in runs)
    assert (tokens == TOKEN).sum() == 8
    rendered = on.player.context.conversation.render(list(outcome.messages), prompts=False)
    collapsed = on.text(outcome)
    for count in (3, 2):
        collapsed = collapsed.replace(made.IMAGE * count + made.IMAGE_END, made.IMAGE + made.IMAGE_END)
    assert collapsed + "\n" == rendered
    # Tokens of an answer are not trained.
    assert trajectory.trained is not None
    assert not trajectory.trained[trajectory.token_ids == TOKEN].any()


def test_tool_images_follow_the_images_of_the_row(stage: SetUp) -> None:
    on, _ = staged(stage, once(call("it")), ToolEpisode(), ToolResult("", images=(b"abc",)))
    (attempt,) = on.attempts()
    (outcome,) = on.play(attempts=[replace(attempt, request=replace(attempt.request, images=ROW))])
    (trajectory,) = outcome.trajectories
    assert trajectory.images is not None
    # The image of the row is shared with the other responses, not copied.
    assert trajectory.images.images[0] is ROW.images[0]
    tokens = np.concatenate([trajectory.prompt_ids, trajectory.token_ids])
    assert trajectory.images.starts.tolist() == [0, np.flatnonzero(tokens == TOKEN)[0]]


def test_equal_tokens_with_other_images_have_other_seeds(stage: SetUp) -> None:
    """A response of a lost engine is not continued with another image."""
    seeds = []
    for image in (b"abc", b"xyz", b"abc"):
        on, _ = staged(stage, once(call("it")), ToolEpisode(), ToolResult("", images=(image,)))
        on.play()
        seeds.append([seed for name, seed in on.engine.submitted.items() if "/" in name])
    assert seeds[0] == seeds[2] != seeds[1]


def test_tool_episode_one_call_per_turn_keeps_the_image(stage: SetUp) -> None:
    say = once(call("it") + call("more"))
    on, _ = staged(stage, say, ToolEpisode(), ToolResult("found", images=(b"abc",)))
    on.player.context.parallel_calls = False
    (outcome,) = on.play()
    assert outcome.error is None
    content = outcome.messages[2]["content"]
    assert content[0] == {"type": "image", "image": b"abc"}
    assert content[1]["text"].startswith("found\n\nError: a message may call one tool")


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (ToolImages(), "tool look answered with images, but the model reads text only"),
        (ToolImages(Reader(), "the template does not show them"), "images, but the template does not show them"),
    ],
)
def test_tool_images_of_other_runs_fail_the_episode(stage: SetUp, images: ToolImages, message: str) -> None:
    on, _ = staged(stage, once(call("it")), ToolEpisode(), ToolResult("", images=(b"abc",)))
    on.player.context.images = images
    (outcome,) = on.play()
    assert message in str(outcome.error)


def test_tool_image_that_the_processor_rejects_is_an_error_of_the_tool(stage: SetUp) -> None:
    on, _ = staged(stage, once(call("it")), ToolEpisode(), ToolResult("", reward=0.5, images=(b"narrow",)))
    (outcome,) = on.play()
    assert (outcome.error, outcome.tool_errors, outcome.extra["tool_rewards"]) == (None, 1, [0.5])
    assert outcome.messages[2]["content"] == "Error: tool look: the image processor rejects an image"


async def looks(session: Any, row: Any, change: Any) -> float:
    """Call the tool after a turn, and continue with changed tokens."""
    sampled = await session.generate(row.token_ids)
    answer = await session.call("look", {"q": "it"})
    shown = session.next_prompt([{"role": "tool", "content": answer.content}])
    begun = len(row.token_ids) + len(sampled.token_ids)
    await session.generate(change(shown[:begun], shown[begun:]))
    return 1.0


@pytest.mark.parametrize(
    "change",
    [
        lambda before, tail: [*before, 0, *tail],
        lambda before, tail: before[:-1] + tail,
        lambda before, tail: before + tail[: tail.index(TOKEN) + 2],
        lambda before, tail: before + tail + [TOKEN],
    ],
)
def test_session_placeholders_at_another_place_are_an_error(stage: SetUp, change: Any) -> None:
    async def run(session: Any, row: Any) -> float:
        return await looks(session, row, change)

    on, _ = staged(stage, lambda _: f"said{made.CLOSE}", run, ToolResult("", images=(b"abc",)))
    (outcome,) = on.play()
    assert "placeholders of an image at another place" in str(outcome.error)


def test_session_part_of_an_image_of_a_sequence_is_an_error(stage: SetUp) -> None:
    async def run(session: Session, row: EpisodePrompt) -> float:
        await looks(session, row, lambda before, tail: before + tail)
        known = session.book.sequences[0].tokens.tolist()
        await session.generate(known[: known.index(TOKEN) + 2])
        return 1.0

    on, _ = staged(stage, lambda _: f"said{made.CLOSE}", run, ToolResult("", images=(b"abc",)))
    (outcome,) = on.play()
    assert "placeholders of an image at another place" in str(outcome.error)


def test_session_sampled_placeholders_and_branches_keep_their_images(stage: SetUp) -> None:
    """The policy samples a placeholder, which is an ordinary token in the next turn and in a branch."""

    async def run(session: Any, row: Any) -> float:
        await looks(session, row, lambda before, tail: before + tail)
        first = session.book.sequences[0].tokens.tolist()
        await session.generate([*first, 0])
        await session.generate([*first[:-2], 0])
        await session.generate(row.token_ids)
        return 1.0

    on, _ = staged(stage, lambda _: f"a{made.IMAGE}b{made.CLOSE}", run, ToolResult("", images=(b"abc",)))
    (outcome,) = on.play()
    assert outcome.error is None
    counts = [0 if each.images is None else len(each.images.images) for each in outcome.trajectories]
    assert counts == [1, 1, 0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_session_branches_at_one_place_have_their_own_images(stage: SetUp, order: tuple[int, int]) -> None:
    """The placeholders of the small image are the first ones of the large image."""
    sizes: list[list[list[int]]] = []

    async def run(session: Session, row: EpisodePrompt) -> float:
        await session.generate(row.token_ids)
        first = session.book.sequences[0].tokens.tolist()
        answers = [(await session.call("look", {"q": "it"})).content for _ in range(2)]
        tails = {number: session.render([{"role": "tool", "content": answers[number]}]) for number in order}
        for number in (0, 1):
            await session.generate(first + tails[number])
        for sequence in session.book.sequences[-2:]:
            assert sequence.images is not None
            sizes.append([image.grid.tolist() for image in sequence.images.images])
        return 1.0

    results = (ToolResult("", images=(image,)) for image in (b"ab", b"abcd"))
    on, _ = staged(stage, lambda _: f"said{made.CLOSE}", run, *results)
    (outcome,) = on.play()
    assert outcome.error is None
    assert sizes == [[[1, 2, 4]], [[1, 2, 8]]]


def test_session_image_that_no_tool_returned_is_an_error(stage: SetUp) -> None:
    async def run(session: Any, row: Any) -> float:
        await session.generate(row.token_ids)
        session.render([{"role": "tool", "content": [{"type": "image", "image": b"own"}]}])
        return 1.0

    on, _ = staged(stage, lambda _: f"said{made.CLOSE}", run)
    (outcome,) = on.play()
    assert "an image that session.call did not return" in str(outcome.error)


def test_images_of_a_branch_do_not_copy_other_branches() -> None:
    book, prompt = SequenceBook(), np.arange(30_000, dtype=np.int32)
    prompt[20_000] = TOKEN  # as a policy may sample it
    for number in range(100):
        ids, one = np.append(prompt, np.int32(number)), np.zeros(1, np.int32)
        book.add(ids, Completion("x", one, one.astype(np.float32), "stop", one), 1.0)
    images = EpisodeImages(ToolImages(Reader(), None), prompt[:5], None)
    tracemalloc.start()
    assert images.inside(ids, book.sequences) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6, "bytes; one sequence has 0.12e6"
    with pytest.raises(DataError, match="placeholders of an image at another place"):
        images.inside(ids, ())
