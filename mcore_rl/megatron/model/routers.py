"""Routers of mixture-of-experts layers in training: auxiliary losses, expert bias, load metrics, and router replay.

Auxiliary losses are sums over the N tokens of the update on all ranks, without padding and dummy micro-batches. The
denominator is known before the backward pass: each token has weight 1/N, as in a mean over tokens. Per layer, with s
the scores that Megatron balances (softmax, or sigmoid scores divided by their sum), z the logits, E experts, k chosen
per token:

    z loss     z_loss_coefficient / N    sum over tokens t       (log sum_i exp z_ti)^2
    balance    aux_loss_coefficient / N  sum over tokens t       E / k  sum_i  s_ti  c_gi / n_g

c_gi is the number of tokens, among the n_g tokens of t's group g, that have expert i among their k largest scores; it
carries no gradient. load_balancing selects the group: seq_aux_loss, the sequence; aux_loss, the micro-batch;
global_aux_loss, all tokens routed so far in this update on all data-parallel ranks. The z loss and seq_aux_loss do not
depend on the layout or on the micro-batches. aux_loss depends on the micro-batches by definition, global_aux_loss also
on the order of samples; each is equal in all layouts with the same micro-batches.

Megatron's own auxiliary losses are disabled. In 0.16.1 they treat a packed row as one sequence, count padding, and are
too small by a factor of tp * cp if the loss is a sum over tokens.

Source: ST-MoE (arXiv 2202.08906), eq. 5; Switch Transformers (2101.03961), eq. 4; DeepSeek-V3 (2412.19437), eq. 16
(bias) and 17 to 20 (per sequence); megatron.core.transformer.moe.router (0.16.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.autograd.function import FunctionCtx

from mcore_rl.config.models import MoeConfig
from mcore_rl.types import Max, Mean, Metric

_LEAST_SUM = 1e-12
"""Least sum of the weights of a token's experts by which softmax scores are divided (ERNIE's moe_norm_min)."""
_TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]
ScaleLoss = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class RoutingRow:
    """Routing data of a packed micro-batch, for the t tokens that this rank routes.

    sequence: index of each token's sequence, -1 for padding; int64 [t].
    lengths: tokens of each sequence on all ranks, without padding; float32 [sequences].
    token_weight: 1/N in an update, None in a pass without gradient.
    imposed: experts to use, by router index; [layers, t, k]; None: routers choose.
    records: store the chosen experts in `found`.
    found: experts chosen by each router, by router index; [t, k] each.
    """

    sequence: torch.Tensor
    lengths: torch.Tensor
    token_weight: float | None = None
    imposed: torch.Tensor | None = None
    records: bool = False
    found: dict[int, torch.Tensor] = field(default_factory=dict)


class PolicyRouter(TopKRouter):
    """Megatron's router with the auxiliary losses of this module and with router replay.

    row: routing data of the next forward pass; None: Megatron's behavior without losses.
    index: number of this router among the decoder routers of the rank; None for multi-token-prediction layers.
    """

    settings = MoeConfig()
    row: RoutingRow | None = None
    index: int | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        # Megatron calls this hook in place of its top-k function.
        self.router_replay = SimpleNamespace(get_replay_topk=self._replay_or_choose)
        if getattr(self.config, "moe_router_bias_in_row", False):
            for name in ("expert_bias", "local_tokens_per_expert"):
                setattr(self, name, getattr(self, name)[None])
        self.to_recompute: deque[RoutingRow] = deque()
        self.counted: RoutingRow | None = None
        self.repeated = False
        self.reset()

    def reset(self) -> None:
        """Clear load counts and losses before an update."""
        self.to_recompute.clear()
        self.counted = None
        self.load = torch.zeros(self.num_experts, dtype=torch.int64)  # tokens per expert
        self.sums = torch.zeros(2)  # balance and z loss, without coefficient
        self.routed = torch.zeros(self.num_experts + 1)  # for global_aux_loss: count per expert, then tokens

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route the tokens. Shapes: logits [t, 1, E] -> probabilities and routing map, [t, E] each."""
        row = self.current = self._row_of_this_pass()
        # transformers' checkpointing records gradients in the first pass too: the second one must not count again.
        self.repeated = self._trains() and row is self.counted
        if self._trains():
            self.counted = row
        has_loss = self.settings.aux_loss_coefficient or self.settings.z_loss_coefficient
        if row is not None and has_loss and self._trains():
            logits = _AddLoss.apply(
                logits, self._auxiliary_loss(logits.flatten(0, 1), row), self.config.grad_scale_func
            )
        routed: tuple[torch.Tensor, torch.Tensor] = super().routing(logits, padding_mask)
        return routed

    def _row_of_this_pass(self) -> RoutingRow | None:
        """Return the routing data of the current pass, which may be a recomputation of an earlier micro-batch.

        With recomputation, the first pass runs without gradient and is queued. When it is recomputed, `row` already
        belongs to a later micro-batch. Pipelines run the backward passes of a chunk in the order of its forward passes,
        so the recomputed pass is always the first in the queue.
        """
        if self.row is None or self.row.token_weight is None:
            return self.row
        if torch.is_grad_enabled():
            return self.to_recompute.popleft() if self.to_recompute else self.row
        self.to_recompute.append(self.row)
        return self.row

    def _trains(self) -> bool:
        return self.current is not None and self.current.token_weight is not None and torch.is_grad_enabled()

    def _auxiliary_loss(self, logits: torch.Tensor, row: RoutingRow) -> torch.Tensor:
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
        # Accumulate on the device; finish_update reads the sums once per update.
        if not self.repeated:
            self.sums = self.sums.to(loss.device) + torch.stack(sums)
        return loss

    def _balance(self, logits: torch.Tensor, row: RoutingRow, valid: torch.Tensor) -> torch.Tensor:
        chosen, scores = compute_routing_scores_for_aux_loss(
            logits, self.topk, self.score_function, padding_mask=~valid
        )
        # group: index of each token's row in `counts`; padding may have any, because its scores are masked.
        group = torch.zeros_like(row.sequence)
        if self.settings.load_balancing == "seq_aux_loss":
            group = row.sequence.clamp(min=0)
            tokens = row.lengths
        else:
            tokens = row.lengths.sum()[None]
        # A dummy micro-batch has no sequences.
        counts = scores.new_zeros(max(len(tokens), 1), self.num_experts).index_add_(0, group, chosen.to(scores.dtype))
        _sum_over(counts, self.tp_cp_group)
        if self.settings.load_balancing == "global_aux_loss":
            if not self.repeated:
                self._count_routed(counts[0], tokens)
            counts, tokens = self.routed[None, :-1], self.routed[-1:]
        share = counts / tokens.to(counts.dtype).clamp(min=1)[:, None] if len(tokens) else counts
        return (scores * share[group]).sum() * (self.num_experts / self.topk)

    def _count_routed(self, counts: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add the tokens of this micro-batch on all data-parallel ranks. Collective: the data-parallel ranks."""
        routed = torch.cat((counts, tokens.to(counts.dtype)))
        _sum_over(routed, parallel_state.get_data_parallel_group())
        self.routed = self.routed.to(routed.device) + routed

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Count tokens per expert, in passes with gradient only. Overrides a Megatron method called once per pass."""
        if self._trains() and not self.repeated:
            assert self.current is not None
            valid = (self.current.sequence >= 0)[:, None]
            # Only the first pass of an update moves the counter to the device.
            self.load = self.load.to(routing_map.device) + (routing_map & valid).sum(0)

    def _replay_or_choose(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute: _TopK
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and experts, [t, k] each: the imposed experts, or the result of `compute`. Replaces Megatron's
        RouterReplay, which has one global list of routers and one global mode."""
        row, index = self.current, self.index
        # Megatron itself adds the bias to sigmoid scores before this call, and normalises the weights after it.
        corrected = self.score_function == "softmax" and self.expert_bias is not None
        if row is not None and index is not None and row.imposed is not None:
            experts = row.imposed[index].to(torch.int64)
            return _weights(scores, experts, normalised=corrected), experts
        choices = scores + self.expert_bias if corrected else scores
        values, experts = compute(choices, topk, num_groups=num_groups, group_topk=group_topk)
        if corrected:
            values = _weights(scores, experts, normalised=True)
        if row is not None and row.records and index is not None:
            # A recomputed pass writes the same values again.
            # int16 is enough for 32,767 experts and takes a quarter of the memory of int64.
            row.found[index] = experts.to(torch.int16)
        return values, experts


def _weights(scores: torch.Tensor, experts: torch.Tensor, *, normalised: bool) -> torch.Tensor:
    """Return the scores of the experts, divided by their sum if `normalised`. Shapes: [t, E], [t, k] -> [t, k]."""
    values = scores.gather(1, experts)
    return values / values.sum(-1, keepdim=True).clamp(min=_LEAST_SUM) if normalised else values


class _AddLoss(torch.autograd.Function):
    """Return the first argument and add the second, a scalar, to the loss in the backward pass. scale_loss: function
    that multiplies the loss by the loss scale; None: the loss is not scaled."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, values: torch.Tensor, loss: torch.Tensor, scale_loss: ScaleLoss | None
    ) -> torch.Tensor:
        ctx.dtype, ctx.scale_loss = loss.dtype, scale_loss
        return values.view_as(values)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        one = torch.ones((), dtype=ctx.dtype, device=grad.device)
        return grad, one if ctx.scale_loss is None else ctx.scale_loss(one).reshape(()), None


def _squared_log_sum(logits: torch.Tensor, row: RoutingRow, valid: torch.Tensor) -> torch.Tensor:
    return (logits.float().logsumexp(-1).square() * valid).sum()


def _sum_over(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)


def use_policy_router(layer_specs: list[ModuleSpec]) -> None:
    """Set PolicyRouter as the router in the specs of layers with experts."""
    for layer in layer_specs:
        parts = getattr(layer.submodules.mlp, "submodules", None)
        if isinstance(parts, MoESubmodules):
            parts.router = PolicyRouter


class Routers:
    """All routers of this rank.

    layers: for each decoder router of the rank, its number among all layers with experts of the model.
    counts: True on one rank per stage, whose layers count in means over layers.
    role: prefix of the metrics.
    """

    def __init__(
        self, chunks: list[torch.nn.Module], settings: MoeConfig, *, counts: bool, role: str = "actor"
    ) -> None:
        self.settings, self.role = settings, role
        self.counts = counts
        self.by_chunk: dict[int, list[PolicyRouter]] = {}
        self.layers: list[int] = []
        for chunk in chunks:
            named = [(n, m) for n, m in chunk.named_modules() if isinstance(m, PolicyRouter)]
            self.by_chunk[id(chunk)] = [router for _, router in named]
            for name, router in named:
                router.settings = settings
                if ".mtp." not in f".{name}":
                    router.index = len(self.layers)
                    self.layers.append(_expert_layer_index(router))
        self.all = [router for routers in self.by_chunk.values() for router in routers]

    def set_row(self, chunk: torch.nn.Module, row: RoutingRow) -> None:
        """Set the routing data of the next forward pass of `chunk`."""
        for router in self.by_chunk[id(chunk)]:
            router.row = row

    def reset(self) -> None:
        """Clear load counts and losses of all routers before an update."""
        for router in self.all:
            router.reset()

    @torch.no_grad()
    def finish_update(self, *, skipped: bool = False) -> dict[str, Metric]:
        """Update the expert biases after an optimizer step, unless it was skipped, and return this rank's part of the
        metrics.

        Collective: the tensor-, context- and data-parallel ranks of a stage.
        """
        if not self.all:
            return {}
        assert not any(router.to_recompute for router in self.all), "a forward pass was not recomputed"
        load = torch.stack([router.load for router in self.all])
        _sum_over(load, parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        mean = load.sum(1, keepdim=True).double() / load.shape[1]
        rate = 0.0 if skipped else self.settings.bias_update_rate
        for router, offset in zip(self.all, mean - load, strict=True):
            if rate:
                # Updates need float32; Megatron restores it if a wrapper changed the dtype.
                router._maintain_float32_expert_bias()
                router.expert_bias += rate * offset.sign().to(router.expert_bias.dtype)
        metrics: dict[str, Metric] = {f"{self.role}/moe_max_load": Max(float((load / mean.clamp(min=1e-9)).max()))}
        sums = torch.stack([router.sums for router in self.all]).sum(0).tolist()
        layers = len(self.all) if self.counts else 0
        for name, total in zip(("aux", "z"), sums, strict=True):
            if getattr(self.settings, f"{name}_loss_coefficient"):
                metrics[f"{self.role}/moe_{name}_loss"] = Mean(total, layers)
        return metrics


def _expert_layer_index(router: PolicyRouter) -> int:
    """Return the index of the router's layer among the layers with experts, from 0."""
    frequency = router.config.moe_layer_freq
    layer = router.layer_number - 1
    return layer // frequency if isinstance(frequency, int) else sum(frequency[:layer])
