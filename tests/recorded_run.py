"""Run directories as a run leaves them, written without running anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from mcore_rl.observe.timeline import STEP_SPAN, Timeline
from mcore_rl.types import Span

CONFIG = "trainer: {steps: 4}\nrun: {dir: runs/x}\nmodel: {hf_path: nowhere}\ndata: {train: [train.jsonl]}\n"


def metrics_line(step: int, **values: float | None) -> str:
    record = {
        "step": step,
        "reward/mean": 0.1 * step,
        "val/accuracy": 0.2 * step,
        "actor/entropy": 2.0,
        "time/step": 1.0,
        **{name.replace("__", "/"): value for name, value in values.items()},
    }
    return json.dumps(record) + "\n"


def response(group: int = 0, sample: int = 0, **values: object) -> dict[str, object]:
    """Return a record of rollouts/step_<n>.jsonl; `values` replace or add fields."""
    return {
        "prompt": f"prompt {group}",
        "response": f"answer {group}.{sample}",
        "reward": float(sample % 2),
        "accuracy": float(sample % 2),
        "tokens": 10 + sample,
        "finish_reason": "stop",
        "group": group,
        "sample": sample,
        "version": 0,
        "versions": [[0, 0, 10 + sample]],
        "submitted_version": 0,
        "ground_truth": "7",
        "error": None,
        "turns": 1,
        "tool_calls": 0,
        **values,
    }


def groups(num_groups: int = 2, samples: int = 4) -> list[dict[str, object]]:
    return [response(group, sample) for group in range(num_groups) for sample in range(samples)]


def write_run(
    directory: Path,
    rollouts: Mapping[str, Iterable[Mapping[str, object]]] | None = None,
    *,
    steps: int = 3,
    config: str = CONFIG,
) -> Path:
    """Write config.yaml, metrics.jsonl of steps 0 to `steps`, timeline.json and rollouts/<name>.jsonl."""
    (directory / "rollouts").mkdir(parents=True)
    (directory / "config.yaml").write_text(config)
    (directory / "metrics.jsonl").write_text("".join(metrics_line(step) for step in range(steps + 1)))
    timeline = Timeline(directory / "timeline.json")
    for step in range(steps + 1):
        timeline.append(
            [
                Span(f"{STEP_SPAN}{step}", 10.0 * step, 10.0 * step + 9, "driver"),
                Span("rollout", 10.0 * step, 10.0 * step + 4, "driver"),
                Span("update", 10.0 * step + 4, 10.0 * step + 9, "driver"),
                Span("generate", 10.0 * step + 1, 10.0 * step + 3, "rollout engine 0"),
            ]
        )
    if rollouts is None:
        rollouts = {f"step_{step}": groups() for step in range(1, steps + 1)}
    for name, records in rollouts.items():
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (directory / "rollouts" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return directory
