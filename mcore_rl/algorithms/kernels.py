"""Loops over responses or tokens, compiled by numba for the CPU. Import inside functions: importing numba is slow.

Arithmetic is always float64: the loops are bound by memory, so the wider type costs little. Only sums over a row may
be reordered, so that they use vector instructions. Tensors on other devices are copied to the host and results back.

Shapes: tensors [B, T] unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba
import numpy as np
import torch
from torch import Tensor

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def discounted_sums(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Compute G_t = r_t + gamma G_{t+1} over the trained tokens of each row; 0 elsewhere.

    A reward on a token that is not trained is added to the preceding trained token.
    """
    sums = _empty_like(rewards)
    _discounted_sums(_host(rewards), _host_mask(mask), gamma, sums)
    return _tensor(sums, rewards)


def discounted_errors(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, decay: float
) -> tuple[Tensor, Tensor]:
    """Compute A_t = r_t + gamma V_{t+1} - V_t + decay A_{t+1} over the trained tokens of each row, and A + V; both 0
    elsewhere.

    A reward on a token that is not trained is added to the preceding trained token; its value is not read.
    """
    advantages, returns = _empty_like(rewards), _empty_like(rewards)
    values = values.to(rewards.dtype)
    _discounted_errors(_host(rewards), _host(values), _host_mask(mask), gamma, decay, (advantages, returns))
    return _tensor(advantages, rewards), _tensor(returns, rewards)


def group_numbers(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Number groups from 0 in order of appearance. Returns the group index of each id and the group sizes.

    Shapes: group_ids [B], any integers -> int64 [B], int64 [num_groups].
    """
    ids = group_ids.cpu().long().contiguous().numpy()
    # Members of a group are mostly adjacent. Sizing the table by the number of runs keeps it in the CPU cache.
    runs = int(np.count_nonzero(ids[1:] != ids[:-1])) + min(1, len(ids))
    index, sizes = np.empty_like(ids), np.zeros(runs, np.int64)
    bits = max(1, (2 * runs).bit_length())
    count = _group_numbers(ids, np.full(1 << bits, -1, np.int32), 64 - bits, index, sizes)
    return torch.from_numpy(index).to(group_ids.device), torch.from_numpy(sizes[:count].copy()).to(group_ids.device)


def centred_in_groups(values: Tensor, index: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the mean of each group from `values`; also the sum of squares of the results per group. Values are first
    taken relative to the group's minimum, so equal values give exactly 0.

    Shapes: values, index [B], sizes [num_groups] -> [B], float64 [num_groups].
    """
    centred, squares = _empty_like(values), np.zeros(len(sizes))
    _centred_in_groups(_host(values), index.cpu().numpy(), sizes.cpu().numpy(), centred, squares)
    return _tensor(centred, values), torch.from_numpy(squares).to(values.device)


def weighted_moments(values: Tensor, mask: Tensor, weights: Tensor) -> tuple[float, float, float]:
    """Count, mean and sum of squared deviations of the entries with mask > 0; an entry of row i counts weights[i]
    times.

    Shapes: weights [B].
    """
    weighted = weights.detach().cpu().double().contiguous().numpy()
    count, mean, squares = _moments(_host(values), _host_mask(mask), weighted)
    return float(count), float(mean), float(squares)


def standardised(values: Tensor, mask: Tensor, mean: float, std: float) -> Tensor:
    """Compute (values - mean) / std where mask > 0, and 0 elsewhere."""
    out = _empty_like(values)
    _standardised(_host(values), _host_mask(mask), mean, 1 / std, out)
    return _tensor(out, values)


def _host(tensor: Tensor) -> np.ndarray:
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32  # numpy has no bfloat16
    return tensor.detach().to("cpu", dtype).contiguous().numpy()


def _host_mask(mask: Tensor) -> np.ndarray:
    return mask.to("cpu", torch.float32).contiguous().numpy()  # one dtype: numba compiles a kernel per dtype


def _empty_like(tensor: Tensor) -> np.ndarray:
    return np.empty(tensor.shape, np.float64 if tensor.dtype == torch.float64 else np.float32)


def _tensor(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device, like.dtype)


def _compiled(**options: object) -> Callable[[Kernel], Kernel]:
    def compiled(function: Kernel) -> Kernel:
        try:
            kernel: Kernel = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # numba found no writable cache directory
            kernel = numba.njit(**options)(function)
        return kernel

    return compiled


GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
"""2^64 / 1.618..., the multiplier of Fibonacci hashing (Knuth, volume 3, section 6.4)."""

_kernel = _compiled(nogil=True)
# Not fastmath=True: it assumes that no NaN or infinity occurs, but these must reach the checks that stop the run.
_row_sum = _compiled(nogil=True, fastmath={"reassoc", "contract", "nsz"})


@_kernel
def _group_numbers(ids: np.ndarray, table: np.ndarray, shift: int, index: np.ndarray, sizes: np.ndarray) -> int:
    """Hash ids into an open-addressing table with linear probing, at most half full."""
    distinct = np.empty_like(sizes)
    count, last = 0, len(table) - 1
    for i in range(len(ids)):
        if i > 0 and ids[i] == ids[i - 1]:
            index[i] = index[i - 1]
        else:
            # The highest bits of the product are the best mixed.
            slot = np.int64((np.uint64(ids[i]) * GOLDEN_RATIO) >> np.uint64(shift))
            while table[slot] >= 0 and distinct[table[slot]] != ids[i]:
                slot = (slot + 1) & last
            if table[slot] < 0:
                table[slot], distinct[count] = count, ids[i]
                count += 1
            index[i] = table[slot]
        sizes[index[i]] += 1
    return count


@_kernel
def _centred_in_groups(
    values: np.ndarray, index: np.ndarray, sizes: np.ndarray, centred: np.ndarray, squares: np.ndarray
) -> None:
    least, total = np.full(len(sizes), np.inf), np.zeros(len(sizes))
    for i in range(len(values)):
        least[index[i]] = min(least[index[i]], values[i])
    for i in range(len(values)):
        total[index[i]] += values[i] - least[index[i]]
    for i in range(len(values)):
        group = index[i]
        distance = values[i] - least[group] - total[group] / sizes[group]
        squares[group] += distance * distance
        centred[i] = distance


@_kernel
def _discounted_sums(rewards: np.ndarray, mask: np.ndarray, gamma: float, sums: np.ndarray) -> None:
    rows, length = rewards.shape
    for i in range(rows):
        later, reward = 0.0, 0.0  # reward: sum since the last trained token, so that other tokens' rewards move to it
        for t in range(length - 1, -1, -1):
            reward += rewards[i, t]
            if mask[i, t] > 0:
                later, reward = reward + gamma * later, 0.0
                sums[i, t] = later
            else:
                sums[i, t] = 0.0


@_kernel
def _discounted_errors(
    rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    gamma: float,
    decay: float,
    out: tuple[np.ndarray, np.ndarray],
) -> None:
    rows, length = rewards.shape
    advantages, returns = out
    for i in range(rows):
        advantage, next_value, reward = 0.0, 0.0, 0.0
        for t in range(length - 1, -1, -1):
            reward += rewards[i, t]
            if mask[i, t] > 0:
                value = np.float64(values[i, t])
                advantage = reward + gamma * next_value - value + decay * advantage
                next_value, reward = value, 0.0
                advantages[i, t], returns[i, t] = advantage, advantage + value
            else:
                advantages[i, t], returns[i, t] = 0.0, 0.0


@_row_sum
def _sum_above(values: np.ndarray, mask: np.ndarray, origin: float) -> tuple[float, int]:
    total, count = 0.0, 0
    for t in range(len(values)):
        total += values[t] - origin if mask[t] > 0 else 0.0
        count += mask[t] > 0
    return total, count


@_row_sum
def _sum_squares(values: np.ndarray, mask: np.ndarray, mean: float) -> float:
    total = 0.0
    for t in range(len(values)):
        distance = values[t] - mean if mask[t] > 0 else 0.0
        total += distance * distance
    return total


@_kernel
def _moments(values: np.ndarray, mask: np.ndarray, weights: np.ndarray) -> tuple[float, float, float]:
    """Compute moments per row and merge them one by one (Chan et al.)."""
    count, mean, squares = 0.0, 0.0, 0.0
    for i in range(len(values)):
        first = 0
        while first < len(values[i]) and not mask[i, first] > 0:
            first += 1
        if first == len(values[i]) or weights[i] == 0:
            continue
        # Relative to the first value, so that equal values give exactly that mean and zero variance.
        origin = np.float64(values[i, first])
        total, n = _sum_above(values[i], mask[i], origin)
        row_mean, row_count = origin + total / n, n * weights[i]
        squares += _sum_squares(values[i], mask[i], row_mean) * weights[i]
        shift = row_mean - mean
        squares += shift * shift * count * row_count / (count + row_count)
        count += row_count
        mean += shift * (row_count / count)  # by exactly 1 for the first row
    return count, mean, squares


@_kernel
def _standardised(values: np.ndarray, mask: np.ndarray, mean: float, scale: float, out: np.ndarray) -> None:
    rows, length = values.shape
    for i in range(rows):
        for t in range(length):
            out[i, t] = (values[i, t] - mean) * scale if mask[i, t] > 0 else 0.0
