"""Loops over all tokens of a batch, compiled for the host. Import inside functions: numba is slow to import.

Arithmetic is float64 whatever the tensors hold: an element is read once from memory and costs little after that.
Sums over a row may be reordered, which makes them vector instructions; nothing else may. Tensors of another device
are brought to the host and the result back.

Shapes: all tensors [B, T]; T steps one after the other, rows independent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor


def discounted_errors(rewards: Tensor, values: Tensor | None, mask: Tensor, gamma: float, decay: float) -> Tensor:
    """A_t = r_t + gamma V_{t+1} - V_t + decay A_{t+1} over the trained tokens of each row, 0 elsewhere; values None: 0.

    Rewards on tokens that are not trained count for the trained token before them.
    """
    out = np.empty(rewards.shape, _host_dtype(rewards))
    values = torch.zeros_like(rewards) if values is None else values
    _discounted_errors(_host(rewards), _host(values), (mask > 0).cpu().numpy(), gamma, decay, out)
    return _back(out, rewards)


def weighted_moments(values: Tensor, mask: Tensor, weights: Tensor) -> tuple[float, float, float]:
    """Count, mean, and sum of squared distances from it, of the entries with mask > 0; an entry of row i counts
    weights[i] times.

    Shapes: weights [B].
    """
    weighted = weights.detach().cpu().double().contiguous().numpy()
    count, mean, squares = _moments(_host(values), (mask > 0).cpu().contiguous().numpy(), weighted)
    return float(count), float(mean), float(squares)


def standardised(values: Tensor, mask: Tensor, mean: float, std: float) -> Tensor:
    """(values - mean) / std where mask > 0, and 0 elsewhere."""
    out = np.empty(values.shape, _host_dtype(values))
    _standardised(_host(values), (mask > 0).cpu().contiguous().numpy(), mean, 1 / std, out)
    return _back(out, values)


def _host_dtype(tensor: Tensor) -> type[np.floating[Any]]:
    return np.float64 if tensor.dtype == torch.float64 else np.float32  # numpy has no bfloat16


def _host(tensor: Tensor) -> np.ndarray:
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.detach().to("cpu", dtype).contiguous().numpy()


def _back(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device, like.dtype)


def _compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # numba found no directory to keep compiled code in
            return numba.njit(**options)(function)

    return compiled


_kernel = _compiled(nogil=True)
# fastmath=True would assume that there is no NaN and no infinity, which must stop a run.
_row_sum = _compiled(nogil=True, fastmath={"reassoc", "contract", "nsz"})


@_kernel
def _discounted_errors(
    rewards: np.ndarray, values: np.ndarray, trained: np.ndarray, gamma: float, decay: float, out: np.ndarray
) -> None:
    rows, length = rewards.shape
    for i in range(rows):
        advantage, next_value, reward = 0.0, 0.0, 0.0
        for t in range(length - 1, -1, -1):
            reward += rewards[i, t]
            if trained[i, t]:
                advantage = reward + gamma * next_value - values[i, t] + decay * advantage
                next_value, reward = np.float64(values[i, t]), 0.0
                out[i, t] = advantage
            else:
                out[i, t] = 0.0


@_row_sum
def _sum_above(values: np.ndarray, trained: np.ndarray, origin: float) -> tuple[float, int]:
    total, count = 0.0, 0
    for t in range(len(values)):
        total += values[t] - origin if trained[t] else 0.0
        count += trained[t]
    return total, count


@_row_sum
def _sum_squares(values: np.ndarray, trained: np.ndarray, mean: float) -> float:
    total = 0.0
    for t in range(len(values)):
        distance = values[t] - mean if trained[t] else 0.0
        total += distance * distance
    return total


@_kernel
def _moments(values: np.ndarray, trained: np.ndarray, weights: np.ndarray) -> tuple[float, float, float]:
    """Each row's own moments, merged one after the other (Chan et al.)."""
    count, mean, squares = 0.0, 0.0, 0.0
    for i in range(len(values)):
        first = 0
        while first < len(values[i]) and not trained[i, first]:
            first += 1
        if first == len(values[i]) or weights[i] == 0:
            continue
        # Measured from one of them, equal values have exactly themselves as mean, and no spread.
        origin = np.float64(values[i, first])
        total, n = _sum_above(values[i], trained[i], origin)
        row_mean, row_count = origin + total / n, n * weights[i]
        squares += _sum_squares(values[i], trained[i], row_mean) * weights[i]
        shift = row_mean - mean
        squares += shift * shift * count * row_count / (count + row_count)
        count += row_count
        mean += shift * row_count / count
    return count, mean, squares


@_kernel
def _standardised(values: np.ndarray, trained: np.ndarray, mean: float, scale: float, out: np.ndarray) -> None:
    rows, length = values.shape
    for i in range(rows):
        for t in range(length):
            out[i, t] = (values[i, t] - mean) * scale if trained[i, t] else 0.0
