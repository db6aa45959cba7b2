"""Sections of the models on Megatron ranks: layout, optimizer, memory, and the roles that have them."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.config.fields import setting


@dataclass
class ParallelConfig:
    tp: int = setting(1, minimum=1)
    """Tensor-parallel ranks, which share every matrix."""
    pp: int = setting(1, minimum=1)
    """Pipeline stages, each with a part of the layers."""
    vpp: int | None = setting(None, minimum=1)
    """Chunks of layers that a pipeline stage holds, for the interleaved schedule; null: one."""
    ep: int = setting(1, minimum=1)
    """Expert-parallel ranks, which share the experts of a layer."""
    etp: int | None = setting(None, minimum=1)
    """Tensor-parallel size of the experts; null: 1 for mixture-of-experts models with ep > 1, else tp."""
    cp: int = setting(1, minimum=1)
    """Ranks that share every packed row; sequences are padded to multiples of 2 * cp tokens."""
    first_stage_layers: int | None = setting(None, minimum=1)
    """Of the first pipeline stage; null: as many as the others have."""
    last_stage_layers: int | None = setting(None, minimum=1)
    """Of the last pipeline stage; null: as many as the others have."""
    pipeline_layout: str | None = None
    """Megatron's layout of pipeline stages, such as `E|(tt|)*30tL`; its stages are pp x vpp. Replaces
    first_stage_layers, last_stage_layers and vpp."""
    sequence_parallel: bool | None = None
    """null: with tp > 1. Mixture-of-experts and latent-attention models are wrong without it."""


@dataclass
class OptimizerSettings:
    lr: float = setting(1e-6, minimum=0)
    """Learning rate of Adam, after the warm-up."""
    min_lr: float = setting(0.0, minimum=0)
    """Where schedules linear and cosine end."""
    weight_decay: float = setting(0.1, minimum=0)
    """Decoupled, as in AdamW."""
    beta1: float = setting(0.9, minimum=0, below=1)
    """Decay of Adam's first moment."""
    beta2: float = setting(0.999, minimum=0, below=1)
    """Decay of Adam's second moment."""
    eps: float = setting(1e-8, above=0)
    """What Adam adds to the root of the second moment."""
    clip_grad: float = setting(1.0, above=0)
    """Norm to which a longer gradient is cut."""
    warmup_steps: int = setting(0, minimum=0, unit="updates")
    """Optimizer updates of linear warm-up from 0."""
    schedule: str = setting("constant", choices=("constant", "linear", "cosine"))
    """constant | linear | cosine; the latter two decay to min_lr over decay_steps."""
    decay_steps: int | None = setting(None, minimum=1, unit="updates")
    """Optimizer updates; null: all updates of the run."""
    cpu_offload: bool = False
    """Adam's moments and float32 weights lie in host memory and visit the GPU in pieces: 24 bytes per parameter over
    the bus at each update, but GPUs hold 6 bytes of a bfloat16 parameter. Needs actor.distributed_optimizer."""


@dataclass
class MoeConfig:
    """Training of mixture-of-experts layers. Coefficients of 0 leave a term out."""

    load_balancing: str = setting("aux_loss", choices=("aux_loss", "seq_aux_loss", "global_aux_loss"))
    """aux_loss (per micro-batch) | seq_aux_loss (per sequence) | global_aux_loss (all that the update has routed so
    far, on all ranks): over what the auxiliary loss balances experts."""
    aux_loss_coefficient: float = setting(0.0, minimum=0)
    """Of the loss that balances the load of experts."""
    z_loss_coefficient: float = setting(0.0, minimum=0)
    """Of the loss that keeps the routers' logits small."""
    bias_update_rate: float = setting(0.0, minimum=0)
    """By how much an update moves the bias with which DeepSeek-V3's routers choose experts; 0: it stays."""
    dispatcher: str = setting("auto", choices=("auto", "alltoall", "allgather", "deepep"))
    """auto | alltoall | allgather | deepep. auto: deepep where it is installed and ep spans nodes, else alltoall."""
    router_replay: str = setting("none", choices=("none", "policy", "engine"))
    """none | policy | engine. policy: updates replay the experts that the old policy's pass chose. engine: the old
    policy's pass and the updates replay those that the engine chose while sampling; they travel with the trajectories,
    one byte per token, layer with experts and expert of a token (two above 256 experts)."""
    replay_check_every_steps: int = setting(10, minimum=0)
    """With engine, how often a pass over the step's samples without replay tells what it changes (routing/ in the
    metrics): shares of tokens and of choices that differ from the engine's, and the log-prob gap. 0: never."""


@dataclass
class OffloadConfig:
    """What moves to host memory while the engine generates, and back before the next pass of the trainer."""

    params: bool = False
    """The weights."""
    grads: bool = False
    """The gradients' buffers."""
    optimizer: bool = False
    """The optimizer's state."""


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA) in the place of full training: a projection W becomes W + scale B A, of which A and B
    are trained and W is frozen. scale is alpha / rank, or alpha / sqrt(rank) with rslora."""

    rank: int = setting(0, minimum=0)
    """Rows of A and columns of B; 0: no adapters, all weights are trained."""
    alpha: float = setting(32.0, above=0)
    """Of the scale."""
    rslora: bool = False
    """Whether the scale divides by the root of rank."""
    target_modules: list[str] = field(default_factory=list)
    """PEFT's names of the projections that get an adapter, such as q_proj; empty: all of attention, dense MLPs and
    shared experts."""
    path: str | None = setting(None, path=True)
    """Adapter in PEFT's format to start from; null: A at random, B zero, so that training starts with the base."""


@dataclass
class ActorConfig:
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    num_ranks: int | None = setting(None, minimum=1)
    """Trainer ranks; null: all that the cluster offers."""
    tokens_per_microbatch: int = setting(4096, minimum=1)
    """Budget of one packed row, which context-parallel ranks share; a longer sequence is refused."""
    logprob_chunk_tokens: int = setting(1024, minimum=1)
    """Tokens whose logits exist at one time."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    recompute: str = setting("none", choices=("none", "selective", "full"))
    """none | selective | full activation recomputation."""
    recompute_modules: list[str] = field(default_factory=list)
    """Of selective recomputation: core_attn, mlp, moe, moe_act, shared_experts, layernorm, mla_up_proj. Empty: those of
    this model that keep much and are computed again at little cost."""
    recompute_layers: int = setting(1, minimum=1)
    """Of full recomputation: layers between two saved activations."""
    distributed_optimizer: bool = True
    """Optimizer state sharded over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Gradients are reduced while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Updated weights are gathered while the forward pass goes on."""
    mtp_loss_coefficient: float = setting(0.0, minimum=0)
    """Above 0 the model's multi-token-prediction layers are trained with this weight; at 0 they are left out."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    fp8: str = setting("none", choices=("none", "delayed", "tensorwise", "blockwise", "mxfp8"))
    """none | delayed | tensorwise | blockwise | mxfp8: TransformerEngine's recipe (CUDA only)."""


@dataclass
class CriticConfig(ActorConfig):
    """The value model of estimators that need one. The keys are the actor's, of a model and a layout of its own; it has
    no log-probabilities, no multi-token prediction and nothing to replay."""

    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=1e-5))
    hf_path: str | None = setting(None, path=True)
    """HF directory of a causal model, whose value head then starts at random, or of a token or sequence classification
    model with one label; null: model.hf_path."""
    clip_range: float | None = setting(0.2, above=0)
    """How far an update may move a value from where it was before and still learn from it; null: no bound."""
    update_epochs: int = setting(1, minimum=1)
    """How often the critic goes through the updates of a step, for each time that the policy does
    (trainer.update_epochs): values may need more of them than a policy bears."""


@dataclass
class RewardModelConfig(ActorConfig):
    """A frozen model that scores responses. Of the actor's keys it has those of a layout of its own, the budget of a
    row, moe.dispatcher, fp8 and offload.params, by which its weights lie in host memory but for its own pass."""

    hf_path: str | None = setting(None, path=True)
    """HF directory of a sequence classification model with one label; null: no reward model."""
    weight: float = 1.0
    """Of its score in the sum with the rule's reward."""


@dataclass
class ReferenceConfig:
    """The frozen policy that algorithm.kl compares with, on the ranks and in the layout of the actor."""

    hf_path: str | None = setting(None, path=True)
    """HF directory of another model of the same architecture; null: the weights that the policy starts with."""
    offload: bool = True
    """Its weights lie in host memory but for its own pass."""
    refresh_every_steps: int = setting(0, minimum=0)
    """After every so many steps it takes the weights that the policy has by then; 0: never."""
