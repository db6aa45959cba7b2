"""Reader of LoRA adapters in PEFT's format. They are merged while the base weights are read: W + scale * B A.

scale is alpha / r, or alpha / sqrt(r) with rsLoRA; rank_pattern and alpha_pattern override both per module. Tensors of
modules_to_save replace whole tensors of the base model.
Source: peft 0.21 tuners/lora (get_delta_weight, get_pattern_key), utils/save_and_load.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from pathlib import Path
from typing import TypeGuard

import torch

from model_converters.errors import ConversionError, listing
from model_converters.hf.quant import TILE_COLUMNS, TILE_ROWS
from model_converters.hf.shards import StoredTensor, TensorFiles, read_header
from model_converters.hf.unlisted_files import same_bytes
from model_converters.inputs import is_number, read_object
from model_converters.mapping.transforms import Shape

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_LORA = re.compile(r"\.lora_[A-Za-z_]+")
# Fields about training or module selection. They do not affect a merge, which takes the modules from the tensor names.
_IGNORED = set(
    """auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config exclude_modules inference_mode
    layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config megatron_config megatron_core
    peft_version qalora_group_size revision runtime_config target_modules task_type""".split()
)
_USED = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save"}
_PREFIX = "base_model.model."
_WRAPPERS = (".modules_to_save.default.", ".modules_to_save.")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Initialisations of A and B that do not change the base weights.
_BASE_PRESERVING = (True, False, None, "gaussian", "orthogonal", "eva")


class LoraAdapter:
    """A LoRA adapter: low-rank `updates` and whole `replaced` tensors, by base tensor name.

    shapes: shapes of the base model's tensors.
    tied: whether the base model ties its head to its embedding.

    Raises: one ConversionError that names every field and tensor that cannot be merged or does not fit the base model.
    """

    def __init__(self, directory: Path | str, shapes: Mapping[str, Shape], *, tied: bool = False) -> None:
        self.directory = Path(directory)
        file = self.directory / CONFIG_NAME
        try:
            self.config = read_object(file)
        except FileNotFoundError:
            raise ConversionError(f"{file} does not exist; an adapter directory needs it") from None
        weights = self.directory / WEIGHTS_NAME
        if not weights.is_file():
            raise ConversionError(f"{weights} does not exist; save the adapter with safe_serialization=True")
        header = read_header(weights)
        modules = self.config.get("modules_to_save")
        saved = {name: base for name in header if (base := _saved_name(name, modules))}
        self.replaced = {base: header[name] for name, base in saved.items()}
        pairs, problems = _pairs({name: stored for name, stored in header.items() if name not in saved})
        problems = _unsupported(self.config) + self._saved_problems(modules, shapes, pairs, tied) + problems
        # Collect all problems before raising, so that the user sees them in one message.
        self._patterns = {field: _compiled(self.config, field, problems) for field in ("rank_pattern", "alpha_pattern")}
        for module, sides in pairs.items():
            problems += self._misfits(module, sides, shapes.get(f"{module}.weight"))
        if not pairs and not self.replaced and not problems:
            problems.append("it contains no tensor")
        if problems:
            raise ConversionError(f"{self.directory}: this adapter cannot be merged: {listing(problems)}")
        self.updates = {
            f"{module}.weight": LowRankUpdate(module, sides["A"], sides["B"], self._scale(module))
            for module, sides in pairs.items()
        }

    def _saved_problems(
        self, modules: object, shapes: Mapping[str, Shape], adapted: Collection[str], tied: bool
    ) -> list[str]:
        """Return the reasons why `replaced` cannot replace base tensors. Removes the head of a tied model from it.

        adapted: modules that have a low-rank update as well.
        """
        if not _is_list_of_names(modules):
            return [f"modules_to_save {modules!r}, which must be a list of names"]
        problems = [
            f"modules_to_save {module!r} has no tensor in the adapter"
            for module in modules or ()
            if not any(_is_inside(name, [module]) for name in self.replaced)
        ]
        if tied:
            problems += self._tied_problems()
        for name, stored in self.replaced.items():
            if name not in shapes:
                problems.append(f"modules_to_save names {name}, which the model does not have")
            elif stored.shape != shapes[name] or not _is_full_precision(stored):
                found = f"{stored.dtype} {stored.shape}"
                problems.append(f"{name} of modules_to_save is {found}, in the base model {shapes[name]}")
            if name.removesuffix(".weight") in adapted:
                problems.append(f"{name} is saved whole and adapted")
        return problems

    def _tied_problems(self) -> list[str]:
        """Check embedding and head of a tied model. PEFT trains copies: both must be saved with equal values."""
        found = [name for name in (_EMBEDDING, _HEAD) if name in self.replaced]
        if len(found) == 1:
            remedy = "merge the adapter with PEFT and save that model with tie_word_embeddings=false"
            return [f"modules_to_save: {found[0]} alone would untie embedding and head; {remedy}"]
        if found and not same_bytes(self.replaced[_EMBEDDING], self.replaced[_HEAD]):
            return ["modules_to_save: embedding and head differ, but the model ties them (tie_word_embeddings)"]
        # The embedding replaces both.
        self.replaced.pop(_HEAD, None)
        return []

    def _misfits(self, module: str, sides: Mapping[str, StoredTensor], base: Shape | None) -> list[str]:
        problems = [f"{module} lacks lora_{side}" for side in "AB" if side not in sides]
        if base is None:
            return [*problems, f"the model has no {module}.weight"]
        if len(base) != 2:
            return [*problems, f"{module}.weight {base} is not a matrix"]
        rank = self._of_module("rank_pattern", module, "r")
        wanted = {"A": (rank, base[1]), "B": (base[0], rank)}
        for side, tensor in sides.items():
            if tensor.shape != wanted[side] or not _is_full_precision(tensor):
                problems.append(f"{module}.lora_{side} {tensor.dtype} {tensor.shape} instead of {wanted[side]}")
        return problems

    def _scale(self, module: str) -> float:
        rank = self._of_module("rank_pattern", module, "r")
        alpha = self._of_module("alpha_pattern", module, "lora_alpha")
        assert is_number(rank)
        assert is_number(alpha)
        return alpha / (sqrt(rank) if self.config.get("use_rslora") else rank)

    def _of_module(self, field: str, module: str, default: str) -> object:
        """Return a module's value in a pattern field, or the field `default` if no pattern matches."""
        values = (value for pattern, value in self._patterns[field] if pattern.match(module))
        return next(values, self.config.get(default))


@dataclass(frozen=True)
class LowRankUpdate:
    """Update scale * B A of a weight [M, N]. Shapes: A [r, N], B [M, r]; both stay in the file."""

    module: str
    a: StoredTensor
    b: StoredTensor
    scale: float


class UpdateWindow:
    """Rows of B and columns of A for a window of the weight, rounded up to whole tiles.

    Products are always computed for whole tiles of a grid fixed to the weight. A matrix product of another size may sum
    in another order, and an element must have the same bits whatever slice it is read with.
    """

    def __init__(self, update: LowRankUpdate, row: int, column: int, shape: Shape) -> None:
        self._scale = update.scale
        num_rows, rank = update.b.shape
        self._a: dict[int, torch.Tensor] = {}
        self._b: dict[int, torch.Tensor] = {}
        with closing(TensorFiles()) as files:
            a = files.read(f"{update.module}.lora_A", update.a)
            for first in range(column // TILE_COLUMNS * TILE_COLUMNS, column + shape[1], TILE_COLUMNS):
                self._a[first] = a[:, first : first + TILE_COLUMNS].float().contiguous()
            for first in range(row // TILE_ROWS * TILE_ROWS, row + shape[0], TILE_ROWS):
                b = torch.empty(min(TILE_ROWS, num_rows - first), rank, dtype=update.b.dtype)
                files.fill_rows(f"{update.module}.lora_B", update.b, b, first=first)
                self._b[first] = b.float()

    def add_to(self, values: torch.Tensor, *, row: int, column: int) -> None:
        """Add the update in place to float32 `values`: part of one tile, starting at element (row, column)."""
        top, left = row // TILE_ROWS * TILE_ROWS, column // TILE_COLUMNS * TILE_COLUMNS
        delta = (self._b[top] @ self._a[left]).mul_(self._scale)
        values += delta[row - top : row - top + values.shape[0], column - left : column - left + values.shape[1]]


def _saved_name(name: str, modules: object) -> str | None:
    """Return the base tensor that an adapter's tensor replaces; None if it is not one of `modules`, modules_to_save."""
    base = name.removeprefix(_PREFIX)
    # PEFT inserts a wrapper into the names, with or without the name of the adapter ("default").
    for wrapper in _WRAPPERS:
        base = base.replace(wrapper, ".")
    saved = _is_list_of_names(modules) and ".lora_" not in name and _is_inside(base, modules or ())
    return base if saved else None


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    """Return whether a tensor belongs to a module whose path ends with one of the names, or to its submodules."""
    paths = accumulate(name.split(".")[:-1], lambda path, part: f"{path}.{part}")
    # Like PEFT, which compares the ends of the paths as text.
    return any(path.endswith(tuple(modules)) for path in paths)


def _is_list_of_names(modules: object) -> TypeGuard[list[str] | None]:
    return modules is None or (isinstance(modules, list) and all(isinstance(name, str) and name for name in modules))


def _is_full_precision(stored: StoredTensor) -> bool:
    # Float8 tensors would need scales, which adapters do not have.
    return stored.dtype.is_floating_point and stored.dtype.itemsize >= 2


def _unsupported(config: Mapping[str, object]) -> list[str]:
    kind, bias, start = config.get("peft_type"), config.get("bias", "none"), config.get("init_lora_weights")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    remedy = "(save the adapter as plain LoRA: path_initial_model_for_weight_conversion)"
    checks = (
        (kind == "LORA", f"peft_type {kind!r}, only 'LORA'"),
        (bias == "none", f"bias {bias!r}, only 'none'"),
        (start in _BASE_PRESERVING, f"init_lora_weights {start!r}, which may have changed the base weights {remedy}"),
        (is_number(rank) and rank >= 1, f"r {rank!r}, which must be a number of at least 1"),
        (is_number(alpha), f"lora_alpha {alpha!r}, which must be a number"),
    )
    problems = [problem for holds, problem in checks if not holds]
    # An unknown field with a true value may change the computation (DoRA, for example), so it is rejected.
    known = _IGNORED | _USED | {"peft_type", "bias", "init_lora_weights"}
    return problems + [f"{key} {value!r}" for key, value in config.items() if key not in known and value]


def _compiled(config: Mapping[str, object], field: str, problems: list[str]) -> list[tuple[re.Pattern[str], object]]:
    """Compile a pattern field to (regular expression, value). Appends invalid entries to `problems`."""
    patterns = config.get(field) or {}
    if not isinstance(patterns, Mapping):
        problems.append(f"{field} {patterns!r}, which must be an object")
        return []
    compiled = []
    for pattern, value in patterns.items():
        if not is_number(value) or (field == "rank_pattern" and value < 1):
            problems.append(f"{field} {pattern!r}: {value!r}, which is not a valid value")
        try:
            compiled.append((re.compile(rf"(.*\.)?({pattern})$"), value))
        except re.error:
            problems.append(f"{field} {pattern!r}, which is not a regular expression")
    return compiled


def _pairs(header: Mapping[str, StoredTensor]) -> tuple[dict[str, dict[str, StoredTensor]], list[str]]:
    """Return A and B by module, and a problem for every other tensor."""
    pairs: dict[str, dict[str, StoredTensor]] = {}
    unknown = []
    for name, stored in header.items():
        if match := _TENSOR.fullmatch(name):
            pairs.setdefault(match["module"], {})[match["side"]] = stored
        else:
            # PEFT also saves a copy of the base weight if the head or the embedding has an adapter.
            remedy = " (save the adapter with save_embedding_layers=False)" if not _LORA.search(name) else ""
            unknown.append(f"{name} is neither lora_A nor lora_B of a linear layer{remedy}")
    return pairs, unknown
