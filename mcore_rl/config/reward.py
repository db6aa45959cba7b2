"""Sections `reward` and `judge`: reward functions, and a language model as judge."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from mcore_rl.config.fields import DOMAIN, Domain, setting

NO_RULE = "none"
"""Value of reward.function if only reward models give rewards."""
BY_DATA_SOURCE = "by_data_source"
"""Value of reward.function if each row's data_source selects its grader."""
GRADERS = (
    *("math", "gsm8k", "math_boxed", "math_dapo", "prime_math", "geometry3k", "search_qa", "code_outputs"),
    "code_asserts",
)
"""Names of the built-in graders (docs/rewards.md)."""
NAIVE, BATCH, PRIME, DAPO = "naive", "batch", "prime", "dapo"
"""Values of reward.manager, with verl's names."""
GROUP, TASK, STEP = "group", "task", "step"
"""Values of reward.batch."""
_METRICS = "mean accuracy std errors greedy kl kl_coefficient length_penalty model judge reward"
_FIELDS = (
    "prompt response tokens response_tokens finish_reason group sample version versions submitted_version ground_truth "
    "error scores turns tool_calls messages mask turn_rewards temperatures digest images role"
)
TAKEN = frozenset(f"{_METRICS} {_FIELDS}".split())
"""Reserved names of metrics (reward/, val/) and record fields. A part with such a name gets `_part` appended."""


@dataclass
class OverlongConfig:
    """DAPO's soft overlong punishment: 0 up to max_response_tokens - buffer_tokens tokens, then linear to -penalty."""

    enable: bool | None = None
    """Punish long responses; null: if reward.manager=dapo."""
    buffer_tokens: int = setting(128, minimum=1)
    """Number of tokens before the limit over which the punishment grows."""
    penalty: float = setting(1.0, minimum=0)
    """Punishment of a response that reaches the limit."""


@dataclass
class WeightedFunctionConfig:
    """One of several functions whose weighted sum is the reward."""

    function: str = setting(MISSING, choices=(BY_DATA_SOURCE, *GRADERS), function=True)
    """Grader, with the values of reward.function."""
    weight: float = 1.0
    """Weight of its score in the sum."""
    name: str | None = None
    """Name of its score in records and metrics; null: the function's name."""
    kwargs: dict[str, str] = field(default_factory=dict)
    """Additional keyword arguments of a user's function."""


@dataclass
class RewardConfig:
    """Reward functions and graders, their weights and time limits."""

    function: str = setting("math", choices=("math", BY_DATA_SOURCE, *GRADERS[1:], NO_RULE), function=True)
    r"""Reward function. math reads \\boxed{}, an `Answer:` line, `####`, or the last formula or number; by_data_source
    selects a grader by each row's data_source (verl's names); another grader's name applies to all rows;
    `module_or_file.py:function` has verl's signature; none: only reward models give rewards."""
    functions: dict[str, str] = field(default_factory=dict, metadata={DOMAIN: Domain(choices=GRADERS, function=True)})
    """Graders by data source for by_data_source, in addition to or instead of the built-in ones. Names may be patterns
    such as "aime*"; the first match applies."""
    weighted: list[WeightedFunctionConfig] = field(default_factory=list)
    """List of {function, weight, name, kwargs} that replaces reward.function. The reward is the weighted sum of the
    scores; records and metrics contain each score under its name."""
    accuracy_of: str | None = None
    """Entry of reward.weighted, by name, that defines accuracy; null: the first."""
    manager: str = setting(PRIME, choices=(NAIVE, BATCH, PRIME, DAPO))
    """Reward manager, with verl's names. prime: many responses concurrently; naive: one at a time; dapo: like prime,
    with reward.overlong; batch: a user's function f(data_sources, solution_strs, ground_truths, extra_infos,
    **reward.kwargs) grades the responses of a reward.batch together and returns a number or dict for each."""
    batch: str = setting(GROUP, choices=(GROUP, TASK, STEP))
    """Responses that reward.manager=batch grades together: the responses to one prompt (group), of an engine's task
    (task), or of a whole step or validation on all engines (step; with dynamic sampling: of each round)."""
    weight: float = 1.0
    """Weight of the function's reward in the sum with scores of reward models."""
    kwargs: dict[str, str] = field(default_factory=dict)
    """Additional keyword arguments of a user's function; with by_data_source, of all functions in reward.functions."""
    correct: float = 1.0
    """Reward of the built-in graders for a right answer."""
    incorrect: float = 0.0
    """Reward of the built-in graders for a wrong answer (DAPO's paper: 1 and -1)."""
    timeout_seconds: float = setting(10.0, above=0)
    """Time limit for grading one response, or one batch; a slower grading counts as failed."""
    workers: int = setting(1, minimum=1, unit="processes")
    """Number of grading processes per engine."""
    max_concurrent_calls: int = setting(16, minimum=1, unit="calls")
    """Maximum number of concurrent calls of an async function in one grading process."""
    memory_mib: int | None = setting(4096, minimum=1)
    """Resident memory limit of a grading process including its children. A process that exceeds it is killed, and its
    current grading counts as failed. null: no limit."""
    max_error_fraction: float = setting(1.0, minimum=0, maximum=1)
    """Fraction of failed gradings in a step or validation that ends the run. A grading fails if the function raises,
    times out, dies, or returns no number. 0: any failure ends the run."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)

    @property
    def punishes_overlong(self) -> bool:
        """True if long responses are punished."""
        return self.manager == DAPO if self.overlong.enable is None else self.overlong.enable

    @property
    def entries(self) -> list[WeightedFunctionConfig]:
        """Functions that grade: the entries of reward.weighted, or reward.function alone."""
        return self.weighted or [WeightedFunctionConfig(self.function, kwargs=self.kwargs)]

    @property
    def chosen(self) -> str:
        """Key and value of the configured graders, for messages."""
        if not self.weighted:
            return f"reward.function={self.function}"
        return f"reward.weighted ({', '.join(entry.function for entry in self.weighted)})"


@dataclass
class JudgeConfig:
    """Frozen language model that reads every response and writes a score, on the run's own engines or on an external
    server."""

    hf_path: str | None = setting(None, path=True, hub="model")
    """Hugging Face directory of a supported model family, run on engines of its own; null: no such judge."""
    url: str | None = None
    """Address of an OpenAI-compatible server to use as judge, such as http://host:8000/v1; null: no server."""
    served_model: str | None = None
    """Model name on the server; null: the only model that it serves."""
    api_key_variable: str | None = None
    """Environment variable with the server's API key, in the process that starts the run; null: no key."""
    timeout_seconds: float = setting(120.0, above=0)
    """Timeout of one request to the server."""
    max_retries: int = setting(3, minimum=0)
    """Number of retries of a failed request to the server, at growing intervals. A request that still fails gives no
    score; reward.max_error_fraction of them in a batch end the run."""
    engine: str | None = setting(None, choices=("vllm", "sglang"))
    """Inference engine of the judge; null: rollout.engine."""
    tokenizer_path: str | None = setting(None, path=True, hub="model")
    """Directory of the tokenizer, or a tokenizer.json file; null: judge.hf_path. Optional with judge.url: without it,
    prompts are not checked for length before they are sent, and texts of special tokens stay in responses."""
    dtype: str | None = setting(None, choices=("float32", "bfloat16", "float16"))
    """Data type of the judge's parameters; null: model.dtype."""
    weight: float = 1.0
    """Weight of the judge's score in the reward."""
    template: str | None = None
    """Prompt for the judge, or a .txt file with it; {prompt}, {response} and {ground_truth} are replaced. It is a user
    message if the judge's tokenizer has a chat template or the judge is a server."""
    score_pattern: str = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, the number. Its last match in the judge's answer is the score."""
    parser: str | None = setting(None, function=True)
    """`module_or_file.py:function` that extracts the score instead, called as f(answer, finish_reason, data_source,
    ground_truth, extra_info) in the judge's process. It returns a number, or None if there is no score."""
    min_score: float | None = None
    """Lowest valid score; a lower one counts as unparsable. null: no bound."""
    max_score: float | None = None
    """Highest valid score; a higher one counts as unparsable. null: no bound."""
    unparsable: float = 0.0
    """Score of an answer without a valid score, and of a response that exceeds judge.max_prompt_tokens."""
    samples: int = setting(1, minimum=1)
    """Number of answers per response; the score is their mean."""
    num_engines: int = setting(1, minimum=1)
    """Number of engines, each with a copy of the judge on judge.tp ranks."""
    tp: int = setting(1, minimum=1)
    """Tensor-parallel ranks per engine."""
    temperature: float = setting(0.0, minimum=0)
    """Sampling temperature of the judge; 0 is greedy."""
    top_p: float = setting(1.0, above=0, maximum=1)
    """Top-p of the judge's sampling; 1: all tokens."""
    max_prompt_tokens: int = setting(4096, minimum=1)
    """Maximum length of the judge's rendered prompt, which includes the prompt and the response."""
    max_response_tokens: int = setting(512, minimum=1)
    """Maximum length of an answer. A truncated answer is parsed, but a score at its very end counts as unparsable,
    since digits may be missing."""
    max_concurrent_requests: int = setting(256, minimum=1)
    """Maximum number of sequences that one engine decodes at a time, or of concurrent requests to the server."""
    kv_cache_gib: float = setting(0.25, above=0)
    """Size of the judge's KV cache per engine rank on CPU; on GPUs, gpu_memory_fraction applies."""
    gpu_memory_fraction: float = setting(0.6, above=0, maximum=1)
    """Fraction of a GPU's memory that a rank of the judge uses; see rollout.gpu_memory_fraction."""
    enforce_eager: bool = False
    """Run the judge without CUDA graphs and compilation; see rollout.enforce_eager."""
