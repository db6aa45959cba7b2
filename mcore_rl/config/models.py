"""Section `model`, and sections of models on Megatron ranks: layout, optimizer, memory, and the roles that use them."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from mcore_rl.config.fields import setting
from mcore_rl.config.quantization import FP8_RECIPES, GROUPS

FSDP2 = "fsdp2"
"""Value of `strategy` for transformers' own model."""
CHECKPOINT_FILES = "config_and_tokenizer"
"""Folder of a Megatron checkpoint with its config.json and tokenizer."""
OTHERS = ""
"""Source of the teacher of all rows that no entry of teacher.by_source names."""


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


@dataclass
class ParallelConfig:
    tp: int = setting(1, minimum=1)
    """Tensor-parallel size."""
    pp: int = setting(1, minimum=1)
    """Number of pipeline stages."""
    vpp: int | None = setting(None, minimum=1)
    """Model chunks per pipeline stage for the interleaved schedule; null: one."""
    ep: int = setting(1, minimum=1)
    """Expert-parallel size."""
    etp: int | None = setting(None, minimum=1)
    """Tensor-parallel size of the experts; null: 1 for mixture-of-experts models with ep > 1, else tp."""
    cp: int = setting(1, minimum=1)
    """Context-parallel size: ranks that share a packed row; sequences are padded to multiples of 2 * cp tokens."""
    first_stage_layers: int | None = setting(None, minimum=1)
    """Layers of the first pipeline stage; null: same as the other stages."""
    last_stage_layers: int | None = setting(None, minimum=1)
    """Layers of the last pipeline stage; null: same as the other stages."""
    pipeline_layout: str | None = None
    """Megatron's pipeline layout string, such as `E|(tt|)*30tL`, with pp x vpp stages. Replaces first_stage_layers,
    last_stage_layers and vpp."""
    sequence_parallel: bool | None = None
    """Use sequence parallelism; null: if tp > 1. Mixture-of-experts and latent-attention models compute wrong results
    without it."""
    shard_parameters: bool = False
    """Divide parameters and gradients over data-parallel ranks too; each layer is gathered for its passes (FSDP)."""


SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126
"""Range of the loss scale. Float32 holds these powers of two and their reciprocals without loss of bits."""


@dataclass
class LossScaleConfig:
    """Loss scaling with model.dtype=float16: the loss is multiplied by a power of two, by which gradients are divided
    before the optimizer's step. An update whose gradients overflow is skipped."""

    initial: float = setting(2.0**32, minimum=SMALLEST_SCALE, maximum=LARGEST_SCALE)
    """Scale of the first update; 2^-126 to 2^126."""
    minimum: float = setting(1.0, minimum=SMALLEST_SCALE, maximum=LARGEST_SCALE)
    """Smallest scale. The run ends when an overflow would lower the scale further."""
    window: int = setting(1000, minimum=1, unit="updates")
    """Updates in a row without an overflow after which the scale doubles, up to 2^126."""
    hysteresis: int = setting(2, minimum=1, unit="updates")
    """Number of overflows from which on each one halves the scale; counted anew when the scale doubles."""


@dataclass
class OptimizerSettings:
    lr: float = setting(1e-6, minimum=0)
    """Learning rate of Adam after the warm-up."""
    min_lr: float = setting(0.0, minimum=0)
    """Final learning rate of the linear and cosine schedules."""
    weight_decay: float = setting(0.1, minimum=0)
    """Decoupled weight decay (AdamW)."""
    beta1: float = setting(0.9, minimum=0, below=1)
    """Decay rate of Adam's first moment."""
    beta2: float = setting(0.999, minimum=0, below=1)
    """Decay rate of Adam's second moment."""
    eps: float = setting(1e-8, above=0)
    """Constant that Adam adds to the root of the second moment."""
    clip_grad: float = setting(1.0, above=0)
    """Maximum gradient norm; larger gradients are scaled down to it."""
    warmup_steps: int = setting(0, minimum=0, unit="updates")
    """Optimizer updates of linear warm-up from 0."""
    schedule: str = setting("constant", choices=("constant", "linear", "cosine"))
    """Learning rate after the warm-up; linear and cosine decay to min_lr over decay_steps."""
    decay_steps: int | None = setting(None, minimum=1, unit="updates")
    """Optimizer updates of the decay; null: all updates of the run."""
    cpu_offload: bool = False
    """Keep Adam's moments and float32 weights in host memory and move them to the GPU in pieces. Each update moves 24
    bytes per parameter over the bus; the GPU holds 6 bytes per bfloat16 parameter. Needs actor.distributed_optimizer.
    """
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)


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
    dispatcher: str = setting("auto", choices=("auto", "alltoall", "allgather", "deepep"))
    """Token dispatcher; auto: deepep if it is installed and ep spans nodes, else alltoall."""
    router_replay: str = setting("none", choices=("none", "policy", "engine"))
    """Replay of expert choices in updates. policy: updates reuse the experts of the old policy's forward pass. engine:
    that pass and the updates reuse the experts that the engine chose while sampling; trajectories then carry one byte
    per token, layer with experts and chosen expert (two bytes above 256 experts)."""
    replay_check_every_steps: int = setting(10, minimum=0)
    """Interval between forward passes without replay (with router_replay=engine), which measure the difference (metrics
    routing/*): fractions of tokens and of choices that differ, and the log-probability gap. 0: never."""


@dataclass
class OffloadConfig:
    """Parts of a model that move to host memory while the engine generates, and back before the trainer's next pass."""

    params: bool = False
    """Offload the weights."""
    grads: bool = False
    """Offload the gradient buffers."""
    optimizer: bool = False
    """Offload the optimizer state."""


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

    strategy: str = setting("megatron", choices=("megatron", FSDP2))
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


@dataclass
class CriticConfig(ActorConfig):
    """Value model for estimators that need one. It has the actor's keys for its own model and layout, except for
    log-probabilities, multi-token prediction and replay."""

    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=1e-5))
    hf_path: str | None = setting(None, path=True, hub="model")
    """Hugging Face directory of a causal model (the value head starts random), or of a token or sequence classification
    model with one label; null: model.hf_path."""
    clip_range: float | None = setting(0.2, above=0)
    """Clip range of the value loss: a value that moved further from its old value gets no gradient; null: no
    clipping."""
    update_epochs: int = setting(1, minimum=1)
    """Critic passes over a step's updates per policy pass (trainer.update_epochs). Values may need more passes than a
    policy tolerates."""


@dataclass
class RewardModelConfig(ActorConfig):
    """Frozen model that scores responses. Of the actor's keys, it uses its own layout, tokens_per_microbatch,
    moe.dispatcher, fp8, and offload.params, which keeps its weights in host memory except during its pass."""

    hf_path: str | None = setting(None, path=True, hub="model")
    """Hugging Face directory of a sequence classification model with one label; null: no reward model."""
    weight: float = 1.0
    """Weight of its score in the reward."""


@dataclass
class ReferenceConfig:
    """Frozen policy for algorithm.kl, on the actor's ranks and in its layout."""

    hf_path: str | None = setting(None, path=True, hub="model")
    """Hugging Face directory of a model with the actor's architecture; null: the policy's initial weights."""
    offload: bool = True
    """Keep its weights in host memory except during its forward pass."""
    refresh_every_steps: int = setting(0, minimum=0)
    """Interval at which the policy's current weights are copied to the reference; 0: never."""


@dataclass
class TeacherSourceConfig:
    """Teacher of the rows of one data_source, an entry of teacher.by_source."""

    source: str = MISSING
    """data_source of the rows."""
    hf_path: str | None = setting(None, path=True, hub="model")
    """Hugging Face directory of the teacher, like teacher.hf_path."""
    checkpoint: str | None = setting(None, path=True)
    """Megatron checkpoint of the teacher, like teacher.checkpoint."""
    moving_average: float | None = setting(None, minimum=0, maximum=1)
    """Rate of an average of the policy's weights as teacher, like teacher.moving_average."""
    url: str | None = None
    """Address of a server with the teacher, like teacher.url."""
    served_model: str | None = None
    """Model name on the server, like teacher.served_model."""

    def key(self, name: str) -> str:
        """Return the full key of a field, for messages."""
        return f"teacher.{name}" if self.source == OTHERS else f"teacher.by_source, {self.source}: {name}"

    @property
    def given(self) -> str:
        """Key and value that select the teacher, for messages."""
        return f"{self.chosen}={getattr(self, self._choice)}"

    @property
    def chosen(self) -> str:
        """Key that selects the teacher, for messages."""
        return self.key(self._choice)

    @property
    def _choice(self) -> str:
        given = (name for name in ("url", "checkpoint", "moving_average") if getattr(self, name) is not None)
        return next(given, "hf_path")

    @property
    def averages(self) -> bool:
        """True if the teacher is an average of the policy's weights, which has no files of its own."""
        return self.moving_average is not None

    @property
    def directory(self) -> str:
        """Directory with config.json and the tokenizer of a teacher that the run loads."""
        return str(self.hf_path) if self.checkpoint is None else f"{self.checkpoint}/{CHECKPOINT_FILES}"


@dataclass
class TeacherConfig:
    """Model from which the policy learns (distillation): it computes the probabilities of the policy's own
    responses, on the actor's ranks and in the actor's layout, on engines, or on a server."""

    hf_path: str | None = setting(None, path=True, hub="model")
    """Hugging Face directory of the teacher, with the policy's tokenizer. Its family and sizes may differ from the
    policy's; null: the teacher of teacher.checkpoint or teacher.url, or no teacher."""
    checkpoint: str | None = setting(None, path=True)
    """Megatron checkpoint of the teacher instead of hf_path, such as RUN_DIR/checkpoints/step_100 of a run without
    adapters, saved in any layout. The teacher then runs on the actor's ranks."""
    url: str | None = None
    """Address of a server with the teacher that returns log-probabilities of given tokens, such as
    http://host:8000/v1; null: no server."""
    moving_average: float | None = setting(None, minimum=0, maximum=1)
    """Rate r of a teacher that is the moving average of the policy's own weights, on the actor's ranks
    (self-distillation). After the updates of a step, average <- r average + (1 - r) policy. 0: the policy at the start
    of the step; 1: the policy at the start of the run; null: another teacher."""
    by_source: list[TeacherSourceConfig] = field(default_factory=list)
    """List of teachers by data_source. Responses to rows of other sources learn from the teacher of hf_path,
    checkpoint, url or moving_average; if all are null, no term is added for them."""
    in_advantage: float = setting(0.0, minimum=0)
    """Weight of log p_teacher - log p_old (nats) of each sampled token, which is added to the token's advantage. p_old
    is the old policy of the loss (algorithm.old_logp). 0: no such term."""
    in_loss: float = setting(0.0, minimum=0)
    """Coefficient of the reverse KL, KL(policy || teacher) over the vocabulary at each trained token, in the policy
    loss. 0: no such term."""
    alone: bool = False
    """Train on the teacher only: the advantages of the rewards are replaced by 0, and rewards are metrics only."""
    top_k: int = setting(0, minimum=0, unit="tokens")
    """Number of the teacher's most probable tokens over which the reverse KL of in_loss is computed; 0: the whole
    vocabulary."""
    rest: str = setting("bucket", choices=("bucket", "renormalize"))
    """Treatment of tokens outside top_k. bucket: together they are one more outcome of the KL. renormalize: they are
    left out, and both distributions are divided by their sums over the top_k tokens."""
    offload: bool = True
    """Keep its weights in host memory except during its forward pass."""
    num_engines: int = setting(0, minimum=0)
    """Number of vLLM engines that compute the log-probabilities, for each teacher, each with a copy of it on teacher.tp
    ranks; 0: the teacher runs on the actor's ranks."""
    tp: int = setting(1, minimum=1)
    """Tensor-parallel ranks per engine."""
    dtype: str | None = setting(None, choices=("float32", "bfloat16", "float16"))
    """Data type of the parameters on engines; null: model.dtype."""
    max_concurrent_requests: int = setting(64, minimum=1)
    """Maximum number of sequences that one engine computes at a time, or of concurrent requests to one server."""
    max_batched_tokens: int = setting(2048, minimum=1)
    """Maximum number of tokens in one pass of an engine. The pass has the float32 logits of one sequence at a time, 4
    bytes per token and entry of the vocabulary."""
    kv_cache_gib: float = setting(0.25, above=0)
    """Size of the KV cache per engine rank on CPU; on GPUs, gpu_memory_fraction applies."""
    gpu_memory_fraction: float = setting(0.6, above=0, maximum=1)
    """Fraction of a GPU's memory that an engine rank uses; see rollout.gpu_memory_fraction."""
    enforce_eager: bool = False
    """Run the engines without CUDA graphs and compilation; see rollout.enforce_eager."""
    api: str = setting("vllm", choices=("vllm", "sglang", "completions"))
    """Interface of the server. vllm: /completions with prompt_logprobs; sglang: /generate; completions: /completions
    with echo and logprobs, which has no token ids, so that teacher.top_k is not available."""
    served_model: str | None = None
    """Model name on the server; null: the only model that it serves."""
    tokenizer_path: str | None = setting(None, path=True, hub="model")
    """Tokenizer of the server's model, a directory or a tokenizer.json file, which is compared with the policy's; null:
    the server's texts of some tokens are compared instead."""
    api_key_variable: str | None = None
    """Environment variable with the server's API key, in the process that starts the run; null: no key."""
    timeout_seconds: float = setting(120.0, above=0)
    """Timeout of one request to the server."""
    max_retries: int = setting(3, minimum=0, maximum=10)
    """Number of retries of a failed request to the server, after 1, 2, 4 ... seconds, at most 8. If it still fails, the
    run ends."""

    @property
    def entries(self) -> list[TeacherSourceConfig]:
        """All teachers: the one for all other rows first, if there is one, with the source `OTHERS`."""
        others = TeacherSourceConfig(
            OTHERS, self.hf_path, self.checkpoint, self.moving_average, self.url, self.served_model
        )
        choices = (self.hf_path, self.checkpoint, self.moving_average, self.url)
        named = any(value is not None for value in choices)
        return ([others] if named else []) + self.by_source

    @property
    def models(self) -> list[int]:
        """Number of the entry whose model each entry uses: averages of equal rate are one model, of the first."""
        rates = [entry.moving_average for entry in self.entries]
        return [number if rate is None else rates.index(rate) for number, rate in enumerate(rates)]
