"""Section `model`: weights, tokenizer and data type of the policy."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from mcore_rl.config.fields import setting


@dataclass
class ModelConfig:
    """Model to train: weights, tokenizer and data type."""

    hf_path: str = setting(MISSING, path=True, hub="model")
    """Hugging Face directory with config.json and safetensors, or a hub id such as owner/name or owner/name@revision;
    also the tokenizer, unless tokenizer_path is set."""
    tokenizer_path: str | None = setting(None, path=True, hub="model")
    """Directory of the tokenizer, or a tokenizer.json file; null: model.hf_path."""
    dtype: str = setting("auto", choices=("auto", "float32", "bfloat16", "float16"))
    """Data type of the parameters in trainer and engines: float32, or bfloat16 or float16 with float32 main parameters
    in the optimizer. float16 has 3 more bits of precision than bfloat16, so engine and trainer differ less, but numbers
    above 65,504 overflow: its gradients are scaled (actor.optimizer.loss_scale). auto: bfloat16 on GPUs, float32 on
    CPU."""
    float32_head: bool = False
    """Compute logits in float32 in engines, too, from hidden states and output weights in model.dtype. The trainer's
    logits are always float32; with this key, their gradients are not rounded on GPUs either."""
    float32_router: bool = False
    """Compute the logits of routers in float32 in engines, too, so that engines choose the same experts as the trainer,
    whose routers are always float32."""
    random_init: bool = False
    """Initialize the weights randomly, from config.json and run.seed, instead of loading them (for tests and throughput
    measurements)."""
    check_logits: str = setting("auto", choices=("auto", "always", "never"))
    """Comparison, before training, of log-probabilities of a few random tokens with the model in transformers on the
    CPU. auto: if the model has at most 2 billion parameters and fits in memory."""
