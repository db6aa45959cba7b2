"""Tensors of an adapter that replace whole tensors of the base: PEFT's modules_to_save."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model_converters.hf.directory.unlisted_files import same_bytes
from model_converters.hf.shards import StoredTensor
from model_converters.mapping.transforms import Shape

_PREFIX = "base_model.model."
_WRAPPERS = (".modules_to_save.default.", ".modules_to_save.")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class SavedModules:
    """`tensors` by the name of the base's tensor; `sources`: their names in the adapter."""

    modules: Any
    tensors: dict[str, StoredTensor]
    sources: frozenset[str]

    def problems(self, shapes: Mapping[str, Shape], adapted: Collection[str], *, tied: bool) -> list[str]:
        """Reasons why the tensors cannot replace the base's, whose shapes are given; `adapted` are modules that have
        a low-rank update as well. Of a tied model the head's copy is taken out of `tensors`."""
        if not _is_list_of_names(self.modules):
            return [f"modules_to_save {self.modules!r}, which must be a list of names"]
        problems = [
            f"modules_to_save {module!r} has no tensor in the adapter"
            for module in self.modules or ()
            if not any(_is_inside(name, [module]) for name in self.tensors)
        ]
        if tied:
            problems += self._tied_problems()
        for name, stored in self.tensors.items():
            problems += _misfit(name, stored, shapes)
            if name.removesuffix(".weight") in adapted:
                problems.append(f"{name} is saved whole and adapted")
        return problems

    def _tied_problems(self) -> list[str]:
        """PEFT trains a copy of each module: embedding and head of a tied model part unless both are saved alike."""
        found = [name for name in (_EMBEDDING, _HEAD) if name in self.tensors]
        if len(found) == 1:
            remedy = "merge the adapter with PEFT and save that model with tie_word_embeddings=false"
            return [f"modules_to_save: {found[0]} alone would part the tied embedding and head; {remedy}"]
        if found and not same_bytes(self.tensors[_EMBEDDING], self.tensors[_HEAD]):
            return ["modules_to_save: embedding and head of a tied model differ; see tie_word_embeddings"]
        self.tensors.pop(_HEAD, None)
        return []


def saved_tensors(header: Mapping[str, StoredTensor], modules: Any) -> SavedModules:
    """The tensors of an adapter that belong to one of `modules`, the value of modules_to_save."""
    tensors: dict[str, StoredTensor] = {}
    sources = set()
    for name, stored in header.items():
        base = name.removeprefix(_PREFIX)
        for wrapper in _WRAPPERS:
            base = base.replace(wrapper, ".")
        if _is_list_of_names(modules) and ".lora_" not in name and _is_inside(base, modules or ()):
            tensors[base] = stored
            sources.add(name)
    return SavedModules(modules, tensors, frozenset(sources))


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    """Whether a tensor belongs to a module whose path ends with one of the names, or to a module within it."""
    parts = name.split(".")[:-1]
    paths = [".".join(parts[: end + 1]) for end in range(len(parts))]
    return any(path.endswith(module) for path in paths for module in modules)


def _is_list_of_names(modules: Any) -> bool:
    return modules is None or (isinstance(modules, list) and all(isinstance(name, str) and name for name in modules))


def _misfit(name: str, stored: StoredTensor, shapes: Mapping[str, Shape]) -> list[str]:
    if name not in shapes:
        return [f"the model has no {name}, which modules_to_save names"]
    if stored.shape != shapes[name] or not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
        return [f"{name} of modules_to_save is {stored.dtype} {stored.shape}, the base's {shapes[name]}"]
    return []
