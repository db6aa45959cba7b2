"""Replacement of remote names in a configuration by paths of local copies, once, in the process that starts a run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rl.config.fields import Leaf, leaves, map_paths, paths_of, urls_of
from mcore_rl.config.reading.overrides import with_override
from mcore_rl.config.reading.remote_names import HubName, is_url, parse_hub_name
from mcore_rl.config.rules.validation import validate_keys
from mcore_rl.config.run_configs import recorded_texts
from mcore_rl.config.schema import Config
from mcore_rl.remote.hub import download_data, download_model
from mcore_rl.remote.storage import fetch

Show = Callable[[str], None]
"""Prints a line of the start-up log."""
LocalNames = Mapping[str, str]
"""Local path -> remote name with its commit."""


@dataclass
class _Localizer:
    """Local copies of remote names. Each name is resolved once, so that equal names have equal copies."""

    config: Config
    weights: bool
    show: Show
    folder: Path
    names: dict[str, str] = field(default_factory=dict)
    _copies: dict[tuple[HubName, bool], str] = field(default_factory=dict)
    _trained: dict[HubName, HubName] = field(default_factory=dict)
    """Names in data.train as given -> with the recorded commit."""
    _fetched: dict[str, str] = field(default_factory=dict)

    def replace(self, leaf: Leaf) -> None:
        """Replace the remote names at a key. Raises: ConfigError."""
        kind = leaf.domain.hub
        assert kind is not None

        def local(key: str, text: str) -> str:
            if (name := parse_hub_name(key, text, kind)) is not None:
                return self._from_hub(leaf.key, key, name)
            return self._from_url(key, text) if is_url(text) else text

        map_paths(leaf, local)

    def _from_url(self, key: str, url: str) -> str:
        if url not in self._fetched:
            self.show(f"{key}: fetching {url}")
            self._fetched[url] = fetch(key, url, self.folder)
            self.names[self._fetched[url]] = url
        return self._fetched[url]

    def _from_hub(self, leaf_key: str, key: str, name: HubName) -> str:
        weights = self.weights and leaf_key.endswith(("hf_path", "lora.path"))
        # The policy's weights are not read; config.json and the tokenizer are.
        if leaf_key == "model.hf_path" and self.config.model.random_init:
            weights = False
        given, name = name, self._as_recorded(leaf_key, name)
        if (name, weights) not in self._copies:
            self.show(f"{key}: looking up {name} on the Hugging Face hub")
            if name.kind == "dataset":
                path, commit = download_data(key, name)
            else:
                folder, commit = download_model(key, name, weights=weights)
                path = str(folder)
            self.show(f"{key}: {name.at(commit)} is in {path}")
            self._copies[name, weights] = path
            self.names[path] = str(name.at(commit))
        if leaf_key == "data.train":
            self._trained[given] = name
        return self._copies[name, weights]

    def _as_recorded(self, leaf_key: str, name: HubName) -> HubName:
        """Return the name at the commit of an earlier start of the run, unless a revision is given."""
        if leaf_key == "data.weights":  # its names are those of data.train, which has been resolved before
            return self._trained.get(name, name)
        if name.revision is not None:
            return name
        for text in recorded_texts(self.config.run.dir, leaf_key):
            before = parse_hub_name(leaf_key, text, name.kind)
            if before is not None and before.repo == name.repo and before.is_pinned:
                return name.at(str(before.revision))
        return name


@contextmanager
def localized(config: Config, show: Show, *, weights: bool = True, data: bool = True) -> Iterator[LocalNames]:
    """Download models and data that the configuration names on the hub or by URL, and replace the names by local paths.
    Files of URLs are in data.cache_dir or, if it is null, in a temporary directory until the end of the block.

    An id without a revision gets the commit that run.dir/config.yaml has recorded for the key, so that a resumed run
    uses the same files. weights: download the weights of models, too. data: download data.

    Yields the remote name, with its commit, of each local path that was inserted.
    Raises: ConfigError, DataError naming the key, for an invalid configuration or a name that cannot be resolved.
    """
    remote = [leaf for leaf in leaves(config) if _is_remote(leaf) and (data or leaf.domain.hub != "dataset")]
    if remote:
        # A download may take hours, so the other keys are checked first.
        validate_keys(config, run_here=False)
    # Only if it is used: a run that is restarted in a network of its own does not leave this block.
    needs_scratch = bool(data and urls_of(config)) and config.data.cache_dir is None
    with tempfile.TemporaryDirectory(prefix="mcore-rl-") if needs_scratch else nullcontext("") as scratch:
        folder = Path(config.data.cache_dir or scratch) / "remote"
        localizer = _Localizer(config, weights, show, folder.absolute())
        for leaf in remote:
            localizer.replace(leaf)
        yield localizer.names


def with_remote_names(config: Config, names: LocalNames) -> Config:
    """Return a copy of the configuration with the remote names of its local paths, for config.yaml."""
    copy = deepcopy(config)
    for leaf in leaves(copy) if names else ():
        if leaf.domain.hub is not None:
            map_paths(leaf, lambda key, path: names.get(path, path))
    return copy


def pinned_overrides(config: Config, names: LocalNames) -> list[str]:
    """Return the overrides that set the keys with remote names to these names, with their commits. `config` and `names`
    belong to a block of `localized`."""
    given, overrides = {leaf.key: leaf.value for leaf in leaves(config)}, list[str]()
    for leaf in leaves(with_remote_names(config, names)):
        # An override would add names to the mapping data.weights, which gets the commits of data.train anyway.
        if leaf.domain.hub is not None and leaf.value != given[leaf.key] and leaf.key != "data.weights":
            overrides = with_override(overrides, leaf.key, leaf.value)
    return overrides


def _is_remote(leaf: Leaf) -> bool:
    """Return True if a key that is read has a remote name. Raises: ConfigError for a malformed name."""
    kind = leaf.domain.hub
    if kind is None:
        return False
    return any(parse_hub_name(leaf.key, path, kind) is not None or is_url(path) for path in paths_of(leaf))
