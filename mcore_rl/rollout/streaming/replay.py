"""When weights changed under the responses of an earlier asynchronous run, which is to be repeated bit for bit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from mcore_rl.config.earlier import CONFIG_FILE
from mcore_rl.config.staleness import RECOMPUTE
from mcore_rl.errors import ConfigError, McoreRLError
from mcore_rl.types import RolloutScalars, Spans

KEY = "rollout.replay_schedule"


@dataclass(frozen=True)
class Replay:
    """Groups by number: those of each step, sorted; the version at which each was submitted, also of those that no step
    has; and of each response [version, first token, token after the last]."""

    of_step: dict[int, list[int]]
    submitted: list[int]
    spans: dict[int, tuple[Spans, ...]]

    @property
    def steps(self) -> int:
        return len(self.of_step)

    def begins(self, number: int, version: int) -> bool:
        """Whether a group had been submitted at this version."""
        return number < len(self.submitted) and self.submitted[number] <= version

    def require_same(self, number: int, scalars: RolloutScalars) -> None:
        """Raises: McoreRLError where responses of a group are not what they were."""
        if (spans := self.spans.get(number)) is None:
            return
        versions = [[of_response[0][0], of_response[-1][0]] for of_response in spans]
        tokens = [of_response[-1][2] for of_response in spans]
        if scalars.versions.tolist() != versions or scalars.response_tokens.tolist() != tokens:
            raise McoreRLError(
                f"group {number} came out otherwise than in the run of {KEY}: {scalars.response_tokens.tolist()} "
                f"tokens for {tokens}; the model, the data, the seed, the engine or a key of rollout is not what it was"
            )


def read_replay(run_dir: Path, samples: int) -> Replay:
    """The steps from the first on of which a run directory has records. `samples` of each group.

    Raises: ConfigError where it has none, or where they are not of such a run.
    """
    if not (run_dir / CONFIG_FILE).exists():
        raise ConfigError(f"{KEY}={run_dir} is no run directory: it has no {CONFIG_FILE}")
    earlier = yaml.safe_load((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))["rollout"]
    if earlier.get("swap") != RECOMPUTE or not earlier.get("max_staleness"):
        raise ConfigError(
            f"{KEY}={run_dir} has rollout.max_staleness={earlier.get('max_staleness')} and "
            f"rollout.swap={earlier.get('swap')}: only an asynchronous run with swap=recompute can be repeated"
        )
    of_step: dict[int, list[int]] = {}
    spans: dict[int, dict[int, Spans]] = {}
    submitted: dict[int, int] = {}
    while (path := run_dir / "rollouts" / f"step_{len(of_step) + 1}.jsonl").exists():
        numbers = set()
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            numbers.add(number := record["group"])
            submitted[number] = record["submitted_version"]
            spans.setdefault(number, {})[record["sample"]] = tuple(tuple(span) for span in record["versions"])
        of_step[len(of_step) + 1] = sorted(numbers)
    if not of_step:
        raise ConfigError(f"{KEY}={run_dir} has no rollouts/step_1.jsonl: nothing is there to be repeated")
    if any(sorted(of_group) != list(range(samples)) for of_group in spans.values()):
        raise ConfigError(f"{KEY}={run_dir} has groups of other than rollout.samples_per_prompt={samples} responses")
    versions = np.zeros(max(submitted) + 1, np.int64)  # of those that had not ended at the end: of the one before
    versions[list(submitted)] = list(submitted.values())
    filled = np.maximum.accumulate(versions).tolist()
    of_group = {number: tuple(by_sample[i] for i in range(samples)) for number, by_sample in spans.items()}
    return Replay(of_step, filled, of_group)
