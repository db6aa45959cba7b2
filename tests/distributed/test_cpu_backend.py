"""Every fix of the CPU backend: upstream code fails without it and works with it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mcore_rl.errors import ConfigError
from mcore_rl.megatron import cpu
from mcore_rl.megatron.cpu.registry import FIXES, Fix, without
from tests.distributed.built import build, run_without
from tests.distributed.launch import RankFailedError, launch
from tests.tiny_models import tiny_fields

cpu.install()
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU backend is a no-op with CUDA")


# ---- helpers on the ranks ----


def _model(kind: str, sizes: dict[str, int], *, dtype: str = "float32", actor: Any = None, **changes: Any) -> Any:
    """Build one randomly initialized chunk in a layout."""
    hf_config = tiny_fields(kind, num_hidden_layers=2, **changes)
    return build(hf_config, sizes, actor=actor, dtype=dtype, random_init=True)[0][0]


def _hidden(chunk: Any, lengths: tuple[int, ...] = (5, 7)) -> torch.Tensor:
    from mcore_rl.megatron.model.attention.packed import pack_sequences

    tokens = torch.arange(sum(lengths)) % 96
    return chunk(tokens[None], None, None, packed_seq_params=pack_sequences(list(lengths)))


def _optimizer(chunk: Any, *, distributed: bool) -> Any:
    """Return an Adam optimizer after one step."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    module = Float16Module(chunk.config, chunk) if chunk.config.bf16 else chunk
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    wrapped = DistributedDataParallel(chunk.config, ddp_config, module)
    options = OptimizerConfig(
        lr=0.1, clip_grad=0.5, bf16=chunk.config.bf16, params_dtype=chunk.config.params_dtype,
        use_distributed_optimizer=distributed,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(options, [wrapped])
    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    _hidden(wrapped).float().square().sum().backward()
    wrapped.finish_grad_sync()
    assert optimizer.step()[0]
    return optimizer


# ---- one test per fix ----


def _build_model(_: int) -> None:
    _hidden(_model("qwen3", {})).sum().backward()


@pytest.mark.parametrize("name", ["cuda_calls", "generator_state"])
def test_model_without_required_fix_cannot_be_built(name: str) -> None:
    launch(_build_model, 1)
    with pytest.raises(RankFailedError, match=r"CUDA|cuda"):
        launch(run_without, 1, [name], _build_model)


def _gradient_norm(_: int) -> float:
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    return get_grad_norm_fp32([torch.tensor([3.0, 4.0])], grad_stats_parallel_group=dist.group.WORLD)


def test_device_literals_mean_cpu_in_megatron_only() -> None:
    assert launch(_gradient_norm, 1) == [pytest.approx(5.0)]
    with pytest.raises(RankFailedError, match="CUDA"):
        launch(run_without, 1, ["device_literals"], _gradient_norm)
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.current_device()


def _tied_over_two_stages(_: int) -> float:
    from mcore_rl.megatron.model.output import output_weight

    chunk = _model("qwen3", {"pp": 2}, tie_word_embeddings=True)
    weight = output_weight(chunk) if chunk.post_process else chunk.embedding.word_embeddings.weight
    return float(weight.detach().double().sum())


def test_tensor_cuda_allows_equal_tied_embeddings_on_both_stages() -> None:
    first, last = launch(_tied_over_two_stages, 2)
    assert first == last != 0.0
    with pytest.raises(RankFailedError, match="CUDA"):
        launch(run_without, 2, ["tensor_cuda"], _tied_over_two_stages)


def _step(_: int, dtype: str, distributed: bool) -> float:
    chunk = _model("qwen3", {}, dtype=dtype)
    before = chunk.decoder.final_layernorm.weight.detach().clone()
    _optimizer(chunk, distributed=distributed)
    return float((chunk.decoder.final_layernorm.weight - before).abs().max())


@pytest.mark.parametrize(
    ("module", "dtype", "distributed"),
    [
        ("optimizer.distrib_optimizer", "bfloat16", True),
        ("optimizer.distrib_optimizer", "float32", True),
        ("optimizer.optimizer", "bfloat16", False),
        ("optimizer.clip_grads", "float32", False),
    ],
)
def test_tensor_type_names_let_optimizers_accept_cpu_parameters(module: str, dtype: str, distributed: bool) -> None:
    (moved,) = launch(_step, 1, dtype, distributed)
    assert moved > 0.01
    with pytest.raises(RankFailedError, match=r"TypeError|AssertionError"):
        launch(run_without, 1, [f"tensor_type_names:{module}"], _step, dtype, distributed)


def test_tensor_type_outside_megatron_is_unchanged() -> None:
    assert torch.zeros(1).type() == "torch.FloatTensor"


def _uneven(rank: int) -> tuple[list[float], list[float]]:
    from megatron.core.tensor_parallel.mappings import (
        _gather_along_first_dim,
        _reduce_scatter_along_first_dim,
    )

    mine = torch.full((1 + 2 * rank, 2), float(rank + 1)).t().contiguous().t()
    gathered = _gather_along_first_dim(mine, dist.group.WORLD, [1, 3])
    total = torch.arange(8.0).view(4, 2) * (rank + 1)
    scattered = _reduce_scatter_along_first_dim(total, dist.group.WORLD, [1, 3])
    return gathered.flatten().tolist(), scattered.flatten().tolist()


def test_uneven_collectives_support_different_lengths() -> None:
    expected = torch.arange(8.0) * 3
    outcomes = launch(_uneven, 2)
    assert [gathered for gathered, _ in outcomes] == [[1.0] * 2 + [2.0] * 6] * 2
    assert [scattered for _, scattered in outcomes] == [expected[:2].tolist(), expected[2:].tolist()]
    with pytest.raises(RankFailedError):
        launch(run_without, 2, ["uneven_collectives"], _uneven)


def _streams(_: int) -> dict[str, Any]:
    from megatron.core import tensor_parallel

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron.core.tensor_parallel.random").addHandler(handler)
    _model("qwen3", {})
    tracker = tensor_parallel.get_cuda_rng_tracker()
    before = torch.get_rng_state()
    with tracker.fork():
        inside = torch.rand(3)
    with tracker.fork("expert-parallel-rng"):
        experts = torch.rand(3)
    with tracker.fork():
        later = torch.rand(3)
    return {
        "outer unchanged": torch.equal(before, torch.get_rng_state()),
        "streams differ": not torch.equal(inside, experts),
        "stream advances": not torch.equal(inside, later),
        "warnings": records,
    }


def test_generator_state_separates_streams_without_warnings() -> None:
    (found,) = launch(_streams, 1)
    assert found == {"outer unchanged": True, "streams differ": True, "stream advances": True, "warnings": []}


def test_jit_fuser_does_not_compile() -> None:
    from megatron.core import jit
    from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train

    assert jit.jit_fuser(len) is len
    assert not hasattr(bias_dropout_add_fused_train, "_torchdynamo_orig_callable")
    with without("jit_fuser"):
        assert jit.jit_fuser is torch.compile


def test_torch_adam_and_torch_multi_tensor_replace_an_installed_package() -> None:
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads

    assert optimizer.Adam is torch.optim.AdamW
    assert clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm
    # As with TransformerEngine, which this environment lacks.
    installed = ModuleType("megatron.core.optimizer")
    vars(installed).update(Adam=object, USING_PYTORCH_OPTIMIZER=False, l2_norm_impl=object)
    for name in ("torch_adam", "torch_multi_tensor:clip_grads"):
        FIXES[name].apply(Fix(name, "optimizer", len), installed)
    assert installed.Adam is torch.optim.AdamW
    assert installed.USING_PYTORCH_OPTIMIZER  # selects torch's arguments
    assert installed.l2_norm_impl is utils.local_multi_tensor_l2_norm
    assert installed.multi_tensor_scale_impl is utils.local_multi_tensor_scale


def test_router_gemm_in_float32_needs_no_transformer_engine() -> None:
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    generator = torch.Generator().manual_seed(0)
    tokens, weight = torch.randn(5, 8, generator=generator), torch.randn(4, 8, generator=generator)
    logits = router_gating_linear(tokens.bfloat16(), weight.bfloat16(), None, torch.float32)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, tokens.bfloat16().float() @ weight.bfloat16().float().t())
    with without("router_gemm"), pytest.raises(NameError):
        router_gating_linear(tokens, weight, None, torch.float32)


def _recompute_norms(_: int) -> None:
    from mcore_rl.config.models import ActorConfig

    _hidden(
        _model("qwen3", {}, actor=ActorConfig(recompute="selective", recompute_modules=["layernorm"]))
    ).sum().backward()


def test_checkpoint_without_output_needs_no_transformer_engine() -> None:
    launch(_recompute_norms, 1)
    with pytest.raises(RankFailedError, match="FP8GlobalStateManager"):
        launch(run_without, 1, ["checkpoint_without_output"], _recompute_norms)


def _expert_parallel(_: int) -> None:
    _hidden(_model("qwen3_moe", {"ep": 2})).sum().backward()


def _add_in_place(_: int) -> None:
    from megatron.core.tensor_parallel import layers

    for reduce in (layers.reduce_from_tensor_model_parallel_region, layers.reduce_scatter_to_sequence_parallel_region):
        weight = torch.ones(2, requires_grad=True)
        output = reduce(3 * weight, group=dist.group.WORLD)
        output += 1
        output.sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [3, 3]


def test_expert_bias_can_be_added_in_place() -> None:
    launch(_add_in_place, 1)
    with pytest.raises(RankFailedError, match="is a view and is being modified inplace"):
        launch(run_without, 1, ["expert_bias"], _add_in_place)


def test_split_sizes_are_numbers_in_all_to_all() -> None:
    launch(_expert_parallel, 2)
    with pytest.raises(RankFailedError, match=r"TypeError|RuntimeError"):
        launch(run_without, 2, ["split_sizes"], _expert_parallel)


def _latent_attention(_: int) -> None:
    _hidden(_model("deepseek_v3", {})).sum().backward()


def test_latent_attention_needs_no_transformer_engine() -> None:
    launch(_latent_attention, 1)
    with pytest.raises(RankFailedError, match="isinstance"):
        launch(run_without, 1, ["latent_attention"], _latent_attention)


def test_linear_attention_is_built_without_fla() -> None:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, perform_initialization=False, linear_conv_kernel_dim=2,
        linear_key_head_dim=4, linear_value_head_dim=4, linear_num_key_heads=1, linear_num_value_heads=1,
    )  # fmt: skip
    one_rank = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    GatedDeltaNet(config, GatedDeltaNetSubmodules(), 1, pg_collection=one_rank)
    with without("linear_attention"), pytest.raises(ImportError, match="FLA is not installed"):
        GatedDeltaNet(config, GatedDeltaNetSubmodules(), 1, pg_collection=one_rank)


def test_every_fix_has_a_test() -> None:
    files = (Path(__file__), Path(__file__).with_name("test_cpu_kernels.py"))
    source = "".join(file.read_text() for file in files)
    assert [name for name in FIXES if not all(part in source for part in name.split(":"))] == []


def _groups(rank: int) -> tuple[int, float]:
    """Number of gloo device threads besides those of the world group after creating ten groups, and a sum in the last
    group."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # not the device of the world's group

    def devices() -> int:
        return sum(name.read_text() == "gloo_tcp_loop\n" for name in Path("/proc/self/task").glob("*/comm"))

    before, value = devices(), torch.tensor(rank + 1.0)
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=20)) for _ in range(10)]
    distributed_c10d._set_pg_timeout(timedelta(seconds=30), groups[-1])
    dist.all_reduce(value, group=groups[-1])
    return devices() - before, value.item()


def test_one_gloo_device_is_shared_by_all_groups() -> None:
    assert launch(_groups, 2) == [(1, 3.0)] * 2
    assert launch(run_without, 2, ["one_gloo_device"], _groups) == [(10, 3.0)] * 2


# ---- installation ----


def test_install_called_twice_adds_one_hook() -> None:
    hooks = list(sys.meta_path)
    assert cpu.install()
    assert sys.meta_path == hooks


def test_install_with_other_megatron_version_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "version", lambda _: "0.17.0")
    with pytest.raises(ConfigError, match=r"megatron-core 0\.17\.0 is installed.*0\.16\.1"):
        cpu._check_version()


def _python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_install_after_import_of_megatron_raises(tmp_path: Path) -> None:
    """An empty megatron.core is used, because only the module's name matters and it imports fast."""
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    out = _python(
        "import megatron.core\n"
        "from mcore_rl.megatron import cpu\n"
        "from mcore_rl.errors import McoreRLError\n"
        "try: cpu.install()\n"
        "except McoreRLError as error: print(error)",
        PYTHONPATH=f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}",
    )
    assert "was imported before mcore_rl.megatron.cpu.install()" in out


def test_megatron_package_imports_no_megatron_core() -> None:
    out = _python("import sys, mcore_rl.megatron; print('torch' in sys.modules, 'megatron.core' in sys.modules)")
    assert out.split() == ["False", "False"]


# ---- with CUDA ----

ON_CUDA = """
import importlib.util, sys
import torch
torch.cuda.is_available = lambda: True
from mcore_rl.megatron import cpu
if sys.argv[1] == "with":
    cpu.transformer_engine = lambda imported: "2.11.0"
before = list(sys.meta_path), torch.Tensor.cuda
assert cpu.install() is False
assert sys.argv[1] == "without" or before == (list(sys.meta_path), torch.Tensor.cuda), "nothing is patched"
import megatron.core.transformer.moe.moe_utils as moe
import megatron.core.transformer.multi_latent_attention as latent
assert moe.torch is torch, "CUDA has torch as it is"
assert sys.argv[1] == "with" or "wandb" not in sys.modules, "ranks do not use it"
print(getattr(moe, "te_general_gemm", "unbound"), latent.HAVE_TE)
"""


@pytest.mark.parametrize(("engine", "expected"), [("without", "None False"), ("with", "unbound True")])
def test_install_on_cuda_fixes_only_missing_transformer_engine(engine: str, expected: str) -> None:
    """TransformerEngine is never installed here; if it is simulated, no fix is applied."""
    command = [sys.executable, "-W", "ignore", "-c", ON_CUDA, engine]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[-2] == expected
