"""Settings of SGLang's ranks by device, and the stream of their calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.settings import EngineSettings
from mcore_rl.engines.sglang import environment
from mcore_rl.engines.sglang.arguments import server_arguments, static_fraction
from mcore_rl.engines.sglang.devices.cpu import Cpu
from mcore_rl.engines.sglang.devices.cuda import Gpu
from mcore_rl.engines.sglang.environment import MemorySaver, find_memory_saver, on_cuda, rank_environment
from mcore_rl.engines.sglang.rank import Rank
from mcore_rl.engines.sglang.settings import RankSettings
from mcore_rl.errors import ConfigError
from tests.tiny_models import write_tiny_model

LIBRARY = "torch_memory_saver_hook_mode_preload_cu13.abi3.so"
ONLY_ON_CPU = {"attention_backend", "SGLANG_USE_CPU_ENGINE", "SGLANG_CPU_OMP_THREADS_BIND"}


def make_environment(directory: Path, cuda: str, *libraries: str) -> Path:
    """Make a virtual environment with a torch for a CUDA version. Returns its interpreter."""
    packages = directory / "lib/python3.11/site-packages"
    (packages / "torch").mkdir(parents=True)
    (packages / "torch" / "version.py").write_text(f"__version__ = '2.14.1'\ncuda: Optional[str] = {cuda}\n")
    for library in libraries:
        (packages / library).parent.mkdir(parents=True, exist_ok=True)
        (packages / library).touch()
    return directory / "bin" / "python"


def test_on_cuda_replaces_trainer_settings_and_preloads_memory_saver() -> None:
    given = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_CUMEM_ENABLE": "1",
        "LD_PRELOAD": "/lib/jemalloc.so",
        "LD_LIBRARY_PATH": "/lib",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True",
    }
    changed = on_cuda(given, MemorySaver(Path("/saver.so"), Path("/cu13/lib")))
    assert changed["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert (changed["NCCL_CUMEM_ENABLE"], changed["NCCL_NVLS_ENABLE"]) == ("1", "0")
    assert (changed["LD_PRELOAD"], changed["LD_LIBRARY_PATH"]) == ("/saver.so:/lib/jemalloc.so", "/cu13/lib:/lib")
    assert "LD_LIBRARY_PATH" not in on_cuda({}, MemorySaver(Path("/saver.so")))
    assert "PYTORCH_CUDA_ALLOC_CONF" not in changed
    assert changed["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    assert changed["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"
    assert not ONLY_ON_CPU & changed.keys()


@pytest.mark.parametrize(("requests", "ranks", "limit"), [(2048, 8, "256"), (1024, 8, None), (2048, 1, None)])
def test_gpu_complete_deepep_holds_a_token_of_each_request(
    requests: int, ranks: int, limit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    arguments: Any = SimpleNamespace(max_running_requests=requests, attn_dp_size=ranks)
    Gpu(RankSettings({}, ranks, 0)).complete(arguments)
    assert os.environ.get("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK") == limit


def test_find_memory_saver_is_for_the_cuda_of_torch(tmp_path: Path) -> None:
    runtime = "nvidia/cu13/lib/libcudart.so.13"
    python = make_environment(tmp_path / "a", "'13.0'", LIBRARY, LIBRARY.replace("13", "12"), runtime)
    found = find_memory_saver(python)
    assert found.library.name == LIBRARY
    assert found.cuda_runtime == found.library.parent / "nvidia/cu13/lib"
    assert find_memory_saver(make_environment(tmp_path / "system", "'13.0'", LIBRARY)).cuda_runtime is None
    with pytest.raises(ConfigError, match=r"needs PyTorch with CUDA, .* run `make sglang EXTRA=gpu`"):
        find_memory_saver(make_environment(tmp_path / "b", "None", LIBRARY))
    with pytest.raises(ConfigError, match=r"needs torch_memory_saver for CUDA 13, .* run `make sglang EXTRA=gpu`"):
        find_memory_saver(make_environment(tmp_path / "c", "'13.0'"))
    with pytest.raises(ConfigError, match="belongs to no virtual environment"):
        find_memory_saver(tmp_path / "d" / "bin" / "python")


def test_rank_environment_has_the_variables_of_its_device_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "sglang_python", lambda: make_environment(tmp_path, "'13.0'", LIBRARY))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    cpu, cuda = rank_environment("cpu", 1, b"key"), rank_environment("cuda", 1, b"key")
    assert cpu["SGLANG_USE_CPU_ENGINE"] == "1"
    assert ONLY_ON_CPU & cuda.keys() == set()
    assert "LD_PRELOAD" not in cpu or cpu["LD_PRELOAD"] == os.environ["LD_PRELOAD"]
    assert cuda["LD_PRELOAD"].startswith(str(tmp_path))
    assert cpu["PYTHONPATH"] == cuda["PYTHONPATH"] != "/elsewhere"


def test_rank_environment_identifies_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = make_environment(tmp_path, "'13.0'", LIBRARY)
    monkeypatch.setattr(environment, "sglang_python", lambda: python)
    first, second, other = (rank_environment("cuda", 2, key)["SGLANG_RUN_ID"] for key in (b"one", b"one", b"two"))
    assert first == second != other
    assert b"one".hex() not in first


def test_server_arguments_on_gpu_have_graphs_and_no_fixed_cache(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, "qwen3", num_hidden_layers=1)

    def arguments(device: str, **rollout: Any) -> dict[str, object]:
        config = RolloutConfig(engine="sglang", **rollout)
        settings = EngineSettings(directory, config, dtype="bfloat16", seed=1, timeout_seconds=1.0)
        return server_arguments(settings, device)

    cpu, cuda = arguments("cpu"), arguments("cuda")
    assert (cpu["device"], cpu["disable_cuda_graph"], cpu["attention_backend"]) == ("cpu", True, "torch_native")
    assert (cuda["device"], cuda["enable_memory_saver"]) == ("cuda", True)
    assert not {"disable_cuda_graph", "attention_backend", "mem_fraction_static"} & cuda.keys()
    assert arguments("cuda", enforce_eager=True)["disable_cuda_graph"] is True
    overlaps = [not arguments("cuda", overlap_schedule=value)["disable_overlap_schedule"] for value in (False, True)]
    assert overlaps == [False, True]


def test_static_fraction_leaves_the_rest_of_the_card_free() -> None:
    gib = 2**30
    # Another process holds 30 of 80 GiB: of the 50 that are free, 80 * 0.4 = 32 stay free, and 18 are for SGLang.
    assert static_fraction(50 * gib, 80 * gib, 0.6, "rollout.gpu_memory_fraction") == pytest.approx(18 / 50)
    assert static_fraction(80 * gib, 80 * gib, 0.6, "rollout.gpu_memory_fraction") == pytest.approx(0.6)
    with pytest.raises(ConfigError, match=r"^judge.gpu_memory_fraction=0.6 leaves 32.0 GiB .* only 30.0 GiB are free"):
        static_fraction(30 * gib, 80 * gib, 0.6, "judge.gpu_memory_fraction")
    with pytest.raises(ConfigError, match=r"^rollout.gpu_memory_fraction=1 leaves SGLang no memory for activations"):
        static_fraction(80 * gib, 80 * gib, 1.0, "rollout.gpu_memory_fraction")


def test_local_rank_counts_the_ranks_of_a_host() -> None:
    settings = RankSettings({}, 8, 0, num_hosts=2)
    local = [RankSettings(**vars(settings) | {"rank": rank}).local_rank for rank in range(8)]
    assert local == [0, 1, 2, 3, 0, 1, 2, 3]


class FakeScheduler:
    """Records the calls and the stream context of a rank."""

    vocab_size = 96

    def __init__(self) -> None:
        self.moves: list[str] = []

    @contextmanager
    def stream(self) -> Iterator[None]:
        self.moves.append("enter")
        try:
            yield
        finally:
            self.moves.append("exit")

    def step(self) -> str:
        self.moves.append("step")
        return "outputs"

    def begin_update(self) -> None:
        raise LookupError


def test_rank_runs_every_call_in_the_stream_of_its_scheduler() -> None:
    rank, scheduler = Rank(), FakeScheduler()
    rank._scheduler = scheduler  # type: ignore[assignment]
    assert rank.call(("step", ())) == "outputs"
    with pytest.raises(LookupError):
        rank.call(("begin_update", ()))
    assert scheduler.moves == ["enter", "step", "exit", "enter", "exit"]


@pytest.mark.parametrize("overlap", [False, True])
def test_gpu_overlap_schedule_has_a_stream_of_its_own_and_a_barrier(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    pool = iter([7, 8])
    monkeypatch.setattr("torch.cuda.Stream", lambda priority: SimpleNamespace(cuda_stream=next(pool)))
    seven = SimpleNamespace(cuda_stream=7)
    scheduler: Any = SimpleNamespace(enable_overlap=overlap, schedule_stream=seven, forward_stream=seven)
    Gpu(RankSettings({}, 1, 0)).adapt(scheduler)
    if overlap:
        assert scheduler.schedule_stream.cuda_stream == 8
        assert scheduler._war_barrier_enabled
    else:
        assert vars(scheduler).keys() == {"enable_overlap", "schedule_stream", "forward_stream"}


@pytest.mark.parametrize(
    ("family", "fields", "attention_ranks", "elements"),
    [
        ("qwen3", {"num_key_value_heads": 4, "head_dim": 16}, 1, 2 * 2 * 16),
        ("qwen3", {"num_key_value_heads": 4, "head_dim": 16}, 2, 2 * 4 * 16),  # all heads, of half of the requests
        ("deepseek_v3", {"kv_lora_rank": 32, "qk_rope_head_dim": 8}, 1, 32 + 8),  # the same on both ranks
    ],
)
def test_cpu_cache_holds_the_tokens_of_its_bytes(
    family: str,
    fields: dict[str, int],
    attention_ranks: int,
    elements: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SGLANG_SHARED_EXPERT_TP1", raising=False)
    directory = write_tiny_model(tmp_path, family, num_hidden_layers=2, **fields)
    arguments = SimpleNamespace(
        model_path=str(directory), dtype="bfloat16", tp_size=2, attn_dp_size=attention_ranks, max_total_tokens=None
    )
    Cpu(RankSettings({}, 2, kv_cache_bytes=1000 * 2 * 2 * elements)).complete(cast("Any", arguments))
    assert arguments.max_total_tokens == 1000
    whole_shared_experts = os.environ.pop("SGLANG_SHARED_EXPERT_TP1", None)
    assert whole_shared_experts == ("1" if attention_ranks > 1 else None)
