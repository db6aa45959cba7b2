"""Routers of mixture-of-experts layers under training: auxiliary losses, the bias that chooses experts, their load, and
the experts that a pass is told to choose.

Auxiliary losses are sums over the update's N tokens, of all ranks, padding and dummy micro-batches excluded, with the
denominator known before the backward pass: 1/N per token, as in a mean over tokens. Per layer, with s the scores that
megatron balances (softmax, or sigmoid scores divided by their sum), z the logits, E experts, k of them per token:

    z loss     z_loss_coefficient / N    sum over tokens t       (log sum_i exp z_ti)^2
    balance    aux_loss_coefficient / N  sum over tokens t       E / k  sum_i  s_ti  c_gi / n_g

c_gi counts in how many of the n_g tokens of t's group g expert i is among the k largest scores; it has no gradient.
load_balancing says what a group is: seq_aux_loss a sequence, aux_loss the micro-batch, global_aux_loss what the update
has routed so far, on all data-parallel ranks. With one sequence per micro-batch the first two are the same. The z loss
and seq_aux_loss do not depend on the cut into micro-batches or on the layout; the other two are by their definition
those of a cut, and equal in all layouts that cut alike (global_aux_loss: that share out alike).

megatron's own terms are switched off: 0.16.1 takes a packed row for one sequence, counts padding, and scales by
1 / (tp * cp) too little where losses are sums over tokens.

Source: ST-MoE (arXiv 2202.08906), eq. 5; Switch Transformers (2101.03961), eq. 4; DeepSeek-V3 (2412.19437), eq. 16
(bias) and 17 to 20 (per sequence); megatron.core.transformer.moe.router (0.16.1).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.config.models import MoeConfig
from mcore_rl.megatron import cpu
from mcore_rl.types import Max, Mean, Metric

cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoESubmodules  # noqa: E402
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402


@dataclass
class Row:
    """What routers need to know of a micro-batch, of the tokens that this rank routes (t of them).

    Shapes: sequence int64 [t], -1 for padding; lengths float32 [sequences], tokens of each on all ranks, no padding;
    imposed [layers, t, k], experts by a router's `index`, None: routers choose; found [t, k] by `index`, where records.
    `token_weight` is 1/N in an update, None in a pass without gradient.
    """

    sequence: torch.Tensor
    lengths: torch.Tensor
    token_weight: float | None = None
    imposed: torch.Tensor | None = None
    records: bool = False
    found: dict[int, torch.Tensor] = field(default_factory=dict)


class PolicyRouter(TopKRouter):
    """megatron's router with the losses of the module's docstring.

    `row` is the micro-batch that the next forward pass is of; None: megatron's behaviour. `index` counts this rank's
    routers of decoder layers, None in multi-token prediction.
    """

    settings = MoeConfig()
    row: Row | None = None
    index: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = _Choice(self)
        self.waiting: deque[Row] = deque()
        self.reset()

    def reset(self) -> None:
        """Before an update: nothing routed, no loss."""
        self.waiting.clear()
        self.load = torch.zeros(self.num_experts, dtype=torch.int64)  # tokens per expert
        self.sums = torch.zeros(2)  # balance and z loss, without coefficient
        self.routed = torch.zeros(self.num_experts + 1)  # of global_aux_loss: counts, tokens

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Shapes: logits [t, 1, E] -> probabilities and map, [t, E] each."""
        row = self.current = self._row_of_this_pass()
        has_loss = self.settings.aux_loss_coefficient or self.settings.z_loss_coefficient
        if row is not None and has_loss and self._trains():
            logits = _AddLoss.apply(logits, self._auxiliary_loss(logits.flatten(0, 1), row))
        routed: tuple[torch.Tensor, torch.Tensor] = super().routing(logits, padding_mask)
        return routed

    def _row_of_this_pass(self) -> Row | None:
        """A recomputed pass is of the first row that waits: pipelines run backward passes in the order of the forward
        passes of a chunk, and by then `row` is that of a later micro-batch."""
        if self.row is None or self.row.token_weight is None:
            return self.row
        if torch.is_grad_enabled():
            return self.waiting.popleft() if self.waiting else self.row
        self.waiting.append(self.row)
        return self.row

    def _trains(self) -> bool:
        return self.current is not None and self.current.token_weight is not None and torch.is_grad_enabled()

    def _auxiliary_loss(self, logits: torch.Tensor, row: Row) -> torch.Tensor:
        loss, weight = logits.new_zeros((), dtype=torch.float32), row.token_weight
        assert weight is not None
        valid = row.sequence >= 0
        sums = []
        for coefficient, term in (
            (self.settings.aux_loss_coefficient, self._balance),
            (self.settings.z_loss_coefficient, _squared_log_sum),
        ):
            value = term(logits, row, valid) * weight if coefficient else loss.new_zeros(())
            loss = loss + coefficient * value
            sums.append(value.detach())
        self.sums = self.sums.to(loss.device) + torch.stack(sums)
        return loss

    def _balance(self, logits: torch.Tensor, row: Row, valid: torch.Tensor) -> torch.Tensor:
        chosen, scores = compute_routing_scores_for_aux_loss(
            logits, self.topk, self.score_function, padding_mask=~valid
        )
        group = torch.zeros_like(row.sequence)
        if self.settings.load_balancing == "seq_aux_loss":
            group = row.sequence.clamp(min=0)
            tokens = row.lengths
        else:
            tokens = row.lengths.sum()[None]
        counts = scores.new_zeros(max(len(tokens), 1), self.num_experts).index_add_(0, group, chosen.to(scores.dtype))
        _sum_over(counts, self.tp_cp_group)
        if self.settings.load_balancing == "global_aux_loss":
            routed = torch.cat((counts[0], tokens.to(counts.dtype)))
            _sum_over(routed, parallel_state.get_data_parallel_group())
            self.routed = self.routed.to(routed.device) + routed
            counts, tokens = self.routed[None, :-1], self.routed[-1:]
        share = counts / tokens.to(counts.dtype).clamp(min=1)[:, None] if len(tokens) else counts
        return (scores * share[group]).sum() * (self.num_experts / self.topk)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Counts tokens per expert, once in every pass that trains."""
        if self._trains():
            assert self.current is not None
            valid = (self.current.sequence >= 0)[:, None]
            self.load = self.load.to(routing_map.device) + (routing_map & valid).sum(0)


class _Choice:
    """Has the form of megatron's RouterReplay, which keeps one list of all routers and one action for all of them."""

    def __init__(self, router: PolicyRouter) -> None:
        self.router = router

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The imposed experts with their current scores, or those that `compute` finds. Shapes: [t, k] each."""
        row, index = self.router.current, self.router.index
        if row is not None and index is not None and row.imposed is not None:
            experts = row.imposed[index].to(torch.int64)
            return scores.gather(1, experts), experts
        values, experts = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if row is not None and row.records and index is not None:
            # The same again where the pass is a recomputed one.
            row.found[index] = experts.to(torch.int16)
        return values, experts


class _AddLoss(torch.autograd.Function):
    """Returns its first argument; the second, a scalar, joins the loss."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.dtype = loss.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device)


def _squared_log_sum(logits: torch.Tensor, row: Row, valid: torch.Tensor) -> torch.Tensor:
    return (logits.float().logsumexp(-1).square() * valid).sum()


def _sum_over(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)


def use_policy_router(layer_specs: list[Any]) -> None:
    """Puts PolicyRouter into the specs of layers with experts."""
    for layer in layer_specs:
        parts = getattr(layer.submodules.mlp, "submodules", None)
        if isinstance(parts, MoESubmodules):
            parts.router = PolicyRouter


class Routers:
    """All routers of this rank. `layers` are the places of its decoder layers' routers among those of the model; on one
    rank of every stage `counts` them in means over layers. `role` is the prefix of metrics."""

    def __init__(
        self, chunks: list[torch.nn.Module], settings: MoeConfig, *, counts: bool, role: str = "actor"
    ) -> None:
        self.settings, self.role = settings, role
        self.counts = counts
        self.of_chunk: dict[int, list[PolicyRouter]] = {}
        self.layers: list[int] = []
        for chunk in chunks:
            named = [(n, m) for n, m in chunk.named_modules() if isinstance(m, PolicyRouter)]
            self.of_chunk[id(chunk)] = [router for _, router in named]
            for name, router in named:
                router.settings = settings
                if ".mtp." not in f".{name}":
                    router.index = len(self.layers)
                    self.layers.append(_place_in_model(router))
        self.all = [router for routers in self.of_chunk.values() for router in routers]

    def enter(self, chunk: torch.nn.Module, row: Row) -> None:
        """Before a forward pass of `chunk`."""
        for router in self.of_chunk[id(chunk)]:
            router.row = row

    def reset(self) -> None:
        """Before an update."""
        for router in self.all:
            router.reset()

    @torch.no_grad()
    def finish_update(self) -> dict[str, Metric]:
        """After an optimizer step: moves the correction biases; this rank's part of the metrics.

        Collective: the tensor-, context- and data-parallel ranks of a stage.
        """
        if not self.all:
            return {}
        assert not any(router.waiting for router in self.all), "a row was recomputed too seldom"
        load = torch.stack([router.load for router in self.all])
        _sum_over(load, parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        mean = load.sum(1, keepdim=True).double() / load.shape[1]
        rate = self.settings.bias_update_rate
        for router, offset in zip(self.all, mean - load, strict=True):
            if rate:
                router._maintain_float32_expert_bias()
                router.expert_bias += rate * offset.sign().to(router.expert_bias.dtype)
        metrics: dict[str, Metric] = {f"{self.role}/moe_max_load": Max(float((load / mean.clamp(min=1e-9)).max()))}
        sums = torch.stack([router.sums for router in self.all]).sum(0).tolist()
        layers = len(self.all) if self.counts else 0
        for name, total in zip(("aux", "z"), sums, strict=True):
            if getattr(self.settings, f"{name}_loss_coefficient"):
                metrics[f"{self.role}/moe_{name}_loss"] = Mean(total, layers)
        return metrics


def _place_in_model(router: PolicyRouter) -> int:
    """Among the layers with experts, from 0."""
    frequency = router.config.moe_layer_freq
    layer = router.layer_number - 1
    return layer // frequency if isinstance(frequency, int) else sum(frequency[:layer])
