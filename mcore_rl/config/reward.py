"""Sections of the rewards: those of rules, and those of a language model that judges."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from mcore_rl.config.fields import DOMAIN, Domain, setting

NO_RULE = "none"
"""Value of reward.function where reward models alone give rewards."""
BY_DATA_SOURCE = "by_data_source"
"""Value of reward.function where each row's data_source names its grader."""
GRADERS = (
    *("math", "gsm8k", "math_boxed", "math_dapo", "prime_math", "geometry3k", "search_qa", "code_outputs"),
    "code_asserts",
)
"""Graders that are built in, by name (docs/rewards.md)."""
NAIVE, BATCH, PRIME, DAPO = "naive", "batch", "prime", "dapo"
GROUP, TASK, STEP = "group", "task", "step"
"""Values of reward.manager, with verl's names."""


@dataclass
class OverlongConfig:
    """DAPO's soft overlong punishment: 0 up to max_response_tokens - buffer_tokens, then linearly to -penalty."""

    enable: bool | None = None
    """Whether long responses are punished; null: where reward.manager=dapo."""
    buffer_tokens: int = setting(128, minimum=1)
    """Length of the stretch before the limit in which the punishment grows."""
    penalty: float = setting(1.0, minimum=0)
    """Of a response that reaches the limit."""


@dataclass
class WeightedFunctionConfig:
    """One of several functions whose weighted sum is the reward."""

    function: str = setting(MISSING, choices=(BY_DATA_SOURCE, *GRADERS), function=True)
    """As reward.function."""
    weight: float = 1.0
    """Of its score in the sum."""
    name: str | None = None
    """Of its score in records and metrics; null: the function's own."""
    kwargs: dict[str, str] = field(default_factory=dict)
    """Extra keyword arguments of a user's function."""


@dataclass
class RewardConfig:
    function: str = setting("math", choices=("math", BY_DATA_SOURCE, *GRADERS[1:], NO_RULE), function=True)
    """math (reads \\boxed{}, an `Answer:` line, `####`, or the last formula or number), by_data_source (each row's
    data_source names its grader, with verl's names), one of those graders for all rows, `module_or_file.py:function`
    with verl's signature, or none: reward models alone."""
    functions: dict[str, str] = field(default_factory=dict, metadata={DOMAIN: Domain(choices=GRADERS, function=True)})
    """With by_data_source: graders of data sources that have none, or another; names may be patterns ("aime*"), and
    the first that fits counts."""
    weighted: list[WeightedFunctionConfig] = field(default_factory=list)
    """Several functions in the place of reward.function: a list of {function, weight, name, kwargs}. The weighted sum
    of their scores is the reward; each score stands by its name in records and metrics."""
    accuracy_of: str | None = None
    """Name of the one of reward.weighted that says what is right; null: the first."""
    manager: str = setting(PRIME, choices=(NAIVE, BATCH, PRIME, DAPO))
    """verl's names. prime: many responses at a time; naive: one after the other; dapo: as prime, with reward.overlong
    on; batch: a user's function f(data_sources, solution_strs, ground_truths, extra_infos, **reward.kwargs) sees the
    responses of a reward.batch together and returns as many numbers or dicts."""
    batch: str = setting(GROUP, choices=(GROUP, TASK, STEP))
    """What reward.manager=batch hands over together: the responses to one prompt, all of an engine's task, or all of a
    step (with dynamic sampling: of each of its rounds) or a validation, whichever engines wrote them."""
    weight: float = 1.0
    """Of the function's reward in the sum with those of reward models."""
    kwargs: dict[str, str] = field(default_factory=dict)
    """Extra keyword arguments of a user's function; with by_data_source, of all those in reward.functions."""
    correct: float = 1.0
    """Reward of the built-in grader for a right answer."""
    incorrect: float = 0.0
    """Rewards of the built-in grader (DAPO's paper: 1 and -1)."""
    timeout_seconds: float = setting(10.0, above=0)
    """Of one response, or of one batch; a function that takes longer has failed."""
    workers: int = setting(1, minimum=1, unit="processes")
    """Grading processes beside each engine."""
    max_concurrent_calls: int = setting(16, minimum=1, unit="calls")
    """Calls of an async function that one grading process has under way together."""
    memory_mib: int | None = setting(4096, minimum=1)
    """Resident memory of one grading process and all that it starts; one that takes more is killed, and what it graded
    has failed. null: no limit."""
    max_error_fraction: float = setting(1.0, minimum=0, maximum=1)
    """A step or a validation ends the run if so many of its responses could not be graded: the function raised, took
    too long, died, or returned no number. 0: any."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)

    @property
    def punishes_overlong(self) -> bool:
        """Whether long responses are punished."""
        return self.manager == DAPO if self.overlong.enable is None else self.overlong.enable

    @property
    def entries(self) -> list[WeightedFunctionConfig]:
        """The functions that grade: those of reward.weighted, or reward.function alone."""
        return self.weighted or [WeightedFunctionConfig(self.function, kwargs=self.kwargs)]

    @property
    def chosen(self) -> str:
        """What grades, for messages: the key with its value."""
        if not self.weighted:
            return f"reward.function={self.function}"
        return f"reward.weighted ({', '.join(entry.function for entry in self.weighted)})"


@dataclass
class JudgeConfig:
    """A frozen language model that reads every response and writes a score, on inference engines of its own or behind
    a server that others keep."""

    hf_path: str | None = setting(None, path=True)
    """HF directory, of a supported family, for engines of the run's own; null: no such judge."""
    url: str | None = None
    """Address of an OpenAI-compatible server, such as http://host:8000/v1, that is asked instead; null: none is."""
    served_model: str | None = None
    """Name by which the server has the judge; null: the only model that it serves."""
    api_key_variable: str | None = None
    """Environment variable, of the process that starts the run, with the server's key; null: it wants none."""
    timeout_seconds: float = setting(120.0, above=0)
    """Of one question to the server."""
    max_retries: int = setting(3, minimum=0)
    """Of a question that the server did not answer, at growing intervals. What then failed has no score;
    reward.max_error_fraction of the questions that are asked together end the run."""
    engine: str | None = setting(None, choices=("vllm", "sglang"))
    """vllm or sglang; null: rollout.engine."""
    tokenizer_path: str | None = setting(None, path=True)
    """Directory or tokenizer.json file; null: judge.hf_path. With judge.url it may be left out: then no question is
    too long before the server says so, and what responses spell of control tokens is left in them."""
    dtype: str | None = setting(None, choices=("float32", "bfloat16"))
    """float32 or bfloat16; null: model.dtype."""
    weight: float = 1.0
    """Of the judge's score in the reward."""
    template: str | None = None
    """What the judge is asked, or a .txt file with it; {prompt}, {response} and {ground_truth} are replaced. Where its
    tokenizer has a chat template, and on a server, this is a user's message."""
    score_pattern: str = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, the number; its last match in the judge's answer is the score."""
    parser: str | None = setting(None, function=True)
    """`module_or_file.py:function` that finds the score instead, called as f(answer, finish_reason, data_source,
    ground_truth, extra_info) in the judge's process; it returns a number, or None where it finds none."""
    min_score: float | None = None
    """A score below it counts as none; null: no bound."""
    max_score: float | None = None
    """A score beyond these bounds counts as none."""
    unparsable: float = 0.0
    """Score of an answer without one, and of a response too long for judge.max_prompt_tokens."""
    samples: int = setting(1, minimum=1)
    """Answers to every response; the score is their mean."""
    num_engines: int = setting(1, minimum=1)
    """Copies of the judge, each on judge.tp ranks."""
    tp: int = setting(1, minimum=1)
    """Tensor-parallel ranks of one engine."""
    temperature: float = setting(0.0, minimum=0)
    """0: greedy."""
    top_p: float = setting(1.0, above=0, maximum=1)
    """As in rollout."""
    max_prompt_tokens: int = setting(4096, minimum=1)
    """Of the rendered question, prompt and response included."""
    max_response_tokens: int = setting(512, minimum=1)
    """An answer that reaches it is read as far as it goes, but a score at its very end, which may lack digits, counts
    as none."""
    max_concurrent_requests: int = setting(256, minimum=1)
    """Sequences that one engine decodes together; questions that are under way to a server."""
    kv_cache_gib: float = setting(0.25, above=0)
    """As in rollout, for judges."""
    gpu_memory_fraction: float = setting(0.6, above=0, maximum=1)
    """As in rollout."""
    enforce_eager: bool = False
    """As in rollout."""
