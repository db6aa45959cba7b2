"""Advantages of a whole step: GRPO compared with the usual scatter form, GAE compared with reading its arrays once.

    python -m benchmarks advantages

GRPO runs on 8,192 prompts x 16 samples with one reward per response, as on the driver. The limit is 0.05 s; the peer is
an implementation of verl's vectorised form (groups numbered by torch.unique, sums by index_add). GAE with whitening
runs on 1,024 responses of 8,192 tokens; the limit is a sum over each of its five arrays: rewards, values, mask,
advantages, returns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.pairs import alternate
from benchmarks.result import Result
from benchmarks.sizes import size
from mcore_rl.algorithms import compute_advantages

PROMPTS, SAMPLES = size((8192, 16), (8, 4))
LIMIT_SECONDS = 0.05
"""Limit for the advantages of one step."""
ROWS, TOKENS = size((1024, 8192), (4, 64))
NAMES = ("grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")


def run() -> list[Result]:
    torch.set_num_threads(1)
    return [*_groups(), *_tokens()]


def _groups() -> list[Result]:
    random = torch.Generator().manual_seed(0)
    responses = PROMPTS * SAMPLES
    in_order = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    shuffled = in_order[torch.randperm(responses, generator=random)]
    rewards = (torch.rand(responses, 1, generator=random) < 0.5).float()
    lengths, mask = torch.randint(1, 4096, (responses,), generator=random), torch.ones(responses, 1)

    def ours(name: str, ids: Tensor) -> Callable[[], Tensor]:
        return lambda: (
            compute_advantages(name, token_rewards=rewards, mask=mask, group_ids=ids, lengths=lengths).advantages
        )

    results = []
    for order, ids in (("in order", in_order), ("shuffled", shuffled)):
        # The peer must compute the same, apart from float32 rounding.
        torch.testing.assert_close(ours("grpo", ids)(), scatter_form(rewards, mask, ids), rtol=1e-4, atol=1e-4)
        ratio, seconds = _alternate(ours("grpo", ids), partial(scatter_form, rewards, mask, ids))
        title = f"grpo, {PROMPTS:,} x {SAMPLES}, groups {order}"
        results.append(Result(title, seconds * 1e3, LIMIT_SECONDS * 1e3, "ms", seconds / LIMIT_SECONDS, "<= 1"))
        results.append(Result(f"{title}, beside scatter", seconds * 1e3, seconds * ratio * 1e3, "ms", ratio, ">= 2"))
    for name in NAMES:
        ratio, seconds = _alternate(ours(name, in_order), ours("grpo", in_order))
        results.append(Result(f"{name}, beside grpo", seconds * 1e3, seconds * ratio * 1e3, "ms", 1 / ratio))
    return results


def _tokens() -> list[Result]:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(ROWS, TOKENS, generator=random)
    mask = (torch.rand(ROWS, TOKENS, generator=random) < 0.9).float()
    rewards = torch.zeros(ROWS, TOKENS)
    rewards[:, -1] = 1.0
    # Five arrays: the clones stand for the outputs.
    arrays = [rewards, values, mask, values.clone(), values.clone()]

    def read() -> list[Tensor]:
        return [array.sum() for array in arrays]

    def gae() -> Tensor:
        inputs = {"token_rewards": rewards, "mask": mask, "values": values}
        return compute_advantages("gae", **inputs, gamma=0.99, lam=0.95).advantages

    def returns() -> Tensor:
        return compute_advantages("reinforce_plus_plus", token_rewards=rewards, mask=mask, gamma=0.99).advantages

    results = []
    for name, action, aim in (("gae", gae, "<= 10"), ("reinforce_plus_plus", returns, "")):
        ratio, seconds = _alternate(action, read)
        title = f"{name}, {ROWS:,} x {TOKENS:,}, beside reading 5 arrays"
        results.append(Result(title, seconds * 1e3, seconds * ratio * 1e3, "ms", 1 / ratio, aim))
    return results


def _alternate(ours: Callable[[], object], limit: Callable[[], object]) -> tuple[float, float]:
    """Like pairs.alternate, after a first call that compiles kernels."""
    ours()
    return alternate(ours, limit)


def scatter_form(rewards: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """Compute GRPO in float32 with scattered sums; a group of one keeps its reward."""
    scores = rewards.sum(-1)
    _, index = torch.unique(group_ids, sorted=True, return_inverse=True)
    num_groups = int(index.max()) + 1
    sizes = scores.new_zeros(num_groups).index_add_(0, index, torch.ones_like(scores))
    means = scores.new_zeros(num_groups).index_add_(0, index, scores) / sizes.clamp_min(1)
    squares = scores.new_zeros(num_groups).index_add_(0, index, (scores - means[index]).square())
    stds = (squares / (sizes - 1).clamp_min(1)).sqrt()
    single = sizes <= 1
    means, stds = means.masked_fill(single, 0.0), stds.masked_fill(single, 1.0)
    return ((scores - means[index]) / (stds[index] + 1e-6))[:, None] * mask
