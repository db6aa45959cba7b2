"""An episode's engine calls become sequences in which every token is marked as sampled or not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.rollout.episodes.sequences import SequenceBook
from mcore_rl.rollout.episodes.shared_tokens import SharedTokens
from mcore_rl.types import NOT_SAMPLED, Completion, TokenSets, Trajectory


def sampled(*ids: int, version: int = 0, experts: int | None = None, before: int = 0) -> Completion:
    """Build a completion; with `experts`, each row has this many, for all tokens but the last."""
    rows = None if experts is None else np.full((before + len(ids) - 1, 1, 1), experts, np.uint8)
    array = np.array(ids, np.int32)
    return Completion("x", array, -array.astype(np.float32), "stop", 0 * array + version, rows)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def trajectories(book: SequenceBook) -> list[Trajectory]:
    return [sequence.trajectory() for sequence in book.sequences]


def test_sequence_book_turns_extend_one_sequence() -> None:
    book = SequenceBook()
    first = book.add(ids(1, 2), sampled(3, 4), 1.0)
    first.reward(0.25)
    again = book.add(ids(1, 2, 3, 4, 9, 9, 9), sampled(5, version=2), 1.0)
    again.reward(0.5)
    assert again is first
    (trajectory,) = trajectories(book)
    assert trajectory.prompt_ids.tolist() == [1, 2]
    assert trajectory.token_ids.tolist() == [3, 4, 9, 9, 9, 5]
    assert trajectory.trained is not None
    assert trajectory.trained.tolist() == [1, 1, 0, 0, 0, 1]
    assert trajectory.logp.tolist() == [-3, -4, 0, 0, 0, -5]
    assert trajectory.versions.tolist() == [0, 0, *[NOT_SAMPLED] * 3, 2]
    assert trajectory.rewards is not None
    assert trajectory.rewards.tolist() == [0, 0.25, 0, 0, 0, 0.5]


def test_sequence_book_branches_share_no_trained_token() -> None:
    book = SequenceBook()
    book.add(ids(1, 2), sampled(3, 4), 1.0)
    book.add(ids(1, 2), sampled(3, 5), 1.0)
    book.add(ids(1, 2, 3, 4, 8), sampled(6), 1.0)
    book.add(ids(1, 2, 3, 5, 8), sampled(7), 1.0)
    book.add(ids(1, 2, 3), sampled(0), 1.0)
    found = [(t.prompt_ids.tolist(), t.token_ids.tolist()) for t in trajectories(book)]
    assert found == [([1, 2], [3, 4, 8, 6]), ([1, 2], [3, 5, 8, 7]), ([1, 2, 3], [0])]


def test_sequence_book_roles_share_no_sequence() -> None:
    book = SequenceBook()
    book.add(ids(1, 2), sampled(3), 1.0, role="solver")
    book.add(ids(1, 2, 3, 8), sampled(4), 1.0, role="critic")
    book.add(ids(1, 2, 3, 9), sampled(5), 1.0, role="solver")
    found = [(t.role, t.prompt_ids.tolist(), t.token_ids.tolist()) for t in trajectories(book)]
    assert found == [("solver", [1, 2], [3, 9, 5]), ("critic", [1, 2, 3, 8], [4])]


def test_sequence_experts_stay_from_the_first_computation() -> None:
    """The last token of a turn, and the messages after it, were computed by the next turn."""
    book = SequenceBook()
    book.add(ids(1, 2), sampled(3, 4, experts=7, before=2), 1.0)
    book.add(ids(1, 2, 3, 4, 9), sampled(5, 6, experts=8, before=5), 1.0)
    (trajectory,) = trajectories(book)
    assert trajectory.routed_experts is not None
    assert trajectory.routed_experts.ravel().tolist() == [7, 7, 7, 8, 8, 8]
    assert len(trajectory.routed_experts) == len(trajectory.prompt_ids) + len(trajectory.token_ids) - 1


def test_sequence_sets_of_messages_are_empty() -> None:
    def with_sets(*tokens: int) -> Completion:
        return replace(sampled(*tokens), kept=TokenSets.of([ids(token) for token in tokens]))

    book = SequenceBook()
    book.add(ids(1, 2), with_sets(3, 4), 1.0)
    book.add(ids(1, 2, 3, 4, 9, 8), with_sets(5), 1.0)
    (trajectory,) = trajectories(book)
    assert trajectory.kept is not None
    assert trajectory.kept.offsets.tolist() == [0, 1, 2, 2, 2, 3]
    assert trajectory.kept.words.tolist() == [3, 4, 5]
    book.add(ids(1, 2, 3, 4, 9, 8, 5), sampled(6), 1.0)
    assert trajectories(book)[0].kept is None


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=8))
def test_sequence_book_trains_each_sampled_token_once(
    calls: list[tuple[int, int, int]],
) -> None:
    """Each call continues an earlier sequence, or the prompt, with some additional words. Oracle: the calls
    themselves."""
    book, ends, total = SequenceBook(), [[1]], 0
    fresh = iter(range(100, 10_000))
    for origin, said, count in calls:
        prefix = ends[origin % len(ends)] + [next(fresh) for _ in range(said)]
        new = [next(fresh) for _ in range(count)]
        book.add(ids(*prefix), sampled(*new), 1.0)
        ends.append(prefix + new)
        total += count
    trained: list[int] = []
    for trajectory in trajectories(book):
        assert trajectory.trained is not None
        trained += trajectory.token_ids[trajectory.trained > 0].tolist()
        assert (trajectory.trained == (trajectory.versions != NOT_SAMPLED)).all()
        whole = [*trajectory.prompt_ids.tolist(), *trajectory.token_ids.tolist()]
        assert whole in ends
        assert trajectory.trained[0] == trajectory.trained[-1] == 1
    assert len(trained) == len(set(trained)) == total


def test_sequence_tokens_have_temperatures_of_their_call() -> None:
    book = SequenceBook()
    book.add(ids(1, 2), sampled(3, 4), 0.5)
    resumed = replace(sampled(5, 6), temperatures=np.array([0.25, 2.0], np.float32))
    book.add(ids(1, 2, 3, 4, 9), resumed, 2.0)
    (trajectory,) = trajectories(book)
    np.testing.assert_array_equal(trajectory.temperatures, np.float32([0.5, 0.5, np.nan, 0.25, 2.0]))


def test_dropped_turn_leaves_the_sequence_as_before_it() -> None:
    book, expected = SequenceBook(), SequenceBook()
    for each in (book, expected):
        each.add(ids(1, 2), sampled(3, 4, experts=7, before=2), 1.0).reward(0.5)
    before = book.sequences[0]
    book.add(ids(1, 2, 3, 4, 9), sampled(5, 6, experts=8, before=5), 0.5).reward(1.0)
    book.drop(before, 7)
    for each in (book, expected):  # the next turn continues what was there before
        each.add(ids(1, 2, 3, 4, 8), sampled(7, experts=9, before=5), 1.0)
    (found,), (wanted,) = trajectories(book), trajectories(expected)
    for name in vars(wanted):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), name)


def test_dropped_only_turn_removes_the_sequence() -> None:
    book = SequenceBook()
    sequence = book.add(ids(1, 2), sampled(3, 4), 1.0)
    book.add(ids(1, 2), sampled(5), 1.0)
    book.drop(sequence, 4)
    assert [trajectory.token_ids.tolist() for trajectory in trajectories(book)] == [[5]]


def test_dropped_turn_with_a_later_turn_is_not_trained() -> None:
    book = SequenceBook()
    sequence = book.add(ids(1, 2), sampled(3, 4), 1.0)
    book.add(ids(1, 2, 3, 4, 9), sampled(5), 1.0)
    book.add(ids(1, 2, 3, 4, 9, 5, 9), sampled(6), 1.0)
    book.drop(sequence, 6)
    (trajectory,) = trajectories(book)
    assert trajectory.trained is not None
    assert trajectory.trained.tolist() == [1, 1, 0, 0, 0, 1]


def test_branches_store_their_common_tokens_once() -> None:
    book = SequenceBook()
    prompt = np.arange(100_000, dtype=np.int32)
    first = book.add(prompt, sampled(*range(10)), 1.0)
    # The row's prompt is stored by the session, and a branch begins inside the first reply.
    branches = [book.add(np.append(prompt, ids(*range(5), 77 + n)), sampled(n), 1.0) for n in range(50)]
    (segment, *_) = first._tokens.segments
    assert all(np.shares_memory(branch._tokens.segments[0], segment) for branch in branches)
    own = [sum(s.nbytes for s in branch._tokens.segments if s.base is None) for branch in branches]
    assert max(own) <= 4 * 2, "one token of the branch and one sampled token"
    for number, branch in enumerate(branches):
        assert branch.tokens.tolist() == [*range(100_000), *range(5), 77 + number, number]


def test_sequence_dropped_turn_in_the_middle_loses_its_reward() -> None:
    book = SequenceBook()
    sequence = book.add(ids(1, 2), sampled(3, 4), 1.0)
    sequence.reward(5.0)
    book.add(ids(1, 2, 3, 4, 9), sampled(5), 1.0).reward(0.5)
    book.drop(sequence, 4)
    (trajectory,) = trajectories(book)
    assert trajectory.trained is not None
    assert trajectory.trained.tolist() == [0, 0, 0, 1]
    assert trajectory.rewards is not None
    assert trajectory.rewards.tolist() == [0, 0, 0, 0.5]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=5), st.lists(st.integers(0, 2), max_size=8)
)
def test_shared_tokens_equal_one_array(segments: list[list[int]], other: list[int]) -> None:
    tokens = SharedTokens()
    for segment in segments:
        tokens.append(ids(*segment))
    whole = [token for segment in segments for token in segment]
    assert tokens.first(len(tokens)).tolist() == whole
    common = next(
        (n for n, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b), min(len(whole), len(other))
    )
    assert tokens.num_common(np.array(other, np.int32)) == common
    assert tokens.branch(common).first(common).tolist() == whole[:common]
