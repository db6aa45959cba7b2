"""The moving average of the policy's weights on one rank, a teacher for self-distillation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from mcore_rl.config.schema import Config
from mcore_rl.megatron.model.names import stored_tensors
from mcore_rl.megatron.roles.teacher import FrozenTeacher
from mcore_rl.megatron.step.outputs import TokenOutputs
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.resolved.teacher import resolved_teacher


class MovingAverage(FrozenTeacher):
    """A teacher whose weights are the exponential moving average of the policy's (Tarvainen and Valpola, "Mean
    teachers", arXiv 1703.01780):

        average <- rate * average + (1 - rate) * policy,

    once per step, after its updates, from the policy's weights at the start of the run. In a LoRA run the weights are
    those with merged adapters.

    `masters` are the float32 averages of weights that the model keeps in another dtype, by the id of the weight; they
    have the shape of this rank's slice. A float32 weight is its own average. Without masters, a rate near 1 would
    round every change of a bfloat16 weight away. With teacher.offload they stay in host memory, and the average is
    computed there. A checkpoint contains the averages, in float32.

    Collective: `outputs`, over all ranks.
    """

    rate: float
    masters: dict[int, torch.Tensor]

    def start(self, rate: float, weights: Mapping[str, torch.Tensor]) -> None:
        """Start the average with the policy's `weights`, see `update`; once, before any other method."""
        self.rate, self.masters = rate, {}
        self.memory.load("params")
        for stored, _ in stored_tensors(self.chunks):
            if stored.dtype != torch.float32:
                device = "cpu" if self.section.offload else stored.device
                self.masters[id(stored)] = torch.empty(stored.shape, dtype=torch.float32, device=device)
        self._average(weights, rate=0.0)

    def update(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Average with the policy's `weights`, whole or this rank's shards, by canonical name. Not collective."""
        self._average(weights, rate=self.rate)

    def restored(self) -> None:
        """Use averages that were written in place, by a checkpoint or an update."""
        with torch.no_grad():
            for stored, _ in stored_tensors(self.chunks):
                if (master := self.masters.get(id(stored))) is not None:
                    stored.copy_(master)
        # Outputs over the whole vocabulary need the current output projection.
        self._weight = None
        self.memory.offload()

    def averages(self) -> dict[str, torch.Tensor]:
        """Return the averages by canonical name, in float32 where the model keeps another dtype. Not collective."""
        self.memory.load("params")
        found: dict[str, torch.Tensor] = {}
        for stored, parts in stored_tensors(self.chunks):
            master = self.masters.get(id(stored))
            found |= parts if master is None else {n: _view_like(part, stored, master) for n, part in parts.items()}
        return found

    def _average(self, weights: Mapping[str, torch.Tensor], *, rate: float) -> None:
        with torch.no_grad():
            for name, average in self.averages().items():
                policy = weights[name]
                assert policy.shape == average.shape, f"{name}: {policy.shape} for an average of {average.shape}"
                # Not lerp_ for rate 0: memory that was never written may contain NaN.
                average.lerp_(policy.to(average), 1 - rate) if rate else average.copy_(policy)
        self.restored()


def build_teachers(
    config: Config, policy: ResolvedModel, outputs: TokenOutputs, weights: Callable[[], Mapping[str, torch.Tensor]]
) -> list[FrozenTeacher]:
    """Build the teacher of each entry of TeacherConfig.entries on this rank; entries whose averages have the same rate
    share one. weights: the policy's, see MovingAverage.start.

    Collective: over all ranks.
    """
    section, gpus, found = config.teacher, config.cluster.gpus_per_node, list[FrozenTeacher]()
    for number, (entry, model) in enumerate(zip(section.entries, section.models, strict=True)):
        if model < number:
            found.append(found[model])
            continue
        spec = resolved_teacher(section, entry, policy)
        if entry.moving_average is not None:
            average = MovingAverage(section, entry, spec, outputs, gpus_per_node=gpus)
            average.start(entry.moving_average, weights())
            found.append(average)
        else:
            found.append(FrozenTeacher(section, entry, spec, outputs, gpus_per_node=gpus))
    return found


def numbered_averages(teachers: Sequence[FrozenTeacher]) -> dict[int, MovingAverage]:
    """Return the averages among the teachers by number; one that entries share has the number of the first."""
    first = {id(each): n for n, each in reversed(list(enumerate(teachers)))}
    return {n: each for n, each in enumerate(teachers) if isinstance(each, MovingAverage) and first[id(each)] == n}


def _view_like(part: torch.Tensor, stored: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Return the elements of `master` that `part` is of `stored`."""
    return master.as_strided(part.shape, part.stride(), part.storage_offset() - stored.storage_offset())
