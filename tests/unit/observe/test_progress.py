import io

import pytest

from mcore_rl.observe.progress import Progress, clock, step_line

METRICS = {
    "reward/mean": 0.41249,
    "response_tokens/mean": 18.21,
    "actor/entropy": 0.3114,
    "time/generate": 0.8,
    "time/update": 0.912,
    "time/weight_sync": 0.05,
    "time/step": 1.9,
}


def test_step_line_shows_metrics_and_seconds_per_phase():
    assert step_line(3, 60, METRICS) == (
        "step  3/60  reward 0.412  length 18.2  entropy 0.311  1.90 s (generate 0.80, update 0.91, weight_sync 0.05)"
    )


@pytest.mark.parametrize("metrics", [{}, {"reward/mean": None}])
def test_step_line_without_metrics_shows_step(metrics):
    assert step_line(1, 2, metrics) == "step 1/2"


def test_progress_prints_one_line_per_step():
    stream = io.StringIO()
    progress = Progress(2, stream=stream)
    progress.update(1, METRICS)
    progress.update(2, {"val/accuracy": 0.5})
    assert stream.getvalue() == step_line(1, 2, METRICS, seconds_left=0) + "\nstep 2/2  accuracy 0.500\n"


def test_time_left_uses_steps_of_this_process(monkeypatch):
    times = iter([100.0, 130.0, 150.0])  # the start, and the ends of steps 5 and 6
    monkeypatch.setattr("mcore_rl.observe.progress.time.monotonic", lambda: next(times))
    stream = io.StringIO()
    progress = Progress(64, first_step=4, stream=stream)
    progress.update(5, {})
    progress.update(6, {})
    assert [line.rpartition("  ")[2] for line in stream.getvalue().splitlines()] == ["left 29:30", "left 24:10"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(9, "0:09"), (59.7, "1:00"), (3600, "1:00:00"), (86400 * 2 + 3 * 3600 + 300, "2 d 3:05:00")]
)
def test_clock_formats_seconds(seconds, shown):
    assert clock(seconds) == shown
