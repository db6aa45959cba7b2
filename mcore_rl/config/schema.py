"""The configuration: one dataclass per section, defaults that run on a laptop, units in the names.

Imports nothing heavy, so a configuration can be read and checked on a machine without torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from omegaconf import MISSING

from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.models import ActorConfig, CriticConfig, ReferenceConfig, RewardModelConfig
from mcore_rl.config.reward import JudgeConfig, RewardConfig


@dataclass
class RunConfig:
    dir: str = MISSING
    """Where everything of this run goes; an existing run in it is resumed."""
    seed: int = 1

    @property
    def logs(self) -> str:
        """Directory of what the processes of the run and third parties write."""
        return os.path.join(self.dir, "logs")


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
    """jsonl, parquet or CSV file of prompts."""
    val: str | None = None
    prompt_key: str | None = None
    """Column of the prompt, a string or chat messages; null: `prompt`, else `question`, whichever a file has. Rows in
    verl's format (`prompt` beside `reward_model`) without the column named here are read as they are, and reported;
    other rows without it are refused, as is a name that no file has."""
    answer_key: str | None = None
    """Column of the ground truth and, for supervised warm start, of the target text; null: `reward_model.ground_truth`,
    else `answer`, else `ground_truth` (of targets: `answer`). Rows in verl's format without the column named here keep
    their `reward_model.ground_truth`."""
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
    """Directory that receives the final weights as an HF checkpoint; of a LoRA run merged."""
    export_adapter: str | None = None
    """Directory that receives the final adapters of a LoRA run in PEFT's format."""


@dataclass
class CheckpointConfig:
    every_steps: int = 10
    """0: only at the end of the run, and when it is stopped."""
    keep_last: int = 2
    keep_best: int = 1
    """Of the checkpoints whose step was validated, those with the highest val/accuracy are kept beside the last."""
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
    """After which a process gives up waiting: a trainer rank for its peers, an engine for one of its ranks."""
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
    """Variables of every task; they stand in the script and in config.yaml: secrets belong into pass_environment."""
    pass_environment: list[str] = field(default_factory=list)
    """Names of variables that every task, in containers too, gets from the environment in which sbatch is called. Their
    values are written nowhere."""
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
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
