"""verl's keys of low-rank adapters."""

from __future__ import annotations

from mcore_rl.migration.verl.run import VerlRun

MERGED = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
}
MODULES = {**MERGED, "linear_fc2": ["down_proj"]}
"""Megatron's names of projections -> PEFT's."""


def translate_lora(run: VerlRun, model: str) -> None:
    """Translate adapters; `model` is the prefix of the model's keys."""
    source, draft = run.source, run.draft
    ranks = (f"{model}.lora.rank", f"{model}.lora_rank")
    alphas = (f"{model}.lora.alpha", f"{model}.lora_alpha")
    modules = (f"{model}.lora.target_modules", f"{model}.target_modules")
    paths = (f"{model}.lora.adapter_path", f"{model}.lora_adapter_path")
    rank = source.integer(*ranks)
    source.find(*alphas, *modules, *paths, f"{model}.lora.merge")
    if rank <= 0:
        return
    draft.take(source, "actor.lora.rank", rank, *ranks)
    default_alpha = 32 if source.is_set(ranks[0]) else 16
    alpha = source.number(*alphas) if source.is_set(*alphas) else default_alpha
    draft.set("actor.lora.alpha", alpha, source.effective(*alphas).origin)
    named = source.effective(*modules).value
    if isinstance(named, list):
        names = [peft for name in named for peft in MODULES.get(str(name), [str(name)])]
        draft.take(source, "actor.lora.target_modules", names, *modules)
    if source.text(*paths) is not None:
        draft.take(source, "actor.lora.path", source.text(*paths), *paths)
    dropout = source.find(f"{model}.lora.dropout")
    if dropout is not None and dropout.value:
        draft.block(dropout, "adapters have no dropout, which would make log-probabilities random")
    draft.drop("reference.offload")
