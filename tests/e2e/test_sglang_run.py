"""A step with SGLang equals the step with vLLM: the same tokens and therefore the same metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.engines import WITH_SGLANG
from tests.e2e.runs import metrics, train

pytestmark = [pytest.mark.slow, WITH_SGLANG]


def test_a_step_with_sglang_is_the_step_with_vllm(task: Path, whole_run: Path, tmp_path: Path) -> None:
    train(task, tmp_path / "run", "rollout.engine=sglang", "trainer.steps=1")
    ours, of_vllm = metrics(tmp_path / "run")[1], metrics(whole_run)[1]
    assert of_vllm["actor/trained_tokens"] == ours["actor/trained_tokens"] > 0
    assert {name: ours[name] for name in of_vllm} == pytest.approx(of_vllm, abs=1e-4)
