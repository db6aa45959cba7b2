"""MLflow, through its client: no global state, and no run that other code could end."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence

from mcore_rl.observe.trackers.interface import COLUMNS, RunFacts, SampledResponse

PARAMS_PER_CALL = 100
METRICS_PER_CALL = 1000
"""Limits of MLflow's REST interface per call."""
MAX_PARAM_CHARACTERS = 6000
"""Limit of MLflow 3 for the value of a parameter."""
_INVALID = re.compile(r"[^\w\-. /]")
"""Characters that names of metrics and parameters cannot have."""


class MlflowRun:
    """One run of MLflow. Offline, it is in run.dir/trackers/mlflow; `mlflow ui --backend-store-uri` shows it.

    Parameters of MLflow cannot change, so they are the configuration of the first start; the artifacts
    configuration/step_<n>.json have the configuration of every start.
    """

    def __init__(self, facts: RunFacts) -> None:
        # Usage statistics, which MLflow would otherwise send to its makers, also offline.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        if facts.offline:
            # MLflow 3.17 refuses the file store unless this is set. Other stores need the full package.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=(facts.files / "mlflow").as_uri() if facts.offline else None)
        known = facts.ids.get("mlflow")
        self._run_id = known or facts.ids.get_or_make("mlflow", lambda: self._create(facts))
        if known is None:
            self._log_params(facts.described())
        else:
            self._client.update_run(self._run_id, status="RUNNING")
        self._client.log_dict(self._run_id, facts.described(), f"configuration/step_{facts.first_step}.json")

    def _create(self, facts: RunFacts) -> str:
        """Create the experiment, if needed, and the run. Returns the id of the run."""
        experiment = self._client.get_experiment_by_name(facts.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(facts.project)
        revision = {"mlflow.source.git.commit": facts.revision} if facts.revision else {}
        run = self._client.create_run(experiment_id, run_name=facts.name, tags=revision)
        return str(run.info.run_id)

    def _log_params(self, described: Mapping[str, object]) -> None:
        from mlflow.entities import Param

        params = [Param(_name(key), str(value)[:MAX_PARAM_CHARACTERS]) for key, value in described.items()]
        for first in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[first : first + PARAMS_PER_CALL])

    def append(self, step: int, metrics: Mapping[str, float], responses: Sequence[SampledResponse]) -> None:
        """Log the metrics, and the responses as artifact responses/step_<n>.json in the form of a table."""
        from mlflow.entities import Metric

        milliseconds = int(time.time() * 1000)
        values = [Metric(_name(name), value, milliseconds, step) for name, value in metrics.items()]
        for first in range(0, len(values), METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=values[first : first + METRICS_PER_CALL])
        if responses:
            table = {"columns": list(COLUMNS), "data": [each.row() for each in responses]}
            self._client.log_dict(self._run_id, table, f"responses/step_{step}.json")

    def close(self, *, failed: bool) -> None:
        """Mark the run as failed or finished."""
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def _name(name: str) -> str:
    return _INVALID.sub("_", name)


def login_problem() -> str | None:
    """Return what to set if no server is named; MLflow would write files into the working directory."""
    return None if os.environ.get("MLFLOW_TRACKING_URI") else "set MLFLOW_TRACKING_URI to the address of the server"
