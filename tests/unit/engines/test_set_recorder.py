"""Sets that an engine records, and their way into completions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pytest
import torch

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.set_recorder import SetRecorder, encode_rows
from mcore_rl.engines.step_output import StepOutput
from mcore_rl.engines.stepped_engine import ActiveRequest, SteppedEngine
from mcore_rl.engines.vllm.arguments import sampling_arguments
from mcore_rl.errors import McoreRLError
from mcore_rl.types import GenerationRequest, SamplingOptions, TokenSets
from mcore_rl.types.token_sets import encode_ids

VOCABULARY = 100


def test_encode_rows_equals_encoding_each_row() -> None:
    generator = torch.Generator().manual_seed(0)
    share = torch.tensor([0.0, 0.01, 0.03, 0.05, 0.2, 0.9, 1.0])[torch.arange(28) % 7]
    kept = torch.rand(28, VOCABULARY, generator=generator) < share[:, None]
    kept[:, 7] = True
    runs = encode_rows(kept)
    expected = [encode_ids(np.flatnonzero(row), VOCABULARY) for row in kept.numpy()]
    assert [run.tolist() for run in runs] == [run.tolist() for run in expected]
    assert {run.dtype for run in runs} == {np.dtype(np.int32)}
    assert {int(run[0]) for run in runs} > {-1}
    assert encode_rows(kept[:0]) == []


def one_hot(*tokens: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY) > 0


def test_recorder_keeps_the_last_sample_of_a_position() -> None:
    """Rejected drafts are sampled again, and pieces of a prompt are never read."""
    recorder = SetRecorder()
    recorder.record(["a", "b"], [3, 9], one_hot(1, 2))
    recorder.record(["a", "a", "a"], [5, 6, 7], one_hot(3, 4, 5))
    recorder.record(["a"], [6], one_hot(6))
    assert [run.tolist() for run in recorder.take({"a": (5, 2)})["a"]] == [[3], [6]]
    assert [run.tolist() for run in recorder.take({"a": (7, 1)})["a"]] == [[5]]
    with pytest.raises(RuntimeError, match="no sampling set for 1 of 1 tokens of a, the first at position 5"):
        recorder.take({"a": (5, 1)})
    recorder.record(["b"], [10], one_hot(2))
    recorder.forget(["b", "unknown"])
    with pytest.raises(RuntimeError, match="no sampling set for 2 of 2 tokens of b, the first at position 9"):
        recorder.take({"b": (9, 2)})
    assert recorder.take({"c": (4, 0)}) == {"c": []}


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        (SamplingOptions(8, top_p=0.9, keep_mask=True), {"keep_set": True}),
        (SamplingOptions(8, top_p=0.9), None),
        (SamplingOptions(8, temperature=0.0, top_p=0.9, keep_mask=True), None),
    ],
)
def test_sampling_arguments_ask_for_sets_of_sampled_tokens(options: SamplingOptions, extra: object) -> None:
    assert sampling_arguments(options, ()).get("extra_args") == extra


class ScriptedEngine(SteppedEngine):
    """Every step samples token 7 for all requests, and the third one ends them; `sets` are returned for each."""

    vocab_size = VOCABULARY

    def __init__(self, sets: TokenSets) -> None:
        super().__init__(RolloutConfig(), captures_routing=False)
        self.sets, self.steps = [sets.take(np.array([row])).words for row in range(len(sets))], 0
        self.wanted: list[tuple[tuple[int, int], int]] = []

    def _require_awake(self) -> None: ...
    def _add(self, added: Mapping[str, ActiveRequest]) -> None: ...
    def _cancel(self, engine_ids: Sequence[str]) -> None: ...

    def _routing_of(self, engine_ids: Collection[str]) -> dict[str, np.ndarray]:
        raise AssertionError

    def _run_step(self, limit: int) -> list[StepOutput]:
        self.steps += 1
        return [StepOutput(i, [7], [-1.0], "length" if self.steps == 3 else None) for i in self._running]

    def _sets_of(
        self, wanted: Mapping[str, tuple[int, int]], ended: Sequence[str]
    ) -> Mapping[str, Sequence[np.ndarray]]:
        self.wanted += [(span, len(ended)) for span in wanted.values()]
        return dict.fromkeys(wanted, self.sets[self.steps - 1 : self.steps])


def run(sets: TokenSets, keep_mask: bool = True) -> tuple[ScriptedEngine, list[object]]:
    engine, found = ScriptedEngine(sets), []
    options = SamplingOptions(3, top_p=0.9, keep_mask=keep_mask)
    engine.generate([GenerationRequest("r", np.array([4, 5], np.int32), 1, options)], found.append)
    return engine, [each.kept for each in found]


def test_engine_reads_sets_of_the_sampled_positions() -> None:
    sets = TokenSets.of([np.array([7], np.int32), np.array([2, 7], np.int32), np.array([7, 9], np.int32)])
    engine, (kept,) = run(sets)
    assert isinstance(kept, TokenSets)
    assert kept.words.tolist() == sets.words.tolist()
    assert engine.wanted == [((2, 1), 0), ((3, 1), 0), ((4, 1), 1)]
    assert run(sets, keep_mask=False)[1] == [None]


def test_engine_token_outside_its_set_is_an_error() -> None:
    sets = TokenSets.of([np.array([7], np.int32), np.array([2, 8], np.int32), np.array([7, 9], np.int32)])
    with pytest.raises(McoreRLError, match=r"token 7 of r is not in the set that it was sampled from"):
        run(sets)
    with pytest.raises(McoreRLError, match=r"the engine returned 2 sampling sets for the 3 tokens of r"):
        run(sets.take(np.array([0, 2])))
