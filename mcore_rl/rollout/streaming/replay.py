"""Schedule of weight changes in an earlier asynchronous run, to repeat it bit for bit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from mcore_rl.config.run_configs import CONFIG_FILE
from mcore_rl.config.staleness import RECOMPUTE
from mcore_rl.errors import ConfigError, McoreRLError
from mcore_rl.types import RolloutScalars, Spans

KEY = "rollout.replay_schedule"


@dataclass(frozen=True)
class Replay:
    """Schedule of a run. Groups are identified by number.

    of_step: groups of each step, sorted. submitted: submission version of each group, also of groups that no step has.
    spans: version spans of each response of a group: (version, first token, token after the last).
    """

    of_step: dict[int, list[int]]
    submitted: list[int]
    spans: dict[int, tuple[Spans, ...]]

    @property
    def steps(self) -> int:
        return len(self.of_step)

    def was_submitted(self, number: int, version: int) -> bool:
        """Return True if a group had been submitted at this version."""
        return number < len(self.submitted) and self.submitted[number] <= version

    def check_same(self, number: int, scalars: RolloutScalars) -> None:
        """Raise McoreRLError if the responses of a group differ from the recorded ones."""
        if (spans := self.spans.get(number)) is None:
            return
        # Scalars have only the first and the last version of a response.
        versions = [[of_response[0][0], of_response[-1][0]] for of_response in spans]
        tokens = [of_response[-1][2] for of_response in spans]
        if scalars.versions.tolist() != versions or scalars.response_tokens.tolist() != tokens:
            raise McoreRLError(
                f"replay diverged at group {number}: {scalars.response_tokens.tolist()} tokens instead of {tokens}; "
                f"the model, data, seed, engine or a rollout key differs from the run of {KEY}"
            )


def read_replay(run_dir: Path, samples: int) -> Replay:
    """Read the consecutive steps with records in a run directory. `samples`: responses per group.

    Raises: ConfigError if there are none, or if the run cannot be replayed.
    """
    if not (run_dir / CONFIG_FILE).exists():
        raise ConfigError(f"{KEY}={run_dir} is not a run directory: it has no {CONFIG_FILE}")
    earlier = yaml.safe_load((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))["rollout"]
    if earlier.get("swap") != RECOMPUTE or not earlier.get("max_staleness"):
        raise ConfigError(
            f"{KEY}={run_dir} has rollout.max_staleness={earlier.get('max_staleness')} and "
            f"rollout.swap={earlier.get('swap')}: only asynchronous runs with rollout.swap=recompute can be replayed"
        )
    of_step: dict[int, list[int]] = {}
    spans: dict[int, dict[int, Spans]] = {}
    submitted: dict[int, int] = {}
    # Up to the first missing step: the steps after it depend on it.
    while (path := run_dir / "rollouts" / f"step_{len(of_step) + 1}.jsonl").exists():
        numbers = set()
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            numbers.add(number := record["group"])
            submitted[number] = record["submitted_version"]
            spans.setdefault(number, {})[record["sample"]] = tuple(tuple(span) for span in record["versions"])
        of_step[len(of_step) + 1] = sorted(numbers)
    if not of_step:
        raise ConfigError(f"{KEY}={run_dir} has no rollouts/step_1.jsonl and cannot be replayed")
    if any(sorted(of_group) != list(range(samples)) for of_group in spans.values()):
        raise ConfigError(f"{KEY}={run_dir}: its groups do not have rollout.samples_per_prompt={samples} responses")
    # Groups that never finished have no record; they get the submission version of the preceding group.
    versions = np.zeros(max(submitted) + 1, np.int64)
    versions[list(submitted)] = list(submitted.values())
    filled = np.maximum.accumulate(versions).tolist()
    of_group = {number: tuple(by_sample[i] for i in range(samples)) for number, by_sample in spans.items()}
    return Replay(of_step, filled, of_group)
