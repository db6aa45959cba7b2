"""Updates of float16 models whose gradients overflow: they are skipped on all ranks, without a trace in the state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.config.models import LoraConfig
from mcore_rl.errors import NonFiniteError
from mcore_rl.megatron.step.loss.rank_batch import RankBatch
from mcore_rl.types import merge_metrics
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import SMALL, launch_cases
from tests.distributed.launch import launch
from tests.distributed.saving import save_checkpoint
from tests.distributed.two_steps import OVERLAPPED, differences
from tests.tiny_models import write_tiny_model

TOO_HIGH, SCALE = 2.0**40, 2.0**10
CASES: dict[int, dict[str, tuple[Any, ...]]] = {
    1: {
        "v3": ("deepseek_v3", {}, {}),
        "dense adapters": ("qwen3", {}, {"lora": LoraConfig(rank=4)}),
    },
    2: {
        "v3 ep2 replicated": ("deepseek_v3", {"ep": 2}, {"distributed_optimizer": False}),
        "v3 pp2 overlapped": ("deepseek_v3", {"pp": 2}, OVERLAPPED),
        "dense fsdp2": ("qwen3", {"strategy": "fsdp2"}, {}),
        "dense dp2 in host memory": ("qwen3", {}, {"cpu_offload": True}),
    },
}
NAMES = [name for cases in CASES.values() for name in cases]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    kinds = ("qwen3", "deepseek_v3")
    return {kind: str(write_tiny_model(root / kind, kind, num_hidden_layers=2)) for kind in kinds}


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    return launch_cases(_overflow, CASES, directories)


def _actor(directory: str, parallel: dict[str, Any], scale: float, **changes: Any) -> Any:
    config = policy_batch.config(directory, parallel, SMALL)
    optimizer = config.actor.optimizer
    optimizer.cpu_offload = changes.pop("cpu_offload", False)
    vars(config.actor).update(changes)
    config.model.dtype = "float16"
    optimizer.lr, optimizer.schedule, optimizer.decay_steps = 4e-3, "linear", 10
    optimizer.loss_scale.initial, optimizer.loss_scale.hysteresis = scale, 1
    config.actor.moe.bias_update_rate = 0.01 if "deepseek" in directory else 0.0
    return policy_batch.build_actor(config)


def _state(actor: Any) -> dict[str, torch.Tensor]:
    """Copies of weights, expert biases, main parameters, moments and schedule."""
    from mcore_rl.megatron.optim.optimizer_state import parameter_states

    actor.gather_parameters()
    tensors = {name: tensor.clone() for name, tensor in actor.tensors().items()}
    for index, state in enumerate(parameter_states(actor.optimizer).values()):
        tensors |= {f"{index}.{name}": tensor.clone() for name, tensor in state.tensors.items()}
    rate = actor.optimizer.param_groups[0]["lr"]
    return tensors | {"schedule": torch.tensor([actor.scheduler.num_steps, rate], dtype=torch.float64)}


def _overflow(rank: int, directories: dict[str, str], cases: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (kind, parallel, changes) in cases.items():
        overflows = _actor(directories[kind], parallel, TOO_HIGH, **changes)
        before = _state(overflows)
        of = found[name] = {"metrics": _update(overflows)}
        of["changed"] = differences(before, _state(overflows))
        of["scale"] = overflows.loss_scaler.value
        overflows.loss_scaler.load({"scale": SCALE, "growth_tracker": 0, "hysteresis_tracker": 1})
        expected = _actor(directories[kind], parallel, SCALE, **changes)
        for actor in (overflows, expected):
            of["next"] = _update(actor)
        of["differing"] = differences(_state(expected), _state(overflows))
        of["moved"] = differences(before, _state(overflows))
    return found


def _update(actor: Any) -> dict[str, Any]:
    batch, _ = actor.recompute_logp(policy_batch.shares(actor), policy_batch.chunks())
    metrics: dict[str, Any] = actor.update(batch, 0)
    actor.gather_parameters()
    return metrics


@pytest.mark.parametrize("case", NAMES)
def test_overflow_skips_the_update_and_halves_the_scale(case: str, results: Any) -> None:
    for rank in results[case]:
        assert rank["changed"] == []
        assert rank["scale"] == TOO_HIGH / 2
    metrics = merge_metrics([rank["metrics"] for rank in results[case]])
    assert (metrics["actor/loss_scale"].value, metrics["actor/skipped_updates"].value) == (TOO_HIGH, 1)
    assert np.isfinite(metrics["actor/loss"].value)
    # Gradients that are not finite have no norm.
    assert [name for name in metrics if "grad_norm" in name] == []


@pytest.mark.parametrize("case", NAMES)
def test_update_after_an_overflow_equals_one_without_bitwise(case: str, results: Any) -> None:
    for rank in results[case]:
        assert rank["differing"] == []
        assert "schedule" in rank["moved"]
        assert any(name.endswith("exp_avg") for name in rank["moved"])
    metrics = merge_metrics([rank["next"] for rank in results[case]])
    assert metrics["actor/skipped_updates"].value == 0


def test_overflow_of_one_ranks_experts_skips_all_parameters(directories: dict[str, str]) -> None:
    """Megatron's own scalers would differ between dense and expert parameters afterwards."""
    for rank in launch(_overflow_of_experts, 2, directories["deepseek_v3"]):
        assert rank["changed"] == []
        assert rank["scales"] == [SCALE, SCALE]
        assert rank["differing"] == []


def _overflow_of_experts(rank: int, directory: str) -> dict[str, Any]:
    actor = _actor(directory, {"ep": 2}, 2 * SCALE)
    before = _state(actor)
    expert = next(p for name, p in actor.chunks[0].named_parameters() if ".experts." in name)
    hook = expert.register_hook(lambda gradient: gradient * (np.inf if rank == 1 else 1))
    _update(actor)
    hook.remove()
    found: dict[str, Any] = {"changed": differences(before, _state(actor))}
    found["scales"] = [float(part.get_loss_scale()) for part in actor.optimizer.chained_optimizers]
    expected = _actor(directory, {"ep": 2}, SCALE)
    for each in (actor, expected):
        _update(each)
    return found | {"differing": differences(_state(expected), _state(actor))}


def test_overflow_of_the_critic_is_reported_under_its_name(directories: dict[str, str]) -> None:
    [(skipped, trained)] = launch(_overflow_of_critic, 1, directories["qwen3"])
    assert (skipped["critic/loss_scale"].value, skipped["critic/skipped_updates"].value) == (TOO_HIGH, 1)
    assert "critic/grad_norm" not in skipped
    assert (trained["critic/skipped_updates"].value, trained["critic/grad_norm"].count) == (0, 1)


def _overflow_of_critic(rank: int, directory: str) -> list[dict[str, Any]]:
    from mcore_rl.megatron.roles.critic import MegatronCritic

    config = policy_batch.config("", {}, SMALL)
    config.critic.hf_path, config.critic.tokens_per_microbatch = directory, SMALL
    config.model.dtype, config.critic.optimizer.loss_scale.initial = "float16", TOO_HIGH
    critic = MegatronCritic(config, rank, 1, None)
    batch = critic.values(policy_batch.shares(critic), policy_batch.chunks())
    returns = {sample: own + 1 for sample, own in batch.values.items()}
    found = [critic.update(batch, 0, returns)]
    critic.loss_scaler.load({"scale": SCALE, "growth_tracker": 0, "hysteresis_tracker": 1})
    return [*found, critic.update(batch, 0, returns)]


def test_overflow_at_the_smallest_scale_ends_the_run_with_names(directories: dict[str, str]) -> None:
    for found in launch(_exhaust, 2, directories["qwen3"]):
        assert "rank 0: gradient of" in found["message"]
        assert "actor.optimizer.loss_scale.minimum=1.09951e+12" in found["message"]
        assert "model.dtype=bfloat16" in found["message"]
        assert found["skipped"] == ["actor/skipped_updates", "actor/skipped_updates"][: found["reports"]]
        assert found["changed"] == []


def test_sample_that_is_not_finite_is_no_matter_of_the_scale(directories: dict[str, str]) -> None:
    """Gradients of the ranks without that sample are not finite either."""
    for messages in launch(_poison, 2, directories["qwen3"]):
        for message in messages:
            assert "sample 8 (" in message
            assert message.endswith("set model.dtype=bfloat16")
            assert "gradient of" not in message


def _poison(rank: int, directory: str) -> list[str]:
    actor = _actor(directory, {}, SCALE)
    shares = policy_batch.shares(actor)
    advantages = np.where(shares[0].samples == 8, np.nan, shares[0].advantages)
    batch = RankBatch([replace(shares[0], advantages=advantages)], policy_batch.chunks())
    messages = []
    for minimum in (1.0, SCALE):
        actor.loss_scaler.settings.minimum = minimum
        assert actor.loss_scaler.is_exhausted == (minimum == SCALE)
        with pytest.raises(NonFiniteError) as caught:
            actor.update(batch, 0)
        messages.append(str(caught.value))
    return messages


def test_outputs_of_every_model_that_are_not_finite_advise_bfloat16(directories: dict[str, str]) -> None:
    [messages] = launch(_outputs, 1, directories["qwen3"])
    wanted = ("log-probability of", "log-probability of the reference", "output of the teacher", "value of")
    for message, start in zip(messages, wanted, strict=True):
        assert message.startswith(f"rank 0: {start}")
        assert message.endswith("set model.dtype=bfloat16")


def _outputs(rank: int, directory: str) -> list[str]:
    from mcore_rl.megatron.roles.critic import MegatronCritic

    config = policy_batch.config(directory, {}, SMALL)
    config.model.dtype, config.critic.hf_path, config.critic.tokens_per_microbatch = "float16", directory, SMALL
    config.algorithm.kl.in_loss, config.reference.offload = 0.1, False
    config.teacher.hf_path, config.teacher.in_advantage, config.teacher.offload = directory, 0.1, False
    actor = policy_batch.build_actor(config)
    shares, chunks = policy_batch.shares(actor), policy_batch.chunks()
    calls = [
        (actor, lambda: actor.sequence_logp(shares, chunks)),
        (actor.reference, lambda: actor.reference.logp(shares[0], chunks)),
        (actor.teachers[0], lambda: actor.teachers[0].outputs(shares[0], chunks)),
    ]
    messages = [_error_of(model, call) for model, call in calls]
    critic = MegatronCritic(config, rank, 1, None)
    return [*messages, _error_of(critic, lambda: critic.values(shares, chunks))]


def _error_of(model: Any, call: Callable[[], object]) -> str:
    """Return the error of a call of a model whose weights are infinite."""
    with torch.no_grad():
        for parameter in model.chunks[0].parameters():
            parameter.fill_(np.inf)
    with pytest.raises(NonFiniteError) as caught:
        call()
    return str(caught.value)


def _exhaust(rank: int, directory: str) -> dict[str, Any]:
    actor = _actor(directory, {}, TOO_HIGH)
    scaler = actor.loss_scaler
    scaler.settings.minimum, scaler.hysteresis = TOO_HIGH, 2
    scaler.min_scale.fill_(TOO_HIGH)
    scaler.load({"scale": TOO_HIGH, "growth_tracker": 0, "hysteresis_tracker": 2})
    before = _state(actor)
    skipped = [name for name, metric in _update(actor).items() if name.endswith("skipped_updates")]
    with pytest.raises(NonFiniteError) as caught:
        _update(actor)
    return {
        "message": str(caught.value),
        "skipped": skipped,
        "reports": int(actor.is_reporting_rank),
        "changed": differences(before, _state(actor)),
    }


def test_checkpoint_restores_the_loss_scale_in_another_layout(directories: dict[str, str], tmp_path: Path) -> None:
    for rank in launch(_resume, 2, directories["deepseek_v3"], str(tmp_path / "saved")):
        assert rank["states"] == [rank["saved"]] * 2
        assert rank["saved"] == {"scale": TOO_HIGH / 2, "growth_tracker": 1, "hysteresis_tracker": 0}
        assert rank["differing"] == []
        # A checkpoint of an earlier version, without a scale.
        assert rank["earlier"] == TOO_HIGH


def _resume(rank: int, directory: str, saved: str) -> dict[str, Any]:
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint

    actor = _actor(directory, {"ep": 2}, TOO_HIGH)
    _update(actor)
    actor.loss_scaler._growth_tracker = 1
    found: dict[str, Any] = {"saved": actor.loss_scaler.state(), "states": []}
    save_checkpoint(saved, actor)
    same = _actor(directory, {"ep": 2}, SCALE)
    load_checkpoint(saved, same)
    found["states"].append(same.loss_scaler.state())
    for each in (actor, same):
        each.loss_scaler._scale.fill_(SCALE)
        _update(each)
    found["differing"] = differences(_state(actor), _state(same))
    # Its process groups replace those of the others.
    other = _actor(directory, {"pp": 2}, SCALE)
    load_checkpoint(saved, other)
    found["states"].append(other.loss_scaler.state())
    if rank == 0:
        common = torch.load(Path(saved, "common.pt"), weights_only=True)
        del common["loss_scale"]
        torch.save(common, Path(saved, "common.pt"))
    torch.distributed.barrier()
    earlier = _actor(directory, {"ep": 2}, TOO_HIGH)
    load_checkpoint(saved, earlier)
    return found | {"earlier": earlier.loss_scaler.value}
