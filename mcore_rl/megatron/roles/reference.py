"""The reference on one rank: a frozen policy in the layout and process groups of the trained policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from mcore_rl.algorithms import kl_penalty
from mcore_rl.config.models import OffloadConfig, ReferenceConfig
from mcore_rl.megatron.lora.adapters import base_only
from mcore_rl.megatron.model.attention.context import ContextPart
from mcore_rl.megatron.model.loading import load_hf
from mcore_rl.megatron.model.model import build_model
from mcore_rl.megatron.model.names import canonical_tensors
from mcore_rl.megatron.model.output import ModelChunk
from mcore_rl.megatron.optim.offload import Offloader
from mcore_rl.megatron.roles.rank_model import FrozenModel, RankModel, TrainedModel
from mcore_rl.megatron.step.loss.trained_tokens import by_sample, whole_by_sample
from mcore_rl.megatron.step.microbatches import MicroBatch
from mcore_rl.megatron.step.objective import Objective, non_finite_samples
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.types import RankShare, TrajectoryBuffers


class FrozenPolicy(FrozenModel):
    """A copy of the policy's model with the weights of reference.hf_path or, if that is null, of `policy`.

    With reference.offload, `memory` keeps the weights in host memory between passes. A checkpoint contains them if they
    exist nowhere else (`is_saved`): if they are refreshed during the run, or if the initial weights are random.

    Collective: every method except copy_from, over all ranks.
    Raises: ConfigError, naming reference.hf_path, for weights that do not fit.
    """

    def __init__(
        self,
        spec: ResolvedModel,
        section: ReferenceConfig,
        objective: Objective,
        policy: Sequence[ModelChunk],
        *,
        gpus_per_node: int,
    ) -> None:
        path, model = section.hf_path, spec.role.model
        self.objective = objective
        self.is_saved = section.refresh_every_steps > 0 or (model.random_init and path is None)
        # Skip the initialization: the weights are loaded or copied below.
        spec = replace(spec, role=replace(spec.role, model=replace(model, random_init=False)))
        chunks = build_model(spec, gpus_per_node=gpus_per_node)
        if path is not None:
            load_hf(chunks, path, spec.layout, "reference.hf_path")
        super().__init__(spec, chunks, offload=section.offload, name="reference")
        self.packing = replace(self.packing, masked=objective.outputs.masked)
        if path is None:
            self.copy_from(policy)
        self.memory.offload()

    def logp(self, share: RankShare, chunks: Sequence[TrajectoryBuffers]) -> dict[int, torch.Tensor]:
        """Compute the log-probabilities of this rank's trained tokens, by sample, at the policy's temperature.

        Ranks of other stages than the last get {}.

        Shapes: [n]. Units: nats.
        Raises: NonFiniteError on every rank, naming the samples.
        """
        logp = _logp(self, self.objective, share, chunks)
        self.memory.offload()
        return logp

    def copy_from(self, policy: Sequence[ModelChunk]) -> None:
        """Copy the weights of `policy`, which must be gathered and on the device. Not collective."""
        self.memory.load("params")
        tensors, given = canonical_tensors(self.chunks), canonical_tensors(policy)
        assert tensors.keys() == given.keys()
        with torch.no_grad():
            # In place: `memory` refers to the storages of these tensors.
            for name, tensor in tensors.items():
                tensor.copy_(given[name])
        self.memory.offload()


class BasePolicy:
    """The base model of a LoRA run as reference: the policy's own chunks with the adapters switched off for a pass.

    It has no weights of its own, so `memory` is empty and checkpoints need no entry for it.

    Collective: every method, over all ranks.
    """

    def __init__(self, policy: TrainedModel, objective: Objective) -> None:
        self.policy, self.objective = policy, objective
        self.memory = Offloader((), None, OffloadConfig())

    def logp(self, share: RankShare, chunks: Sequence[TrajectoryBuffers]) -> dict[int, torch.Tensor]:
        """See FrozenPolicy.logp. Routers use their own scores even if the policy replays experts."""
        with base_only(self.policy.chunks):
            return _logp(self.policy, self.objective, share, chunks)


def _logp(
    model: RankModel, objective: Objective, share: RankShare, chunks: Sequence[TrajectoryBuffers]
) -> dict[int, torch.Tensor]:
    batches = model.microbatches(share, chunks)
    # free: the policy's experts must not be imposed on the reference.
    logp_by_batch = model.infer(
        batches, objective.outputs.logp_of, [model.routing.row(batch, free=True) for batch in batches]
    )
    bad = [sample for batch, logp in logp_by_batch for sample in non_finite_samples(batch, logp)]
    model.require_finite_samples("log-probability of the reference", bad, share)
    return by_sample(logp_by_batch)


def whole_kl(
    batches: Sequence[MicroBatch],
    old_logp: Mapping[int, torch.Tensor],
    ref_logp: Mapping[int, torch.Tensor],
    kind: str,
    context: ContextPart,
) -> dict[int, np.ndarray]:
    """Compute the KL of every trained token in `batches`, gathered over the context-parallel ranks.

    Shapes: old_logp, ref_logp: this rank's tokens by sample; result: float32 [n] for the whole response. Units: nats.
    Collective: the context-parallel group.
    """
    kl_by_sample: dict[int, np.ndarray] = {}
    for batch in batches:
        # A dummy micro-batch, on all context-parallel ranks alike: none of them gathers.
        if not batch.samples:
            continue
        old, ref = (torch.cat([logp[sample] for sample in batch.samples]) for logp in (old_logp, ref_logp))
        kl_by_sample |= whole_by_sample(batch, kl_penalty(old, ref, kind), context)
    return kl_by_sample
