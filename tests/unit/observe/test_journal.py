"""Times and metrics that the run journal writes for a step."""

from __future__ import annotations

from pathlib import Path

from mcore_rl.observe.journal import RunJournal
from mcore_rl.observe.metrics import read_metrics
from mcore_rl.observe.timeline import read_timeline
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


def test_finish_step_marks_the_step_on_the_timeline(tmp_path: Path) -> None:
    spans = [Span("rollout", 10.0, 12.0, "driver"), Span("update", 12.5, 15.0, "driver")]
    journal = RunJournal(tmp_path, 2, lambda: spans, [lambda: [Span("generate", 9.0, 11.0, "engine")]])
    journal.resume_after(-1)
    journal.finish_step(3)
    journal.close()
    (mark,) = [event for event in read_timeline(tmp_path / "timeline.json") if event["name"] == "step 3"]
    assert (mark["ts"], mark["dur"]) == (10_000_000, 5_000_000)
    assert "time/step 3" not in read_metrics(tmp_path / "metrics.jsonl")[0]
