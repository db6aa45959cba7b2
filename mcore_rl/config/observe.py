"""Section `observe` of the configuration: outputs of a run for people."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.config.fields import setting

TOKEN_VALUES = "tokens"
"""Folder of run.dir with the per-token values of a few responses, one file step_<n>.jsonl per step."""
TRAJECTORIES = "trajectories"
"""Folder of run.dir with the batches of the last steps, one folder step_<n> per step."""

LOCAL_TRACKER = "tensorboard"
"""Tracker that always writes into the run directory and needs no network."""
TRACKERS = (LOCAL_TRACKER, "wandb", "mlflow", "trackio", "swanlab")
LOOPBACK = "127.0.0.1"


@dataclass
class ProfileConfig:
    """Profiles of trainer ranks by torch.profiler, in the folder profile of run.dir; on GPUs with memory snapshots and
    NVTX ranges."""

    steps: list[int] = setting([], minimum=1, one_or_more=True)
    """Steps that are profiled, from their beginning to the end of the weight sync. A profiled step is slower. []: none;
    no profiler is loaded."""
    ranks: list[int] = setting([0], minimum=0, one_or_more=True)
    """Trainer ranks that record a profile."""


@dataclass
class ObserveConfig:
    """Reports, trackers, profiles and records of the run."""

    plain: bool = False
    """`train` prints lines even if stderr is a terminal that can show the live screen."""
    report_every_steps: int = setting(50, minimum=0)
    """Interval at which report.html is written during training, by a process of its own. It is also written at the end
    of the run. 0: only at the end."""
    token_responses: int = setting(8, minimum=0, unit="responses")
    """Responses per step whose log-probabilities of engine and trainer are recorded token by token, for the report. One
    trainer rank writes them. 0: none."""
    keep_trajectories: int = setting(0, minimum=0, unit="steps")
    """Last steps whose trajectories stay in run.dir/trajectories, for `mcore-rl debug train`. A token takes about 13
    bytes, and one or two more per layer and chosen expert with actor.moe.router_replay=engine. 0: none."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    trackers: list[str] = setting([LOCAL_TRACKER], choices=TRACKERS, one_or_more=True)
    """Trackers that receive metrics, the configuration and a few responses. Each works in a thread of its own and
    cannot stop the run. []: none."""
    trackers_offline: bool = False
    """Trackers write below run.dir/trackers instead of sending to a server."""
    project: str = "mcore-rl"
    """Project of wandb, trackio and swanlab; experiment of mlflow."""
    run_name: str | None = None
    """Name of the run in trackers; null: the last part of run.dir."""
    table_responses: int = setting(4, minimum=0, unit="responses")
    """Responses per step, and per validation, that trackers show in a table. 0: none."""
    prometheus_port: int = setting(0, minimum=0, maximum=65535)
    """Port of an OpenMetrics endpoint with the metrics of the last step. 0: no endpoint."""
    prometheus_host: str = LOOPBACK
    """Address at which the endpoint listens. It has no authentication; 0.0.0.0 lets every host that reaches this one
    read the metrics."""

    @property
    def online_trackers(self) -> list[str]:
        """Trackers that may send to a server."""
        return [] if self.trackers_offline else [name for name in self.trackers if name != LOCAL_TRACKER]
