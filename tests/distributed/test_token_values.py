"""Per-token values of responses whose tokens are divided over context-parallel ranks."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_rl.megatron.model.attention.context import ContextPart
from mcore_rl.megatron.step.microbatches import Packing, build_microbatches
from mcore_rl.megatron.step.token_values import TokenValueWriter
from tests.distributed import policy_batch
from tests.distributed.launch import launch

SAMPLES = list(range(len(policy_batch.PROMPTS)))


def test_token_values_of_context_ranks_are_whole_and_written_once(tmp_path: Path) -> None:
    assert launch(_write, 2, tempfile.mkdtemp(dir=tmp_path)) == [True, True]
    (path,) = tmp_path.rglob("step_*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 7
    for record in records:
        first, count = record["logp_policy"][0], len(record["logp_rollout"])
        # In the order of the response, from both ranks.
        assert record["logp_policy"] == [first + place for place in range(count)]


def _write(rank: int, directory: str) -> bool:
    part = ContextPart(rank, dist.get_world_size(), dist.group.WORLD)
    share, chunks = policy_batch.share(SAMPLES, 0, 1), policy_batch.chunks()
    microbatches = build_microbatches(share, chunks, Packing(tokens=40, context=part))
    logp = {}
    for batch in microbatches:
        values = [
            1000.0 * sample + torch.arange(count)
            for sample, count in zip(batch.samples, batch.whole_counts, strict=True)
        ]
        own = torch.cat(values)[batch.owners == rank]
        logp |= dict(zip(batch.samples, own.split(list(batch.trained_counts)), strict=True))
    TokenValueWriter(Path(directory), 7, part).write(share, chunks, microbatches, logp)
    return True
