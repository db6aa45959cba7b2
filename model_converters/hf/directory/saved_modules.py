"""Tensors of an adapter that replace whole tensors of the base model: PEFT's modules_to_save."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from model_converters.hf.directory.unlisted_files import same_bytes
from model_converters.hf.shards import StoredTensor
from model_converters.mapping.transforms import Shape

_PREFIX = "base_model.model."
_WRAPPERS = (".modules_to_save.default.", ".modules_to_save.")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class SavedModules:
    """Replacement tensors of an adapter.

    modules: value of modules_to_save.
    tensors: base tensor name -> replacement.
    sources: names of the replacements in the adapter.
    """

    modules: object
    tensors: dict[str, StoredTensor]
    sources: frozenset[str]

    def problems(self, shapes: Mapping[str, Shape], adapted: Collection[str], *, tied: bool) -> list[str]:
        """Return the reasons why the tensors cannot replace the base tensors of the given shapes.

        `adapted`: modules that have a low-rank update as well. For a tied model, removes the head from `tensors`.
        """
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
        """Check embedding and head of a tied model. PEFT trains copies: both must be saved with equal values."""
        found = [name for name in (_EMBEDDING, _HEAD) if name in self.tensors]
        if len(found) == 1:
            remedy = "merge the adapter with PEFT and save that model with tie_word_embeddings=false"
            return [f"modules_to_save: {found[0]} alone would untie embedding and head; {remedy}"]
        if found and not same_bytes(self.tensors[_EMBEDDING], self.tensors[_HEAD]):
            return ["modules_to_save: embedding and head differ, but the model ties them (tie_word_embeddings)"]
        # The embedding replaces both.
        self.tensors.pop(_HEAD, None)
        return []


def saved_tensors(header: Mapping[str, StoredTensor], modules: object) -> SavedModules:
    """Return the tensors of an adapter that belong to `modules`, the value of modules_to_save."""
    tensors: dict[str, StoredTensor] = {}
    sources = set()
    for name, stored in header.items():
        base = name.removeprefix(_PREFIX)
        # PEFT inserts a wrapper into the names, with or without the name of the adapter ("default").
        for wrapper in _WRAPPERS:
            base = base.replace(wrapper, ".")
        if _is_list_of_names(modules) and ".lora_" not in name and _is_inside(base, modules or ()):
            tensors[base] = stored
            sources.add(name)
    return SavedModules(modules, tensors, frozenset(sources))


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    """Return whether a tensor belongs to a module whose path ends with one of the names, or to its submodules."""
    parts = name.split(".")[:-1]
    paths = [".".join(parts[: end + 1]) for end in range(len(parts))]
    # Like PEFT, which compares the ends of the paths as text.
    return any(path.endswith(module) for path in paths for module in modules)


def _is_list_of_names(modules: object) -> TypeGuard[list[str] | None]:
    return modules is None or (isinstance(modules, list) and all(isinstance(name, str) and name for name in modules))


def _misfit(name: str, stored: StoredTensor, shapes: Mapping[str, Shape]) -> list[str]:
    if name not in shapes:
        return [f"modules_to_save names {name}, which the model does not have"]
    if stored.shape != shapes[name] or not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
        return [f"{name} of modules_to_save is {stored.dtype} {stored.shape}, in the base model {shapes[name]}"]
    return []
