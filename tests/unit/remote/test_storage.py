"""URLs of data and exports, on fsspec's file system in memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mcore_rl import verbs
from mcore_rl.config import load_config
from mcore_rl.config.fields import make_paths_absolute, urls_of
from mcore_rl.config.schema import Config
from mcore_rl.data.sources.paths import file_weights, find_files
from mcore_rl.errors import ConfigError, DataError, StorageError
from mcore_rl.ports import Actor
from mcore_rl.preparation.preflight import check_outputs
from mcore_rl.remote.localize import localized, with_remote_names
from mcore_rl.remote.storage import fetch, has_export, uploaded
from mcore_rl.runtime.isolation import choice, namespace

FILES = {"a/train-0.jsonl": b"0", "a/train-1.jsonl": b"1", "a/b/train-2.jsonl": b"2", "a/notes.md": b"n", "v.csv": b"v"}


@pytest.fixture
def bucket(bucket: MemoryFileSystem) -> MemoryFileSystem:
    """File system in memory with FILES in /bucket."""
    for name, data in FILES.items():
        bucket.pipe_file(f"/bucket/{name}", data)
    return bucket


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Path of a configuration; the directory is the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("model: {hf_path: m}\ndata: {train: memory://bucket/a/*.jsonl}\nrun: {dir: run}\n")
    return "config.yaml"


def contents(names: list[str]) -> list[bytes]:
    return [file.read_bytes() for file in find_files(names, "data.train")]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("v.csv", [b"v"]),
        ("a", [b"0", b"1"]),
        ("a/", [b"0", b"1"]),
        ("a/*.jsonl", [b"0", b"1"]),
        ("a/**/train-*", [b"2", b"0", b"1"]),
        ("a/train-[1].jsonl", [b"1"]),
    ],
)
def test_fetch_finds_the_files_that_a_local_path_would(
    bucket: MemoryFileSystem, tmp_path: Path, path: str, expected: list[bytes]
) -> None:
    # The cache itself may have a name that looks like a glob.
    name = fetch("data.train", f"memory://bucket/{path}", tmp_path / "[c]")
    assert contents([name]) == expected
    local = tmp_path / "bucket"
    for file, data in FILES.items():
        (local / file).parent.mkdir(parents=True, exist_ok=True)
        (local / file).write_bytes(data)
    assert contents([f"{local}/{path}"]) == expected


def test_fetch_changed_file_is_fetched_again_and_others_are_not(
    bucket: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch("k", "memory://bucket/v.csv", tmp_path)
    bucket.pipe_file("/bucket/v.csv", b"w")
    assert Path(fetch("k", "memory://bucket/v.csv", tmp_path)).read_bytes() == b"w"
    assert Path(first).read_bytes() == b"v"
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda *_: pytest.fail("fetched again"))
    fetch("k", "memory://bucket/v.csv", tmp_path)


def test_fetch_that_was_cut_leaves_no_files(
    bucket: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(self: MemoryFileSystem, source: str, target: str) -> None:
        Path(target).write_bytes(b"half")
        raise ConnectionResetError("connection reset")

    monkeypatch.setattr(MemoryFileSystem, "get_file", cut)
    with pytest.raises(
        ConfigError, match=r"^data\.val=memory://bucket/a: ConnectionResetError: connection reset; check"
    ):
        fetch("data.val", "memory://bucket/a", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        ("memory://bucket/none.jsonl", DataError, r"^data\.train: there is no file memory://bucket/none\.jsonl"),
        ("memory://bucket/a/*.csv", DataError, "there is no file"),
        (
            "s3://bucket/a.jsonl",
            ConfigError,
            "^data.train=s3://bucket/a.jsonl: Install s3fs.* install it with pip in /",
        ),
        ("gs://bucket/a.jsonl", ConfigError, "install gcsfs to access"),
        ("nope://bucket/a", ConfigError, "nope:// is not known to fsspec; use one such as s3://"),
    ],
)
def test_fetch_url_that_cannot_be_read_is_one_message(
    bucket: MemoryFileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    kind: type[ConfigError],
    message: str,
) -> None:
    import sys

    for package in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, package, None)  # not installed
    with pytest.raises(kind, match=message) as caught:
        fetch("data.train", url, tmp_path)
    assert caught.value.exit_code == 2


def test_fetch_name_that_leaves_the_directory_is_rejected(
    bucket: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda *_, **__: ["/bucket/a/../../evil.jsonl"])
    monkeypatch.setattr(MemoryFileSystem, "isfile", lambda *_: True)
    with pytest.raises(DataError, match=r"has no name, or '\.\.' in it"):
        fetch("data.train", "memory://bucket/a", tmp_path)


def test_localized_urls_are_temporary_and_recorded_as_written(bucket: MemoryFileSystem, base: str) -> None:
    config = load_config(base, ["data.weights={memory://bucket/a/*.jsonl: 2}", "data.val={x: memory://bucket/v.csv}"])
    with localized(config, print) as names:
        make_paths_absolute(config)
        assert contents(config.data.train) == [b"0", b"1"]
        assert file_weights(config.data.weights, config.data.train) == (2.0, 2.0)
        recorded = with_remote_names(config, names)
    assert recorded.data.train == list(recorded.data.weights) == ["memory://bucket/a/*.jsonl"]
    assert recorded.data.validation == {"data.val.x": ["memory://bucket/v.csv"]}
    with pytest.raises(DataError, match="there is no file"):
        find_files(config.data.train, "data.train")


def test_localized_urls_with_cache_dir_stay(bucket: MemoryFileSystem, base: str) -> None:
    config = load_config(base, ["data.cache_dir=cache"])
    with localized(config, print):
        pass
    assert contents(config.data.train) == [b"0", b"1"]


def test_make_paths_absolute_keeps_urls_of_exports(base: str) -> None:
    config = load_config(base, ["trainer.export_hf=memory://bucket/x", "trainer.export_adapter=file:///x/y"])
    make_paths_absolute(config)
    assert (config.trainer.export_hf, config.trainer.export_adapter) == ("memory://bucket/x", "/x/y")
    assert urls_of(config) == {"data.train": "memory://bucket/a/*.jsonl", "trainer.export_hf": "memory://bucket/x"}


def write_export(directory: str) -> None:
    for name in ("config.json", "model-1.safetensors", "sub/tokenizer.json"):
        (Path(directory) / name).parent.mkdir(parents=True, exist_ok=True)
        (Path(directory) / name).write_text(name)


def test_uploaded_export_has_its_marker_last(
    bucket: MemoryFileSystem, tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    put = MemoryFileSystem.put_file

    def noted(self: MemoryFileSystem, source: str, target: str) -> None:
        sent.append(target)
        put(self, source, target)

    monkeypatch.setattr(MemoryFileSystem, "put_file", noted)
    url, staging = "memory://bucket/out", tmp_path / "uploads" / "export_hf"
    assert not has_export("k", url)
    with uploaded("k", url, staging) as directory:
        write_export(directory)
    assert sent[-1] == "/bucket/out/config.json"
    assert bucket.cat_file("/bucket/out/sub/tokenizer.json") == b"sub/tokenizer.json"
    assert has_export("k", url)
    assert not staging.exists()
    with pytest.raises(ConfigError, match=rf"^trainer\.export_hf={url} exists already"):
        check_outputs(load_config(base, [f"trainer.export_hf={url}"]))


def test_uploaded_cut_upload_names_local_files_and_is_repeated(
    bucket: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, staging, put = "memory://bucket/out", tmp_path / "uploads" / "export_hf", MemoryFileSystem.put_file

    def cut(self: MemoryFileSystem, source: str, target: str) -> None:
        if target.endswith("tokenizer.json"):
            raise PermissionError("access denied")
        put(self, source, target)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "put_file", cut)
        with (
            pytest.raises(
                StorageError, match=rf"^k={url}: PermissionError: access denied; the files are in {staging};"
            ),
            uploaded("k", url, staging) as directory,
        ):
            write_export(directory)
    assert (staging / "sub" / "tokenizer.json").is_file()
    assert not has_export("k", url)
    with uploaded("k", url, staging) as directory:
        assert not Path(directory).exists()
        write_export(directory)
    assert has_export("k", url)


def test_export_of_a_run_uploads_only_to_urls(bucket: MemoryFileSystem, base: str) -> None:
    Path("run").mkdir()
    config = load_config(base, ["trainer.export_hf=memory://bucket/out", "trainer.export_adapter=adapter"])
    actor = SimpleNamespace(
        export_hf=lambda path, _: write_export(path), export_adapter=lambda path, _: Path(path).mkdir()
    )
    verbs._export(cast(Actor, actor), config)
    assert has_export("k", "memory://bucket/out")
    assert (Path("adapter").is_dir(), list(Path("run").rglob("*.json"))) == (True, [])


def test_isolated_run_with_urls_is_rejected(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The namespace has no network: neither data nor exports could be transferred."""
    monkeypatch.setattr(namespace, "is_inside", lambda: False)
    config: Config = load_config(base, ["cluster.isolation=namespace"])
    with pytest.raises(
        ConfigError, match=r"cannot reach data\.train=memory://bucket/a/\*\.jsonl; set cluster\.isolation"
    ):
        choice.reason_for_own_network(config)
