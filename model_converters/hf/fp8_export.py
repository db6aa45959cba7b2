"""FP8 export: selection of quantised tensors, their plans, and quantization_config of config.json.

Quantisation needs whole blocks, so the caller joins each tensor and writes it in one piece:

    export = Fp8Export(config, bound, scales)
    targets = export.plans(plans)              by_name = {plan.hf_name: plan for plan in targets}
    writer.begin(targets)
    for every HF tensor:
        for plan, piece, part in export.encoded(by_name, name, tensor): writer.write(plan, piece, part)
    writer.finish(source)                      # adds or removes quantization_config
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from model_converters.errors import ConversionError
from model_converters.families.parts.hf_config import HFConfig, fp8_block, section
from model_converters.hf.quant import EXPORT_BLOCK, FP8, SCALE_SUFFIX, Block, quantise, scale_shape
from model_converters.mapping.placement import Piece, TensorPlan
from model_converters.mapping.table import BoundRow
from model_converters.mapping.transforms import Shape

_SCALE_FORMAT = "scale_fmt"


class Fp8Export:
    """Selection of the weights to quantise and of their scales.

    A model released in FP8 (`config` has quantization_config) keeps its block size and scale format. With the record of
    the release (`scales`: weight -> dtype of its scales; `scales_of` reads them) it also keeps the set of quantised
    weights, and every unchanged block keeps its bytes. For other models, the weights of rows marked `fp8` are quantised
    in blocks of 128 x 128.
    """

    def __init__(
        self,
        config: HFConfig,
        bound: Sequence[BoundRow],
        scales: Mapping[str, torch.dtype] | None = None,
        scales_of: Callable[[str], torch.Tensor | None] = lambda name: None,
    ) -> None:
        self.block, self.power_of_two = fp8_block(config) or EXPORT_BLOCK, has_powers(config)
        self._dtypes, self._scales_of = dict(scales or {}), scales_of
        # The record of a release decides which weights are quantised; without one, the rows of the table do.
        self._names = set(self._dtypes) or {name for row in bound if row.row.fp8 for name in row.hf}

    def plans(self, plans: Sequence[TensorPlan]) -> list[TensorPlan]:
        """Replace the plan of each quantised weight by the plans of its FP8 codes and its scales.

        Both have one piece that covers the whole tensor. Check completeness before: the table has no rows for scales.
        """
        result = []
        for plan in plans:
            if plan.hf_name not in self._names:
                result.append(plan)
                continue
            result.append(_whole(plan, plan.hf_name, plan.shape, FP8))
            shape = scale_shape(plan.shape, self.block)
            dtype = self._dtypes.get(plan.hf_name, torch.float32)
            result.append(_whole(plan, plan.hf_name + SCALE_SUFFIX, shape, dtype))
        return result

    def encoded(
        self, plans: Mapping[str, TensorPlan], name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[TensorPlan, Piece, torch.Tensor]]:
        """Yield the arguments of HFWriter.write for a whole HF tensor, or for its codes and scales if planned in FP8.

        Raises: ConversionError naming the tensor if it cannot be quantised.
        """
        plan = plans[name]
        # Not quantised: written in the pieces of the plan, which the caller has joined.
        if plan.dtype != FP8:
            for piece in plan.pieces:
                yield plan, piece, tensor.narrow(piece.dim, piece.start, piece.length) if tensor.dim() else tensor
            return
        scale_plan = plans[name + SCALE_SUFFIX]
        try:
            codes, scales = quantise(
                tensor,
                self.block,
                power_of_two=self.power_of_two or scale_plan.dtype == torch.float8_e8m0fnu,
                scale_dtype=scale_plan.dtype,
                original_scales=self._scales_of(name),
            )
        except ConversionError as error:
            raise ConversionError(f"{name}: {error}") from None
        yield plan, plan.pieces[0], codes
        yield scale_plan, scale_plan.pieces[0], scales


def has_powers(config: HFConfig) -> bool:
    """Return whether the scales of an FP8 release are powers of two."""
    return section(config, "quantization_config").get(_SCALE_FORMAT) == "ue8m0"


def _whole(plan: TensorPlan, name: str, shape: Shape, dtype: torch.dtype) -> TensorPlan:
    piece = plan.pieces[0]._replace(dim=0, start=0, length=shape[0], local_start=0)
    return TensorPlan(name, shape, dtype, plan.group, (piece,))


def is_quantised_from(
    tensor: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    block: Block = EXPORT_BLOCK,
    *,
    power_of_two: bool = False,
) -> bool:
    """Return whether codes and scales equal quantise(tensor) bit for bit, or represent its values exactly.

    The values of an FP8 export differ from the weights by rounding, so verification compares the bytes with the result
    of the same rounding.
    """
    if scales is None or codes.dtype != FP8 or codes.shape != tensor.shape:
        return False
    own_codes, own_scales = quantise(
        tensor, block, power_of_two=power_of_two, scale_dtype=scales.dtype, original_scales=scales
    )
    return _same_bytes(own_codes, codes) and _same_bytes(own_scales, scales)


def _same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (first, second)))


def exported_config(config: HFConfig, plans: Iterable[TensorPlan]) -> dict[str, object]:
    """Return `config` with the dtype of the planned tensors, and with quantization_config only if some are FP8."""
    plans = list(plans)
    quantised = {plan.hf_name for plan in plans if plan.dtype == FP8}
    others = [plan for plan in plans if plan.dtype != FP8 and not plan.hf_name.endswith(SCALE_SUFFIX)]
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    if others:
        dtype = str(others[0].dtype).removeprefix("torch.")
        kept |= {key: dtype for key in ("dtype", "torch_dtype") if key in kept}
    if quantised:
        # Readers treat every linear layer as quantised except the listed ones.
        unquantised = [plan.hf_name for plan in others if len(plan.shape) == 2]
        fields = quantization_config(unquantised, fp8_block(config) or EXPORT_BLOCK)
        kept["quantization_config"] = fields | ({_SCALE_FORMAT: "ue8m0"} if has_powers(config) else {})
    return kept


def quantization_config(unquantised: Iterable[str], block: Block = EXPORT_BLOCK) -> dict[str, object]:
    """Return the field quantization_config of config.json. `unquantised`: names of the matrices that are not FP8."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": [name.removesuffix(".weight") for name in unquantised if name.endswith(".weight")],
    }


def quantised_fields(rows: Iterable[BoundRow]) -> dict[str, object]:
    """Return quantization_config for engines that receive the weights of rows marked `fp8` as codes and scales."""
    unquantised = (bound for bound in rows if not bound.row.fp8)
    named = ((name, shape) for bound in unquantised for name, shape in zip(bound.hf, bound.row.shapes, strict=True))
    return quantization_config(name for name, shape in named if len(shape) == 2)
