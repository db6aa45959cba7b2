"""The configuration: one dataclass per section, defaults that run on a laptop, units in the names.

Imports nothing heavy, so a configuration can be read and checked on a machine without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from mcore_rl.config.algorithm import AlgorithmConfig


@dataclass
class RunConfig:
    dir: str = MISSING
    """Where everything of this run goes; an existing run in it is resumed."""
    seed: int = 1


@dataclass
class ModelConfig:
    hf_path: str = MISSING
    """HF directory with config.json and safetensors; also where the tokenizer is, unless tokenizer_path is set."""
    tokenizer_path: str | None = None
    """Directory or tokenizer.json file."""
    dtype: str = "float32"
    """Of the parameters: float32 or bfloat16 (then with float32 main parameters in the optimizer)."""
    random_init: bool = False
    """Initialise from config.json alone, with run.seed, ignoring weights (for tests and throughput runs)."""


@dataclass
class DataConfig:
    train: str = MISSING
    """jsonl or parquet file of prompts."""
    val: str | None = None
    prompt_key: str = "prompt"
    """Column of the prompt: a string or chat messages. Falls back to `question` where the column is absent."""
    answer_key: str = "answer"
    """Column of the ground truth (plain rows) and, for supervised warm start, of the target text."""
    template: str = "auto"
    """auto | chat | plain. auto: chat when the tokenizer has a chat template, else plain."""
    plain_template: str = "{prompt}"
    """Text around a plain prompt; {prompt} is replaced."""
    val_max_prompts: int | None = None
    long_prompts: str = "drop"
    """drop | truncate_left | truncate_right: what happens to prompts longer than rollout.max_prompt_tokens. Truncation
    keeps the last (left) or the first (right) tokens of the rendered prompt, chat template included."""
    shuffle: bool = True


@dataclass
class RolloutConfig:
    engine: str = "vllm"
    """vllm | sglang."""
    num_engines: int = 1
    tp: int = 1
    """Tensor-parallel ranks of one engine."""
    samples_per_prompt: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_prompt_tokens: int = 512
    max_response_tokens: int = 512
    validation_temperature: float = 0.0
    validation_top_p: float = 1.0
    validation_samples: int = 1
    """Responses per validation prompt; accuracy is their mean. Temperature 0 is greedy."""
    max_batched_tokens: int | None = None
    """Tokens that an engine computes in one pass, prompts in pieces where they exceed it (chunked prefill); null: the
    engine's default."""
    expert_parallel: bool = False
    """The engine's tensor-parallel ranks hold whole experts instead of slices of all (CUDA only)."""
    max_concurrent_requests: int = 256
    """Sequences that one engine decodes together."""
    kv_cache_gib: float = 0.25
    """Memory of one engine rank's KV cache (CPU; on GPUs gpu_memory_fraction decides)."""
    gpu_memory_fraction: float = 0.6
    enforce_eager: bool = True


@dataclass
class OverlongConfig:
    """DAPO's soft overlong punishment: 0 up to max_response_tokens - buffer_tokens, then linearly to -penalty."""

    enable: bool = False
    buffer_tokens: int = 128
    penalty: float = 1.0


@dataclass
class RewardConfig:
    function: str = "math"
    """math, or `module_or_file.py:function` with verl's signature."""
    kwargs: dict[str, str] = field(default_factory=dict)
    """Extra keyword arguments of a user's function."""
    correct: float = 1.0
    incorrect: float = 0.0
    """Rewards of the built-in grader (DAPO's paper: 1 and -1)."""
    timeout_seconds: float = 10.0
    workers: int = 1
    """Grading processes beside each engine."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)


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


@dataclass
class ReferenceConfig:
    """The frozen policy that algorithm.kl compares with, on the ranks and in the layout of the actor."""

    hf_path: str | None = None
    """HF directory of another model of the same architecture; null: the weights that the policy starts with."""
    offload: bool = True
    """Its weights lie in host memory but for its own pass."""
    refresh_every_steps: int = 0
    """It becomes the policy of then after every so many steps; 0: never."""


@dataclass
class WeightsConfig:
    bucket_mib: float = 256.0
    num_buckets: int = 2
    """Slots of the ring; when the whole model fits in them, nothing is staged twice."""
    verify_every: int = 0
    """Compare every tensor of every engine with the trainer's at each N-th sync; 0: never."""


@dataclass
class TrainerConfig:
    steps: int = 100
    prompts_per_step: int = 32
    prompts_per_update: int = 32
    """Prompts (groups) per optimizer update; prompts_per_step / prompts_per_update updates follow one rollout."""
    update_epochs: int = 1
    critic_warmup_steps: int = 0
    """The first steps train the critic alone, if there is one."""
    validate_every_steps: int = 10
    """0: only before and after training."""
    validate_before: bool = True
    export_hf: str | None = None
    """Directory that receives the final weights as an HF checkpoint."""


@dataclass
class CheckpointConfig:
    every_steps: int = 0
    """0: only at the end of the run."""
    keep_last: int = 2
    async_save: bool = False
    """Files are written while training goes on; a checkpoint counts once it is complete."""


@dataclass
class ClusterConfig:
    nodes: int = 1
    gpus_per_node: int = 1
    """Trainer slots per node: GPUs, or on CPU processes."""
    gpu_memory_gib: float = 80.0
    host_memory_gib: float | None = None
    """Of one node, for what `plan` says of offloading; null: not checked."""
    placement: str = "colocated"
    """colocated | disaggregated."""
    device: str = "auto"
    """auto | cpu | cuda."""
    collective_timeout_seconds: int = 600
    object_store_gib: float = 0.5
    address: str | None = None
    """Ray cluster to join; null: start one on this machine."""


@dataclass
class SlurmConfig:
    """Of the job script that `mcore-rl slurm` renders."""

    job_name: str = "mcore-rl"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: str = "04:00:00"
    """Of one run of the job; a preempted job is queued again and resumes."""
    grace_seconds: int = 600
    """Before the time limit SLURM sends USR1: the run saves a checkpoint within this time and is queued again."""
    start_timeout_seconds: int = 600
    """Nodes that have not passed their check, or not joined the Ray cluster, within this time are excluded."""
    cpus_per_node: int | None = None
    """null: whole nodes, shared with no other job."""
    exclude: str | None = None
    container: str = "none"
    """none | pyxis | apptainer."""
    container_image: str | None = None
    container_mounts: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    """Shell commands on every node before Ray starts, such as activating an environment."""
    environment: dict[str, str] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    """Further #SBATCH options, such as --constraint=h100."""


@dataclass
class PlanConfig:
    """Assumptions of `mcore-rl plan` that no other key says."""

    peak_tflops: float | None = None
    """Of one GPU in the training dtype; null: no time estimate."""
    mfu_update: float = 0.3
    mfu_logp: float = 0.35
    mfu_prefill: float = 0.3
    memory_bandwidth_gib_per_second: float | None = None
    """Of one GPU; decides the time of decoding. null: no time estimate."""
    mean_response_fraction: float = 0.5
    """Mean response length, of rollout.max_response_tokens."""
    moe_imbalance: float = 1.5
    """Tokens of the most loaded expert-parallel rank over the mean."""


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
