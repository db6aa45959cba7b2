"""Export in FP8: which tensors are written as codes and scales, and what config.json then says.

A block must be seen whole to be quantised, so these tensors are written in one piece each, joined by the caller:

    targets = fp8_plans(plans, bound)          by_name = {plan.hf_name: plan for plan in targets}
    writer.begin(targets)
    for every HF tensor:  for plan, piece, part in encoded(by_name, name, tensor): writer.write(plan, piece, part)
    writer.finish(source)                      # quantization_config appears, or disappears, by itself
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from model_converters.errors import ConversionError
from model_converters.hf.quant import EXPORT_BLOCK, FP8, SCALE_SUFFIX, Block, quantise, scale_shape
from model_converters.mapping.placement import Piece, TensorPlan
from model_converters.mapping.table import BoundRow
from model_converters.mapping.transforms import Shape


def fp8_plans(plans: Sequence[TensorPlan], bound: Sequence[BoundRow]) -> list[TensorPlan]:
    """The plans with the weights of rows marked `fp8` as FP8 codes, each followed by its scales.

    Both are of one piece, which stands for the whole joined tensor. Check completeness before: the table has no scales.
    """
    names = {name for row in bound if row.row.fp8 for name in row.hf}
    result = []
    for plan in plans:
        if plan.hf_name not in names:
            result.append(plan)
            continue
        result.append(_whole(plan, plan.hf_name, plan.shape, FP8))
        scales = scale_shape(plan.shape, EXPORT_BLOCK)
        result.append(_whole(plan, plan.hf_name + SCALE_SUFFIX, scales, torch.float32))
    return result


def _whole(plan: TensorPlan, name: str, shape: Shape, dtype: torch.dtype) -> TensorPlan:
    piece = plan.pieces[0]._replace(dim=0, start=0, length=shape[0], local_start=0)
    return TensorPlan(name, shape, dtype, plan.group, (piece,))


def encoded(
    plans: Mapping[str, TensorPlan], name: str, tensor: torch.Tensor
) -> Iterator[tuple[TensorPlan, Piece, torch.Tensor]]:
    """What HFWriter.write takes for one whole HF tensor: itself or, when it is planned in FP8, its codes and scales.

    Raises: ConversionError naming the tensor when it cannot be quantised.
    """
    plan = plans[name]
    if plan.dtype != FP8:
        for piece in plan.pieces:
            yield plan, piece, tensor.narrow(piece.dim, piece.start, piece.length) if tensor.dim() else tensor
        return
    try:
        codes, scales = quantise(tensor)
    except ConversionError as error:
        raise ConversionError(f"{name}: {error}") from None
    yield plan, plan.pieces[0], codes
    scale_plan = plans[name + SCALE_SUFFIX]
    yield scale_plan, scale_plan.pieces[0], scales


def is_quantised_from(
    tensor: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None, block: Block = EXPORT_BLOCK
) -> bool:
    """Whether codes and scales are, bit for bit, what quantise() makes of `tensor`.

    This is what can be certified of an FP8 export: its values differ from the weights by the rounding, the bytes do
    not differ from what that rounding gives.
    """
    if scales is None or codes.dtype != FP8 or codes.shape != tensor.shape:
        return False
    own_codes, own_scales = quantise(tensor, block)
    return torch.equal(own_codes.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(own_scales, scales)


def exported_config(config: Mapping[str, Any], plans: Iterable[TensorPlan]) -> dict[str, Any]:
    """config.json for the tensors of `plans`: their dtype, and a quantization_config exactly when some are FP8."""
    plans = list(plans)
    quantised = {plan.hf_name for plan in plans if plan.dtype == FP8}
    others = [plan for plan in plans if plan.dtype != FP8 and not plan.hf_name.endswith(SCALE_SUFFIX)]
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    if others:
        dtype = str(others[0].dtype).removeprefix("torch.")
        kept |= {key: dtype for key in ("dtype", "torch_dtype") if key in kept}
    if quantised:
        # Readers quantise every linear layer but those that are named.
        unquantised = [p.hf_name for p in others if len(p.shape) == 2 and p.hf_name.endswith(".weight")]
        kept["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(EXPORT_BLOCK),
            "modules_to_not_convert": [name.removesuffix(".weight") for name in unquantised],
        }
    return kept
