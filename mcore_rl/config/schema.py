"""Configuration schema: one dataclass per section. Names contain units, and the defaults run on a laptop.

Imports neither torch nor other large packages, so that a configuration can be read and checked on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.episodes import EpisodeConfig
from mcore_rl.config.fields import setting
from mcore_rl.config.models import (
    ActorConfig,
    CriticConfig,
    ModelConfig,
    ReferenceConfig,
    RewardModelConfig,
    TeacherConfig,
)
from mcore_rl.config.objectives import ObjectiveConfig, PreferenceConfig
from mcore_rl.config.observe import ObserveConfig
from mcore_rl.config.quantization import GROUPS, QUANTIZATIONS, UNQUANTIZED
from mcore_rl.config.reward import JudgeConfig, RewardConfig
from mcore_rl.config.sampling import SamplingConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.staleness import StalenessConfig

TOOL_FORMATS = ("hermes", "qwen3_coder", "deepseek", "kimi", "mistral", "harmony", "llama3", "glm45")
"""Formats of tool calls that can be parsed (implemented in rollout.tools.formats)."""


@dataclass
class RunConfig:
    """Directory and seed of the run."""

    dir: str = setting("runs/{name}-{date}-{time}", path=True)
    """Directory for all files of the run. If it holds a run, that run is resumed. {name} stands for the names of the
    configuration files, {date} and {time} for the time of the start, so that each start has a new directory."""
    seed: int = setting(1, minimum=0)
    """Seed of everything random: prompt order, sampling, initial weights."""


def resolved_dtype(dtype: str, *, cuda: bool) -> str:
    """Resolve model.dtype=auto: bfloat16 on GPUs, whose attention kernels need it; float32 on CPU, where it is
    fastest."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if cuda else "float32"


@dataclass
class DataConfig:
    """Prompts for training and validation."""

    train: list[str] = setting(MISSING, path=True, hub="dataset", urls=True)
    """Training prompts: a jsonl, parquet or CSV file, a glob of such files, a directory of them or one saved by
    `datasets`, a data set on the hub (owner/name, hf://datasets/owner/name/path), or a URL such as s3://bucket/*.jsonl;
    or a list of these."""
    val: list[str] | None = setting(None, path=True, hub="dataset", urls=True)
    """Validation prompts, in the forms of data.train; null: no validation. `data.val={name: path}` defines several
    sets."""
    val_sets: dict[str, list[str]] | None = setting(None, path=True, hub="dataset", urls=True)
    """Named sets of validation prompts, {name: path or list of paths}; each set has the metric `val/accuracy/<name>`.
    Set by `data.val={name: path}`."""
    weights: dict[str, float] = setting({}, above=0, path=True, hub="dataset", urls=True)
    """Sampling weight of files, by their entry in data.train (a path or glob): 2 samples each row twice per epoch, 0.5
    in every second epoch. Files without an entry have weight 1."""
    prompt_key: str | None = None
    """Column with the prompt, a string or chat messages; null: `prompt`, else `question`. Rows in verl's format
    (with the columns `prompt` and `reward_model`) that lack this column are read in that format, with a notice. Other
    rows without it are rejected, and so is a column that no file has."""
    answer_key: str | None = None
    """Column with the ground truth and, for supervised warm start, the target text; null: `reward_model.ground_truth`,
    else `answer`, else `ground_truth` (target text: `answer`). Rows in verl's format that lack this column use their
    `reward_model.ground_truth`."""
    image_key: str = "images"
    """Column with the images of a prompt, for models with a vision tower: paths, bytes, or objects with either."""
    hint_key: str | None = None
    """Column with a training row's hint, after which teachers score the responses: a text, or chat messages instead of
    the prompt. `extra_info.solution` is a field of a column. null: teachers read the policy's prompts."""
    hint_template: str = "{prompt}\n\n{hint}"
    """Last user message of a prompt with a hint in text form; {prompt} is replaced by the message of the row."""
    max_hinted_tokens: int | None = setting(None, minimum=1, unit="tokens")
    """Maximum length of a prompt with its hint; longer rows are dropped. null: rollout.max_prompt_tokens."""
    template: str = setting("auto", choices=("auto", "chat", "plain"))
    """Rendering of prompts. auto: chat if the tokenizer has a chat template, else plain."""
    plain_template: str = "{prompt}"
    """Text around a plain prompt; {prompt} is replaced by the prompt."""
    val_max_prompts: int | None = setting(None, minimum=1, unit="prompts")
    """Number of prompts to use from the beginning of data.val; null: all."""
    long_prompts: str = setting("drop", choices=("drop", "truncate_left", "truncate_right"))
    """Treatment of prompts longer than rollout.max_prompt_tokens: drop them, or keep the last (truncate_left) or first
    (truncate_right) tokens of the rendered prompt, including the chat template."""
    shuffle: bool = True
    """Shuffle the prompts in each epoch; false: keep the order of the file."""
    curriculum: str | None = setting(None, function=True)
    """`module_or_file.py:function`, called as f(epoch, prompts, seed). It returns the rows of the epoch as a list of
    prompt indices, in sampling order. null: all rows, ordered by data.shuffle."""
    system_prompt: str | None = None
    """System message added to prompts that have none; null: none is added."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking: false`, for every rendered prompt and turn. An argument
    that the template does not use is rejected."""
    workers: int = setting(1, minimum=1, unit="processes")
    """Number of processes that tokenize large files; the result does not depend on it."""
    cache_dir: str | None = setting(None, path=True)
    """Directory that caches tokenized files, and files of URLs, for later starts; null: no cache."""

    @property
    def validation(self) -> dict[str, list[str]]:
        """Files of each validation set, by the key that names them; {} without validation."""
        if self.val_sets is not None:
            return {f"data.val.{name}": names for name, names in self.val_sets.items()}
        return {} if self.val is None else {"data.val": self.val}


@dataclass
class RolloutConfig(SamplingConfig, EpisodeConfig, StalenessConfig):
    """Generation of responses: engines, sampling, episodes and asynchronous training."""

    engine: str = setting("vllm", choices=("vllm", "sglang"))
    """Inference engine that generates responses."""
    num_engines: int = setting(1, minimum=1)
    """Number of inference engines, each with a copy of the policy on rollout.tp ranks."""
    tp: int = setting(1, minimum=1)
    """Tensor-parallel ranks per engine. If larger than cluster.gpus_per_node, an engine spans whole nodes."""
    nodes: int = setting(0, minimum=0)
    """Number of nodes, counted from the end, that only engines use (cluster.placement=disaggregated); 0: engines use
    the slots that trainer ranks leave free."""
    max_engine_restarts: int = setting(3, minimum=0)
    """Number of times in a run that a dead or hanging engine is restarted; the next failure ends the run."""
    samples_per_prompt: int = setting(8, minimum=1)
    """Number of responses to each prompt; they form a group."""
    max_prompt_tokens: int = setting(512, minimum=1)
    """Maximum length of a prompt. Longer prompts are dropped or truncated, see data.long_prompts."""
    max_response_tokens: int = setting(512, minimum=1)
    """Maximum length of a response."""
    max_batched_tokens: int | None = setting(None, minimum=1)
    """Maximum number of tokens per engine step; longer prompts are processed in chunks (chunked prefill). null: the
    engine's default."""
    expert_parallel: bool = False
    """Place whole experts on the engine's tensor-parallel ranks, instead of a slice of every expert."""
    data_parallel_attention: bool = False
    """Give each of the rollout.tp ranks of an SGLang engine its own requests, with their KV cache and the whole
    attention weights. Only the experts are divided (rollout.expert_parallel); on GPUs DeepEP delivers their tokens."""
    max_concurrent_requests: int = setting(256, minimum=1)
    """Maximum number of sequences that one engine decodes at a time."""
    kv_cache_gib: float = setting(0.25, above=0)
    """Size of the KV cache per engine rank on CPU; on GPUs, gpu_memory_fraction applies."""
    max_logp_gap: int | float | str | None = setting("auto", above=0, choices=("auto",), unit="nats")
    """Limit of the mean absolute difference between the log-probabilities of engine and trainer for a few responses.
    The run stops before its first step if it is exceeded. auto: 1e-3 with model.dtype=float32, 0.01 with float16, 0.05
    with bfloat16, 0.2 with actor.fp8 or rollout.quantization=fp8, 0.5 with int4 unless actor.quantization_aware is set;
    null: no comparison."""
    gpu_memory_fraction: float = setting(0.6, above=0, maximum=1)
    """Fraction of a GPU's memory that an engine rank uses for weights, workspace and KV cache. With SGLang, workspace
    and CUDA graphs take memory in addition."""
    enforce_eager: bool = False
    """Run the engine without CUDA graphs and compilation, which are never used on CPU: it starts faster and decodes
    more slowly."""
    quantization: str = setting(UNQUANTIZED, choices=QUANTIZATIONS)
    """Format of the policy's matrices in the engines. fp8: 8-bit codes with a scale per block of 128 x 128, which
    halves the engine's weights and the bytes of a weight sync. int4: 4-bit codes of the experts' matrices. Both need
    rollout.engine=vllm and model.dtype=bfloat16."""
    quantization_group: int = setting(GROUPS[-1], minimum=GROUPS[0], maximum=GROUPS[-1], unit="elements")
    """Elements of a row of an expert's matrix that share a scale with rollout.quantization=int4: 32 or 128. 32 rounds
    less, and needs 4.5 instead of 4.125 bits per weight."""
    overlap_schedule: bool = False
    """Let SGLang prepare a batch while the one before runs. It samples the same tokens. false: a batch starts when the
    results of the one before are processed; this costs fewer CPU seconds per token."""
    tools: str | None = setting(None, path=True, function=True)
    """Tools that the model may call: a YAML file of tools, in verl's format or with functions; `module_or_file.py:name`
    of a function, a class or a list of them; or a file.py with verl's @function_tool. null: no tools."""
    tool_parser: str = setting("auto", choices=("auto", *TOOL_FORMATS), function=True)
    """Format in which the model writes tool calls; auto: detected from the chat template."""
    tool_processes: int = setting(1, minimum=1, unit="processes")
    """Number of tool processes per engine. All calls of an episode run in the same process."""
    max_tool_seconds: float = setting(30.0, above=0)
    """Time limit of a tool call, unless the tool file sets another one."""
    max_tool_calls_per_turn: int = setting(8, minimum=1, unit="calls")
    """Maximum number of tool calls in a message; they run concurrently."""
    tool_answer_characters: int = setting(8192, minimum=16, unit="characters")
    """Maximum length of a tool's result in the conversation; longer results are truncated."""
    tool_answer_keep: str = setting("start", choices=("start", "end", "both"))
    """Part of a truncated tool result that is kept: start, end, or both with half of the characters each."""


@dataclass
class WeightsConfig:
    """Transfer of weights from trainer ranks to engines."""

    bucket_mib: float = setting(256.0, above=0)
    """Size of a bucket, the unit in which weights are sent to engines."""
    num_buckets: int = setting(2, minimum=1)
    """Number of buckets in a staging buffer: trainer ranks fill one while engines read the previous ones."""
    transport: str = setting("auto", choices=("auto", "shared_memory", "cuda_ipc", "network", "files"))
    """Transport of weights to an engine rank. auto: cuda_ipc if it shares a GPU with a trainer rank, network if both
    have GPUs, shared_memory if it shares a host, else network. The other values require one transport. files: through
    files in weights.directory, for engines that trainer ranks reach only over a slow network."""
    directory: str | None = setting(None, path=True, urls=True)
    """Directory that all hosts share, or URL such as s3://bucket/weights, for the files of weights.transport=files. A
    run keeps up to two versions of the weights there and removes them at its end."""
    delta: bool = False
    """Send only the weights that changed since the last sync, between hosts and through files. Trainer ranks and
    receivers keep a copy of these weights in host memory. Other transports within a host send whole weights."""
    verify_every: int = setting(0, minimum=0, unit="syncs")
    """Compare every tensor of every engine with the trainer's at each N-th weight sync; 0: never."""


@dataclass
class TrainerConfig(ObjectiveConfig):
    """Objective, steps, batch sizes, validation and exports."""

    steps: int = setting(100, minimum=1)
    """Total number of training steps; each generates responses and trains on them."""
    prompts_per_step: int = setting(32, minimum=1, unit="prompts")
    """Prompts (groups) per training step."""
    prompts_per_update: int = setting(32, minimum=1, unit="prompts")
    """Prompts (groups) per optimizer update. A step has prompts_per_step / prompts_per_update updates."""
    update_epochs: int = setting(1, minimum=1)
    """Number of passes over a step's responses; each repeats the updates."""
    critic_warmup_steps: int = setting(0, minimum=0)
    """Number of steps at the beginning that train only the critic, if there is one."""
    validate_every_steps: int = setting(10, minimum=0)
    """Interval between validations; 0: only before and after training."""
    validate_before: bool = True
    """Validate before the first step; reported as step 0 of the metrics."""
    export_hf: str | None = setting(None, path=True, urls=True)
    """Directory for the final weights as a Hugging Face checkpoint, or a URL such as s3://bucket/name to upload it to;
    LoRA adapters are merged. null: no export."""
    export_adapter: str | None = setting(None, path=True, urls=True)
    """Directory, or URL, for the final adapters of a LoRA run in PEFT's format; null: no export."""


@dataclass
class CheckpointConfig:
    """Interval, number and saving of checkpoints."""

    every_steps: int = setting(10, minimum=0)
    """Interval between checkpoints; 0: only at the end of the run and when it is stopped."""
    keep_last: int = setting(2, minimum=1, unit="checkpoints")
    """Number of newest checkpoints to keep; older ones are removed."""
    keep_best: int = setting(1, minimum=0, unit="checkpoints")
    """Number of checkpoints with the highest val/accuracy to keep in addition; only checkpoints of steps with a
    validation count."""
    drain: bool = False
    """Finish running responses before saving a checkpoint (with rollout.max_staleness). false: the checkpoint contains
    the partial responses, which a resumed run continues."""
    async_save: bool = False
    """Write checkpoint files while training continues. A checkpoint is valid once it is complete."""
    copy_to: str | None = setting(None, path=True, urls=True)
    """Directory or URL, such as s3://bucket/run, to which a process copies each checkpoint while training continues. A
    start without a checkpoint in run.dir resumes from the newest copy."""


@dataclass
class ClusterConfig:
    """Hosts, devices, placement and timeouts."""

    nodes: int = setting(1, minimum=1)
    """Number of hosts, each with gpus_per_node slots."""
    gpus_per_node: int = setting(1, minimum=1)
    """Slots per node: GPUs, or processes on CPU."""
    gpu_memory_gib: float = setting(80.0, above=0)
    """Memory of one GPU; used by `mcore-rl plan` only."""
    host_memory_gib: float | None = setting(None, above=0)
    """Memory of one node; used by `mcore-rl plan` to check offloading. null: not checked."""
    placement: str = setting("colocated", choices=("colocated", "disaggregated"))
    """colocated: engines share devices with trainer ranks and alternate with them; disaggregated: engines have their
    own."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda"))
    """Device of trainer ranks and engines; auto: GPUs if available."""
    collective_timeout_seconds: int = setting(600, minimum=1)
    """Timeout of collectives and engine calls; the run ends when it expires."""
    start_timeout_seconds: int = setting(1800, minimum=1)
    """Timeout for the start of engines, critic, reward model and judge."""
    object_store_gib: float = setting(0.5, above=0)
    """Shared memory per node for Ray's object store, which holds trajectories."""
    address: str | None = None
    """Address of the Ray cluster to join; null: start one on this machine."""
    isolation: str = setting("auto", choices=("auto", "namespace", "none"))
    """Protection of the run's ports from other users of the host. auto: a private network namespace if other users are
    logged in; namespace: always; none: never. Processes in the namespace cannot reach other machines. A run that joins
    a Ray cluster is rejected unless this is none, if other users are logged in on its hosts."""

    @property
    def uses_cuda(self) -> bool:
        """True if ranks and engines run on GPUs."""
        if self.device != "auto":
            return self.device == "cuda"
        # Imported only if needed: the configuration must be readable without torch.
        import torch

        return torch.cuda.is_available()


@dataclass
class SlurmConfig:
    """Options of the job script that `mcore-rl slurm` prints."""

    job_name: str = "mcore-rl"
    """Name of the job and of its log, NAME.JOB.log."""
    partition: str | None = None
    """Partition of the job; null: the cluster's default."""
    account: str | None = None
    """Account of the job; null: the user's default."""
    qos: str | None = None
    """Quality of service of the job; null: the user's default."""
    time_limit: str = "04:00:00"
    """Time limit of one execution of the job. A preempted job is queued again and resumes."""
    grace_seconds: int = setting(600, minimum=0)
    """Time before the limit at which SLURM sends USR1; within it, the run saves a checkpoint and is queued again."""
    start_timeout_seconds: int = setting(600, minimum=1)
    """Timeout for the start of nodes: a node that has not passed its checks or joined the Ray cluster is excluded."""
    fabric_test: bool = False
    """Measure every device, node and link between nodes before Ray starts, as `mcore-rl doctor --node` does."""
    fabric_slow_percent: int = setting(80, minimum=0, maximum=100)
    """Threshold for excluding a slow node, in percent of the median of the other nodes; 0: only nodes that fail."""
    cpus_per_node: int | None = setting(None, minimum=1)
    """CPUs to request per node; null: whole nodes, not shared with other jobs."""
    exclude: str | None = None
    """Nodes that the job never uses, such as n[3-4]."""
    container: str = setting("none", choices=("none", "pyxis", "apptainer"))
    """Container runtime of the tasks."""
    container_image: str | None = None
    """Image for pyxis or apptainer."""
    container_mounts: list[str] = field(default_factory=list)
    """Mounts such as /data:/data, in addition to the working directory and the run directory."""
    setup: list[str] = field(default_factory=list)
    """Shell commands to run on every node before Ray starts, such as activating an environment."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every task. They are written to the script and config.yaml: use pass_environment for
    secrets."""
    pass_environment: list[str] = field(default_factory=list)
    """Names of variables that all tasks inherit from the environment of sbatch; their values are written to no file."""
    extra: list[str] = field(default_factory=list)
    """Additional #SBATCH options, such as --constraint=h100."""


@dataclass
class PlanConfig:
    """Assumptions of `mcore-rl plan` about hardware and workload."""

    peak_tflops: float | None = setting(None, above=0)
    """Peak throughput of one GPU in the training dtype; null: no time estimate."""
    mfu_update: float = setting(0.3, above=0, maximum=1)
    """Fraction of peak_tflops that training updates reach."""
    mfu_logp: float = setting(0.35, above=0, maximum=1)
    """Fraction of peak_tflops that forward-only passes reach."""
    mfu_prefill: float = setting(0.3, above=0, maximum=1)
    """Fraction of peak_tflops that engines reach on prompts."""
    memory_bandwidth_gib_per_second: float | None = setting(None, above=0)
    """Memory bandwidth of one GPU; determines the decoding time. null: no time estimate."""
    network_gib_per_second: float | None = setting(None, above=0)
    """Network bandwidth per GPU to other hosts, in one direction, for the time of a weight sync. null: no estimate."""
    mean_response_fraction: float = setting(0.5, above=0, maximum=1)
    """Mean response length as a fraction of rollout.max_response_tokens."""
    moe_imbalance: float = setting(1.5, minimum=1)
    """Tokens of the most loaded expert-parallel rank divided by the mean."""


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    @property
    def num_trainer_ranks(self) -> int:
        """Number of trainer ranks: actor.num_ranks, or all slots of the nodes that are not reserved for engines."""
        free_nodes = self.cluster.nodes - self.rollout.nodes
        return self.actor.num_ranks or free_nodes * self.cluster.gpus_per_node
