"""Times and metrics that the run journal writes for a step."""

from __future__ import annotations

from pathlib import Path

from mcore_rl.observe.journal import RunJournal
from mcore_rl.observe.metrics import read_metrics
from mcore_rl.types import Span, Total


def test_finish_step_sums_phases_and_throughput_of_training(tmp_path: Path) -> None:
    lengths = {
        "rollout": 2.0,
        "update": 3.0,
        "weight_sync": 1.0,
        "validate": 10.0,
        "checkpoint": 4.0,
        "engine_sleep": 0.5,
    }
    spans = [Span(name, 100.0, 100.0 + seconds / 2, "driver") for name, seconds in lengths.items() for _ in range(2)]
    journal = RunJournal(tmp_path, 2, lambda: spans, [])
    journal.resume_after(-1)
    journal.record({"tokens/trained_sequences": Total(600)})
    journal.finish_step(1)
    journal.close()
    (step,) = read_metrics(tmp_path / "metrics.jsonl")
    assert step["time/step"] == 20.0  # engine_sleep is a part of the rollout
    assert step["time/validate"] == 10.0
    assert step["throughput/tokens_per_second"] == 100.0
