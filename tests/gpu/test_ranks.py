"""Two ranks on two GPUs clip by the same gradient norm as a single rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import policy_batch
from tests.distributed.two_updates import make_actor
from tests.gpu.engine_layers import FIELDS
from tests.gpu.ranks import launch_installed
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.gpus(2)

DENSE = {"first_k_dense_replace": 4}
"""Latent attention in every layer and no experts: in bfloat16 a router might choose another expert."""


def test_latent_attention_over_two_ranks_has_the_gradient_norm_of_one(device: str, tmp_path: Path) -> None:
    """TransformerEngine marks undivided projections as divided. If they were counted twice, the norm would be 7 %
    larger."""
    directory = str(write_tiny_model(tmp_path / "v3", "deepseek_v3", **FIELDS["deepseek_v3"], **DENSE))
    norms = [launch_installed(gradient_norm, tp, directory, tp, device=device)[0] for tp in (1, 2)]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


def gradient_norm(rank: int, directory: str, tp: int) -> float:
    """Return the gradient norm of an update in bfloat16; 0 on ranks that do not report it."""
    actor, shares = make_actor(directory, {"tp": tp}, model={"dtype": "bfloat16"})
    metrics = actor.update(actor.recompute_logp(shares[:1], policy_batch.chunks())[0], 0)
    return metrics["actor/grad_norm"].value if "actor/grad_norm" in metrics else 0.0
