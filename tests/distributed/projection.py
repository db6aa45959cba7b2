"""The fused output projection and softmax, and torch's in float64 for the same operands."""

from __future__ import annotations

import torch

from mcore_rl.megatron.step.logprobs import linear_logp_entropy

TOKENS, HIDDEN, VOCABULARY = 37, 16, 120
Results = dict[str, torch.Tensor]


def inputs(dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight and targets with the same values on every device."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    # Logits up to about +-40: at temperature 0.3, exponentials overflow unless the maximum is subtracted.
    weight = (3 * torch.randn(VOCABULARY, HIDDEN, generator=generator)).to(dtype)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    targets[:2] = torch.tensor([0, VOCABULARY - 1])
    return hidden.to(device), weight.to(device), targets.to(device)


def upstream(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Upstream gradients of log-probabilities and entropies."""
    generator = torch.Generator().manual_seed(6)
    return torch.randn(TOKENS, generator=generator).to(device), torch.randn(TOKENS, generator=generator).to(device)


def per_token(temperature: float | None, device: str = "cpu") -> float | torch.Tensor:
    """Return the temperature or, for None, a different temperature for each token."""
    return torch.linspace(0.3, 2.0, TOKENS, device=device) if temperature is None else temperature


def reference(dtype: torch.dtype, temperature: float | None) -> Results:
    """Compute torch's log_softmax in float64 on the CPU, with operands rounded to `dtype`."""
    hidden, weight, targets = inputs(dtype)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    divisor = per_token(temperature)
    divisor = divisor.double()[:, None] if isinstance(divisor, torch.Tensor) else divisor
    log_p = torch.log_softmax(hidden @ weight.t() / divisor, -1)
    logp = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    grad_logp, grad_entropy = upstream()
    ((logp * grad_logp).sum() + (entropy * grad_entropy).sum()).backward()
    return {"logp": logp, "entropy": entropy, "hidden": hidden.grad, "weight": weight.grad}


def fused(
    dtype: torch.dtype,
    temperature: float | None,
    chunk: int,
    shard: slice,
    group: object = None,
    *,
    device: str = "cpu",
    float32_head: bool = False,
) -> Results:
    """Call the fused function with the rows `shard` of the weight."""
    hidden, weight, targets = inputs(dtype, device)
    hidden, weight = hidden.requires_grad_(), weight[shard].contiguous().requires_grad_()
    logp, entropy = linear_logp_entropy(
        *(hidden, weight, targets),
        temperature=per_token(temperature, device),
        chunk_tokens=chunk,
        group=group,
        float32_head=float32_head,
    )
    grad_logp, grad_entropy = upstream(device)
    ((logp * grad_logp).sum() + (entropy * grad_entropy).sum()).backward()
    return {"logp": logp, "entropy": entropy, "hidden": hidden.grad, "weight": weight.grad}


def assert_close(ours: Results, expected_of: Results, tolerance: float) -> None:
    """Compare with a tolerance relative to the tensor's largest entry."""
    for name, expected in expected_of.items():
        error = (ours[name].cpu().double() - expected).abs().max() / expected.abs().max()
        assert error <= tolerance, f"{name}: relative error {error:.1e}"
