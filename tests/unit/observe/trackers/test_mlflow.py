"""MLflow with its file store, read by MLflow's own client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mcore_rl.observe.trackers.mlflow import MAX_PARAM_CHARACTERS, MlflowRun
from tests.selection import needs_package
from tests.unit.observe.trackers.recorded import facts, response

if TYPE_CHECKING:
    import mlflow

pytestmark = needs_package("mlflow", "scripts/setup_trackers.sh")


def stored(run_dir: Path) -> tuple[object, mlflow.MlflowClient]:
    """Return the only run, and a client of its store."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=(run_dir / "trackers" / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("project")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return run, client


def table(run_dir: Path, client: mlflow.MlflowClient, run: object, path: str) -> dict[str, list[list[object]]]:
    assert path in {item.path for item in client.list_artifacts(run.info.run_id, "responses")}
    (file,) = (run_dir / "trackers" / "mlflow").rglob(path)
    return json.loads(file.read_text())


@pytest.mark.slow
def test_mlflow_records_metrics_config_and_table(tmp_path: Path) -> None:
    run = MlflowRun(facts(tmp_path))
    run.append(1, {"reward/mean": 0.25, "val/accuracy/GSM8k (é)": 1.0}, [response(), response(is_validation=True)])
    run.append(2, {"reward/mean": 0.5}, [])
    run.close(failed=True)
    found, client = stored(tmp_path)
    history = client.get_metric_history(found.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5)]
    assert "val/accuracy/GSM8k _é_" in found.data.metrics
    assert found.data.params["actor.optimizer.lr"] == "1e-06"
    assert found.data.tags["mlflow.source.git.commit"] == "abc-dirty"
    assert (found.info.status, found.info.run_name) == ("FAILED", "name")
    rows = table(tmp_path, client, found, "responses/step_1.json")
    assert [row[1] for row in rows["data"]] == ["training", "validation"]
    assert rows["data"][0][-1] == response().response


@pytest.mark.slow
def test_mlflow_resume_continues_the_run_with_other_values(tmp_path: Path) -> None:
    for first_step, lr in ((0, 1e-6), (2, 1e-5)):
        run = MlflowRun(facts(tmp_path, first_step=first_step, lr=lr))
        run.append(first_step, {"loss": 1.0}, [])
        run.close(failed=False)
    found, client = stored(tmp_path)
    assert [metric.step for metric in client.get_metric_history(found.info.run_id, "loss")] == [0, 2]
    assert found.info.status == "FINISHED"
    assert found.data.params["actor.optimizer.lr"] == "1e-06"  # parameters cannot change
    (newest,) = (tmp_path / "trackers" / "mlflow").rglob("configuration/step_2.json")
    assert json.loads(newest.read_text())["actor.optimizer.lr"] == 1e-5


@pytest.mark.slow
def test_mlflow_large_configurations_and_steps_are_split(tmp_path: Path) -> None:
    described = facts(tmp_path)
    config = {**described.config, **{f"key{number}": "x" * 10_000 for number in range(250)}}
    run = MlflowRun(type(described)(**{**vars(described), "config": config}))
    run.append(1, {f"metric{number}": 1.0 for number in range(1100)}, [])
    found, _ = stored(tmp_path)
    assert len(found.data.metrics) == 1100
    assert len(found.data.params["key249"]) == MAX_PARAM_CHARACTERS
