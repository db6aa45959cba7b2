"""Fixes of single megatron.core modules. Upstream: megatron-core 0.16.1."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist

from mcore_rl.megatron.cpu.registry import Fix, fix


@fix("jit_fuser", "jit")
def _jit_fuser(this: Fix, module: ModuleType) -> None:
    """Disable jit_fuser (torch.compile), which starts a C++ compiler at the first call of each fused function. This
    uses the module's own switch, before other modules import the name."""
    fuser = module.jit_fuser
    module.disable_jit_fuser()
    this.replaced.append((module, "jit_fuser", fuser, module.jit_fuser))


@fix("generator_state", "tensor_parallel.random")
def _generator_state(this: Fix, module: ModuleType) -> None:
    """Use the CPU generator in the RNG tracker instead of torch.cuda.default_generators, which is empty. The tracker's
    warning that the CPU state changed within a fork is then always raised and irrelevant, so it is filtered."""

    def get_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    this.patch(module, "_get_cuda_rng_state", get_state)
    this.patch(module, "_set_cuda_rng_state", set_state)
    logging.getLogger(module.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


@fix("checkpoint_without_output", "tensor_parallel.random", on_cuda=True)
def _checkpoint_without_output(this: Fix, module: ModuleType) -> None:
    """Correct recomputation of norms. It passes fp8=False, but the class tests `fp8 is not None` and then calls
    TransformerEngine, which raises NameError if it is missing. It also resizes storages, so kernels must keep them
    resizable."""
    original = module.CheckpointWithoutOutput.__init__

    def initialize(self: object, fp8: object = None) -> None:
        from mcore_rl.megatron.cpu.kernels.jit import resize_storages

        resize_storages()
        original(self, fp8=fp8 or None)

    this.patch(module.CheckpointWithoutOutput, "__init__", initialize)


@fix("router_gemm", "transformer.moe.moe_utils", on_cuda=True)
def _router_gemm(this: Fix, module: ModuleType) -> None:
    """Define te_general_gemm, which moe_router_dtype=fp32 tests for None; without TransformerEngine the name is
    undefined."""
    # megatron.core imports the name from TransformerEngine, if that is installed.
    if "te_general_gemm" not in vars(module):
        this.patch(module, "te_general_gemm", None)


@fix("expert_bias", "tensor_parallel.layers", on_cuda=True)
def _expert_bias(this: Fix, module: ModuleType) -> None:
    """Return the output of a row-parallel projection itself if its group has one rank. Otherwise it is the unchanged
    input of a custom autograd function, to which MLP.forward adds an expert's bias in place: RuntimeError in
    training."""
    for name in ("reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region"):
        this.patch(module, name, _unless_alone(getattr(module, name)))


def _unless_alone(reduce: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def reduce_ranks(x: torch.Tensor, group: dist.ProcessGroup | None = None, **options: object) -> torch.Tensor:
        return x if group is not None and group.size() == 1 else reduce(x, group=group, **options)

    return reduce_ranks


@fix("split_sizes", "transformer.moe.token_dispatcher")
def _split_sizes(this: Fix, module: ModuleType) -> None:
    """Convert split sizes to numpy also for CPU tensors. The dispatcher converts them only when it copies them from the
    device, but all_to_all_single does not accept tensors."""

    def to_cpu(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    this.patch(module, "maybe_move_tensor_to_cpu", to_cpu)


@fix("latent_attention", "transformer.multi_latent_attention", on_cuda=True)
def _latent_attention(this: Fix, module: ModuleType) -> None:
    """Set HAVE_TE correctly. Without TransformerEngine it is True, although TELinear is a mock that isinstance
    rejects."""
    this.patch(module, "HAVE_TE", isinstance(module.TELinear, type))


@fix("linear_attention", "ssm.gated_delta_net", on_cuda=True)
def _linear_attention(this: Fix, module: ModuleType) -> None:
    """Let the constructor of gated delta nets accept a missing fla, whose kernels only its own forward pass needs."""
    this.patch(module, "HAVE_FLA", True)


@fix("torch_adam", "optimizer")
def _torch_adam(this: Fix, module: ModuleType) -> None:
    """Use torch's AdamW. If TransformerEngine or apex is installed, for example on a login node, the optimizer uses
    their FusedAdam, which needs a GPU."""
    this.patch(module, "Adam", torch.optim.AdamW)
    this.patch(module, "USING_PYTORCH_OPTIMIZER", True)


@fix("torch_multi_tensor:clip_grads", "optimizer.clip_grads")
@fix("torch_multi_tensor:optimizer", "optimizer.optimizer")
def _torch_multi_tensor(this: Fix, module: ModuleType) -> None:
    """Use Megatron's own functions for norms and copies of many tensors, like `torch_adam`."""
    from megatron.core import utils

    this.patch(module, "multi_tensor_applier", utils.local_multi_tensor_applier)
    this.patch(module, "multi_tensor_scale_impl", utils.local_multi_tensor_scale)
    if "l2_norm_impl" in vars(module):
        this.patch(module, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
