"""Tiny models with adapters created by PEFT, PEFT's results for them, and our adapters by PEFT's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_rl.config.models import LoraConfig
from mcore_rl.config.schema import Config
from tests.distributed import policy_batch
from tests.tiny_models import GROUPS, VOCABULARY, YARN, write_tiny_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
DELTA_NET = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


@dataclass(frozen=True)
class Model:
    """A tiny model with adapters. targets: target_modules given to PEFT; actor.lora gets them only if `named`,
    otherwise it must find the same modules itself."""

    kind: str
    targets: list[str]
    changes: dict[str, Any] = field(default_factory=dict)
    named: bool = False
    rank: int = 3
    alpha: float = 7.0
    rslora: bool = False


MODELS = {
    "dense": Model("qwen3", ATTENTION + MLP),
    "biased": Model("qwen2", ATTENTION + MLP),
    "some": Model("qwen3", ["q_proj", "v_proj", "up_proj"], named=True, rslora=True),
    # Fewer key-value heads than tensor-parallel ranks.
    "odd": Model("qwen3", ATTENTION + MLP, {"num_key_value_heads": 1, "vocab_size": VOCABULARY + 1}),
    "moe": Model("qwen3_moe", ATTENTION),
    "linear attention": Model("qwen3_5_text", ATTENTION + MLP + DELTA_NET),
    "v3": Model("deepseek_v3", LATENT + MLP, {"rope_parameters": YARN, **GROUPS}),
    "v3 without query latent": Model("deepseek_v3", ["q_proj", *LATENT[2:], *MLP], {"q_lora_rank": None}),
}


def write_models(root: Path, names: list[str] | None = None) -> dict[str, str]:
    """Write the models. Returns directories by name, each with a model and, in `adapter`, the files saved by PEFT."""
    directories = {}
    for name in names or MODELS:
        model = MODELS[name]
        directory = write_tiny_model(root / name.replace(" ", "_"), model.kind, **model.changes)
        _write_adapter(directory, model)
        directories[name] = str(directory)
    return directories


def _write_adapter(directory: Path, model: Model) -> None:
    from transformers import AutoModelForCausalLM

    save_adapter(AutoModelForCausalLM.from_pretrained(directory, local_files_only=True), directory, model)


def save_adapter(model_of_transformers: Any, directory: Path, model: Model) -> None:
    """Save random adapters for a model of transformers to directory/adapter."""
    import peft

    options = {"r": model.rank, "lora_alpha": model.alpha, "use_rslora": model.rslora, "task_type": "CAUSAL_LM"}
    base = _as_it_is(model_of_transformers)
    torch.manual_seed(5)
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=model.targets, **options))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)  # PEFT's initial B is zero, and with it the gradient of A
    adapted.save_pretrained(directory / "adapter")


def peft_model(directory: str, adapter: str | Path) -> Any:
    """Load PEFT's model in float64 with all adapters trainable."""
    import peft

    base = _as_it_is(policy_batch.reference_model(directory))
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).double()


def _as_it_is(model: Any) -> Any:
    """Keep PEFT from interpreting gate_proj, up_proj and down_proj as names of the routed experts, which would adapt
    nothing else."""
    model.config.model_type = "no type that PEFT knows"
    return model


def named(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adapter tensors of a PeftModel by the names used in files."""
    return {name.replace(".default.", "."): tensor for name, tensor in tensors.items() if "lora_" in name}


def peft_gradients(directory: str, samples: list[int]) -> tuple[float, dict[str, torch.Tensor]]:
    """Like policy_batch.reference_gradients, but only gradients of adapters."""
    model = peft_model(directory, f"{directory}/adapter")
    with torch.no_grad():
        old = {
            s: policy_batch.reference_logp(model, s)[0] + torch.from_numpy(policy_batch.drift(s)).double()
            for s in samples
        }
    loss, _ = policy_batch.reference_loss(model, samples, old)
    loss.backward()
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if "lora_" not in name)
    return float(loss.detach()), named({name: parameter.grad for name, parameter in model.named_parameters()})


def lora_config(name: str, directory: str, parallel: dict[str, Any], tokens: int, *, path: bool = True) -> Config:
    """Configuration of the actor. path=False: new adapters instead of saved ones."""
    model = MODELS[name]
    config = policy_batch.config(directory, parallel, tokens)
    targets = model.targets if model.named else []
    config.actor.lora = LoraConfig(
        model.rank, model.alpha, model.rslora, targets, f"{directory}/adapter" if path else None
    )
    return config


def adapter_pieces(actor: Any, *, gradients: bool = False) -> list[Any]:
    """Return this rank's slices of the adapters' tensors or gradients, in the form of policy_batch.assemble."""
    from mcore_rl.megatron.lora.adapters import adapter_parameters
    from mcore_rl.megatron.roles.export import adapter_plan
    from model_converters.mapping.plan import export_pieces

    held = {
        factor.bound.mcore: parameter.main_grad if gradients else parameter
        for factor, parameter in adapter_parameters(actor.chunks)
    }
    return [
        (plan.hf_name, plan.shape, piece.dim, piece.start, piece.rows, view.detach().float().numpy().copy())
        for plan, piece, view in export_pieces(adapter_plan(actor), held, actor.rank)
    ]
