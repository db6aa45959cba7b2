"""Everything that can be refused before a process starts, and the inputs that passed. Only cli and assembly use it."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.algorithms import Needs, estimator, policy_loss
from mcore_rl.algorithms.aggregation import check_mode
from mcore_rl.config import Config, num_trainer_ranks, read_hf_config, validate, write_resolved
from mcore_rl.data.prompts import LoadReport, PromptSet, load_prompts
from mcore_rl.data.supervised import SupervisedSet, load_supervised
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.layout import train_layout
from mcore_rl.rewards.functions import check_reward_function
from model_converters.errors import ConversionError
from model_converters.io import HFCheckpoint
from model_converters.layout import TrainLayout

# Of a checkpoint: a float32 parameter, its float32 main copy and two Adam moments.
CHECKPOINT_BYTES_PER_PARAMETER = 16


@dataclass(frozen=True)
class Prepared:
    """Checked inputs of a run: `prompts` for reinforcement learning, or `targets` for supervised training."""

    layout: TrainLayout
    prompts: dict[str, PromptSet]
    targets: SupervisedSet | None
    reports: tuple[LoadReport, ...]


def prepare(config: Config) -> Prepared:
    """Checks everything, loads the data, makes the run directory and writes the resolved configuration there.

    Raises: ConfigError, DataError for the first thing that cannot work; nothing has been written then.
    """
    validate(config)
    hf_config = read_hf_config(config)
    layout = train_layout(config.actor.parallel, num_trainer_ranks(config), hf_config)
    parameters = _check_weights(config, hf_config)
    needs = _check_algorithm(config)
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.hf_path)
    prompts: dict[str, PromptSet] = {}
    targets: SupervisedSet | None = None
    reports = []
    if needs.advantages:
        if config.rollout.engine != "vllm":
            raise ConfigError(f"rollout.engine={config.rollout.engine} is not available; set rollout.engine=vllm")
        check_reward_function(config.reward)
        paths = {"train": config.data.train, "val": config.data.val}
        for name, path in paths.items():
            if path is not None:
                limit = config.data.val_max_prompts if name == "val" else None
                prompts[name], report = load_prompts(
                    path, tokenizer, config.data, config.rollout, f"data.{name}", max_prompts=limit
                )
                reports.append(report)
    else:
        targets, report = load_supervised(config.data.train, tokenizer, config.data, config.rollout)
        reports.append(report)
    _make_run_dir(config, parameters * CHECKPOINT_BYTES_PER_PARAMETER)
    return Prepared(layout, prompts, targets, tuple(reports))


def _check_algorithm(config: Config) -> Needs:
    """Names and options that the registries refuse are refused here; what the loss needs."""
    algorithm, loss = config.algorithm, config.algorithm.policy_loss
    estimator(algorithm.advantage, normalize_by_std=algorithm.normalize_by_std)
    check_mode(algorithm.loss_aggregation)
    chosen = policy_loss(loss.name, clip_low=loss.clip_low, clip_high=loss.clip_high, dual_clip=loss.dual_clip)
    return chosen.needs


def _check_weights(config: Config, hf_config: dict[str, object]) -> int:
    """Number of parameters in the HF directory (0 with random_init); reads headers only."""
    if config.model.random_init:
        return 0
    try:
        checkpoint = HFCheckpoint(config.model.hf_path)
    except ConversionError as error:
        raise ConfigError(f"model.hf_path: {error}") from None
    return sum(math.prod(shape) for shape in checkpoint.shapes.values())


def _make_run_dir(config: Config, checkpoint_bytes: int) -> None:
    directory = Path(config.run.dir)
    try:
        for name in ("rollouts", "checkpoints"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory).free
        if free < checkpoint_bytes:
            raise ConfigError(
                f"run.dir={directory}: {free / 2**20:.0f} MiB free, but one checkpoint needs about "
                f"{checkpoint_bytes / 2**20:.0f} MiB; set run.dir to a larger disk"
            )
        write_resolved(config, directory / "config.yaml")
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"run.dir={directory} cannot be written: {reason}; set run.dir to another place") from None
