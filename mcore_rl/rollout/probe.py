"""Short ungraded responses of each engine to training prompts: what its log-probabilities are compared on before
training. They share no id, journal entry or record with the responses of any step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.ports import EngineProbe
from mcore_rl.rollout.collector import training_sampling
from mcore_rl.types import RolloutResult, RolloutTask

PROBE = "probe"
"""Name under which engines have the training prompts for these responses; their request ids begin with it."""
MAX_TOKENS = 32
"""Length limit of a response: 4 prompts give about 100 tokens, enough for a mean, in less than a second."""


class ProbedPool(Protocol):
    def probe(self, task: RolloutTask) -> dict[str, RolloutResult]:
        """Runs the task on every engine, each time with other group ids; results by the engine's name."""


@dataclass(frozen=True)
class PromptProbe:
    """An EngineProbe with the sampling options of training.

    Shapes: prompt_tokens int64 [N], the length of every training prompt.
    """

    pool: ProbedPool
    prompt_tokens: np.ndarray
    rollout: RolloutConfig
    seed: int

    def probe(self, num_prompts: int) -> dict[str, RolloutResult]:
        """As EngineProbe.probe. Prompts range from the longest to the shortest; they repeat if there are too few."""
        sampling = training_sampling(self.rollout)
        sampling = replace(sampling, max_response_tokens=min(MAX_TOKENS, sampling.max_response_tokens))
        longest_first = np.argsort(-self.prompt_tokens, kind="stable")
        rows = longest_first[np.linspace(0, len(longest_first) - 1, num_prompts).astype(np.int64)]
        return self.pool.probe(RolloutTask(PROBE, rows, np.arange(num_prompts), 1, sampling, self.seed))


if TYPE_CHECKING:
    _port: type[EngineProbe] = PromptProbe
