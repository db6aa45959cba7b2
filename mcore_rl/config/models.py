"""Sections of the models on Megatron ranks: layout, optimizer, memory, and the roles that have them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ParallelConfig:
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    """Tensor-parallel size of the experts; null: 1 for mixture-of-experts models with ep > 1, else tp."""
    cp: int = 1
    """Ranks that share every packed row; sequences are padded to multiples of 2 * cp tokens."""
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    pipeline_layout: str | None = None
    """Megatron's layout of pipeline stages, such as `E|(tt|)*30tL`; its stages are pp x vpp. Replaces
    first_stage_layers, last_stage_layers and vpp."""
    sequence_parallel: bool | None = None
    """null: with tp > 1. Mixture-of-experts and latent-attention models are wrong without it."""


@dataclass
class OptimizerSettings:
    lr: float = 1e-6
    min_lr: float = 0.0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_grad: float = 1.0
    warmup_steps: int = 0
    """Optimizer updates of linear warm-up from 0."""
    schedule: str = "constant"
    """constant | linear | cosine; the latter two decay to min_lr over decay_steps."""
    decay_steps: int | None = None
    """Optimizer updates; null: all updates of the run."""
    cpu_offload: bool = False
    """Adam's moments and float32 weights lie in host memory and visit the GPU in pieces: 24 bytes per parameter over
    the bus at each update, but GPUs hold 6 bytes of a bfloat16 parameter. Needs actor.distributed_optimizer."""


@dataclass
class MoeConfig:
    """Training of mixture-of-experts layers. Coefficients of 0 leave a term out."""

    load_balancing: str = "aux_loss"
    """aux_loss (per micro-batch) | seq_aux_loss (per sequence) | global_aux_loss (all that the update has routed so
    far, on all ranks): over what the auxiliary loss balances experts."""
    aux_loss_coefficient: float = 0.0
    z_loss_coefficient: float = 0.0
    bias_update_rate: float = 0.0
    """By how much an update moves the bias with which DeepSeek-V3's routers choose experts; 0: it stays."""
    dispatcher: str = "auto"
    """auto | alltoall | allgather | deepep. auto: deepep where it is installed and ep spans nodes, else alltoall."""
    router_replay: str = "none"
    """none | policy | engine. policy: updates replay the experts that the old policy's pass chose. engine: the old
    policy's pass and the updates replay those that the engine chose while sampling; they travel with the trajectories,
    one byte per token, layer with experts and expert of a token (two above 256 experts)."""
    replay_check_every_steps: int = 10
    """With engine, how often a pass over the step's samples without replay tells what it changes (routing/ in the
    metrics): shares of tokens and of choices that differ from the engine's, and the log-prob gap. 0: never."""


@dataclass
class OffloadConfig:
    """What moves to host memory while the engine generates, and back before the next pass of the trainer."""

    params: bool = False
    grads: bool = False
    optimizer: bool = False


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA) in the place of full training: a projection W becomes W + scale B A, of which A and B
    are trained and W is frozen. scale is alpha / rank, or alpha / sqrt(rank) with rslora."""

    rank: int = 0
    """Rows of A and columns of B; 0: no adapters, all weights are trained."""
    alpha: float = 32.0
    rslora: bool = False
    target_modules: list[str] = field(default_factory=list)
    """PEFT's names of the projections that get an adapter, such as q_proj; empty: all of attention, dense MLPs and
    shared experts."""
    path: str | None = None
    """Adapter in PEFT's format to start from; null: A at random, B zero, so that training starts with the base."""


@dataclass
class ActorConfig:
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    num_ranks: int | None = None
    """Trainer ranks; null: all that the cluster offers."""
    tokens_per_microbatch: int = 4096
    """Budget of one packed row, which context-parallel ranks share; a longer sequence is refused."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits exist at one time."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    recompute: str = "none"
    """none | selective | full activation recomputation."""
    recompute_modules: list[str] = field(default_factory=lambda: ["core_attn"])
    """Of selective recomputation: core_attn, mlp, moe, moe_act, shared_experts, layernorm, mla_up_proj."""
    recompute_layers: int = 1
    """Of full recomputation: layers between two saved activations."""
    distributed_optimizer: bool = True
    """Optimizer state sharded over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    mtp_loss_coefficient: float = 0.0
    """Above 0 the model's multi-token-prediction layers are trained with this weight; at 0 they are left out."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    fp8: str = "none"
    """none | delayed | tensorwise | blockwise | mxfp8: TransformerEngine's recipe (CUDA only)."""


@dataclass
class CriticConfig(ActorConfig):
    """The value model of estimators that need one. The keys are the actor's, of a model and a layout of its own; it has
    no log-probabilities, no multi-token prediction and nothing to replay."""

    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=1e-5))
    hf_path: str | None = None
    """HF directory of a causal model, whose value head then starts at random, or of a token or sequence classification
    model with one label; null: model.hf_path."""
    clip_range: float | None = 0.2
    """How far an update may move a value from where it was before and still learn from it; null: no bound."""
    update_epochs: int = 1
    """How often the critic goes through the updates of a step, for each time that the policy does
    (trainer.update_epochs): values may need more of them than a policy bears."""


@dataclass
class RewardModelConfig(ActorConfig):
    """A frozen model that scores responses. Of the actor's keys it has those of a layout of its own, the budget of a
    row, moe.dispatcher, fp8 and offload.params, by which its weights lie in host memory but for its own pass."""

    hf_path: str | None = None
    """HF directory of a sequence classification model with one label; null: no reward model."""
    weight: float = 1.0
    """Of its score in the sum with the rule's reward."""


@dataclass
class ReferenceConfig:
    """The frozen policy that algorithm.kl compares with, on the ranks and in the layout of the actor."""

    hf_path: str | None = None
    """HF directory of another model of the same architecture; null: the weights that the policy starts with."""
    offload: bool = True
    """Its weights lie in host memory but for its own pass."""
    refresh_every_steps: int = 0
    """It becomes the policy of then after every so many steps; 0: never."""
