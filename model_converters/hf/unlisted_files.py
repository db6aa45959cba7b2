"""Weight files of an HF directory that its index does not list.

Readers treat them differently. The trainer reads the files in the index. vLLM and SGLang read every `*.safetensors` if
there is no index. transformers prefers model.safetensors to an index and applies an adapter in the same directory.
Files that would change the model for some reader are rejected; the others are reported and ignored.

| file | decision |
|---|---|
| `*.safetensors` with a tensor that the index lacks, or lists with another dtype, shape or bytes | rejected |
| `*.safetensors` with copies of listed tensors | reported |
| `model.safetensors` next to an index, without some of the listed tensors | rejected |
| `consolidated*.safetensors` (Mistral's format) | reported if there is an index, else rejected |
| `adapter_config.json`, `adapter_model.safetensors` | rejected |
| PyTorch, GGUF, ONNX, Flax and TensorFlow weights | reported |
| folders with weight files, such as `original/` | reported |

Source: transformers 5.19 modeling_utils._get_resolved_checkpoint_files and integrations.peft.maybe_load_adapters; vLLM
0.32 model_loader.default_loader._prepare_weights; SGLang srt.model_loader.loader.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from model_converters.errors import ConversionError, listing
from model_converters.hf.index import INDEX_NAME, SINGLE_NAME
from model_converters.hf.shards import StoredTensor, read_header
from model_converters.inputs import open_regular, special_kind

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_OTHER_FORMATS = (".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth")
# Prefixes of files that trainers save and that are not weights.
_NO_WEIGHTS = ("optimizer", "rng_state", "scaler", "scheduler", "training_args")
_COMPARED_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Unlisted:
    """Unlisted files that do not change the model.

    notes: one line per file or folder, for the user.
    copies: (name, listed tensor, copy in an unlisted file), to be compared by `check_copies`.
    """

    notes: tuple[str, ...]
    copies: tuple[tuple[str, StoredTensor, StoredTensor], ...]

    def check_copies(self) -> None:
        """Compare every copy with its listed tensor.

        Raises: ConversionError naming the file and the tensors that differ.
        """
        problems: dict[Path, list[str]] = {}
        for name, listed, copy in self.copies:
            if not same_bytes(listed, copy):
                problems.setdefault(copy.file, []).append(name)
        if problems:
            found = "; ".join(f"{file.name} has other values of {listing(names)}" for file, names in problems.items())
            raise ConversionError(f"{next(iter(problems)).parent}: {found} than the listed files; {_REMEDY}")


_REMEDY = f"add it to {INDEX_NAME}, or remove the file"


def find_unlisted(directory: Path, stored: Mapping[str, StoredTensor]) -> Unlisted:
    """Find the weight files from which no tensor of `stored` is read. Reads only the headers of safetensors files.

    Raises: one ConversionError naming every file that would change the model for some reader.
    """
    listed = {tensor.file for tensor in stored.values()}
    indexed = (directory / INDEX_NAME).exists()
    notes: list[str] = []
    problems: list[str] = []
    copies: list[tuple[str, StoredTensor, StoredTensor]] = []
    for file in _weight_files(directory):
        if file in listed:
            continue
        if file.name in _ADAPTER_FILES:
            problems.append(
                f"{file.name} is an adapter, which transformers applies and other readers ignore; merge it (--lora)"
            )
        elif file.suffix != ".safetensors":
            notes.append(f"{file.name}{'/' if file.is_dir() else ''} is ignored")
        elif file.name.startswith("consolidated") and indexed:
            notes.append(f"{file.name} (Mistral's format) is ignored")
        else:
            # transformers reads only model.safetensors if it exists, so it must then contain the whole model.
            problem, found = _compare(file, stored, whole=indexed and file.name == SINGLE_NAME)
            problems += problem
            copies += found
            notes += [] if problem else [f"{file.name} contains copies of listed tensors and is ignored"]
    if problems:
        source = INDEX_NAME if indexed else f"{SINGLE_NAME} (there is no index)"
        raise ConversionError(f"{directory}: weight files that {source} does not list: {'; '.join(problems)}")
    return Unlisted(tuple(notes), tuple(copies))


def _weight_files(directory: Path) -> Iterator[Path]:
    """Yield files with weights in any format, and folders that contain some. Like all readers, skips dotfiles."""
    for file in sorted(directory.iterdir()):
        if file.name.startswith("."):
            continue
        # A folder with the name of a weight file is yielded as a file; _compare rejects it.
        if file.is_dir() and file.suffix != ".safetensors":
            if any(_is_weights(inside.name) for inside in file.glob("*")):
                yield file
        elif _is_weights(file.name):
            yield file


def _is_weights(name: str) -> bool:
    if name in _ADAPTER_FILES or name.endswith(".safetensors"):
        return True
    return name.endswith(_OTHER_FORMATS) and not name.startswith(_NO_WEIGHTS)


def _compare(
    file: Path, stored: Mapping[str, StoredTensor], *, whole: bool
) -> tuple[list[str], list[tuple[str, StoredTensor, StoredTensor]]]:
    """Return (problems, copies) of an unlisted safetensors file. `whole`: it must contain every listed tensor."""
    kind = special_kind(file)
    if kind is not None:
        return [f"{file.name} is {kind}"], []
    try:
        header = read_header(file)
    except ConversionError as error:
        return [f"{error}; remove the file"], []
    unknown = sorted(name for name in header if name not in stored)
    others = sorted(name for name in header if name in stored and _kind(header[name]) != _kind(stored[name]))
    missing = sorted(set(stored) - set(header)) if whole else []
    problems = []
    if unknown:
        problems.append(f"{file.name} contains {listing(unknown)}: {_REMEDY}")
    if others:
        problems.append(f"{file.name} contains {listing(others)} with another dtype or shape: {_REMEDY}")
    if missing:
        problems.append(f"{file.name} lacks {listing(missing)}, but transformers reads only this file: remove it")
    return problems, [(name, stored[name], tensor) for name, tensor in header.items() if name in stored]


def _kind(tensor: StoredTensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape


def same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    """Return whether two tensors of one dtype and shape are equal bit for bit."""
    with open_regular(first.file) as one, open_regular(second.file) as other:
        # Hard links and symbolic links to the same file need no comparison.
        if os.path.sameopenfile(one.fileno(), other.fileno()) and first.offset == second.offset:
            return True
        one.seek(first.offset)
        other.seek(second.offset)
        left = first.num_bytes
        while left:
            size = min(left, _COMPARED_BYTES)
            if one.read(size) != other.read(size):
                return False
            left -= size
    return True
