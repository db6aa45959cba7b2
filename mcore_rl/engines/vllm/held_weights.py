"""Weights that vLLM's kernels use, as parts of HF tensors.

On CPU vLLM keeps linear weights only inside oneDNN, packed, and expert weights permuted. A product with the identity
returns a packed weight exactly, because every sum has a single nonzero term. The permutation of the experts is found by
packing element numbers. On GPUs the layout of experts depends on the kernels that vLLM has selected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import torch
from vllm._custom_ops import causal_conv1d_weight_pack, cpu_prepack_moe_weight
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16 import (  # noqa: E501
    CompressedTensorsWNA16MoEMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from mcore_rl.engines.held_weights import (
    Held,
    Reader,
    linear_parts,
    modules_with_parameters,
    read_module,
    unknown_layout,
)
from mcore_rl.engines.vllm.expert_blocks import block_rows, from_blocks
from mcore_rl.engines.vllm.held_fp8 import absorbed_differ, expert_codes, linear_codes
from mcore_rl.engines.vllm.held_int4 import expert_words
from mcore_rl.engines.vllm.packing import Pack, unpacked

ReadMatrix = Callable[[torch.Tensor], torch.Tensor]

_PROBE_ROWS = 1024
"""Columns of a weight that one product reads, which bounds the extra memory."""


@torch.no_grad()
def held_tensors(model: torch.nn.Module) -> Iterator[Held]:
    """Yield the parts of HF tensors that this rank holds, one module at a time.

    Raises: WeightSyncError for a module whose memory layout is unknown.
    """
    names = {module: name for name, module in model.named_modules()}
    readers: list[Reader] = [
        (VocabParallelEmbedding, UnquantizedEmbeddingMethod, partial(_vocabulary, packed=_packs_head(model))),
        (LinearBase, UnquantizedLinearMethod, lambda module, name: linear_parts(module, name, _weight(module))),
        (RoutedExperts, UnquantizedFusedMoEMethod, _experts),
        (LinearBase, Fp8LinearMethod, linear_codes),
        (RoutedExperts, Fp8MoEMethod, partial(_quantised_experts, read=expert_codes)),
        (RoutedExperts, CompressedTensorsWNA16MoEMethod, partial(_quantised_experts, read=expert_words)),
    ]
    head = tied_head(model)
    for name, module in modules_with_parameters(model):
        if isinstance(module, MLAAttention):
            # Decoding with latent attention reads copies of kv_b_proj: report them under its name. Copies of codes and
            # scales are reported, as a difference, only if they are not equal to these.
            absorbed_name, weight = _absorbed(module, names[module.kv_b_proj])
            if absorbed_differ(module.kv_b_proj, absorbed_name, weight):
                yield absorbed_name, weight
        elif module is head:
            # Report a tied head under the embedding's name: a stale packed copy then shows as a difference there.
            yield from read_module(module, next(names[table] for table in _tables(model) if table is not head), readers)
        else:
            yield from read_module(module, name, readers)


def tied_head(model: torch.nn.Module) -> ParallelLMHead | None:
    """Return the output layer if its weight is the embedding's, else None."""
    # The text model inside a model with a vision tower.
    head = getattr(getattr(model, "language_model", model), "lm_head", None)
    if not isinstance(head, ParallelLMHead):
        return None
    return head if any(table.weight is head.weight for table in _tables(model) if table is not head) else None


def _tables(model: torch.nn.Module) -> list[VocabParallelEmbedding]:
    return [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]


def derived_parameters(model: torch.nn.Module) -> set[str]:
    """Return the names of parameters that no update contains: copies that vLLM computes from others after loading, and
    the shapes of INT4 experts, which no kernel reads."""
    return {
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key, _ in module.named_parameters(recurse=False)
        if isinstance(module, MLAAttention) or (isinstance(module, RoutedExperts) and key.endswith("_weight_shape"))
    }


def _absorbed(module: MLAAttention, name: str) -> Held:
    """Assemble kv_b_proj.weight from the copies that latent attention keeps.

    Shapes: W_UK_T [heads, P, L] and W_UV [heads, L, V] -> [heads * (P + V), L].
    """
    names = {key for key, _ in module.named_parameters(recurse=False)}
    if names != {"W_UK_T", "W_UV"}:
        raise unknown_layout(name, f"latent attention's {', '.join(sorted(names))}")
    weight = torch.cat([module.W_UK_T.detach(), module.W_UV.detach().transpose(1, 2)], dim=1)
    return f"{name}.weight", weight.flatten(0, 1)


def _packs_head(model: torch.nn.Module) -> bool:
    """Return True if logits are computed from a packed copy of the output weights; a head in another dtype than the
    model's (model.float32_head) reads the weights themselves."""
    processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    return all(each.head_dtype in (None, next(model.parameters()).dtype) for each in processors)


def _vocabulary(module: VocabParallelEmbedding, name: str, *, packed: bool) -> list[Held]:
    # The embedding lookup reads the table itself; logits are computed from its packed copy.
    weight = _weight(module) if packed and isinstance(module, ParallelLMHead) else module.weight.detach()
    return [(f"{name}.weight", weight[: module.shard_indices.num_org_elements])]


def _weight(module: LinearBase | VocabParallelEmbedding) -> torch.Tensor:
    """Return the weight of a linear module, unpacked. Shapes: [rows on this rank, columns on this rank]."""
    if hasattr(module, "_cpu_unpacked_conv_weight"):
        # A convolution in bfloat16, on CPUs with AVX512-BF16. Its kernels read the packed weight, [channels, width].
        return unpacked(module.weight.detach(), _pack_convolution).unsqueeze(1)
    if not hasattr(module, "cpu_linear"):
        return module.weight.detach()
    if isinstance(module, VocabParallelEmbedding):
        columns = module.embedding_dim
    else:
        columns = module.input_size_per_partition if isinstance(module, RowParallelLinear) else module.input_size
    dtype = module.weight.dtype
    products = []
    for start in range(0, columns, _PROBE_ROWS):
        count = min(_PROBE_ROWS, columns - start)
        # Rows of the identity: their product with the packed weight is a block of its columns, exactly.
        unit = torch.zeros(count, columns, dtype=dtype)
        unit[torch.arange(count), start + torch.arange(count)] = 1
        products.append(module.quant_method.apply(module, unit))
    return torch.cat(products).t()


def _pack_convolution(matrices: torch.Tensor) -> torch.Tensor:
    return causal_conv1d_weight_pack(matrices[0])


def _experts(module: RoutedExperts, name: str) -> Iterator[Held]:
    prefix = name.removesuffix(".routed_experts")
    read_gate_up, read_down = _expert_readers(module, prefix)
    # The kernels pad the intermediate size, separately for gate and up.
    inner = module.moe_config.intermediate_size_per_partition_unpadded
    gate, up, down = module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name
    # This activation takes rows of gate and up in turn.
    alternate = module.activation == MoEActivation.SWIGLUOAI

    def gate_and_up(fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (fused[0::2], fused[1::2]) if alternate else fused.chunk(2)
        return first[:inner], second[:inner]

    for own, expert in enumerate(_own_experts(module)):
        name = f"{prefix}.{expert}"
        for part, weight in zip((gate, up), gate_and_up(read_gate_up(module.w13_weight[own].detach())), strict=True):
            yield f"{name}.{part}.weight", weight
        yield f"{name}.{down}.weight", read_down(module.w2_weight[own].detach())[:, :inner]
        if module.moe_config.has_bias:
            # The kernel has its own references, which a reload may leave with the biases of an earlier version.
            kernel = module.quant_method.moe_kernel.fused_experts
            for part, bias in zip((gate, up), gate_and_up(kernel.w1_bias[own].detach()), strict=True):
                yield f"{name}.{part}.bias", bias
            yield f"{name}.{down}.bias", kernel.w2_bias[own].detach()


def _quantised_experts(
    module: RoutedExperts, name: str, read: Callable[[RoutedExperts, str, list[int]], Iterator[Held]]
) -> Iterator[Held]:
    return read(module, name.removesuffix(".routed_experts"), _own_experts(module))


def _expert_readers(module: RoutedExperts, prefix: str) -> tuple[ReadMatrix, ReadMatrix]:
    """Return the functions that convert one expert's matrices, gate and up together and down, from the layout of the
    module's kernels to rows and columns as in the checkpoint.

    Raises: WeightSyncError for an unknown layout.
    """
    method = module.quant_method
    backend = method.unquantized_backend
    if backend is UnquantizedMoeBackend.CPU:
        experts = method.moe_kernel.fused_experts
        if not isinstance(experts, CPUUnquantizedExperts) or experts._use_zentorch:
            raise unknown_layout(prefix, type(experts).__name__)
        read = partial(unpacked, pack=_packing(experts.isa))
        return read, read
    if backend in (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON):
        return lambda matrix: matrix, lambda matrix: matrix
    if backend is UnquantizedMoeBackend.FLASHINFER_CUTLASS:  # up before gate
        return lambda matrix: torch.cat(matrix.chunk(2)[::-1]), lambda matrix: matrix
    if backend is UnquantizedMoeBackend.FLASHINFER_TRTLLM:
        gate_up, down = module.w13_weight, module.w2_weight
        rows = block_rows(tuple(gate_up.shape[1:]), tuple(down.shape[1:]), gate_up.device)
        return lambda matrix: from_blocks(matrix, rows[0]), lambda matrix: from_blocks(matrix, rows[1])
    raise unknown_layout(prefix, f"experts of vLLM's {backend.value}")


@lru_cache
def _packing(isa: str) -> Pack:
    """Return the function that packs experts; always the same object, by which `unpacked` caches permutations."""
    return lambda matrices: cpu_prepack_moe_weight(matrices, isa)


def _own_experts(module: RoutedExperts) -> list[int]:
    """Return the model's numbers of this rank's experts, in the rank's order."""
    if module.expert_map is None:
        return list(range(len(module.w13_weight)))
    own = module.expert_map.tolist()
    return sorted((expert for expert, place in enumerate(own) if place >= 0), key=own.__getitem__)
