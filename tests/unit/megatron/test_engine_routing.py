"""Extraction of the engine's experts from trajectories."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.step.replay import engine_routing
from tests.distributed import policy_batch


def test_engine_routing_covers_computed_tokens_and_names_missing_samples() -> None:
    chunks = policy_batch.chunks()
    places = np.arange(len(chunks[1].tokens), dtype=np.int16)[:, None, None]
    chunks[1] = replace(chunks[1], routed_experts=np.concatenate([places, places + 500], 1))
    found = engine_routing([policy_batch.share([6], 0, 1)], chunks)
    first = int(chunks[1].token_offsets[6 - policy_batch.FIRST_CHUNK])
    last = policy_batch.PROMPTS[6] + int(np.flatnonzero(policy_batch.trained(6))[-1])
    assert found[6][:, :, 0].tolist() == [
        list(range(first, first + last)),
        list(range(first + 500, first + 500 + last)),
    ]
    with pytest.raises(McoreRLError, match=r"router_replay=engine: .* no experts for the tokens of sample 4"):
        engine_routing([policy_batch.share([4, 6], 0, 1)], chunks)
