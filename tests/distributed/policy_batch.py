"""A small batch of trajectories, divided for any number of data-parallel ranks, actors that train on it, and reference
results computed with plain torch and transformers' model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_rl.config.models import ActorConfig, ParallelConfig
from mcore_rl.config.schema import Config
from mcore_rl.data.trajectories import compact_temperatures
from mcore_rl.types import NOT_SAMPLED, RankShare, TrajectoryBuffers
from tests.tiny_models import VOCABULARY, checkpoint_tensors, correction_biases

PROMPTS = [3, 5, 2, 7, 4, 3, 6, 2, 1]
RESPONSES = [9, 4, 14, 1, 8, 6, 3, 11, 5]
FIRST_CHUNK = 5  # samples 0..4 are in chunk 0, the rest in chunk 1
UPDATES = ([0, 2, 4, 6, 8], [1, 3, 5, 7])
GROUPS = np.array([2, 0, 1, 0, 1, 1, 2, 0, 2], np.int32)
"""Prompt of each sample. Samples of one prompt are on different data-parallel ranks."""
TEMPERATURE, SECOND_TEMPERATURE = 0.8, 1.25
"""Temperature of the run, and of the samples in the second chunk."""
ENTROPY_COEFFICIENT = 0.02
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.2, 0.28, 1.6


@contextmanager
def complete_gradients(model: Any) -> Iterator[None]:
    """Context in which passes complete the gradients on every data-parallel rank."""
    model.run = partial(model.run, force_all_reduce=True)
    try:
        yield
    finally:
        del model.run


def chunks() -> list[TrajectoryBuffers]:
    """Two buffers. Every fifth response token is not trained, as if a tool had written it."""
    return [_buffers(range(FIRST_CHUNK)), _buffers(range(FIRST_CHUNK, len(PROMPTS)))]


def sequence(sample: int) -> np.ndarray:
    generator = np.random.default_rng(100 + sample)
    return generator.integers(0, VOCABULARY, PROMPTS[sample] + RESPONSES[sample]).astype(np.int32)


def trained(sample: int) -> np.ndarray:
    return (np.arange(RESPONSES[sample]) % 5 != 3).astype(np.uint8)


def logp_rollout(sample: int) -> np.ndarray:
    return np.random.default_rng(200 + sample).normal(-4, 1, RESPONSES[sample]).astype(np.float32)


VERSION = 5


def versions(sample: int) -> np.ndarray:
    """Versions up to three older than the weights before the updates, never all the same."""
    sampled = VERSION - np.random.default_rng(400 + sample).integers(0, 4, RESPONSES[sample])
    return np.where(trained(sample), sampled, NOT_SAMPLED).astype(np.int32)


def temperatures(sample: int) -> np.ndarray:
    """A different temperature for every token; NaN: rollout.temperature. The second chunk has one temperature for all
    tokens."""
    if sample >= FIRST_CHUNK:
        return np.full(RESPONSES[sample], SECOND_TEMPERATURE, np.float32)
    mixed = np.random.default_rng(500 + sample).uniform(0.3, 1.6, RESPONSES[sample]).astype(np.float32)
    return np.where(np.arange(RESPONSES[sample]) % 4 == 0, np.float32(np.nan), mixed)


def advantages() -> np.ndarray:
    signs = np.where(np.arange(len(PROMPTS)) // 2 % 2, -1, 1)
    return (signs * np.random.default_rng(1).uniform(0.3, 1.5, len(PROMPTS))).astype(np.float32)


def loss_weights(samples: list[int]) -> np.ndarray:
    """Weights of token-mean over one update."""
    weights = np.zeros(len(PROMPTS), np.float32)
    weights[samples] = 1 / sum(int(trained(sample).sum()) for sample in samples)
    return weights


def observation_weights(samples: list[int]) -> np.ndarray:
    """Weights of the observations of one update, with factors of sources from 0 to 2."""
    return (np.arange(len(PROMPTS)) % 3 / len(samples)).astype(np.float32)


def drift(sample: int) -> np.ndarray:
    """Old minus current log-probability of each trained token; the ratios are on both sides of every clip bound."""
    return np.random.default_rng(300 + sample).normal(0, 0.35, int(trained(sample).sum())).astype(np.float32)


def held(sample: int, layout: Any, rank: int) -> np.ndarray:
    """Mask of the sample's trained tokens on this context-parallel rank, counted out from chunks and mirrored
    chunks."""
    predictors = PROMPTS[sample] - 1 + np.flatnonzero(trained(sample))
    num_chunks = 2 * layout.cp
    chunk = -(-(int(predictors[-1]) + 1) // num_chunks)
    cp = layout.coordinates(rank).cp
    return np.isin(predictors // chunk, [cp, num_chunks - 1 - cp])


def share(samples: list[int], dp_rank: int, num_dp_ranks: int) -> RankShare:
    """An uneven division: the last data-parallel rank gets one sample, so it needs dummy micro-batches."""
    mine = [s for i, s in enumerate(samples) if min(i, num_dp_ranks - 1) == num_dp_ranks - 1 - dp_rank]
    index = np.array(mine, np.int64)
    chunk_ids = (index >= FIRST_CHUNK).astype(np.int32)
    rows = np.where(index >= FIRST_CHUNK, index - FIRST_CHUNK, index).astype(np.int32)
    return RankShare(
        samples=index,
        chunk_ids=chunk_ids,
        rows=rows,
        origins=np.stack([chunk_ids, rows], axis=1),
        total_tokens=np.array([len(sequence(s)) for s in mine], np.int32),
        rewards=2 * advantages()[index] + 1,
        advantages=advantages()[index],
        loss_weights=loss_weights(samples)[index],
        version=VERSION,
        groups=GROUPS[index],
        observation_weights=observation_weights(samples)[index],
    )


def shares(model: Any) -> list[RankShare]:
    """Return this rank's shares of both updates."""
    dp = model.layout.coordinates(model.rank).dp
    return [share(samples, dp, model.layout.dp) for samples in UPDATES]


def config(directory: str | Path, parallel: dict[str, Any], tokens_per_microbatch: int) -> Config:
    made = Config()
    made.model.hf_path = str(directory)
    made.model.dtype = "float32"  # auto is bfloat16 on GPUs
    made.rollout.temperature = TEMPERATURE
    made.algorithm.entropy_coefficient = ENTROPY_COEFFICIENT
    loss = made.algorithm.policy_loss
    loss.clip_low, loss.clip_high, loss.dual_clip = CLIP_LOW, CLIP_HIGH, DUAL_CLIP
    set_layout(made.actor, parallel)
    made.actor.tokens_per_microbatch = tokens_per_microbatch
    made.actor.logprob_chunk_tokens = 7
    made.cluster.collective_timeout_seconds = 60
    return made


def set_layout(section: ActorConfig, parallel: dict[str, Any]) -> None:
    """Set the keys of the section's parallel layout and, if it is among them, the strategy."""
    sizes = {"strategy": "megatron"} | parallel
    section.strategy = sizes.pop("strategy")
    section.parallel = ParallelConfig(**sizes)


def build_actor(config: Config) -> Any:
    """Build this rank's actor in the process group of all ranks."""
    import torch.distributed as dist

    from mcore_rl.megatron.roles.actor import MegatronActor

    return MegatronActor(config, dist.get_rank(), dist.get_world_size(), None)


def update_once(actor: Any, index: int = 0) -> None:
    """Run one of the updates by itself."""
    batch, _ = actor.recompute_logp([shares(actor)[index % 2]], chunks())
    actor.update(batch, 0)


def reference_model(directory: str | Path) -> torch.nn.Module:
    """Load transformers' model in float64."""
    from transformers import AutoModelForCausalLM

    # transformers' fused experts have no float64 kernel.
    loops = {"attn_implementation": "eager", "experts_implementation": "eager", "local_files_only": True}
    return AutoModelForCausalLM.from_pretrained(directory, **loops).double()


def reference_logp(
    model: torch.nn.Module, sample: int, temperature: float | None = None, *, unrecorded: float = TEMPERATURE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probability and entropy of each trained token from the unpacked sequence. temperature: the same for
    all tokens; None: that of each token, or `unrecorded` where it is NaN."""
    tokens = torch.from_numpy(sequence(sample).astype(np.int64))
    positions = PROMPTS[sample] + np.flatnonzero(trained(sample))
    sampled_at = torch.from_numpy(temperatures(sample)[trained(sample) > 0]).double().nan_to_num(unrecorded)
    divisor = sampled_at[:, None] if temperature is None else temperature
    log_p = torch.log_softmax(model(tokens[None]).logits[0][positions - 1] / divisor, -1)
    return log_p.gather(1, tokens[positions][:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def reference_loss(
    model: torch.nn.Module, samples: list[int], old_logp: dict[int, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute DAPO's objective and the means over tokens that the metrics report."""
    weights, advantage = loss_weights(samples).astype(float), advantages().astype(float)
    total = torch.zeros((), dtype=torch.float64)
    seen: dict[str, list[torch.Tensor]] = {"actor/entropy": [], "actor/ppo_kl": [], "actor/clip_fraction": []}
    for sample in samples:
        logp, entropy = reference_logp(model, sample)
        ratio = torch.exp(logp - old_logp[sample])
        a = advantage[sample]
        bounded = -a * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        loss = torch.maximum(-a * ratio, bounded)
        seen["actor/clip_fraction"].append((bounded > -a * ratio).double())
        if a < 0:
            loss = loss.clamp(max=-a * DUAL_CLIP)
        total = total + weights[sample] * (loss - ENTROPY_COEFFICIENT * entropy).sum()
        seen["actor/entropy"].append(entropy.detach())
        seen["actor/ppo_kl"].append((old_logp[sample] - logp).detach())
    return total, {name: float(torch.cat(values).mean()) for name, values in seen.items()}


def reference_gradients(directory: str | Path, samples: list[int]) -> tuple[float, dict[str, torch.Tensor]]:
    """Compute loss and gradients by HF name; old and current log-probabilities differ by `drift`.

    The routers' correction bias has no gradient: it is represented by its value, which no update may change.
    """
    model = reference_model(directory)
    with torch.no_grad():
        old = {s: reference_logp(model, s)[0] + torch.from_numpy(drift(s)).double() for s in samples}
    loss, _ = reference_loss(model, samples, old)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return float(loss.detach()), checkpoint_tensors(model, gradients | correction_biases(model))


def hf_pieces(actor: Any, tensors: dict[str, torch.Tensor] | None = None) -> list[Any]:
    """Return tensors by canonical name, by default the parameters in their exported dtype, as this rank's slices of HF
    tensors."""
    from model_converters.mapping.plan import export_pieces

    found = []
    for plan, piece, view in export_pieces(actor.export_plan(), tensors or actor.tensors(), actor.rank):
        values = view.detach().to(plan.dtype if tensors is None else view.dtype).float().cpu().numpy().copy()
        found.append((plan.hf_name, plan.shape, piece.dim, piece.start, piece.rows, values))
    return found


def gradient_pieces(actor: Any) -> list[Any]:
    """Return the gradients as this rank's slices of HF tensors. The routers' correction bias has no gradient: it is
    represented by its value."""
    # Frozen parameters have no main_grad.
    parameters = [
        (p, p.main_grad if hasattr(p, "main_grad") else torch.zeros_like(p))
        for chunk in actor.ddp
        for p in chunk.parameters()
    ]
    return hf_pieces(actor, {name: part_like(t, parameters, t) for name, t in actor.tensors().items()})


def part_like(
    tensor: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]], default: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the elements of `values` at the place of `tensor` in `parameter`, for the pair (parameter, values) whose
    parameter contains the tensor."""
    for parameter, values in pairs:
        distance = tensor.data_ptr() - parameter.data_ptr()
        if tensor.numel() and 0 <= distance < parameter.nbytes:
            start = distance // parameter.element_size()
            return values.view(-1)[start : start + tensor.numel()].view(tensor.shape)
    assert default is not None
    return default


def assemble(ranks: list[list[Any]]) -> dict[str, torch.Tensor]:
    """Assemble whole HF tensors from the slices of all ranks, float64; NaN where no rank wrote."""
    whole: dict[str, torch.Tensor] = {}
    for name, shape, dim, start, rows, values in (piece for rank in ranks for piece in rank):
        target = whole.setdefault(name, torch.full(tuple(shape), torch.nan, dtype=torch.float64))
        part = torch.from_numpy(values).double()
        target.narrow(dim, start, part.shape[dim])[slice(*rows) if rows else ...].copy_(part)
    return whole


def _buffers(samples: range) -> TrajectoryBuffers:
    sequences = [sequence(sample) for sample in samples]
    responses = [RESPONSES[sample] for sample in samples]
    return TrajectoryBuffers(
        tokens=np.concatenate(sequences),
        token_offsets=np.cumsum([0, *map(len, sequences)]).astype(np.int64),
        prompt_tokens=np.array([PROMPTS[sample] for sample in samples], np.int32),
        response_offsets=np.cumsum([0, *responses]).astype(np.int64),
        logp_rollout=np.concatenate([logp_rollout(sample) for sample in samples]),
        versions=np.concatenate([versions(sample) for sample in samples]),
        trained=np.concatenate([trained(sample) for sample in samples]),
        temperatures=compact_temperatures(np.concatenate([temperatures(sample) for sample in samples])),
    )
