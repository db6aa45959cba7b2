"""What can be refused of a run in its first second: nothing here imports torch, transformers, Megatron, an engine or
Ray, which takes longer than all of these checks. `preparation` has those that need them. Only cli and verbs use it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_rl.config import Config, read_hf_config, validate, validate_reward_model
from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.fields import make_paths_absolute
from mcore_rl.config.rules.available import cannot_run, missing_engine, missing_nixl
from mcore_rl.config.rules.judge import server_key, template_text, uses_judge, validate_judge
from mcore_rl.config.rules.reward_model import uses_reward_model
from mcore_rl.data.sources.paths import file_weights, find_files
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.placement import place

DEVICES = Path("/dev")
GPU_FILES = ("nvidia[0-9]*", "dxg", "kfd", "nvhost-gpu")
"""What drivers make of a GPU: NVIDIA's, that of Windows' Linux, AMD's, and that of NVIDIA's boards."""


def check_run(config: Config) -> None:
    """Checks everything that a run on this machine needs and that is known at once, and makes paths absolute: other
    processes need not run in this one's directory, nor read the file of a judge's template.

    Raises: ConfigError, DataError for the first thing that cannot work.
    """
    validate(config)
    validate_judge(config)
    if uses_reward_model(config) and not is_supervised(config.algorithm):
        validate_reward_model(config)
    for problem in (*cannot_run(config), missing_engine(config), missing_nixl(config)):
        if problem is not None:
            raise ConfigError(problem)
    server_key(config.judge)
    _check_cluster(config)
    _check_device(config)
    place(
        config,
        on_gpus=config.cluster.device == "cuda",
        num_engines=0 if is_supervised(config.algorithm) else config.rollout.num_engines,
    )
    _check_data(config)
    make_paths_absolute(config)
    if uses_judge(config):
        config.judge.template = template_text(config.judge)


def missing_files(config: Config) -> list[str]:
    """What a run would not find of its files, were it here."""
    messages = []
    for check in (_check_data, _check_model, validate_judge):
        try:
            check(config)
        except ConfigError as error:
            messages.append(str(error))
    return messages


def has_gpu(devices: Path = DEVICES) -> bool:
    """Whether a driver offers a GPU; asked of its device files, as no library is needed for them."""
    return any(any(devices.glob(pattern)) for pattern in GPU_FILES)


def _check_cluster(config: Config) -> None:
    if config.cluster.nodes > 1 and config.cluster.address is None:
        raise ConfigError(
            f"cluster.address must name the Ray cluster that offers cluster.nodes={config.cluster.nodes} nodes (a job "
            "of `mcore-rl slurm` sets it by itself); on one machine set cluster.nodes=1 and more cluster.gpus_per_node"
        )


def _check_device(config: Config) -> None:
    """Of a cluster that is joined other machines have the GPUs."""
    if config.cluster.device == "cuda" and config.cluster.address is None and not has_gpu():
        raise ConfigError(
            "cluster.device=cuda, but this machine has no GPU (there is no /dev/nvidia0); set cluster.device=cpu, or "
            "cluster.address to a Ray cluster that has GPUs"
        )


def check_exports(config: Config) -> None:
    """Raises: ConfigError where what a run is to leave exists already; one that is finished has left it."""
    for key in ("export_hf", "export_adapter"):
        target = getattr(config.trainer, key)
        if target is not None and Path(target).exists():
            raise ConfigError(f"trainer.{key}={target} exists already; remove it or name another directory")


def _check_model(config: Config) -> None:
    """Weights and tokenizer; what is in them is looked at when a run begins."""
    model = Path(config.model.hf_path)
    read_hf_config(config.model)
    if not config.model.random_init and not any(model.glob("*.safetensors")):
        raise ConfigError(f"model.hf_path={model}: no safetensors there; set it to a directory with the weights")
    if config.model.tokenizer_path is not None and not Path(config.model.tokenizer_path).exists():
        raise ConfigError(f"model.tokenizer_path={config.model.tokenizer_path} does not exist")


def _check_data(config: Config) -> None:
    """Whether the files are there and of a known kind; rows are read only when they are asked for."""
    data = config.data
    find_files(data.train, "data.train")
    _check_set_names(data.val_sets)
    for key, names in data.validation.items():
        if not is_supervised(config.algorithm):
            find_files(names, key)
    if data.weights and data.curriculum is not None:
        raise ConfigError(
            "data.weights has no effect beside data.curriculum, whose function says how often a row is drawn: it may"
            " return an index more than once; set one of the two"
        )
    file_weights(data.weights, data.train)


def _check_set_names(sets: Mapping[str, Sequence[str]] | None) -> None:
    """Rejects names that cannot end the name of a metric."""
    if sets is not None and not sets:
        raise ConfigError("data.val is an empty mapping; set it to {name: path}, to a path, or to null")
    for name in sets or ():
        if re.fullmatch(r"[\w.-]{1,100}", name) is None:
            raise ConfigError(
                f"data.val: {name!r} cannot name a set, as metrics end with it (val/accuracy/<name>); use letters, "
                "digits, _, - and ."
            )
