"""Section `teacher`: models from which the policy learns."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from mcore_rl.config.fields import setting
from mcore_rl.config.models.actor import DISPATCHERS, STRATEGIES
from mcore_rl.config.models.layout import ParallelConfig
from mcore_rl.config.quantization import FP8_RECIPES

CHECKPOINT_FILES = "config_and_tokenizer"
"""Folder of a Megatron checkpoint with its config.json and tokenizer."""
OTHERS = ""
"""Source of the teacher of all rows that no entry of teacher.by_source names."""


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
class TeacherMoeConfig:
    """Mixture-of-experts layers of teachers on ranks of their own."""

    dispatcher: str = setting("auto", choices=DISPATCHERS)
    """Token dispatcher; auto: deepep if it is installed and ep spans nodes, else alltoall."""


@dataclass
class TeacherConfig:
    """Model from which the policy learns (distillation): it computes the probabilities of the policy's own
    responses, on the actor's ranks in the actor's layout, on ranks of its own, on engines, or on a server."""

    hf_path: str | None = setting(None, path=True, hub="model")
    """Hugging Face directory of the teacher, with the policy's tokenizer. Its family and sizes may differ from the
    policy's; null: the teacher of teacher.checkpoint or teacher.url, or no teacher."""
    checkpoint: str | None = setting(None, path=True)
    """Megatron checkpoint of the teacher instead of hf_path, such as RUN_DIR/checkpoints/step_100 of a run without
    adapters, saved in any layout. The teacher then runs on Megatron ranks: the actor's, or its own (num_ranks)."""
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
    num_ranks: int = setting(0, minimum=0)
    """Number of Megatron ranks of its own, for each teacher, in the layout of teacher.parallel. They share the GPUs of
    the first trainer ranks; 0: the teacher runs on the actor's ranks in the actor's layout, unless num_engines or url
    is set."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tokens_per_microbatch: int = setting(4096, minimum=1)
    """Maximum number of tokens in a packed row on ranks of its own; a longer sequence is rejected."""
    strategy: str = setting("megatron", choices=STRATEGIES)
    """Model on ranks of its own; see actor.strategy."""
    moe: TeacherMoeConfig = field(default_factory=TeacherMoeConfig)
    fp8: str = setting("none", choices=("none", *FP8_RECIPES))
    """FP8 recipe of TransformerEngine on ranks of its own (CUDA only)."""
    num_engines: int = setting(0, minimum=0)
    """Number of vLLM engines that compute the log-probabilities, for each teacher, each with a copy of it on teacher.tp
    ranks; 0: the teacher runs on Megatron ranks."""
    tp: int = setting(1, minimum=1)
    """Tensor-parallel ranks per engine."""
    dtype: str | None = setting(None, choices=("float32", "bfloat16", "float16"))
    """Data type of the parameters on engines or ranks of its own; null: model.dtype."""
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
