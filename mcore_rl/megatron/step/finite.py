"""Stops every rank, together, before a step that is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from mcore_rl.errors import NonFiniteError
from mcore_rl.types import RankShare

NAMED = 8
"""Samples and parameters named per rank; a batch of thousands would bury the message."""


def require_finite(problem: str | None, device: torch.device) -> None:
    """Raises NonFiniteError on every rank when any rank has a problem; the message holds every rank's.

    Costs one all-reduce of a number while all is well.

    Collective: all ranks.
    """
    any_problem = torch.tensor([problem is not None], dtype=torch.int32, device=device)
    dist.all_reduce(any_problem, op=dist.ReduceOp.MAX)
    if not any_problem.item():
        return
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    raise NonFiniteError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text))


def describe_samples(what: str, samples: Iterable[int], share: RankShare) -> str | None:
    """`what` with the samples and where their records lie; None without samples."""
    wanted = sorted(set(samples))
    if not wanted:
        return None
    place = {int(sample): index for index, sample in enumerate(share.samples)}
    named = ["{} (rollout call {}, row {})".format(sample, *share.origins[place[sample]]) for sample in wanted[:NAMED]]
    more = f" and {len(wanted) - NAMED} more" if len(wanted) > NAMED else ""
    return f"{what} of sample{'s' if len(wanted) > 1 else ''} {', '.join(named)}{more}"


def describe_gradients(chunks: Sequence[torch.nn.Module], share: RankShare) -> str | None:
    """The parameters whose accumulated gradient is not finite on this rank, with the samples they may come from;
    None when all are finite."""
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]  # type: ignore[misc]
    if all(_is_finite(buffer.grad_data) for buffer in buffers):
        return None
    names = [
        name.removeprefix("module.")
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if hasattr(parameter, "main_grad") and not _is_finite(parameter.main_grad)
    ]
    listed = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    samples = describe_samples("a token", (int(sample) for sample in share.samples), share)
    return f"gradient of {listed} after {samples or 'no sample of its own'}"


def _is_finite(tensor: torch.Tensor) -> bool:
    """One pass, no mask in memory: NaN and infinity survive in the extremes."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
