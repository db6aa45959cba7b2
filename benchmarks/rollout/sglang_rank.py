"""Rank of an SGLang engine that reports its CPU seconds (runs in SGLang's environment). Arguments as of
`python -m mcore_rl.engines.sglang.rank`.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from mcore_rl.engines.sglang import rank

if TYPE_CHECKING:
    from mcore_rl.engines.sglang.settings import RankSettings

_create = rank._scheduler


def _measured(settings: RankSettings) -> Any:
    """Return a rank's scheduler with a method `spent`: CPU seconds of the process, and those in the model's forward
    pass."""
    scheduler: Any = _create(settings)
    runner = scheduler._scheduler.tp_worker.model_runner
    forward, inside = runner.forward, 0.0

    def timed(*arguments: object, **keywords: object) -> object:
        nonlocal inside
        started = time.process_time()
        output = forward(*arguments, **keywords)
        inside += time.process_time() - started
        return output

    runner.forward = timed
    scheduler.spent = lambda: (time.process_time(), inside)
    return scheduler


if __name__ == "__main__":
    rank._scheduler = _measured
    rank.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    os._exit(0)
