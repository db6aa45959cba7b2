"""actor.optimizer.cpu_offload: training is bitwise unchanged, and no optimizer state is on the device between steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.errors import OffloadedError
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import case_parameters
from tests.distributed.two_steps import OVERLAPPED, configure, differences, held_tensors, run_cases, train_two_steps

PIECE_ELEMENTS = 5000
"""Size that gives several pieces with several parameters each."""
CASES: dict[int, dict[str, tuple[str, str, dict[str, Any]]]] = {
    1: {"dense float32": ("qwen3", "float32", {})},
    2: {
        "dense dp2 bfloat16 overlapped": ("qwen3", "bfloat16", {"actor": OVERLAPPED}),
        "moe ep2 bfloat16": ("qwen3_moe", "bfloat16", {"ep": 2}),
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Results of all ranks by case."""
    return run_cases(_train_both_ways, CASES, tmp_path_factory.mktemp("host_optimizer"))


def _train_both_ways(rank: int, directories: dict[str, str], root: str, cases: dict[str, Any]) -> dict[str, Any]:
    from mcore_rl.megatron.optim import host_optimizer

    host_optimizer.PIECE_ELEMENTS = PIECE_ELEMENTS
    results: dict[str, Any] = {}
    for name, (kind, dtype, parallel) in cases.items():
        device = _actor(directories[kind], dtype, parallel, on_host=False)
        train_two_steps(device)
        expected = held_tensors(device)
        host = _actor(directories[kind], dtype, parallel, on_host=True)
        found = results[name] = {"built": _main_bytes(host), "largest": _largest(host), "pieces": _watch_pieces(host)}
        # The weights are offloaded and loaded as well.
        train_two_steps(host, host.memory.offload)
        found["pieces"] = list(found["pieces"])
        found["trained"] = _main_bytes(host)
        found["training"] = differences(expected, held_tensors(host))
        host.memory.offload()
        found["refusals"] = _refusals(host)
        found["checkpoint"] = _save_and_load(
            host, _actor(directories[kind], dtype, parallel, on_host=True), Path(root, "checkpoints", name)
        )
    return results


def _actor(directory: str, dtype: str, layout: dict[str, Any], *, on_host: bool) -> Any:
    config = configure(directory, dtype, layout)
    config.actor.optimizer.cpu_offload = on_host
    config.actor.offload.params = config.actor.offload.grads = on_host
    return policy_batch.build_actor(config)


def _main_bytes(actor: Any) -> int:
    """Bytes of main parameters that are copies and have their own storage."""
    from mcore_rl.megatron.optim.main_params import main_parameters, optimizer_parts

    return sum(
        owned.main.untyped_storage().nbytes()
        for part in optimizer_parts(actor.optimizer)
        for owned in main_parameters(part)
        if owned.is_copy
    )


def _watch_pieces(actor: Any) -> list[int]:
    """Record, for every piece, the bytes of main parameters on the device while it is updated."""
    from mcore_rl.megatron.optim.main_params import optimizer_parts

    found: list[int] = []
    for part in optimizer_parts(actor.optimizer):
        part.optimizer._inner.register_step_pre_hook(lambda *_: found.append(_main_bytes(actor)))
    return found


def _largest(actor: Any) -> int:
    """Bytes of the largest copied main parameter."""
    from mcore_rl.megatron.optim.main_params import main_parameters, optimizer_parts

    parts = optimizer_parts(actor.optimizer)
    return max([0, *(4 * o.main.numel() for part in parts for o in main_parameters(part) if o.is_copy)])


def _refusals(actor: Any) -> list[str]:
    """Errors of reading main parameters."""
    main = actor.optimizer.param_groups[0]["params"][0]
    messages = []
    for read in (lambda t: t + 1, lambda t: t.detach(), lambda t: t.tolist(), lambda t: t.zero_()):
        try:
            read(main)
            messages.append("read")
        except OffloadedError as error:
            messages.append(str(error))
    return messages


def _save_and_load(trained: Any, fresh: Any, directory: Path) -> list[str]:
    """Names of tensors that differ if another actor resumes from a checkpoint, after one more step of both."""
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from tests.distributed.saving import save_checkpoint

    save_checkpoint(str(directory), trained)
    load_checkpoint(str(directory), fresh)
    for actor in (trained, fresh):
        train_two_steps(actor)
    return differences(held_tensors(trained), held_tensors(fresh))


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_host_optimizer_trains_bitwise_like_device_optimizer(size: int, case: str, results: Any) -> None:
    assert [rank["training"] for rank in results[case]] == [[]] * size


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_host_optimizer_keeps_at_most_a_piece_on_the_device(size: int, case: str, results: Any) -> None:
    for rank in results[case]:
        assert (rank["built"], rank["trained"]) == (0, 0)
        if "float32" in case:  # its main parameters are the weights
            assert set(rank["pieces"]) == {0}
        else:
            assert 0 < max(rank["pieces"]) <= max(4 * PIECE_ELEMENTS, rank["largest"])
        # Two steps with two updates each, and several pieces per update.
        assert len(rank["pieces"]) > 3 * 4


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_host_optimizer_reading_main_parameters_raises(size: int, case: str, results: Any) -> None:
    for rank in results[case]:
        if "bfloat16" in case:
            assert all("actor.optimizer.cpu_offload" in message for message in rank["refusals"])
        else:
            assert all("actor.offload.params" in message for message in rank["refusals"])


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_host_optimizer_checkpoint_resumes_bitwise(size: int, case: str, results: Any) -> None:
    assert [rank["checkpoint"] for rank in results[case]] == [[]] * size
