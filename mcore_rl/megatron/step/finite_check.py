"""Checks for NaN and infinity that stop all ranks together, before the optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from mcore_rl.errors import NonFiniteError
from mcore_rl.megatron.optim.main_params import gradient_tensors
from mcore_rl.types import RankShare

MAX_NAMED = 8
"""Maximum number of samples and parameters listed per rank in an error."""


def require_finite(problem: str | None, device: torch.device, *, remedy: str = "") -> None:
    """Raise NonFiniteError on every rank if any rank has a problem; the message contains the problems of all ranks, and
    the remedy.

    Without a problem it costs one all-reduce of one number.

    Collective: all ranks.
    """
    # Exchange the messages only if there is one: all_gather_object is slow and pickles.
    any_problem = torch.tensor([problem is not None], dtype=torch.int32, device=device)
    dist.all_reduce(any_problem, op=dist.ReduceOp.MAX)
    if not any_problem.item():
        return
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
    raise NonFiniteError(f"{listed}. {remedy}" if remedy else listed)


def describe_samples(what: str, samples: Iterable[int], share: RankShare) -> str | None:
    """Format `what` with the samples and the locations of their rollout records; None without samples."""
    numbers = sorted(set(samples))
    if not numbers:
        return None
    index_of = {int(sample): index for index, sample in enumerate(share.samples)}
    named = [
        "{} (rollout call {}, row {})".format(sample, *share.origins[index_of[sample]])
        for sample in numbers[:MAX_NAMED]
    ]
    more = f" and {len(numbers) - MAX_NAMED} more" if len(numbers) > MAX_NAMED else ""
    return f"{what} of sample{'s' if len(numbers) > 1 else ''} {', '.join(named)}{more}"


def describe_gradients(chunks: Sequence[torch.nn.Module], share: RankShare) -> str | None:
    """List the parameters whose accumulated gradient is not finite on this rank, and the samples of the rank; None if
    all are finite."""
    if _are_finite([gradient for chunk in chunks for gradient in gradient_tensors(chunk)]):
        return None
    names = [
        name.removeprefix("module.")
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        # Frozen parameters have no main_grad.
        if hasattr(parameter, "main_grad") and not _are_finite([parameter.main_grad])
    ]
    listed = ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
    samples = describe_samples("a token", (int(sample) for sample in share.samples), share)
    return f"gradient of {listed} after {samples or 'no sample of this rank'}"


def _are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Check each tensor in one pass without a temporary mask: minimum and maximum propagate NaN and infinity. The host
    waits once for all of them."""
    extremes = [extreme for tensor in tensors if tensor.numel() for extreme in torch.aminmax(tensor)]
    return not extremes or bool(torch.isfinite(torch.stack(extremes)).all())
