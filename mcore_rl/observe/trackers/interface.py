"""Protocol of trackers, and the values that they receive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mcore_rl.observe.trackers.run_ids import RunIds


@dataclass(frozen=True)
class RunFacts:
    """Description of a run, which a tracker receives when it is opened.

    directory: run.dir. offline: write below `files` and send nothing.
    first_step: first step that this process will report; larger than 0 if the run was resumed.
    config: flattened resolved configuration, {"actor.optimizer.lr": 1e-6}, without secrets.
    revision: commit of this project, with "-dirty" after changes; None outside a git checkout.
    versions: {package: version} of this project, Python and the main packages.
    """

    directory: Path
    project: str
    name: str
    offline: bool
    first_step: int
    ids: RunIds
    config: Mapping[str, object]
    revision: str | None
    versions: Mapping[str, str]

    @property
    def files(self) -> Path:
        """Folder for the files of trackers."""
        return self.ids.directory

    def described(self) -> dict[str, object]:
        """Return the configuration with code revision and versions under the prefix `environment.`."""
        environment = {f"environment.{name}": version for name, version in self.versions.items()}
        return {**self.config, "environment.revision": self.revision, **environment}


COLUMNS = ("step", "set", "group", "reward", "accuracy", "tokens", "finish_reason", "prompt", "response")
"""Columns of the table of responses."""


@dataclass(frozen=True)
class SampledResponse:
    """One response of a step: a row of the table. Its texts are cut to MAX_CHARACTERS and valid UTF-8.

    is_validation: generated for validation, after the step. Units: tokens.
    """

    step: int
    is_validation: bool
    group: int
    reward: float
    accuracy: float
    tokens: int
    finish_reason: str
    prompt: str
    response: str

    def row(self) -> list[int | float | str]:
        """Return the values of COLUMNS."""
        subset = "validation" if self.is_validation else "training"
        facts = (self.step, subset, self.group, self.reward, self.accuracy, self.tokens, self.finish_reason)
        return [*facts, self.prompt, self.response]

    def caption(self) -> str:
        """Return the facts about the response in one line."""
        scores = f"reward {self.reward:g}, accuracy {self.accuracy:g}"
        return f"group {self.group}, {scores}, {self.tokens} tokens, {self.finish_reason}"


def by_set(responses: Sequence[SampledResponse]) -> Iterator[tuple[str, list[SampledResponse]]]:
    """Yield responses/training and responses/validation, the names in trackers, with their responses, if any."""
    for name, is_validation in (("responses/training", False), ("responses/validation", True)):
        chosen = [each for each in responses if each.is_validation is is_validation]
        if chosen:
            yield name, chosen


class Tracker(Protocol):
    """One open run of a tracker. All calls come from one thread, which is not the main thread.

    Any method may block or raise any exception: the caller counts it, and the training goes on.
    """

    def append(self, step: int, metrics: Mapping[str, float], responses: Sequence[SampledResponse]) -> None:
        """Record the metrics, all of them finite, and the sampled responses of a step.

        Steps increase, except that a resumed run repeats steps that its checkpoint does not contain.
        """
        ...

    def close(self, *, failed: bool) -> None:
        """Send the rest and end the run. `failed`: an error or a signal ended the training."""
        ...
