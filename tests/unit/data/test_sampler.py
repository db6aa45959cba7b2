"""Order of the prompt sampler, weights of rows, and curricula."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.data.prompts import PromptSet, prompt_set
from mcore_rl.data.sampler import Curriculum, PromptSampler, RowWeights
from mcore_rl.errors import CheckpointError, ConfigError, CurriculumError, DataError
from mcore_rl.types import Prompt


def prompts(count: int) -> PromptSet:
    ids = np.array([1, 2], np.int32)
    return prompt_set([Prompt(-1, ids, f"p{i}", "s", "a", {"level": i % 3}) for i in range(count)])


@pytest.fixture
def curriculum(tmp_path: Path) -> Any:
    def made(body: str, count: int = 6, seed: int = 1) -> Curriculum:
        path = tmp_path / f"order{len(list(tmp_path.iterdir()))}.py"
        path.write_text(f"import random\n\ndef order(epoch, prompts, seed):\n    {body}\n")
        return Curriculum(f"{path}:order", prompts(count), seed)

    return made


PINNED = [2, 4, 7, 5, 0, 6, 3, 1, 5, 6, 3, 0, 7, 2, 1, 4]


def test_sampler_returns_every_row_once_per_epoch() -> None:
    sampler = PromptSampler(100, seed=3)
    first, second = sampler.draw(100), sampler.draw(100)
    assert np.array_equal(np.sort(first), np.arange(100))
    assert np.array_equal(np.sort(second), np.arange(100))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, PromptSampler(100, seed=4).draw(100))


def test_sampler_order_is_pinned_for_any_draw_sizes() -> None:
    # Existing runs cannot be resumed if this order changes, also by another numpy version or platform.
    assert PromptSampler(8, seed=1).draw(16).tolist() == PINNED
    sampler = PromptSampler(8, seed=1)
    assert np.concatenate([sampler.draw(size) for size in (1, 7, 0, 5, 3)]).tolist() == PINNED


@pytest.mark.parametrize("other", [PromptSampler(11, 1), PromptSampler(10, 2), PromptSampler(10, 1, shuffle=False)])
def test_sampler_state_of_other_run_is_rejected(other: PromptSampler) -> None:
    with pytest.raises(CheckpointError, match=r"run\.seed, data\.train"):
        PromptSampler(10, 1).load_state_dict(other.state_dict())


def test_sampler_empty_set_is_rejected() -> None:
    with pytest.raises(DataError, match=r"data\.train"):
        PromptSampler(0, 1)


@pytest.mark.parametrize("weight", [0.01, 0.3, 1, 2.75])
def test_row_weights_counts_follow_weight_over_epochs(weight: float) -> None:
    weights, rows = RowWeights((7, 11), (weight, 1), seed=3), np.zeros(18, np.int64)
    for epoch in range(40):
        rows += weights.counts(epoch)
        share = round(weight * 1_000_000) * (epoch + 1)  # integers, because 0.3 * 10 != 3
        low, high = share // 1_000_000, -(-share // 1_000_000)
        assert rows[:7].min() >= low
        assert rows[:7].max() <= high
        assert rows[:7].sum() == share * 7 // 1_000_000
        assert (rows[7:] == epoch + 1).all()


def test_row_weights_extra_draws_depend_on_seed_and_file() -> None:
    counts = RowWeights((100, 100), (0.5, 0.5), seed=1).counts(0)
    assert (counts[:100] != counts[100:]).any()
    assert (counts != RowWeights((100, 100), (0.5, 0.5), seed=2).counts(0)).any()


def test_row_weights_counts_are_exact_for_large_numbers() -> None:
    weights, epochs = RowWeights((200_000,), (1.999999,), seed=1), (0, 1, 4, 10**6)
    of_file = [200_000 * 1_999_999 * (e + 1) // 10**6 - 200_000 * 1_999_999 * e // 10**6 for e in epochs]
    assert [int(weights.counts(epoch).sum()) for epoch in epochs] == of_file == [399_999, 400_000, 400_000, 399_999]


def test_sampler_weighted_epoch_matches_counts_and_mixes_files() -> None:
    weights = RowWeights((4, 4), (3, 0.5), seed=1)
    sampler = PromptSampler(8, 1, weights=weights)
    for epoch in range(5):
        counts = weights.counts(epoch)
        drawn = sampler.draw(int(counts.sum()))
        assert np.array_equal(np.bincount(drawn, minlength=8), counts)
        assert not np.array_equal(drawn, np.sort(drawn))


def test_sampler_weights_of_one_keep_the_order() -> None:
    # A run without weights and a run with equal weights have the same order.
    ours = PromptSampler(9, 5, weights=RowWeights((4, 5), (1, 1), 5)).draw(40)
    assert np.array_equal(ours, PromptSampler(9, 5).draw(40))


def test_sampler_without_shuffle_keeps_file_order() -> None:
    assert PromptSampler(3, seed=1, shuffle=False).draw(7).tolist() == [0, 1, 2, 0, 1, 2, 0]
    weighted = PromptSampler(3, 1, shuffle=False, weights=RowWeights((1, 2), (1, 2), 1))
    assert weighted.draw(10).tolist() == [0, 1, 1, 2, 2] * 2


def test_sampler_small_weight_allows_empty_epochs() -> None:
    drawn = PromptSampler(1, 1, weights=RowWeights((1,), (0.01,), 1)).draw(3)
    assert drawn.tolist() == [0, 0, 0]


def test_sampler_state_with_other_weights_is_rejected() -> None:
    weighted, plain = PromptSampler(8, 1, weights=RowWeights((3, 5), (2, 1), 1)), PromptSampler(8, 1)
    for one, other in ((weighted, plain), (plain, weighted)):
        with pytest.raises(CheckpointError, match=r"data\.weights"):
            one.load_state_dict(other.state_dict())


def test_sampler_state_without_weights_is_accepted() -> None:
    sampler, state = PromptSampler(8, 1), {"num_rows": 8, "seed": 1, "shuffle": True, "epoch": 1, "position": 3}
    sampler.load_state_dict(state)
    assert sampler.draw(3).tolist() == PINNED[11:14]


def test_curriculum_orders_filters_and_repeats_rows(curriculum: Any) -> None:
    easy = "return [i for i, p in enumerate(prompts) if p.extra_info['level'] <= epoch]"
    assert PromptSampler(6, 1, curriculum=curriculum(easy)).draw(12).tolist() == [0, 3, 0, 1, 3, 4, 0, 1, 2, 3, 4, 5]
    assert PromptSampler(6, 1, curriculum=curriculum("return (5, 5, 0)")).draw(4).tolist() == [5, 5, 0, 5]


def test_curriculum_may_return_numpy_or_generator(curriculum: Any) -> None:
    backwards = curriculum("import numpy as np; return np.arange(len(prompts))[::-1]")
    assert backwards.order(0).tolist() == list(range(5, -1, -1))
    assert curriculum("return (p.row for p in prompts)").order(0).tolist() == list(range(6))


def test_curriculum_seed_and_epoch_determine_shuffle(curriculum: Any) -> None:
    random_order = list(range(6))
    random.Random(1001).shuffle(random_order)
    assert PromptSampler(6, 1, curriculum=curriculum(SHUFFLED)).draw(8)[4:].tolist() == random_order[:4]


@pytest.mark.parametrize("kind", ["plain", "weights", "curriculum"])
def test_sampler_restored_state_continues(curriculum: Any, kind: str) -> None:
    def made() -> PromptSampler:
        weights = RowWeights((1, 5), (2.5, 0.7), 1) if kind == "weights" else None
        return PromptSampler(6, 1, weights=weights, curriculum=curriculum(SHUFFLED) if kind == "curriculum" else None)

    for drawn in (0, 3, 4, 5, 6, 7, 11, 40):  # within epochs and at their ends
        sampler, restored = made(), made()
        sampler.draw(drawn)
        restored.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
        assert np.array_equal(restored.draw(25), sampler.draw(25))


SHUFFLED = "rows = list(range(len(prompts))); random.Random(seed * 1000 + epoch).shuffle(rows); return rows[:4]"


def test_sampler_changed_curriculum_order_is_rejected(curriculum: Any) -> None:
    sampler = PromptSampler(6, 1, curriculum=curriculum(SHUFFLED))
    sampler.draw(2)
    for other in (curriculum("return [0, 1, 2, 3]"), None):
        with pytest.raises(CheckpointError, match=r"middle of epoch 0, for which data\.curriculum now gives another"):
            PromptSampler(6, 1, curriculum=other).load_state_dict(sampler.state_dict())
    with pytest.raises(CheckpointError, match=r"data\.curriculum"):
        sampler.load_state_dict(PromptSampler(6, 1).state_dict())


def test_curriculum_is_called_once_per_epoch(curriculum: Any) -> None:
    counting = curriculum("order.calls = getattr(order, 'calls', 0) + 1; return [order.calls]")
    counting.order(0)
    assert PromptSampler(6, 1, curriculum=counting).draw(3).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return []", "returned no row"),
        ("return [0, 6]", "returned row 6; valid rows are 0 to 5"),
        ("return [-1]", "returned row -1"),
        ("return [0, 1.0]", "returned float '1.0'; return a list of whole numbers"),
        ("return [True, False]", "returned bool 'True'"),
        ("return prompts", "returned Prompt"),
        ("import numpy as np; return np.ones(3)", "returned an array of float64 with 1 dimensions"),
        ("import numpy as np; return np.ones((2, 2), int)", "returned an array of int64 with 2 dimensions"),
        ("return None", r"raised TypeError: 'NoneType' object is not iterable$"),
        ("return [p.extra_info['no'] for p in prompts]", r"raised KeyError: 'no' \(.*order0\.py, line 4, in "),
        ("raise SystemExit(3)", r"raised SystemExit: 3 \(.*order0\.py, line 4, in order\)"),
        ("return random.Random(seed).choice([])", r"raised IndexError: .* \(.*order0\.py, line 4, in order\)"),
    ],
)
def test_curriculum_invalid_result_is_named(curriculum: Any, body: str, message: str) -> None:
    with pytest.raises(
        CurriculumError, match=rf"(?s)^data\.curriculum=.*order0\.py:order, called for epoch 2, {message}"
    ):
        curriculum(body).order(2)


def test_sampler_curriculum_error_keeps_position(curriculum: Any) -> None:
    sampler = PromptSampler(6, 1, curriculum=curriculum("return [0, 1] if epoch < 1 else 1 / 0"))
    with pytest.raises(CurriculumError, match="called for epoch 1, raised ZeroDivisionError"):
        sampler.draw(5)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (0, 2)


def test_curriculum_requires_epoch_prompts_and_seed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(epoch, rows): return [0]\nasync def g(epoch, prompts, seed): return [0]\n")
    with pytest.raises(ConfigError, match=r"^data\.curriculum=.*:f cannot be called as f\(epoch, prompts, seed\)"):
        Curriculum(f"{tmp_path}/mine.py:f", prompts(2), 1)
    with pytest.raises(ConfigError, match="not an async one"):
        Curriculum(f"{tmp_path}/mine.py:g", prompts(2), 1)
