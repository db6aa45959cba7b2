"""Aggregation of per-token losses into a scalar: one weight per response, computed before the backward pass.

n_b: trained tokens of response b; S: responses with at least one; N: trained tokens in total; L: configured length;
P: prompts (groups) with a trained token; n_G(b): trained tokens of all responses to the prompt of response b.

    token-mean                1 / N             arXiv 2503.14476 (DAPO)
    seq-mean-token-sum        1 / S
    seq-mean-token-mean       1 / (S n_b)       arXiv 2402.03300 (GRPO)
    seq-mean-token-sum-norm   1 / (S L)         arXiv 2503.20783 (Dr. GRPO)
    prompt-mean               1 / (P n_G(b))    arXiv 2510.13786 (ScaleRL), the prompt average
    token-sum                 1                 the sum of all tokens; it grows with the batch

prompt-mean is the mean over prompts of the mean over all tokens of a prompt's responses. token-sum has no denominator,
so its gradient is proportional to the number of tokens of an update: scale the learning rate or gradient clipping
accordingly. The number of ranks and micro-batches does not change it.

The aggregate is sum_b weight_b sum_t loss_bt. Training uses the weights of the whole update (`loss_weights`), so that
ranks and micro-batches add plain sums; `aggregate_loss` computes the same for one block of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mcore_rl.algorithms.segments import Segments
from mcore_rl.errors import ConfigError

# mode -> options that override the counts of the block
MODE_OPTIONS: dict[str, tuple[str, ...]] = {
    "token-mean": ("num_tokens",),
    "seq-mean-token-sum": ("num_sequences",),
    "seq-mean-token-mean": ("num_sequences",),
    "seq-mean-token-sum-norm": ("num_sequences", "norm_tokens"),
    "prompt-mean": ("num_prompts",),
    "token-sum": (),
}
NEED_GROUPS = ("prompt-mean",)
"""Modes that need the group of each response."""


def aggregate_loss(
    loss: Tensor, mask: Tensor, mode: str, *, group_ids: Tensor | None = None, **options: float | None
) -> Tensor:
    """Aggregate a block of per-token losses into a scalar. Without trained tokens the result is 0.

    Options: num_tokens N, num_sequences S and num_prompts P of the larger batch that contains this block (None: counted
    in this block); norm_tokens L (None: T). prompt-mean needs group_ids and a block of whole groups.

    Shapes: loss, mask [B, T]; group_ids int64 [B].
    Raises: ConfigError for an unknown mode or unsupported option; ValueError for missing or misshapen group_ids.
    """
    if loss.shape != mask.shape:
        raise ValueError(f"mask {list(mask.shape)} must have the shape of loss, {list(loss.shape)}")
    selected = mask > 0
    if mode == "seq-mean-token-sum-norm" and options.get("norm_tokens") is None:
        options["norm_tokens"] = loss.shape[-1]
    weights = _weights(mode, selected.sum(-1), group_ids, options)
    kept = torch.where(selected, loss, torch.zeros((), dtype=loss.dtype, device=loss.device))
    return (kept.sum(-1) * weights.to(loss.dtype)).sum()


def loss_weights(
    mode: str, trained_tokens: np.ndarray, group_ids: np.ndarray | None = None, **options: float | None
) -> np.ndarray:
    """Compute one factor per response; the sum of all token losses times these factors is the aggregate.

    Options like aggregate_loss; seq-mean-token-sum-norm needs norm_tokens, and prompt-mean needs group_ids and whole
    groups. A response without trained tokens has weight 0.

    Shapes: trained_tokens integer [B], group_ids int64 [B] -> float32 [B].
    Raises: ConfigError for an unknown mode, an unsupported option, or a missing norm_tokens; ValueError for missing or
    misshapen group_ids.
    """
    tokens = torch.from_numpy(np.asarray(trained_tokens, np.int64))
    groups = None if group_ids is None else torch.from_numpy(np.asarray(group_ids, np.int64))
    weights: np.ndarray = _weights(mode, tokens, groups, options).to(torch.float32).numpy()
    return weights


def check_mode(mode: str) -> None:
    """Check that `mode` exists. Raises: ConfigError."""
    if mode not in MODE_OPTIONS:
        raise ConfigError(f"algorithm.loss_aggregation={mode} is not known. Known: {', '.join(MODE_OPTIONS)}.")


def _weights(mode: str, tokens: Tensor, group_ids: Tensor | None, options: Mapping[str, float | None]) -> Tensor:
    check_mode(mode)
    given = {name: value for name, value in options.items() if value is not None}
    _check_options(mode, given)
    counted = tokens > 0
    # float32 does not hold every count above 2**24 exactly.
    n = tokens.double()
    if mode == "token-mean":
        weights = torch.ones_like(n) / given.get("num_tokens", n.sum())
    elif mode == "seq-mean-token-mean":
        # Infinite for a response without trained tokens; replaced by 0 below.
        weights = 1 / (n * given.get("num_sequences", counted.sum()))
    elif mode == "token-sum":
        weights = torch.ones_like(n)
    elif mode == "prompt-mean":
        groups = _groups(mode, group_ids, tokens)
        group_tokens = groups.sum(n)
        weights = 1 / (groups.expand(group_tokens) * given.get("num_prompts", (group_tokens > 0).sum()))
    else:
        length = given.get("norm_tokens", 1) if mode == "seq-mean-token-sum-norm" else 1
        weights = torch.ones_like(n) / (given.get("num_sequences", counted.sum()) * length)
    return torch.where(counted, weights, 0.0)


def _groups(mode: str, group_ids: Tensor | None, tokens: Tensor) -> Segments:
    if group_ids is None:
        raise ValueError(f"{mode} needs group_ids")
    if group_ids.shape != tokens.shape:
        raise ValueError(f"group_ids {list(group_ids.shape)} must have one entry per response, {list(tokens.shape)}")
    return Segments.of(group_ids)


def _check_options(mode: str, given: Mapping[str, float]) -> None:
    supported = MODE_OPTIONS[mode]
    unsupported = [name for name in given if name not in supported]
    if unsupported:
        raise ConfigError(
            f"{', '.join(unsupported)}: not an option of algorithm.loss_aggregation={mode}; "
            f"it takes {', '.join(supported) or 'no options'}"
        )
    bad = [f"{name}={value}" for name, value in given.items() if not float(value) > 0]
    if bad:
        raise ConfigError(f"algorithm.loss_aggregation={mode}: {', '.join(bad)} must be greater than 0")
    if mode == "seq-mean-token-sum-norm" and "norm_tokens" not in given:
        raise ConfigError(f"algorithm.loss_aggregation={mode} needs norm_tokens, the divisor")
