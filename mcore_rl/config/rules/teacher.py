"""Rules for the teacher of a distillation run."""

from __future__ import annotations

import os
from dataclasses import replace
from urllib.parse import urlsplit

from mcore_rl.config.algorithm import AlgorithmConfig, is_supervised
from mcore_rl.config.fields import reject_unless_default
from mcore_rl.config.models import OTHERS, ParallelConfig, TeacherConfig, TeacherSourceConfig
from mcore_rl.config.reward import NO_RULE
from mcore_rl.config.rules.estimators import OF_TOKENS
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError

FORMER_DEFAULT = 1.0
"""Default of teacher.in_advantage in earlier versions."""
RANK_KEYS = ("offload",)
"""Keys with an effect on teachers on Megatron ranks only, the actor's or their own."""
OWN_RANK_KEYS = (
    *("tokens_per_microbatch", "strategy", "moe.dispatcher", "fp8"),
    *(f"parallel.{name}" for name in vars(ParallelConfig())),
)
"""Keys with an effect on teachers on ranks of their own only."""
ENGINE_KEYS = ("tp", "max_batched_tokens", "kv_cache_gib", "gpu_memory_fraction", "enforce_eager")
"""Keys with an effect on teachers on engines only."""
SERVER_KEYS = ("api", "tokenizer_path", "api_key_variable", "timeout_seconds", "max_retries")
"""Keys with an effect on teachers behind servers only."""
SERVED_KEYS = ("max_concurrent_requests",)
"""Keys without effect on teachers on the actor's ranks."""
HINT_KEYS = ("hint_key", "hint_template", "max_hinted_tokens")
"""Keys of `data` about the prompts that teachers read."""


def uses_teacher(teacher: TeacherConfig) -> bool:
    """Return True if the policy learns from a teacher."""
    return bool(teacher.entries)


def is_on_server(teacher: TeacherConfig) -> bool:
    """Return True if servers compute the teachers' log-probabilities."""
    return any(entry.url is not None for entry in teacher.entries)


def is_on_engines(teacher: TeacherConfig) -> bool:
    """Return True if the run's own engines compute the teachers' log-probabilities."""
    return uses_teacher(teacher) and teacher.num_engines > 0


def has_own_ranks(teacher: TeacherConfig) -> bool:
    """Return True if Megatron ranks of their own compute the teachers' log-probabilities."""
    return uses_teacher(teacher) and teacher.num_ranks > 0


def is_on_ranks(teacher: TeacherConfig) -> bool:
    """Return True if the actor's ranks compute the teachers' log-probabilities."""
    return uses_teacher(teacher) and not (is_on_server(teacher) or is_on_engines(teacher) or has_own_ranks(teacher))


def is_served(teacher: TeacherConfig) -> bool:
    """Return True if engines or servers compute the teachers' log-probabilities, at temperature 1."""
    return is_on_engines(teacher) or is_on_server(teacher)


def replaces_rewards(teacher: TeacherConfig) -> bool:
    """Return True if the policy learns from the teacher and not from rewards."""
    return uses_teacher(teacher) and teacher.alone


def server_key(teacher: TeacherConfig) -> str | None:
    """Return the API key in teacher.api_key_variable; None if the servers need no key.

    Raises: ConfigError if the variable is not set, or has characters that a header cannot have.
    """
    variable = teacher.api_key_variable
    if variable is None:
        return None
    # An empty variable counts as unset.
    if key := os.environ.get(variable):
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(
                f"teacher.api_key_variable={variable}: the key has a line break or another character that an HTTP "
                "header cannot have; export it without"
            )
        return key
    raise ConfigError(f"teacher.api_key_variable={variable}: there is no such environment variable; export it")


def teacher_prompt_tokens(config: Config) -> int:
    """Return the length of the longest prompt that a teacher reads. Units: tokens."""
    policy = config.rollout.max_prompt_tokens
    if config.data.hint_key is None:
        return policy
    # Rows without a hint have the policy's prompt.
    return max(policy, config.data.max_hinted_tokens or policy)


def check_hints(config: Config) -> None:
    """Raise ConfigError for keys of hints without a teacher or without hints, and for hints that cannot be used."""
    data, teacher = config.data, config.teacher
    if not uses_teacher(teacher):
        remedy = "set teacher.moving_average, or teacher.hf_path, teacher.checkpoint or teacher.url"
        reject_unless_default("data", data, remedy, HINT_KEYS)
    if data.hint_key is None:
        reject_unless_default("data", data, "set data.hint_key", HINT_KEYS)
        return
    if missing := [place for place in ("{prompt}", "{hint}") if place not in data.hint_template]:
        raise ConfigError(
            f"data.hint_template has no {missing[0]}; put it where the {missing[0].strip('{}')} of a row goes"
        )
    if (count := data.hint_template.count("{prompt}")) > 1:
        raise ConfigError(f"data.hint_template has {count} times {{prompt}}, and the prompt is put in once; leave one")
    if data.long_prompts != "drop":
        raise ConfigError(
            f"data.long_prompts={data.long_prompts} would shorten the policy's prompt and not the prompt with the hint "
            "(data.hint_key); set it to drop"
        )
    longest = teacher_prompt_tokens(config) + config.rollout.max_response_tokens
    prefix, section = ("teacher", teacher) if has_own_ranks(teacher) else ("actor", config.actor)
    if not is_served(teacher) and longest > (row := section.tokens_per_microbatch):
        raise ConfigError(
            f"{prefix}.tokens_per_microbatch={row} is below the {longest} tokens of a prompt with its hint "
            "(data.max_hinted_tokens) and a response; raise it, or lower data.max_hinted_tokens"
        )


def check_teacher(config: Config) -> None:
    """Raise ConfigError for a key that has no effect or that another key excludes."""
    teacher, algorithm = config.teacher, config.algorithm
    check_hints(config)
    if not uses_teacher(teacher):
        # 1 was the default of in_advantage, so the configurations of earlier runs have it.
        checked = replace(teacher, in_advantage=0.0) if teacher.in_advantage == FORMER_DEFAULT else teacher
        reject_unless_default(
            "teacher", checked, "set teacher.hf_path, teacher.checkpoint, teacher.url or teacher.moving_average"
        )
        return
    if teacher.served_model is not None and teacher.url is None:
        raise ConfigError(
            f"teacher.served_model={teacher.served_model} has no effect without teacher.url; remove it, or set "
            "served_model of entries of teacher.by_source"
        )
    _check_entries(teacher)
    given = teacher.entries[0].given
    if is_supervised(algorithm):
        raise ConfigError(
            f"{given}: the teacher computes probabilities of sampled responses, and "
            f"algorithm.policy_loss.name={algorithm.policy_loss.name} samples none; set it to null"
        )
    if not teacher.in_advantage and not teacher.in_loss:
        raise ConfigError(
            f"{given} has no effect with teacher.in_advantage=0 and teacher.in_loss=0: set teacher.in_advantage=1 for "
            "the teacher's log-probabilities in the advantages, or teacher.in_loss=1 for the reverse KL in the loss; "
            "or remove the teacher"
        )
    if config.rollout.keep_sampling_mask:
        raise ConfigError(
            f"{given}: the teacher's distribution covers the whole vocabulary, and rollout.keep_sampling_mask=true "
            "trains on the sampled sets; sample from all tokens with rollout.keep_sampling_mask=false, or remove the "
            "teacher"
        )
    if not teacher.in_loss:
        reject_unless_default("teacher", teacher, "set teacher.in_loss above 0", ("top_k",))
    if not teacher.top_k:
        reject_unless_default("teacher", teacher, "set teacher.top_k above 0", ("rest",))
    _check_place(config, given)
    if teacher.alone:
        _check_alone(algorithm)
    if config.reward.function == NO_RULE and teacher.alone and algorithm.dynamic_sampling.enable:
        raise ConfigError(
            "algorithm.dynamic_sampling.enable=true drops groups of equal rewards, and with reward.function=none all "
            "rewards are 0; set it to false"
        )


def _check_entries(teacher: TeacherConfig) -> None:
    """Check that every entry has one teacher, and that all are in one kind of place."""
    named = [entry.source for entry in teacher.by_source]
    if twice := [name for name in dict.fromkeys(named) if named.count(name) > 1]:
        raise ConfigError(f"teacher.by_source names {', '.join(twice)} twice; remove one of the entries")
    if OTHERS in named:
        raise ConfigError(
            "teacher.by_source has an entry with an empty source; name a data_source, or set teacher.hf_path, "
            "teacher.checkpoint, teacher.url or teacher.moving_average for all other rows"
        )
    for entry in teacher.entries:
        _check_entry(teacher, entry)
    if is_on_server(teacher) and any(entry.url is None for entry in teacher.entries):
        raise ConfigError(
            "teacher: some teachers have a url and others do not; set url for all of them, or hf_path, checkpoint or "
            "moving_average for all of them"
        )


def _check_entry(teacher: TeacherConfig, entry: TeacherSourceConfig) -> None:
    """Check that an entry has exactly one teacher, which its place can load or reach."""
    url = entry.url
    if url is not None:
        # First, because other messages show the URL.
        _check_url(entry.key("url"), url)
    chosen = {name: getattr(entry, name) for name in ("hf_path", "checkpoint", "url", "moving_average")}
    given = [f"{entry.key(name)}={value}" for name, value in chosen.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(
            f"{given[0]} has no effect with {given[-1]}; set one of the two (a server's tokenizer is "
            "teacher.tokenizer_path)"
        )
    if not given:
        raise ConfigError(
            f"{entry.key('hf_path')}, checkpoint, url or moving_average must be set: the entry has no teacher"
        )
    if teacher.num_engines and entry.averages:
        raise ConfigError(
            f"teacher.num_engines={teacher.num_engines}: the average of {given[0]} is on the actor's ranks; set "
            "teacher.num_engines=0"
        )
    if teacher.num_engines and entry.checkpoint is not None:
        raise ConfigError(
            f"teacher.num_engines={teacher.num_engines}: engines read Hugging Face directories; convert "
            f"{given[0]} with `python -m model_converters to-hf`, or set teacher.num_engines=0"
        )
    if teacher.num_ranks and entry.averages:
        raise ConfigError(
            f"teacher.num_ranks={teacher.num_ranks}: the average of {given[0]} is on the actor's ranks, which have the "
            "policy's weights; set teacher.num_ranks=0"
        )
    if url is None and entry.served_model is not None:
        key = entry.key("served_model")
        raise ConfigError(f"{key}={entry.served_model} has no effect without a url; remove it")


def _check_url(key: str, url: str) -> None:
    """Check the form of a server's address. Messages leave out a password."""
    remedy = "write it as http://host:8000/v1"
    try:
        address = urlsplit(url)
        # urlsplit accepts any text; without a scheme, the host is part of the path. It reads `port` only here.
        valid = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:
        raise ConfigError(f"{key} is not the address of a server (host or port are malformed); {remedy}") from None
    if "@" in address.netloc:
        raise ConfigError(
            f"{key} has a user or a password, which servers of teachers do not read; remove it, and set "
            "teacher.api_key_variable for an API key"
        )
    if not valid or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"{key}={url} is not the address of a server; {remedy}")


def _check_place(config: Config, given: str) -> None:
    """Reject keys of other places than the teachers', and terms that the teachers' place does not support."""
    teacher = config.teacher
    _check_place_keys(teacher, given)
    if is_on_ranks(teacher):
        return
    where = "a server" if is_on_server(teacher) else f"engines (teacher.num_engines={teacher.num_engines})"
    if has_own_ranks(teacher):
        where = f"ranks of its own (teacher.num_ranks={teacher.num_ranks})"
    if teacher.in_loss and not teacher.top_k:
        cannot = "do not send" if has_own_ranks(teacher) else "cannot return"
        raise ConfigError(
            f"teacher.in_loss={teacher.in_loss:g} over the whole vocabulary needs the teacher's hidden states, which "
            f"{where} {cannot}; set teacher.top_k above 0, or teacher.in_loss=0 and "
            "teacher.in_advantage=1"
        )
    if teacher.top_k and is_on_server(teacher) and teacher.api == "completions":
        raise ConfigError(
            f"teacher.top_k={teacher.top_k}: teacher.api=completions returns no ids of the most probable tokens; set "
            "teacher.api to vllm or sglang, or teacher.in_loss=0"
        )
    if is_served(teacher) and config.rollout.temperature != 1:
        raise ConfigError(
            f"rollout.temperature={config.rollout.temperature:g}: log-probabilities from {where} have temperature 1, "
            "and the policy must be sampled at the same temperature; set it to 1, or load the teacher on Megatron "
            "ranks (teacher.hf_path with teacher.num_engines=0)"
        )


def _check_place_keys(teacher: TeacherConfig, given: str) -> None:
    """Require one place for the teachers, and defaults of the keys of other places."""
    if teacher.num_ranks and teacher.num_engines:
        raise ConfigError(
            f"teacher.num_ranks={teacher.num_ranks} has no effect with teacher.num_engines={teacher.num_engines}: a "
            "teacher runs on ranks or on engines; set one of the two to 0"
        )
    for key, number in {"num_engines": teacher.num_engines, "num_ranks": teacher.num_ranks}.items():
        if number and is_on_server(teacher):
            raise ConfigError(
                f"teacher.{key}={number} has no effect with {given}, whose server computes the probabilities; set it "
                "to 0"
            )
    engines, ranks = "set teacher.num_engines above 0", "set teacher.num_ranks above 0"
    if not is_on_server(teacher):
        reject_unless_default("teacher", teacher, "set teacher.url instead of teacher.hf_path", SERVER_KEYS)
    if not is_on_engines(teacher):
        reject_unless_default("teacher", teacher, engines, ENGINE_KEYS)
    if not has_own_ranks(teacher):
        reject_unless_default("teacher", teacher, ranks, OWN_RANK_KEYS)
    if not is_on_engines(teacher) and not has_own_ranks(teacher):
        reject_unless_default("teacher", teacher, f"{engines}, or teacher.num_ranks", ("dtype",))
    if is_served(teacher):
        remedy = "set teacher.num_engines=0 and teacher.hf_path or teacher.checkpoint"
        reject_unless_default("teacher", teacher, remedy, RANK_KEYS)
    else:
        reject_unless_default("teacher", teacher, f"{engines}, or teacher.url", SERVED_KEYS)


def _check_alone(algorithm: AlgorithmConfig) -> None:
    """Reject settings of advantages, which teacher.alone drops."""
    kl, sources = algorithm.kl.in_reward, [entry.source for entry in algorithm.per_source if entry.has_estimator]
    for given, key, remedy in (
        (algorithm.length_penalty > 0, f"algorithm.length_penalty={algorithm.length_penalty:g}", "set it to 0"),
        (kl > 0, f"algorithm.kl.in_reward={kl:g}", "set it to 0, and algorithm.kl.in_loss instead"),
        (
            algorithm.advantage == OF_TOKENS,
            f"algorithm.advantage={OF_TOKENS}",
            "set it to an estimator without a pass, such as grpo",
        ),
        (
            bool(sources),
            f"algorithm.per_source, {', '.join(sources)}: advantage",
            "remove it and its options; source, weight and the keys of the loss may stay",
        ),
        (algorithm.baseline != "prompt", f"algorithm.baseline={algorithm.baseline}", "set it to prompt"),
    ):
        if given:
            raise ConfigError(
                f"{key} has no effect with teacher.alone=true, which drops the advantages of rewards; {remedy}"
            )
