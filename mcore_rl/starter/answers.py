"""The five questions of `mcore-rl init`. An answer is a flag or, in a terminal, typed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.config.fields import leaves
from mcore_rl.config.functions import names_function
from mcore_rl.config.models import ModelConfig
from mcore_rl.config.reading.expansion import expand_path, expand_spec
from mcore_rl.config.reading.remote_names import parse_hub_name
from mcore_rl.config.rules.validation import read_hf_config
from mcore_rl.config.schema import Config
from mcore_rl.data.sources.paths import find_files
from mcore_rl.errors import ConfigError
from mcore_rl.remote.hub import download_model

ALGORITHMS = ("grpo", "dapo", "gspo")


@dataclass(frozen=True)
class Question:
    """A question and its flag, --NAME.

    text: the question. check: raises ConfigError for an invalid answer. default: answer of an empty line; None if an
    answer is required.
    """

    name: str
    text: str
    check: Callable[[str], object]
    default: str | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answers:
    """Checked answers. `val` is empty without validation. `positions`: maximum length of the model; None if its
    config.json has none."""

    model: str
    train: str
    val: str
    algorithm: str
    reward: str
    positions: int | None


def _hf_config(answer: str) -> dict[str, Any]:
    """Read config.json of a model; of one on the hub, only small files are downloaded. Raises: ConfigError."""
    path = expand_path("--model", answer)
    if (name := parse_hub_name("--model", path, "model")) is not None:
        path = str(download_model("--model", name, weights=False)[0])
    return read_hf_config(ModelConfig(hf_path=path))


def _check_train(answer: str) -> None:
    _check_files("--train", answer, "data.train")


def _check_val(answer: str) -> None:
    if answer:
        _check_files("--val", answer, "data.val")


def _check_files(flag: str, answer: str, key: str) -> None:
    path = expand_path(flag, answer)
    # The hub finds the files when the run starts, or rejects the name.
    if parse_hub_name(flag, path, "dataset") is None:
        find_files(path, key)


def _check_algorithm(answer: str) -> None:
    if answer not in ALGORITHMS:
        raise ConfigError(f"--algorithm={answer} must be one of {', '.join(ALGORITHMS)}")


def _check_reward(answer: str) -> None:
    domain = next(leaf.domain for leaf in leaves(Config()) if leaf.key == "reward.function")
    if (demand := domain.violation(answer)) is not None:
        raise ConfigError(f"--reward={answer} must be {demand}")
    file = expand_spec("--reward", answer).rpartition(":")[0]
    if names_function(answer) and file.endswith(".py") and not Path(file).is_file():
        raise ConfigError(f"--reward={answer}: there is no file {file}")


QUESTIONS = (
    Question("model", "Model: a Hugging Face directory with config.json, or a hub id", _hf_config),
    Question("train", "Training prompts: jsonl, parquet or CSV file, a glob of such files, or a hub id", _check_train),
    Question("val", "Validation prompts (empty: none)", _check_val, ""),
    Question("algorithm", "Algorithm", _check_algorithm, "grpo", ALGORITHMS),
    Question("reward", "Reward: a built-in grader, or file.py:function", _check_reward, "math"),
)


def collect(
    flags: Mapping[str, str | None], read: Callable[[Question], str] | None, show: Callable[[str], None]
) -> Answers:
    """Take the answers from `flags`, by the names of the questions. The others are read with `read`, again after an
    invalid one, which `show` reports. Without `read` (no terminal), they have their defaults.

    Raises: ConfigError for an invalid flag, or for a required one that is missing without a terminal.
    """
    given = {name: answer for name, answer in flags.items() if answer is not None}
    missing = [f"--{each.name}" for each in QUESTIONS if each.name not in given and each.default is None]
    if read is None and missing:
        raise ConfigError(f"init asks its questions in a terminal only; set {' and '.join(missing)}")
    for question in QUESTIONS:
        if question.name in given:
            question.check(given[question.name])
    for question in QUESTIONS:
        if question.name not in given:
            given[question.name] = _read(question, read, show)
    limit = _hf_config(given["model"]).get("max_position_embeddings")
    return Answers(**given, positions=limit if isinstance(limit, int) else None)


def _read(question: Question, read: Callable[[Question], str] | None, show: Callable[[str], None]) -> str:
    if read is None:
        return question.default or ""
    while True:
        answer = read(question).strip()
        try:
            question.check(answer)
            return answer
        except ConfigError as error:
            show(str(error))


def read_from_terminal(question: Question) -> str:
    """Ask a question in the terminal. Raises: ConfigError at the end of the input (Ctrl-D)."""
    from rich.prompt import Prompt

    choices, default = list(question.choices) or None, question.default
    try:
        if default is None:
            return Prompt.ask(question.text)
        return Prompt.ask(question.text, choices=choices, default=default, show_default=bool(default))
    except EOFError:
        raise ConfigError(f"no answer; set --{question.name}") from None
