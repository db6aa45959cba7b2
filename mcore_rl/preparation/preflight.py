"""Checks that run in the first second of a command. Only cli and verbs import this module.

Nothing here imports torch, transformers, Megatron, an engine or Ray: each of these imports takes longer than all checks
of this module. `prepare` has the checks that need them.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from mcore_rl.config import Config
from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.fields import make_paths_absolute
from mcore_rl.config.models import ModelConfig
from mcore_rl.config.rules.engine_support import cannot_run, missing_engine
from mcore_rl.config.rules.judge import server_key, template_text, uses_judge, validate_judge
from mcore_rl.config.rules.models import uses_reward_model
from mcore_rl.config.rules.objective import is_warm_start
from mcore_rl.config.rules.validation import read_hf_config, validate, validate_reward_model
from mcore_rl.config.schema import ClusterConfig, DataConfig
from mcore_rl.data.sources.paths import file_weights, find_files
from mcore_rl.errors import ConfigError
from mcore_rl.preparation.sglang_files import check_sglang_files
from mcore_rl.remote.shared_folder import SharedFolder
from mcore_rl.remote.storage import has_export
from mcore_rl.resolved.nccl import nccl_packages
from mcore_rl.resolved.placement import place

DEVICES = Path("/dev")
GPU_FILES = ("nvidia[0-9]*", "dxg", "nvhost-gpu")
"""Device files of drivers that CUDA can use: NVIDIA, WSL, NVIDIA Jetson."""


def check_run(config: Config, *, sends_weights: bool = True) -> None:
    """Check the configuration and this machine, select the device of `auto`, make paths absolute, and read the judge's
    template.

    Other processes may have another working directory, no access to the template's file, and no GPU that they see.
    `sends_weights`: False for engines that load model.hf_path and have no trainer ranks.

    Raises: ConfigError, DataError for the first setting that cannot work.
    """
    resolve_device(config.cluster)
    validate(config)
    validate_judge(config.judge, config.rollout, config.model, cuda=config.cluster.device == "cuda")
    if uses_reward_model(config.reward_model) and not is_supervised(config.algorithm):
        validate_reward_model(config)
    for problem in (*cannot_run(config), missing_engine(config.algorithm, config.rollout, config.judge)):
        if problem is not None:
            raise ConfigError(problem)
    if sends_weights and not is_supervised(config.algorithm):
        _check_nccl(config)
    # Only for the error: the key is read again when the server is called.
    server_key(config.judge)
    _check_cluster(config.cluster)
    _check_placement(config, 0 if is_supervised(config.algorithm) else config.rollout.num_engines)
    _check_data(config.data, validates=not is_warm_start(config))
    make_paths_absolute(config)
    if sends_weights and not is_supervised(config.algorithm) and config.weights.directory is not None:
        SharedFolder("weights.directory", config.weights.directory).check_writable()
        if config.rollout.engine == "sglang":
            check_sglang_files("weights.directory", config.weights.directory)
    if uses_judge(config.judge):
        config.judge.template = template_text(config.judge)


def check_update(config: Config) -> None:
    """Make the checks of `check_run` for an update without engines, data and models that score responses.

    Raises: ConfigError for the first setting that cannot work.
    """
    resolve_device(config.cluster)
    validate(config)
    _check_cluster(config.cluster)
    _check_placement(config, num_engines=0)
    make_paths_absolute(config)


def missing_files(config: Config, *, cuda: bool) -> list[str]:
    """Return one message for each of data, model and judge whose files are missing or invalid on this machine. `cuda`:
    the run uses GPUs."""
    messages = []
    for check in (
        lambda: _check_data(config.data, validates=not is_warm_start(config)),
        lambda: _check_model(config.model),
        lambda: validate_judge(config.judge, config.rollout, config.model, cuda=cuda),
    ):
        try:
            check()
        except ConfigError as error:
            messages.append(str(error))
    return messages


def resolve_device(cluster: ClusterConfig) -> None:
    """Replace cluster.device=auto by the device of this machine, once and before all rules that depend on it.

    `prepare` rejects GPUs that torch cannot use.
    """
    if cluster.device == "auto":
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        cluster.device = "cuda" if not hidden and has_gpu() and torch_has_cuda() else "cpu"


def has_gpu(devices: Path | None = None) -> bool:
    """Return True if a driver of NVIDIA GPUs has created device files. This check needs no library."""
    return any(any((devices or DEVICES).glob(pattern)) for pattern in GPU_FILES)


def torch_has_cuda() -> bool:
    """Return True if the installed torch was built for CUDA, found without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).parent / "version.py"
    return re.search(r"^cuda\b.*= *'", version.read_text(encoding="utf-8"), re.MULTILINE) is not None


def _check_placement(config: Config, num_engines: int) -> None:
    """Place the processes, only for the errors: the run computes the placement again."""
    cluster, on_gpus = config.cluster, config.cluster.uses_cuda
    place(cluster, config.rollout, config.num_trainer_ranks, on_gpus=on_gpus, num_engines=num_engines)


def _check_nccl(config: Config) -> None:
    """Require one NCCL in the environments of the trainer and of SGLang if weights are sent between their GPUs.

    The versions that are loaded are compared when the processes connect, but the engines have loaded the model then.
    """
    uses_nccl = config.cluster.placement == "disaggregated" and config.weights.transport in ("auto", "network")
    if not uses_nccl or config.rollout.engine != "sglang" or config.cluster.device == "cpu":
        return
    packages = nccl_packages()
    if packages is not None and not packages.connect:
        raise ConfigError(
            "rollout.engine=sglang: NCCL sends the weights (cluster.placement=disaggregated), and connects only "
            f"processes with the same version of it; the trainer's environment has {packages.trainer[1]}, and SGLang's "
            f"has {packages.sglang[1]}; {packages.remedy}"
        )


def _check_cluster(cluster: ClusterConfig) -> None:
    """Require the address of a cluster for several nodes, and a GPU on this machine unless the run joins a cluster,
    where other machines may have the GPUs."""
    if cluster.nodes > 1 and cluster.address is None:
        raise ConfigError(
            f"cluster.address must name the Ray cluster that offers cluster.nodes={cluster.nodes} nodes (a job "
            "of `mcore-rl slurm` sets it by itself); on one machine set cluster.nodes=1 and more cluster.gpus_per_node"
        )
    if cluster.device == "cuda" and cluster.address is None and not has_gpu():
        raise ConfigError(
            "cluster.device=cuda, but this machine has no GPU (there is no /dev/nvidia0); set cluster.device=cpu, or "
            "cluster.address to a Ray cluster that has GPUs"
        )


def check_outputs(config: Config) -> None:
    """Require that the exports of an unfinished run do not exist, that their URLs and checkpoint.copy_to can be read,
    and that this run owns the copies of checkpoints there.

    Raises: ConfigError naming the key.
    """
    trainer, copy_to = config.trainer, config.checkpoint.copy_to
    if copy_to is not None:
        from mcore_rl.trainer.copies import check_copies

        check_copies(copy_to, Path(config.run.dir) / "checkpoints")
    for key in ("export_hf", "export_adapter"):
        target = getattr(trainer, key)
        if target is not None and has_export(f"trainer.{key}", target):
            raise ConfigError(f"trainer.{key}={target} exists already; remove it or name another directory")


def _check_model(model: ModelConfig) -> None:
    """Require that files of weights and tokenizer exist. Their contents are checked when a run starts."""
    directory = Path(model.hf_path)
    read_hf_config(model)
    if not model.random_init and not any(directory.glob("*.safetensors")):
        raise ConfigError(f"model.hf_path={directory}: no safetensors there; set it to a directory with the weights")
    if model.tokenizer_path is not None and not Path(model.tokenizer_path).exists():
        raise ConfigError(f"model.tokenizer_path={model.tokenizer_path} does not exist")


def _check_data(data: DataConfig, *, validates: bool) -> None:
    """Require existing data files of a known format, and valid set names and weights. Reads no rows."""
    find_files(data.train, "data.train")
    if data.val_sets is not None and not data.val_sets:
        raise ConfigError("data.val is an empty mapping; set it to {name: path}, to a path, or to null")
    for name in data.val_sets or ():
        # Names of sets are the last part of metric names.
        if re.fullmatch(r"[\w.-]{1,100}", name) is None:
            raise ConfigError(
                f"data.val: {name!r} cannot name a set, as metrics end with it (val/accuracy/<name>); use letters, "
                "digits, _, - and ."
            )
    for key, names in data.validation.items():
        # A warm start reads no validation data.
        if validates:
            find_files(names, key)
    if data.weights and data.curriculum is not None:
        raise ConfigError(
            "data.weights has no effect with data.curriculum, whose function determines how often a row is sampled: it"
            " may return an index more than once; set one of the two"
        )
    file_weights(data.weights, data.train)
