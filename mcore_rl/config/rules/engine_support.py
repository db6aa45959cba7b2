"""Configurations that this version or this machine cannot run."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_rl.config.algorithm import AlgorithmConfig, is_supervised
from mcore_rl.config.reward import JudgeConfig
from mcore_rl.config.roles import EngineRole
from mcore_rl.config.schema import Config, RolloutConfig
from mcore_rl.errors import ConfigError

SGLANG_PYTHON = "MCORE_RL_SGLANG_PYTHON"
"""Environment variable with the path of the interpreter in SGLang's environment."""

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Names of the number of routed experts in config.json, by model family."""
MLP_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
SGLANG_MLP_ROWS = 32
"""SGLang on CPU pads the inner size of MLPs to a multiple of this for each rank."""

SGLANG_VERSION = "0.5.23"
"""The only supported version, since its internals are used."""


def sglang_python() -> Path:
    """Return the path of SGLang's interpreter; the default is where `make sglang` installs it."""
    default = Path(__file__).parents[3] / ".venv-sglang" / "bin" / "python"
    return Path(os.environ.get(SGLANG_PYTHON, default))


def sglang_packages() -> Iterator[Path]:
    """Yield the folders of packages in SGLang's environment; none if its interpreter belongs to no environment."""
    yield from sglang_python().absolute().parent.parent.glob("lib/python3*/site-packages")


def sglang_version() -> str | None:
    """Return the version of SGLang in its environment, found without importing it; None if there is none."""
    # SGLang has an environment of its own, with another Python version or other packages.
    for packages in sglang_packages():
        for distribution in importlib.metadata.distributions(name="sglang", path=[str(packages)]):
            return distribution.version
    return None


def missing_engine(algorithm: AlgorithmConfig, rollout: RolloutConfig, judge: JudgeConfig) -> str | None:
    """Return the remedy if rollout or judge use an engine that is not installed on this machine; else None."""
    keys = sglang_keys(algorithm, rollout, judge)
    python, version = sglang_python(), sglang_version()
    if not keys or (python.is_file() and version == SGLANG_VERSION):
        return None
    found = f"has {f'SGLang {version}' if version else 'no SGLang'}" if python.is_file() else "is not there"
    return (
        f"{keys[0]}=sglang: {python} {found}, and SGLang {SGLANG_VERSION} is needed; run `make sglang`, or set "
        f"{SGLANG_PYTHON} to the interpreter of an environment that has it"
    )


def check_sglang_model(role: EngineRole, hf: dict[str, Any], *, cuda: bool) -> None:
    """Reject models that SGLang computes wrongly: it treats every layer of Qwen2-MoE and Qwen3-MoE as one with experts,
    and on CPU it silently pads heads and MLPs that its ranks do not divide. Also reject settings with which it would
    not start.

    cuda: the engine runs on GPUs.
    Raises: ConfigError.
    """
    engine, fraction = role.key("engine"), role.section.gpu_memory_fraction
    if role.section.engine != "sglang":
        return
    if hf.get("mlp_only_layers") or hf.get("decoder_sparse_step", 1) != 1:
        kind = hf.get("model_type")
        raise ConfigError(f"{engine}=sglang cannot run a {kind} with dense layers (mlp_only_layers); set it to vllm")
    if hf.get("shared_expert_intermediate_size") and not cuda:
        # SGLang 0.5.23 computes the gate in a Triton kernel (fused_gate_sigmoid_mul_add).
        raise ConfigError(
            f"{engine}=sglang cannot run a shared expert with a gate (shared_expert_intermediate_size) on CPU; set it "
            "to vllm, or cluster.device to cuda"
        )
    if hf.get("kv_lora_rank") and rope_section(hf, "yarn")[1] is None and not cuda:
        raise ConfigError(
            f"{engine}=sglang cannot run latent attention (kv_lora_rank) without YaRN on CPU; set it to vllm, or "
            "cluster.device to cuda"
        )
    if cuda and fraction == 1:
        raise ConfigError(
            f"{role.key('gpu_memory_fraction')}=1 leaves SGLang no memory for activations and CUDA graphs, which it "
            "does not count as its own; set it to at most 0.95"
        )
    if hf.get("vision_config") and role.section.tp > 1:
        raise ConfigError(
            f"{role.key('tp')}={role.section.tp}: SGLang with a vision tower is not tested on several ranks; set it to "
            f"1, or {engine} to vllm"
        )
    if role.section.data_parallel_attention:
        _check_data_parallel_attention(role, hf, cuda=cuda)
    if role.section.tp > 1:
        _check_sglang_ranks(role, hf, cuda=cuda)


def _check_data_parallel_attention(role: EngineRole, hf: dict[str, Any], *, cuda: bool) -> None:
    key, family = role.key("data_parallel_attention"), hf.get("model_type")
    if family == "mixtral":
        raise ConfigError(f"{key}=true: SGLang divides the attention of {family} among all ranks; set it to false")
    if family == "glm4_moe" and hf.get("n_shared_experts") and not cuda:
        raise ConfigError(
            f"{key}=true: SGLang on CPU divides the shared experts of {family} among all ranks; set it to false, or "
            "use GPUs (cluster.device=cuda)"
        )


def _check_sglang_ranks(role: EngineRole, hf: dict[str, Any], *, cuda: bool) -> None:
    tp, key, engine = role.section.tp, role.key("tp"), role.key("engine")
    limits: dict[str, int] = {}
    if not cuda:  # also with data_parallel_attention, where the ranks do not divide the heads
        limits |= {"num_attention_heads": tp, "num_key_value_heads": tp}
        limits |= dict.fromkeys(MLP_SIZES, SGLANG_MLP_ROWS * tp)
    if role.section.expert_parallel:
        limits |= dict.fromkeys(EXPERT_COUNTS, tp)
        if not hf.get("n_shared_experts"):  # their size is a multiple of moe_intermediate_size, and they are divided
            limits.pop("moe_intermediate_size", None)
    where, remedy = ("", "") if cuda else (" on CPU", ", or use GPUs (cluster.device=cuda)")
    for name, multiple in limits.items():
        size = hf.get(name)
        if size and size % multiple:
            raise ConfigError(
                f"{key}={tp}: SGLang{where} needs {name} to be a multiple of {multiple}, and the model has {size}; "
                f"lower it, or set {engine}=vllm{remedy}"
            )


def check_attention(rollout: RolloutConfig) -> None:
    """Check the keys of attention data parallelism.

    Raises: ConfigError.
    """
    if not rollout.data_parallel_attention:
        return
    key = "rollout.data_parallel_attention"
    if rollout.engine != "sglang":
        raise ConfigError(f"{key}=true needs rollout.engine=sglang; set it to false, or rollout.engine to sglang")
    if not rollout.expert_parallel:
        raise ConfigError(f"{key}=true divides nothing but experts; set rollout.expert_parallel=true, or it to false")
    if rollout.max_concurrent_requests % rollout.tp:
        raise ConfigError(
            f"{key}=true divides rollout.max_concurrent_requests={rollout.max_concurrent_requests} among "
            f"rollout.tp={rollout.tp} ranks; set it to a multiple of {rollout.tp}"
        )


ORIGINAL = "original_max_position_embeddings"


def rope_section(hf: dict[str, Any], kind: str) -> tuple[str, dict[str, Any] | None]:
    """Return the name of the rotation settings in config.json, and their contents if their rope type is `kind`. A
    top-level ORIGINAL replaces the value in the settings, as in transformers."""
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    section = hf.get(name)
    if not isinstance(section, dict) or section.get("rope_type", section.get("type")) != kind:
        return name, None
    return name, section | ({ORIGINAL: hf[ORIGINAL]} if ORIGINAL in hf else {})


def exact_positions(hf: dict[str, Any]) -> tuple[str, int] | None:
    """Return the field of config.json that limits the tokens of a sequence, and its value; None without such a field.

    Beyond max_position_embeddings, the rope type dynamic changes the frequencies with the length of the sequence;
    beyond the original length, longrope has other frequencies.
    """
    name, section = rope_section(hf, "longrope")
    fields = {
        "max_position_embeddings": hf.get("max_position_embeddings"),
        f"{name}.{ORIGINAL}": section.get(ORIGINAL) if section else None,
    }
    # The model's family rejects other values.
    limits = [(key, limit) for key, limit in fields.items() if isinstance(limit, int) and limit > 0]
    return min(limits, key=lambda limit: limit[1], default=None)


def cannot_run(config: Config) -> list[str]:
    """Return the features that this version lacks to run the configuration, each starting with its key.

    cluster.device=auto counts as GPUs, as in a plan; runs replace it first.
    """
    if config.cluster.device == "cpu" or is_supervised(config.algorithm):
        return []
    if config.actor.moe.router_replay == "engine" and config.rollout.engine == "vllm":
        # vLLM 0.32 returns them with its second model runner only; engines.vllm.sampler needs the first.
        remedy = "set rollout.engine=sglang, or actor.moe.router_replay=policy"
        return [f"actor.moe.router_replay=engine: vLLM returns no experts on GPUs here; {remedy}"]
    return []


def sglang_keys(algorithm: AlgorithmConfig, rollout: RolloutConfig, judge: JudgeConfig) -> list[str]:
    """Return the keys that select SGLang for engines that the run starts."""
    if is_supervised(algorithm):
        return []
    keys = ["rollout.engine"] if rollout.engine == "sglang" else []
    if judge.hf_path is not None and judge.engine == "sglang":
        keys.append("judge.engine")
    return keys
