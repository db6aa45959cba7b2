"""scripts/compare_staleness.py compares losses that can be configured, each with and without a correction."""

from __future__ import annotations

import json
from pathlib import Path

import compare_staleness
import pytest
from compare_staleness import ANCHORED, CORRECTED, LOSSES, ON_STALE_DATA, StalenessResult, losses_of_eta4

from mcore_rl.algorithms.configured import configured_corrections, configured_loss
from mcore_rl.config import load_config
from tests.readme import ROOT


@pytest.mark.parametrize("loss", [*LOSSES, *ANCHORED])
def test_loss_on_stale_data_differs_by_its_correction_only(loss: str) -> None:
    ways, corrects = losses_of_eta4(), {}
    for name in (loss, f"{loss}_{CORRECTED}"):
        config = load_config(str(ROOT / "configs/demo_think_cpu.yaml"), list(ways[name]))
        assert (config.rollout.max_staleness, config.algorithm.policy_loss.name) == (4, loss)
        built = configured_loss(config.algorithm)
        # The engine's probability is in the ratio of the loss, or in the weight of a correction.
        corrects[name] = built.needs.rollout_logp or bool(configured_corrections(config, built))
    assert list(corrects.values()) == [False, True]


def test_comparison_continues_with_missing_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"steps": 20, "accuracy": [0.1, 0.5], "staleness_mean": 3.0, "staleness_max": 4.0}
    recorded = tmp_path / "benchmarks" / "results" / "2026-01-01-cpu-losses-think2.json"
    recorded.parent.mkdir(parents=True)
    recorded.write_text(json.dumps({"machine": "", ON_STALE_DATA: {"gspo": [result, result], "sapo": [result]}}))
    measured, saved = [], {}

    def measure(task: str, name: str, seed: int, *run: object) -> StalenessResult:
        measured.append((name, seed))
        return StalenessResult(**result)

    def save(file: str, key: str, results: dict[str, list[StalenessResult]]) -> None:
        saved.update({name: len(runs) for name, runs in results.items()})

    monkeypatch.setattr(compare_staleness, "ROOT", tmp_path)
    monkeypatch.setattr(compare_staleness, "measure", measure)
    monkeypatch.setattr(compare_staleness, "save", save)
    monkeypatch.setattr(compare_staleness, "chosen", lambda *_: ["gspo", "dro"])
    compare_staleness.main(["--losses", "--task", "think2", "--seeds", "3", "--continue"])
    assert measured == [("dro", 1), ("dro", 2), ("gspo", 3), ("dro", 3)]
    assert saved == {"gspo": 3, "sapo": 1, "dro": 3}
