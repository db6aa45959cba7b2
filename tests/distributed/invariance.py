"""Rank functions of the invariance tests: load one distributed checkpoint in a layout and compute everything that must
not depend on the layout."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mcore_rl.config.models import ParallelConfig
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.layout import train_layout
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import ONE_MICROBATCH, SMALL
from tests.distributed.two_updates import make_config


@dataclass(frozen=True)
class Case:
    """Division of the update over ranks and micro-batches."""

    model: str
    parallel: dict[str, Any] = field(default_factory=dict)
    tokens: int = SMALL

    def __str__(self) -> str:
        sizes = [f"{key}{value}" for key, value in self.parallel.items()]
        return " ".join([self.model, *sizes, *["whole"] * (self.tokens == ONE_MICROBATCH)])


def layouts(num_ranks: int, hf_config: dict[str, Any]) -> list[dict[str, int]]:
    """List all layouts of num_ranks ranks that the model supports, with axes that are powers of two; axes of size 1 are
    left out."""
    powers = [1 << exponent for exponent in range(num_ranks.bit_length())]
    found = []
    for tp, pp, cp, ep, etp in itertools.product(powers, repeat=5):
        for vpp in (1, 2):
            sizes = {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": ep, "etp": etp}
            if all(hf_config.get(key) is None for key in ("num_experts", "n_routed_experts", "num_local_experts")):
                if etp != tp:
                    continue
                del sizes["etp"]
            try:
                layout = train_layout(ParallelConfig(**sizes), num_ranks, hf_config)
            except ConfigError:
                continue
            if vpp > 1 and layout.vpp is None:
                continue
            kept = {key: size for key, size in sizes.items() if size > 1 or key == "etp"}
            found.append(kept)
    return found


def measure(rank: int, directories: dict[str, str], checkpoints: dict[str, str], cases: list[Case]) -> list[Any]:
    """Compute the results of every case on this rank."""
    return [_measure(rank, directories[case.model], checkpoints[case.model], case) for case in cases]


def _measure(rank: int, directory: str, checkpoint: str, case: Case) -> dict[str, Any]:
    from mcore_rl.megatron.step.loss.rank_batch import RankBatch

    actor = build_actor(directory, case)
    if not actor.layout.shard_parameters:
        load_weights(actor, checkpoint)
    place = actor.layout.coordinates(rank)
    shares, chunks = policy_batch.shares(actor), policy_batch.chunks()
    values = {s: found for share in shares for s, found in policy_values(actor, share, chunks).items()}
    old_logp = {
        sample: torch.from_numpy(logp + policy_batch.drift(sample)[held]) for sample, (held, logp, _) in values.items()
    }
    # Like a second update, with old log-probabilities.
    later = RankBatch([shares[1], shares[0]], chunks, old_logp)
    with policy_batch.complete_gradients(actor):
        _, reports = actor.accumulate_gradients(later, 1)
    loss = sum(report.loss for report in reports) if place.tp == 0 else 0.0
    gradients = policy_batch.gradient_pieces(actor)
    batch, _ = actor.recompute_logp(shares, chunks)
    metrics = [actor.update(batch, index) for index in range(len(shares))]
    actor.gather_parameters()
    return {
        "loss": loss,
        "values": values if place.tp == 0 else {},
        "gradients": gradients,
        "weights": policy_batch.hf_pieces(actor),
        "norms": {name: metric for name, metric in metrics[0].items() if "grad_norm" in name},
    }


def build_actor(directory: str, case: Case) -> Any:
    """Build an actor on this rank: with random weights, or with the model's if parameters are sharded, which Megatron's
    reader cannot load."""
    config = make_config(directory, case.parallel)
    config.model.random_init = "shard_parameters" not in case.parallel
    config.actor.tokens_per_microbatch = case.tokens
    return policy_batch.build_actor(config)


def load_weights(actor: Any, checkpoint: str) -> None:
    """Load the model from a distributed checkpoint with Megatron's reader."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    metadata = ensure_metadata_has_dp_cp_group({})
    wanted = {
        f"model{index}": {
            name: entry
            for name, entry in chunk.sharded_state_dict(metadata=metadata).items()
            if not isinstance(entry, ShardedObject)
        }
        for index, chunk in enumerate(actor.chunks)
    }
    state = dist_checkpointing.load(wanted, checkpoint)
    for index, chunk in enumerate(actor.chunks):
        missing = set(chunk.load_state_dict(state[f"model{index}"], strict=False).missing_keys)
        assert all(name.endswith("_extra_state") for name in missing), missing
    actor.optimizer.reload_model_params()


def policy_values(actor: Any, share: Any, chunks: list[Any]) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """By sample, on the ranks of the last stage: the trained tokens that this rank holds, their log-probabilities and
    entropies."""

    def evaluate(model: Any, batch: Any, hidden: torch.Tensor) -> Any:
        return batch, actor.objective.outputs.logp(model, hidden, batch, compute_entropy=True)

    values = {}
    for batch, found in actor.infer(actor.microbatches(share, chunks), evaluate):
        parts = [tensor.split(list(batch.trained_counts)) for tensor in found]
        for sample, logp, entropy in zip(batch.samples, *parts, strict=True):
            held = policy_batch.held(sample, actor.layout, actor.rank)
            values[sample] = held, logp.numpy().copy(), entropy.numpy().copy()
    return values
