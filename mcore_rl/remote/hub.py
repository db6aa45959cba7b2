"""Repositories on the Hugging Face hub. Files are downloaded into the hub's cache, whose location and credentials are
set by the hub's own variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE)."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.config.reading.remote_names import DATASETS, HUB, HubName, parse_hub_name
from mcore_rl.errors import ConfigError, DataError

MODEL_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
"""Files of a model without its weights: configuration, tokenizer and chat template."""
WEIGHT_FILES = ("*.safetensors",)
DATA_KINDS = (".jsonl", ".parquet", ".csv")
_CARD = ("README.md",)
"""A download of this small file determines the commit and lists the files of a repository."""


def download_model(key: str, name: HubName, *, weights: bool) -> tuple[Path, str]:
    """Download a model, without its weights if `weights` is false; complete files in the cache are not downloaded
    again. Returns its directory and commit.

    Raises: ConfigError naming `key`, the id, the reason and the remedy.
    """
    # Folders hold the weights in other formats.
    return _download(key, name, MODEL_FILES + (WEIGHT_FILES if weights else ()), ignore=("*/*",))


def download_data(key: str, name: HubName) -> tuple[str, str]:
    """Download files of a data set. Without a path in the name, the repository must have one folder with files of one
    split. Returns a path or glob of the local files, and the commit.

    Raises: ConfigError naming `key`, the id, the reason and the remedy; DataError if no or several sets match.
    """
    root, commit = _download(key, name, _CARD)
    path = name.path or _only_pattern(key, name, _listed(name.at(commit), root))
    # A folder has all its files; the local search for files reads those directly in it.
    wanted = (path, *(f"{path}/*{kind}" for kind in DATA_KINDS))
    _download(key, name.at(commit), wanted)
    local = f"{glob.escape(str(root))}/{path}" if glob.has_magic(path) else str(root / path)
    if not glob.glob(local, recursive=True):
        raise DataError(f"{key}={name}: the data set has no file {path} at commit {commit}; correct the path")
    return local, commit


def cached_model_file(text: str, file: str) -> Path | None:
    """Return a file of a model that a configuration names by hub id, if the cache has it; None for other names."""
    try:
        name = parse_hub_name("model.hf_path", text, "model")
    except ConfigError:
        return None
    if name is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name.repo, file, revision=name.revision)
    return Path(found) if isinstance(found, str) else None


def _listed(name: HubName, root: Path) -> list[str]:
    """Return the files of the repository at a commit; if its listing is not in the cache, the files in the cache."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        listed = get_cached_repo_tree(name.repo, repo_type=name.kind, revision=name.revision)
    except CachedRepoTreeNotFoundError:  # a cache that was copied or written by an older version
        return [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    return [file.path for file in listed]


def _only_pattern(key: str, name: HubName, files: Sequence[str]) -> str:
    """Return the glob of all data files, if they are in one folder and have one split.

    Raises: DataError with the globs to choose from.
    """
    patterns = sorted({_pattern(file) for file in files if _is_data(file)})
    if len(patterns) == 1:
        return patterns[0]
    if not patterns:
        raise DataError(f"{key}={name}: the data set has no {', '.join(DATA_KINDS)} file; convert it to one of these")
    shown = ", ".join(f"{HUB}{DATASETS}{name.repo}/{pattern}" for pattern in patterns[:6])
    raise DataError(f"{key}={name} has several splits or subsets; set {key} to one of {shown}")


def _is_data(file: str) -> bool:
    return file.endswith(DATA_KINDS) and not any(part[0] in "._" for part in file.split("/"))


def _pattern(file: str) -> str:
    """Return the glob of the shards that a file belongs to: data/train-*.parquet for data/train-00000-of-00002.parquet.
    A file that is not numbered is its own pattern."""
    folder, slash, name = file.rpartition("/")
    stem, _, kind = name.rpartition(".")
    first, dash, rest = stem.partition("-")
    shown = f"{first}-*.{kind}" if dash and rest[:1].isdigit() else name
    return f"{glob.escape(folder)}{slash}{shown}"


def _download(
    key: str, name: HubName, patterns: Sequence[str], ignore: Sequence[str] | None = None
) -> tuple[Path, str]:
    """Download the files that match, and return the directory of the commit and the commit."""
    from httpx2 import HTTPError
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name.repo,
            repo_type=name.kind,
            revision=name.revision,
            allow_patterns=list(patterns),
            ignore_patterns=None if ignore is None else list(ignore),
        )
    # OSError: files that are not in the cache, or a cache that cannot be written. ValueError: an invalid id.
    except (HTTPError, OSError, ValueError) as error:
        raise ConfigError(f"{key}={name}: {_problem(name, error)}, or set {key} to a local path") from error
    return Path(folder), Path(folder).name


def _problem(name: HubName, error: Exception) -> str:
    """Return the reason of a failed download and its remedy."""
    from huggingface_hub import constants, errors

    kind = "data set" if name.kind == "dataset" else "model"
    match error:
        case errors.GatedRepoError():
            page = f"{constants.ENDPOINT}/{DATASETS if name.kind == 'dataset' else ''}{name.repo}"
            return f"access to the {kind} is restricted; accept its terms at {page} and set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return (
                f"there is no such directory, and {constants.ENDPOINT} has no such {kind}, or a private one; correct "
                "the id, set HF_TOKEN to a token that may read it"
            )
        case errors.RevisionNotFoundError():
            return f"the {kind} has no revision {name.revision}; name another one"
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            if constants.HF_HUB_OFFLINE:
                reason = "HF_HUB_OFFLINE is set"
            else:
                cause = error.__cause__ or error
                reason = f"{constants.ENDPOINT} cannot be reached ({type(cause).__name__}: {_first_line(cause)})"
            return (
                f"there is no such directory, {reason}, and the cache {constants.HF_HUB_CACHE} does not have all files"
                f" of this {kind}; run `hf download {_arguments(name)}` on a machine with a network and set HF_HOME to "
                "its cache, set HF_ENDPOINT to a mirror"
            )
    return f"the {kind} cannot be downloaded from {constants.ENDPOINT}: {_first_line(error)}; try again"


def _arguments(name: HubName) -> str:
    kind = " --repo-type dataset" if name.kind == "dataset" else ""
    return f"{name.repo}{kind}{'' if name.revision is None else f' --revision {name.revision}'}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
