"""Forward and backward pass of every policy loss on 2^20 tokens with one thread, compared with ppo_clip.

    python -m benchmarks losses

Tokens are flat, as in a packed micro-batch, or one response of 4,096 tokens per row if a loss needs whole responses.
Limit: 1.5 times ppo_clip; both are timed alternately. A loss that chooses tokens of a whole update receives the choice,
as in training; the choice has a separate row. A loss of whole groups receives the results of its groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from benchmarks.pairs import alternate
from benchmarks.result import Result
from benchmarks.sizes import size
from mcore_rl.algorithms import Correction, PolicyLossInputs, compute_value_loss, policy_loss
from mcore_rl.algorithms.interface import PolicyLoss
from mcore_rl.algorithms.registry import POLICY_LOSSES
from mcore_rl.algorithms.selection import choose
from mcore_rl.config.algorithm import CorrectionConfig

RESPONSES, TOKENS = size((256, 4096), (4, 32))
ROUNDS = size(9, 1)
AIM = "<= 1.5"


def run() -> list[Result]:
    torch.set_num_threads(1)
    rows = make_inputs()
    flat = PolicyLossInputs(**{name: None if t is None else t.flatten() for name, t in vars(rows).items()})
    reference = step_of(policy_loss("ppo_clip"), flat)
    results = []
    for name in POLICY_LOSSES:
        loss = policy_loss(name)
        # Most losses see a packed micro-batch, without rows.
        inputs = rows if loss.needs.whole_sequence else flat
        if loss.needs.selection:
            results.append(_row(f"{name}: choosing", partial(choose_tokens, loss, flat), reference))
            inputs = replace(flat, chosen=choose_tokens(loss, flat))
        if loss.needs.whole_group:
            inputs = replace(flat, group_loss=torch.ones_like(flat.logp), slope=torch.ones_like(flat.logp))
        results.append(_row(name, step_of(loss, inputs), reference, AIM))
    loglinear = policy_loss("decoupled_ppo", prox="loglinear")
    results.append(_row("decoupled_ppo, loglinear", step_of(loglinear, flat), reference, AIM))
    results.append(_row("value loss", lambda: value_step(rows), reference))
    for level in ("token", "sequence", "geometric"):
        results.append(_row(f"correction, {level}", partial(correct, level, rows), reference))
    return results


def make_inputs() -> PolicyLossInputs:
    g = torch.Generator().manual_seed(0)
    shape = RESPONSES, TOKENS
    old = -3 * torch.rand(shape, generator=g)
    return PolicyLossInputs(
        logp=old + 0.1 * torch.randn(shape, generator=g),
        mask=torch.ones(shape),
        old_logp=old,
        advantages=torch.randn(RESPONSES, 1, generator=g).repeat(1, TOKENS),
        rollout_logp=old + 0.01 * torch.randn(shape, generator=g),
        staleness=torch.ones(shape),
    )


def step_of(loss: PolicyLoss, inputs: PolicyLossInputs) -> Callable[[], object]:
    """Return a function that computes loss, metrics and gradient."""

    def step() -> None:
        logp = inputs.logp.detach().requires_grad_()  # a fresh leaf: gradients do not accumulate
        loss(replace(inputs, logp=logp)).loss.sum().backward()

    return step


def choose_tokens(loss: PolicyLoss, inputs: PolicyLossInputs) -> torch.Tensor:
    return choose(loss, [inputs], [torch.arange(inputs.logp.numel())])[0]  # type: ignore[arg-type]


def value_step(rows: PolicyLossInputs) -> None:
    assert rows.old_logp is not None
    assert rows.advantages is not None
    values = rows.logp.detach().requires_grad_()
    result = compute_value_loss(
        values=values, old_values=rows.old_logp, returns=rows.advantages, mask=rows.mask, clip_range=0.2
    )
    result.loss.sum().backward()


def correct(level: str, rows: PolicyLossInputs) -> None:
    assert rows.old_logp is not None
    assert rows.rollout_logp is not None
    Correction(CorrectionConfig("truncate", level))(
        old_logp=rows.old_logp, rollout_logp=rows.rollout_logp, mask=rows.mask
    )


def _row(name: str, ours: Callable[[], object], reference: Callable[[], object], aim: str = "") -> Result:
    inverse, seconds = alternate(ours, reference, ROUNDS, shortest=0.0)
    return Result(name, 1e3 * seconds, 1e3 * seconds * inverse, "ms", 1 / inverse, aim)
