"""Main functions of the ranks in test_transformer_engine.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.distributed import policy_batch
from tests.distributed.two_updates import make_actor
from tests.tiny_models import VOCABULARY

LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "head_dim": 64, "v_head_dim": 128}
LATENT |= {"kv_lora_rank": 128, "q_lora_rank": 128}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 8}
"""Every token goes to all experts, so that rounding to bfloat16 cannot change the choice."""
FIELDS: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64},
    "qwen3_moe": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, **EXPERTS},
    "deepseek_v3": {"hidden_size": 256, "intermediate_size": 256, **EXPERTS, **LATENT},
    # With the tiny model's limit of 1, rounding decides whether a gate is clamped.
    "gpt_oss": {
        "hidden_size": 256,
        "intermediate_size": 256,
        "head_dim": 64,
        "num_experts_per_tok": 8,
        "swiglu_limit": 7.0,
    },
}
"""Head sizes that TransformerEngine's kernels support, and matrix sizes that are multiples of FP8's blocks of 128."""
LENGTHS = [5, 60, 1, 62]


def sequences() -> list[list[int]]:
    tokens = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return [part.tolist() for part in tokens.split(LENGTHS)]


def logits(rank: int, directory: str) -> dict[str, Any]:
    """Return the bfloat16 logits of packed sequences by local and by TransformerEngine's layers, and the latter's
    attention."""
    from mcore_rl.resolved.installed import here

    installed = here()
    assert installed.transformer_engine
    return {
        "local": _logits(directory, replace(installed, transformer_engine=None)),
        "engine": _logits(directory, installed),
        "attention": _chosen_attention(),
    }


def _logits(directory: str, installed: Any) -> list[torch.Tensor]:
    from mcore_rl.config.models import ActorConfig, ParallelConfig
    from mcore_rl.config.roles import ModelRole
    from mcore_rl.config.schema import ModelConfig
    from mcore_rl.megatron.model import parallel
    from mcore_rl.megatron.model.attention.packed import pack_sequences
    from mcore_rl.megatron.model.loading import load_hf
    from mcore_rl.megatron.model.model import build_model
    from mcore_rl.megatron.model.output import logits_emitted
    from mcore_rl.resolved.layout import train_layout
    from mcore_rl.resolved.model import ResolvedModel
    from model_converters.families.parts.hf_config import read_hf_config

    hf_config = read_hf_config(directory)
    layout = train_layout(ParallelConfig(), 1, hf_config)
    parallel.initialize_groups(layout, timeout_seconds=60, seed=0)
    role = ModelRole.policy(ActorConfig(), ModelConfig(hf_path="", dtype="bfloat16"))
    (model,) = build_model(ResolvedModel(role, hf_config, layout), installed=installed)
    load_hf([model], directory, layout)
    device = next(model.parameters()).device
    tokens = torch.tensor([token for part in sequences() for token in part], device=device)
    with torch.no_grad(), logits_emitted([model]):
        row = model(tokens[None], None, None, packed_seq_params=pack_sequences(LENGTHS, device))[0]
    return [part.float().cpu() for part in row[:, :VOCABULARY].split(LENGTHS)]


def _chosen_attention() -> str:
    """Return the attention backend that TransformerEngine has selected; 2.11 keeps it in a table of the module."""
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    chosen = dot_product_attention._attention_backends
    names = [name for name in ("flash", "fused", "unfused") if chosen[f"use_{name}_attention"]]
    return " ".join(
        str(part) for part in (*names, chosen["flash_attention_backend"], chosen["fused_attention_backend"])
    )


def first_step(rank: int, directory: str) -> tuple[str, float]:
    """Return the optimizer's class, and the largest difference of its first step from torch's AdamW."""
    from mcore_rl.megatron.optim.main_params import optimizer_parts

    actor, shares = make_actor(directory, {}, model={"dtype": "bfloat16"})
    (part,) = optimizer_parts(actor.optimizer)
    inner = part.optimizer
    expected: list[torch.Tensor] = []
    inner.register_step_pre_hook(lambda *_: expected.extend(_stepped(inner)))
    actor.update(actor.recompute_logp(shares[:1], policy_batch.chunks())[0], 0)
    mains = [main for group in inner.param_groups for main in group["params"]]
    worst = max(float((main - other).abs().max()) for main, other in zip(mains, expected, strict=True))
    return f"{type(inner).__module__}.{type(inner).__name__}", worst


def _stepped(inner: Any) -> list[torch.Tensor]:
    """Return copies of the main parameters after a first step of torch's AdamW with the same gradients and settings."""
    groups = []
    for group in inner.param_groups:
        copies = [torch.nn.Parameter(main.detach().clone()) for main in group["params"]]
        for copy, main in zip(copies, group["params"], strict=True):
            copy.grad = main.grad.clone()
        settings = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay") if key in group}
        groups.append({"params": copies, **settings})
    torch.optim.AdamW(groups).step()
    return [copy.detach() for group in groups for copy in group["params"]]


def update(rank: int, directory: str, fp8: str) -> tuple[float, bool]:
    """Return the loss of an update, and whether every matrix has changed."""
    actor, shares = make_actor(directory, {}, actor={"fp8": fp8}, model={"dtype": "bfloat16"})
    before = {name: tensor.clone() for name, tensor in actor.tensors().items() if tensor.dim() == 2}
    metrics = actor.update(actor.recompute_logp(shares[:1], policy_batch.chunks())[0], 0)
    tensors = actor.tensors()
    return metrics["actor/loss"].value, all(not torch.equal(before[name], tensors[name]) for name in before)


Scales = dict[str, list[float]]


def save_and_resume(rank: int, directory: str, checkpoint: str) -> tuple[Scales, Scales]:
    """Return the state of FP8's delayed scaling after an update, by module, in the saving and in the resumed actor."""
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from tests.distributed.saving import save_checkpoint

    # The other recipes keep no state between steps.
    settings = {"actor": {"fp8": "delayed"}, "model": {"dtype": "bfloat16"}}
    actor, shares = make_actor(directory, {}, **settings)
    actor.update(actor.recompute_logp(shares[:1], policy_batch.chunks())[0], 0)
    save_checkpoint(checkpoint, actor)
    resumed, _ = make_actor(directory, {}, **settings)
    load_checkpoint(checkpoint, resumed)
    return _scales(actor), _scales(resumed)


def _scales(actor: Any) -> Scales:
    """Return the scales of each module's operands."""
    states = {name: getattr(module, "fp8_meta", {}) for name, module in actor.chunks[0].named_modules()}
    return {name: state["scaling_fwd"].scale.tolist() for name, state in states.items() if "scaling_fwd" in state}
