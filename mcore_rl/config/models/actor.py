"""Section `actor`: training of the policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.config.fields import setting
from mcore_rl.config.models.layout import OffloadConfig, ParallelConfig
from mcore_rl.config.models.optimizer import OptimizerSettings
from mcore_rl.config.quantization import FP8_RECIPES, GROUPS

FSDP2 = "fsdp2"
"""Value of `strategy` for transformers' own model."""
STRATEGIES = ("megatron", FSDP2)
DISPATCHERS = ("auto", "alltoall", "allgather", "deepep")


@dataclass
class MoeConfig:
    """Training of mixture-of-experts layers. A coefficient of 0 disables a term."""

    load_balancing: str = setting("aux_loss", choices=("aux_loss", "seq_aux_loss", "global_aux_loss"))
    """Scope in which the auxiliary loss balances experts: a micro-batch (aux_loss), a sequence (seq_aux_loss), or all
    tokens of the update so far on all ranks (global_aux_loss)."""
    aux_loss_coefficient: float = setting(0.0, minimum=0)
    """Coefficient of the load-balancing loss."""
    z_loss_coefficient: float = setting(0.0, minimum=0)
    """Coefficient of the loss that keeps router logits small."""
    bias_update_rate: float = setting(0.0, minimum=0)
    """Change per update of the expert bias in DeepSeek-V3's routers; 0: the bias is constant."""
    dispatcher: str = setting("auto", choices=DISPATCHERS)
    """Token dispatcher; auto: deepep if it is installed and ep spans nodes, else alltoall."""
    router_replay: str = setting("none", choices=("none", "policy", "engine"))
    """Replay of expert choices in updates. policy: updates reuse the experts of the old policy's forward pass. engine:
    that pass and the updates reuse the experts that the engine chose while sampling; trajectories then carry one byte
    per token, layer with experts and chosen expert (two bytes above 256 experts)."""
    replay_check_every_steps: int = setting(10, minimum=0)
    """Interval between forward passes without replay (with router_replay=engine), which measure the difference (metrics
    routing/*): fractions of tokens and of choices that differ, and the log-probability gap. 0: never."""


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA) instead of full training: a projection W becomes W + scale B A, where A and B are
    trained and W is frozen. scale is alpha / rank, or alpha / sqrt(rank) with rslora."""

    rank: int = setting(0, minimum=0)
    """Rank of the adapters; 0: no adapters, all weights are trained."""
    alpha: float = setting(32.0, above=0)
    """Numerator of the adapters' scale."""
    rslora: bool = False
    """Divide alpha by the square root of the rank, instead of the rank."""
    target_modules: list[str] = field(default_factory=list)
    """Projections with adapters, by PEFT's names such as q_proj; empty: all projections of attention, dense MLPs and
    shared experts."""
    path: str | None = setting(None, path=True, hub="model")
    """Adapter in PEFT's format to start from; null: A random and B zero, so that training starts from the base
    model."""


@dataclass
class ActorConfig:
    """Training of the policy: layout, memory, optimizer and adapters."""

    strategy: str = setting("megatron", choices=STRATEGIES)
    """Model that is trained. megatron: Megatron-Core's, with all parallel axes. fsdp2: transformers' own, with all its
    parameters sharded over data-parallel ranks."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    num_ranks: int | None = setting(None, minimum=1)
    """Number of trainer ranks; null: all slots of the cluster that are not reserved for engines."""
    tokens_per_microbatch: int = setting(4096, minimum=1)
    """Maximum number of tokens in a packed row, shared by the context-parallel ranks; a longer sequence is rejected."""
    logprob_chunk_tokens: int = setting(1024, minimum=1)
    """Number of tokens whose logits are in memory at a time."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    recompute: str = setting("none", choices=("none", "selective", "full"))
    """Activation recomputation in the backward pass."""
    recompute_modules: list[str] = field(default_factory=list)
    """Modules of selective recomputation: core_attn, mlp, moe, moe_act, shared_experts, layernorm, mla_up_proj. Empty:
    the modules of this model that save much memory at little cost."""
    recompute_layers: int = setting(1, minimum=1)
    """Layers between two saved activations in full recomputation."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients during the backward pass."""
    overlap_param_gather: bool = False
    """Gather updated weights during the forward pass."""
    mtp_loss_coefficient: float = setting(0.0, minimum=0)
    """Loss coefficient of the model's multi-token-prediction layers; 0: these layers are not built."""
    train_vision: bool = False
    """Train the vision tower of a model that reads images too; false: it keeps its weights."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    fp8: str = setting("none", choices=("none", *FP8_RECIPES))
    """FP8 recipe of TransformerEngine (CUDA only)."""
    quantization_aware: int = setting(0, minimum=0, maximum=GROUPS[-1], unit="elements")
    """Quantisation-aware training for rollout.quantization=int4: forward passes of policy and reference use the INT4
    values of the experts' weights, with one scale per this number of elements. It must equal
    rollout.quantization_group. Gradients pass the rounding unchanged, and checkpoints keep the unrounded weights. 0:
    unrounded weights."""

    @property
    def shards_parameters(self) -> bool:
        """True if weights and gradients are divided over data-parallel ranks."""
        return self.strategy == FSDP2 or self.parallel.shard_parameters
