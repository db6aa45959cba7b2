"""The configuration: one dataclass per section, defaults that run on a laptop, units in the names.

Imports nothing heavy, so a configuration can be read and checked on a machine without torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.episodes import EpisodeConfig
from mcore_rl.config.fields import setting
from mcore_rl.config.models import ActorConfig, CriticConfig, ReferenceConfig, RewardModelConfig
from mcore_rl.config.reward import JudgeConfig, RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.staleness import StalenessConfig

TOOL_FORMATS = ("hermes", "qwen3_coder", "deepseek", "kimi", "mistral", "llama3", "glm45")
"""In which tool calls can be read (rollout.tools.formats has them)."""


@dataclass
class RunConfig:
    dir: str = setting(MISSING, path=True)
    """Where everything of this run goes; an existing run in it is resumed."""
    seed: int = setting(1, minimum=0)
    """Of everything that is drawn: prompts, samples, initial weights."""

    @property
    def logs(self) -> str:
        """Directory of what the processes of the run and third parties write."""
        return os.path.join(self.dir, "logs")


@dataclass
class ModelConfig:
    hf_path: str = setting(MISSING, path=True)
    """HF directory with config.json and safetensors; also where the tokenizer is, unless tokenizer_path is set."""
    tokenizer_path: str | None = setting(None, path=True)
    """Directory or tokenizer.json file."""
    dtype: str = setting("auto", choices=("auto", "float32", "bfloat16"))
    """Of the parameters: float32 or bfloat16 (then with float32 main parameters in the optimizer); auto: bfloat16 on
    GPUs, float32 on CPU."""
    random_init: bool = False
    """Initialise from config.json alone, with run.seed, ignoring weights (for tests and throughput runs)."""
    check_logits: str = setting("auto", choices=("auto", "always", "never"))
    """Before training, log-probabilities of a few random tokens against transformers' model on the CPU: auto (up to 2
    billion parameters that fit in memory) | always | never."""


@dataclass
class DataConfig:
    train: list[str] = setting(MISSING, path=True)
    """Prompts: a jsonl, parquet or CSV file, a glob of such files, a directory of them or one that `datasets` saved; or
    a list of these."""
    val: list[str] | None = setting(None, path=True)
    """Prompts of validation, named as in data.train; null: no validation. `data.val={name: path}`: several sets."""
    val_sets: dict[str, list[str]] | None = setting(None, path=True)
    """Named sets of validation prompts, {name: path or list of paths}, each with its metric `val/accuracy/<name>`;
    `data.val={name: path}` sets it."""
    weights: dict[str, float] = setting({}, above=0, path=True)
    """How often rows are drawn, by what data.train names them with (a path or a glob): 2 is twice per epoch, 0.5 in
    every second one; 1 for files that are not named here."""
    prompt_key: str | None = None
    """Column of the prompt, a string or chat messages; null: `prompt`, else `question`, whichever a file has. Rows in
    verl's format (`prompt` beside `reward_model`) without the column named here are read as they are, and reported;
    other rows without it are refused, as is a name that no file has."""
    answer_key: str | None = None
    """Column of the ground truth and, for supervised warm start, of the target text; null: `reward_model.ground_truth`,
    else `answer`, else `ground_truth` (of targets: `answer`). Rows in verl's format without the column named here keep
    their `reward_model.ground_truth`."""
    template: str = setting("auto", choices=("auto", "chat", "plain"))
    """auto | chat | plain. auto: chat when the tokenizer has a chat template, else plain."""
    plain_template: str = "{prompt}"
    """Text around a plain prompt; {prompt} is replaced."""
    val_max_prompts: int | None = setting(None, minimum=1, unit="prompts")
    """The first so many of data.val; null: all."""
    long_prompts: str = setting("drop", choices=("drop", "truncate_left", "truncate_right"))
    """drop | truncate_left | truncate_right: what happens to prompts longer than rollout.max_prompt_tokens. Truncation
    keeps the last (left) or the first (right) tokens of the rendered prompt, chat template included."""
    shuffle: bool = True
    """Prompts in another order in every epoch; false: in that of the file."""
    curriculum: str | None = setting(None, function=True)
    """module_or_file.py:function that is called as f(epoch, prompts, seed) and returns the rows of an epoch, as a list
    of indices of prompts, in the order in which they are drawn; null: all, as data.shuffle says."""
    system_prompt: str | None = None
    """A system message for prompts that have none; null: none is added."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking: false`, for every prompt and turn that it renders. An
    argument that the template does not read is refused."""
    workers: int = setting(1, minimum=1, unit="processes")
    """That tokenise, for large files on hosts with cores to spare; what comes out is the same for any number."""
    cache_dir: str | None = setting(None, path=True)
    """Directory that keeps tokenised files for later starts; null: none."""

    @property
    def validation(self) -> dict[str, list[str]]:
        """Files of each set of validation prompts, by the key that names them; {} without validation."""
        if self.val_sets is not None:
            return {f"data.val.{name}": names for name, names in self.val_sets.items()}
        return {} if self.val is None else {"data.val": self.val}


@dataclass
class RolloutConfig(EpisodeConfig, StalenessConfig):
    engine: str = setting("vllm", choices=("vllm", "sglang"))
    """vllm | sglang."""
    num_engines: int = setting(1, minimum=1)
    """Copies of the policy that generate, each on rollout.tp ranks."""
    tp: int = setting(1, minimum=1)
    """Tensor-parallel ranks of one engine; more than cluster.gpus_per_node span whole nodes."""
    nodes: int = setting(0, minimum=0)
    """The last nodes of the cluster are the engines' alone (cluster.placement=disaggregated); 0: engines take the slots
    that the trainer ranks leave."""
    max_engine_restarts: int = setting(3, minimum=0)
    """How often, in a run, an engine that dies or hangs is started again; once more ends the run."""
    samples_per_prompt: int = setting(8, minimum=1)
    """Responses to a prompt; they form a group."""
    temperature: float = setting(1.0, minimum=0, maximum=2)
    """Temperature of sampling for training, from 0.01 to vLLM's limit of 2. 0 is refused: greedy sampling has no
    distribution that could be trained."""
    top_p: float = setting(1.0, above=0, maximum=1)
    """Must be 1 for training (all tokens): the trainer computes the full softmax. rollout.validation_top_p may be
    less."""
    top_k: int = setting(-1, minimum=-1, unit="tokens")
    """Must be -1 for training (all tokens): the trainer computes the full softmax. rollout.validation_top_k may be
    another number."""
    max_prompt_tokens: int = setting(512, minimum=1)
    """Longer prompts are dropped, or cut, as data.long_prompts says."""
    max_response_tokens: int = setting(512, minimum=1)
    """Where a response ends at the latest."""
    stop: list[str] = setting([], one_or_more=True)
    """Texts that end a response, in training and validation. The token that completes one is the response's last
    token and is trained; graders see the text before it. Special tokens count as the text that the tokenizer shows."""
    validation_temperature: float = setting(0.0, minimum=0, maximum=2)
    """Of validation; 0 is greedy."""
    validation_top_p: float = setting(1.0, above=0, maximum=1)
    """Validation samples from the likeliest tokens that have this probability together; 1: from all."""
    validation_top_k: int = setting(-1, minimum=-1, unit="tokens")
    """Validation samples from so many of the likeliest tokens; -1: from all."""
    validation_samples: int = setting(1, minimum=1)
    """Responses per validation prompt; accuracy is their mean. Temperature 0 is greedy."""
    max_batched_tokens: int | None = setting(None, minimum=1)
    """Tokens that an engine computes in one pass, prompts in pieces where they exceed it (chunked prefill); null: the
    engine's default."""
    expert_parallel: bool = False
    """The engine's tensor-parallel ranks hold whole experts instead of slices of all."""
    max_concurrent_requests: int = setting(256, minimum=1)
    """Sequences that one engine decodes together."""
    kv_cache_gib: float = setting(0.25, above=0)
    """Memory of one engine rank's KV cache (CPU; on GPUs gpu_memory_fraction decides)."""
    max_logp_gap: int | float | str | None = setting("auto", above=0, choices=("auto",), unit="nats")
    """Mean absolute difference between the engine's and the trainer's log-probabilities of a few responses, above which
    a run stops before its first step. auto: 1e-3 with model.dtype=float32, 0.05 with bfloat16, 0.2 with actor.fp8;
    null: no comparison."""
    gpu_memory_fraction: float = setting(0.6, above=0, maximum=1)
    """Share of a GPU's memory that an engine rank takes for weights, workspace and KV cache."""
    enforce_eager: bool = False
    """The engine runs without CUDA graphs and compilation, as it does on CPU: it starts sooner and decodes slower."""
    tools: str | None = setting(None, path=True, function=True)
    """What models may call: a YAML file of tools, in verl's form or with functions; `module_or_file.py:name` of a
    function, a class or a list of them; or a file.py with verl's @function_tool; null: nothing."""
    tool_parser: str = setting("auto", choices=("auto", *TOOL_FORMATS), function=True)
    """How a model writes calls: as its chat template does (auto), or in the format named here."""
    tool_processes: int = setting(1, minimum=1, unit="processes")
    """Beside each engine, in which tools run; an episode stays in one of them."""
    max_tool_seconds: float = setting(30.0, above=0)
    """Of one call, unless the file of tools says another limit."""
    max_tool_calls_per_turn: int = setting(8, minimum=1, unit="calls")
    """Of one message; they run at once."""
    tool_answer_characters: int = setting(8192, minimum=16, unit="characters")
    """Of a tool's answer, which a model sees; longer ones are cut."""
    tool_answer_keep: str = setting("start", choices=("start", "end", "both"))
    """What is kept of an answer that is cut: its start, its end, or half of the characters of both."""


@dataclass
class WeightsConfig:
    bucket_mib: float = setting(256.0, above=0)
    """Of weights that travel to the engines in one piece."""
    num_buckets: int = setting(2, minimum=1)
    """Slots of a window: a bucket is written while engines take from those before it."""
    transport: str = setting("auto", choices=("auto", "shared_memory", "cuda_ipc", "network", "vllm_rdt"))
    """How weights reach an engine rank. auto: through a GPU's memory that it shares with a trainer rank, else through
    the host's, else by the network; the next three insist on one of these. vllm_rdt: by vLLM's own sharded_rdt."""
    verify_every: int = setting(0, minimum=0, unit="syncs")
    """Compare every tensor of every engine with the trainer's at each N-th sync; 0: never."""


@dataclass
class TrainerConfig:
    steps: int = setting(100, minimum=1)
    """Of the whole run: each generates responses and trains on them."""
    prompts_per_step: int = setting(32, minimum=1, unit="prompts")
    """Prompts (groups) that a step trains on."""
    prompts_per_update: int = setting(32, minimum=1, unit="prompts")
    """Prompts (groups) per optimizer update; prompts_per_step / prompts_per_update updates follow one rollout."""
    update_epochs: int = setting(1, minimum=1)
    """How often the updates of a step go through its responses."""
    critic_warmup_steps: int = setting(0, minimum=0)
    """The first steps train the critic alone, if there is one."""
    validate_every_steps: int = setting(10, minimum=0)
    """0: only before and after training."""
    validate_before: bool = True
    """Validation before the first step, as step 0 of the metrics."""
    export_hf: str | None = setting(None, path=True)
    """Directory that receives the final weights as an HF checkpoint; of a LoRA run merged."""
    export_adapter: str | None = setting(None, path=True)
    """Directory that receives the final adapters of a LoRA run in PEFT's format."""


@dataclass
class CheckpointConfig:
    every_steps: int = setting(10, minimum=0)
    """0: only at the end of the run, and when it is stopped."""
    keep_last: int = setting(2, minimum=1, unit="checkpoints")
    """Older ones are removed."""
    keep_best: int = setting(1, minimum=0, unit="checkpoints")
    """Of the checkpoints whose step was validated, those with the highest val/accuracy are kept beside the last."""
    drain: bool = False
    """With rollout.max_staleness, responses in progress end before a checkpoint is saved; false: it holds what there is
    of them, and they go on from there."""
    async_save: bool = False
    """Files are written while training goes on; a checkpoint counts once it is complete."""


@dataclass
class ClusterConfig:
    nodes: int = setting(1, minimum=1)
    """Hosts of the run, each with gpus_per_node slots."""
    gpus_per_node: int = setting(1, minimum=1)
    """Trainer slots per node: GPUs, or on CPU processes."""
    gpu_memory_gib: float = setting(80.0, above=0)
    """Of one GPU, for what `plan` says."""
    host_memory_gib: float | None = setting(None, above=0)
    """Of one node, for what `plan` says of offloading; null: not checked."""
    placement: str = setting("colocated", choices=("colocated", "disaggregated"))
    """colocated | disaggregated."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda"))
    """auto | cpu | cuda."""
    collective_timeout_seconds: int = setting(600, minimum=1)
    """After which a process gives up waiting: a trainer rank for its peers, an engine for one of its ranks."""
    start_timeout_seconds: int = setting(1800, minimum=1)
    """Within which engines, and models beside the trainer ranks, have to be ready."""
    object_store_gib: float = setting(0.5, above=0)
    """Shared memory of a node in which Ray keeps trajectories."""
    address: str | None = None
    """Ray cluster to join; null: start one on this machine."""
    isolation: str = setting("auto", choices=("auto", "namespace", "none"))
    """Protection of the run's ports from other users of its host: auto (a private network namespace if other users are
    logged in) | namespace (always) | none. Processes in the namespace cannot reach other machines. A run that joins a
    Ray cluster is rejected unless none is set, if other users are logged in on its hosts."""


@dataclass
class SlurmConfig:
    """Of the job script that `mcore-rl slurm` renders."""

    job_name: str = "mcore-rl"
    """Also of its log, NAME.JOB.log."""
    partition: str | None = None
    """null: the cluster's default."""
    account: str | None = None
    """null: the user's default."""
    qos: str | None = None
    """null: the user's default."""
    time_limit: str = "04:00:00"
    """Of one run of the job; a preempted job is queued again and resumes."""
    grace_seconds: int = setting(600, minimum=0)
    """Before the time limit SLURM sends USR1: the run saves a checkpoint within this time and is queued again."""
    start_timeout_seconds: int = setting(600, minimum=1)
    """Nodes that have not passed their check or test, or not joined the Ray cluster, within this time are excluded."""
    fabric_test: bool = False
    """Before Ray starts, every device, node and link between nodes is measured, as by `mcore-rl doctor --node`."""
    fabric_slow_percent: int = setting(80, minimum=0, maximum=100)
    """A node that reaches less than this share of the others' median is excluded; 0: only one that fails."""
    cpus_per_node: int | None = setting(None, minimum=1)
    """null: whole nodes, shared with no other job."""
    exclude: str | None = None
    """Nodes that the job never uses, such as n[3-4]."""
    container: str = setting("none", choices=("none", "pyxis", "apptainer"))
    """none | pyxis | apptainer."""
    container_image: str | None = None
    """What pyxis or apptainer runs a task in."""
    container_mounts: list[str] = field(default_factory=list)
    """Such as /data:/data, beside the working and the run directory."""
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

    peak_tflops: float | None = setting(None, above=0)
    """Of one GPU in the training dtype; null: no time estimate."""
    mfu_update: float = setting(0.3, above=0, maximum=1)
    """Share of peak_tflops that updates reach."""
    mfu_logp: float = setting(0.35, above=0, maximum=1)
    """Share of it that passes without gradients reach."""
    mfu_prefill: float = setting(0.3, above=0, maximum=1)
    """Share of it that engines reach on prompts."""
    memory_bandwidth_gib_per_second: float | None = setting(None, above=0)
    """Of one GPU; decides the time of decoding. null: no time estimate."""
    network_gib_per_second: float | None = setting(None, above=0)
    """Of one GPU's way to other hosts, in one direction; decides the time of a weight sync. null: no time estimate."""
    mean_response_fraction: float = setting(0.5, above=0, maximum=1)
    """Mean response length, of rollout.max_response_tokens."""
    moe_imbalance: float = setting(1.5, minimum=1)
    """Tokens of the most loaded expert-parallel rank over the mean."""


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
