"""Short ungraded responses of each engine to training prompts, to compare log-probabilities before training. They share
no id, journal entry or record with the responses of any step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.ports import EngineProbe
from mcore_rl.rollout.collector import training_sampling
from mcore_rl.types import RolloutResult, RolloutTask

PROBE = "probe"
"""Name of this prompt set on engines; the request ids start with it."""
MAX_TOKENS = 32
"""Length limit of a response: 4 prompts give about 100 tokens, enough for a mean, in less than a second."""


class ProbedPool(Protocol):
    """Engines that can all run the same task."""

    def probe(self, task: RolloutTask) -> dict[str, RolloutResult]:
        """Run the task on every engine, with different group ids each; returns {engine name: result}."""


@dataclass(frozen=True)
class PromptProbe:
    """EngineProbe with the sampling options of training.

    Shapes: prompt_tokens int64 [N], the length of every training prompt.
    """

    pool: ProbedPool
    prompt_tokens: np.ndarray
    rollout: RolloutConfig
    seed: int

    def probe(self, num_prompts: int) -> dict[str, RolloutResult]:
        """Same as EngineProbe.probe. Prompts range from the longest to the shortest; they repeat if there are too
        few."""
        sampling = training_sampling(self.rollout)
        sampling = replace(sampling, max_response_tokens=min(MAX_TOKENS, sampling.max_response_tokens))
        # Long and short prompts, because some errors, such as a wrong attention window, depend on the length.
        longest_first = np.argsort(-self.prompt_tokens, kind="stable")
        rows = longest_first[np.linspace(0, len(longest_first) - 1, num_prompts).astype(np.int64)]
        return self.pool.probe(RolloutTask(PROBE, rows, np.arange(num_prompts), 1, sampling, self.seed))


if TYPE_CHECKING:
    _port: type[EngineProbe] = PromptProbe
