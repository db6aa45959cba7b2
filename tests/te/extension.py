"""Stand-in for `transformer_engine_torch`, TransformerEngine's C extension. It has every exported name and the
functions in kernels.py. Calls of other functions raise an error with the name."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import ModuleType
from typing import Any

ENUMERATIONS = {
    "DType", "NVTE_Bias_Type", "NVTE_Mask_Type", "NVTE_QKV_Layout", "NVTE_QKV_Format", "NVTE_Fused_Attn_Backend",
    "NVTE_Softmax_Type", "CommOverlapType", "CommOverlapAlgo", "Float8BlockScaleTensorFormat",
}  # fmt: skip
"""Enumerations of which Python code uses members, but never their values."""


class FP8FwdTensors(enum.IntEnum):
    """Positions of a layer's tensors in lists. Source: TransformerEngine 2.11, common/common.h."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(enum.IntEnum):
    """Positions of the gradients, like FP8FwdTensors."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class _Members(type):
    """Metaclass of enumerations that have every member: (name of the enumeration, name of the member)."""

    def __getattr__(cls, name: str) -> tuple[str, str]:
        if name.startswith("__"):
            raise AttributeError(name)
        member = (cls.__name__, name)
        setattr(cls, name, member)
        return member


class Extension(ModuleType):
    """The module. `kernels`: functions by name in the extension."""

    def __init__(self, kernels: dict[str, Callable[..., Any]]) -> None:
        super().__init__("transformer_engine_torch")
        self.__dict__.update(kernels, FP8FwdTensors=FP8FwdTensors, FP8BwdTensors=FP8BwdTensors)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any
        if name in ENUMERATIONS:
            made = _Members(name, (), {})
        elif name[0].isupper():
            made = type(name, (), {})
        else:
            made = _missing(name)
        setattr(self, name, made)
        return made


def _missing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{name} has no stand-in in tests/te/kernels.py")

    refuse.__name__ = name
    return refuse
