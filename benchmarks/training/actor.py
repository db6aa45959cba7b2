"""One actor rank compared with plain PyTorch: an update and a log-probability pass of a 27M-parameter Qwen3 in float32.

The peer of the update is transformers' model with padded batches, the same loss and AdamW; with equal lengths there is
no padding. The peer of the log-probability pass is its matrix products. The share of corrections is the time that a
list of them adds to the loss of the update's micro-batches, divided by the time of the update without them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.result import Result, compare
from benchmarks.sizes import size
from benchmarks.timing import medians
from benchmarks.training.actor_task import CLIP, LEARNING_RATE, MODEL, PROMPT, actor_config, trajectories, write_model
from mcore_rl.algorithms import Correction, PolicyLossInputs, policy_loss
from mcore_rl.algorithms.corrections import corrected
from mcore_rl.config.algorithm import ListedCorrectionConfig
from mcore_rl.config.rules.presets import PRESETS
from mcore_rl.types import RankShare, TrajectoryBuffers
from model_converters.families.parts.hf_config import integer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mcore_rl.megatron.roles.actor import MegatronActor

REPEATS = size(3, 1)
LOSS_REPEATS = size(21, 1)
EQUAL = np.full(*size((16, 224), (2, 16)))
BUDGET = 2048
"""Tokens per micro-batch, for both sides."""


def run() -> list[Result]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mcore_rl_actor_") as directory:
        return _measure(Path(directory))


def _measure(directory: Path) -> list[Result]:
    from mcore_rl.megatron.model import parallel
    from mcore_rl.megatron.roles.actor import MegatronActor

    config = actor_config(write_model(directory / "model"), tokens_per_microbatch=BUDGET)
    actor = MegatronActor(config, 0, 1, f"file://{directory / 'store'}")
    try:
        peer = _peer_model()
        rows = [
            _update_row("equal lengths", ">= 0.9", actor, peer, EQUAL),
            _update_row("long-tailed lengths", "", actor, peer, long_tailed(size(24, 2))),
        ]
        return [*rows, _logp_row(actor), _corrections_row(rows[0])]
    finally:
        parallel.destroy()  # Megatron's groups are global: the next actor of this process needs new ones


def long_tailed(count: int) -> np.ndarray:
    """Return lognormal lengths, as of reasoning models."""
    return np.clip(np.random.default_rng(0).lognormal(4.5, 0.9, count), 8, 1024).astype(np.int64)


def _update_row(name: str, aim: str, actor: MegatronActor, peer: PreTrainedModel, responses: np.ndarray) -> Result:
    share, buffers = trajectories(responses)
    tokens = int(share.total_tokens.sum())
    optimizer = torch.optim.AdamW(peer.parameters(), lr=LEARNING_RATE, weight_decay=0.1)

    def ours() -> None:
        batch, _ = actor.recompute_logp([share], [buffers])
        actor.update(batch, 0)

    def theirs() -> None:
        _plain_update(peer, optimizer, share, buffers)

    seconds, alone = medians([ours, theirs], REPEATS)
    note = f"{len(responses)} responses, {tokens} tokens; medians of {REPEATS} alternating runs, one thread each"
    return Result(f"update, {name}", tokens / seconds, tokens / alone, "tokens/s", alone / seconds, aim=aim, note=note)


def _peer_model() -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in MODEL.items() if key != "torch_dtype"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), attn_implementation="sdpa").float()


def _plain_update(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, share: RankShare, buffers: TrajectoryBuffers
) -> None:
    """Run the update with padded batches, as a simple implementation would."""
    # Sorted, so that sequences of one batch have similar lengths: the usual way to reduce padding.
    order = np.argsort(-share.total_tokens, kind="stable")
    optimizer.zero_grad()
    while len(order):
        longest = int(share.total_tokens[order[0]])
        members, order = np.split(order, [max(BUDGET // longest, 1)])
        _padded_loss(model, share, buffers, members).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _padded_loss(
    model: PreTrainedModel, share: RankShare, buffers: TrajectoryBuffers, members: np.ndarray
) -> torch.Tensor:
    places = [(int(buffers.token_offsets[i]), int(share.total_tokens[i])) for i in members]
    rows = [torch.from_numpy(buffers.tokens[start : start + count].astype(np.int64)) for start, count in places]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
    logits = model(tokens, attention_mask=mask.long()).logits[:, PROMPT - 1 : -1]
    targets, trained = tokens[:, PROMPT:], mask[:, PROMPT:]
    log_p = torch.log_softmax(logits, -1)
    logp = log_p.gather(-1, targets[..., None])[..., 0]
    with torch.no_grad():
        (-(log_p.exp() * log_p).sum(-1) * trained).sum()  # the entropy metric, which ours computes too
    advantages = torch.from_numpy(share.advantages[members])[:, None]
    ratio = torch.exp(logp - logp.detach())  # 1 in the first update, as in ours
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    return (loss * trained * torch.from_numpy(share.loss_weights[members])[:, None]).sum()


def _logp_row(actor: MegatronActor) -> Result:
    share, buffers = trajectories(EQUAL)
    arrays = {name: values for name, values in vars(share).items() if name != "version" and values is not None}
    # An empty first update makes the second one need old log-probabilities.
    nothing = RankShare(**{name: values[:0] for name, values in arrays.items()})
    tokens, trained = int(share.total_tokens.sum()) - len(EQUAL), int(EQUAL.sum())
    products = [(tokens, inner, outer) for inner, outer in _layer_products()] * integer(MODEL, "num_hidden_layers")
    products.append((trained, integer(MODEL, "hidden_size"), integer(MODEL, "vocab_size")))
    # Written once: torch.empty's pages do not exist until the first product.
    operands = [(torch.randn(m, k), torch.randn(n, k), torch.empty(m, n).fill_(0)) for m, k, n in products]

    def ours() -> None:
        actor.recompute_logp([nothing, share], [buffers])  # only samples of later updates are computed

    def theirs() -> None:
        for left, right, out in operands:
            torch.mm(left, right.t(), out=out)

    seconds, alone = medians([ours, theirs], REPEATS)
    note = "the peer is every matrix product of the forward pass, without attention, norms and softmax"
    return compare("log-probability pass", seconds, alone, "s", note=note)


def _corrections_row(update: Result) -> Result:
    """Compare with the row of the update with equal lengths."""
    share, _ = trajectories(EQUAL)
    shape = len(EQUAL), int(EQUAL[0])
    advantages = torch.from_numpy(share.advantages)[:, None].expand(shape).contiguous()
    noise = 0.01 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    logp = noise - 3
    inputs = PolicyLossInputs(logp, torch.ones(shape), logp, advantages, rollout_logp=logp - noise)
    # As many calls as the update has micro-batches.
    responses = max(BUDGET // int(share.total_tokens[0]), 1)
    cut = {name: value.split(responses) for name, value in vars(inputs).items() if value is not None}
    parts = [PolicyLossInputs(**dict(zip(cut, values, strict=True))) for values in zip(*cut.values(), strict=True)]
    entries = [ListedCorrectionConfig(**entry) for entry in PRESETS["skyrl_recommended"].corrections]  # type: ignore[arg-type]  # by name
    listed, loss = [Correction(entry) for entry in entries], policy_loss("ppo_clip")

    def losses(corrections: list[Correction]) -> None:
        for part in parts:
            corrected(loss, corrections, part)

    corrections, plain = medians([lambda: losses(listed), lambda: losses([])], LOSS_REPEATS)
    added, seconds = corrections - plain, int(share.total_tokens.sum()) / update.ours
    note = f"{len(listed)} corrections (algorithm.correction_preset=skyrl_recommended), {len(parts)} micro-batches"
    return Result("corrections, share of an update", added, seconds, "s", added / seconds, aim="<= 0.01", note=note)


def _layer_products() -> list[tuple[int, int]]:
    hidden, head, heads, groups, wide = (
        integer(MODEL, key)
        for key in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    return [(hidden, (heads + 2 * groups) * head), (heads * head, hidden), (hidden, 2 * wide), (wide, hidden)]
