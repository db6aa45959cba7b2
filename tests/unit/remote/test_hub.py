"""Models and data sets by hub id: the commit is pinned, and each failure names the key, the id and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from mcore_rl.cli import main
from mcore_rl.config import load_config
from mcore_rl.config.fields import check_domains
from mcore_rl.config.reading.remote_names import HubName, parse_hub_name
from mcore_rl.config.run_configs import replace_config
from mcore_rl.config.schema import Config
from mcore_rl.data.sources.paths import file_weights, find_files
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.observe.report.token_pieces import Pieces
from mcore_rl.remote.localize import localized, pinned_overrides, with_remote_names
from tests.unit.remote.conftest import NEW, OLD, Hub

MODEL = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": b"w", "original/x.safetensors": b"other"}
SHARDS = {"data/train-00000-of-00002.parquet": b"1", "data/train-00001-of-00002.parquet": b"2", "README.md": b"#"}
SET = "hf://datasets/o/set"
ROWS = b'{"question": "q", "answer": "a"}\n'


def configured(*overrides: str) -> Config:
    Path("config.yaml").write_text("model: {hf_path: m}\ndata: {train: t.jsonl}\nrun: {dir: run}\n")
    return load_config("config.yaml", overrides)


def start(*overrides: str) -> Config:
    """Localize and record the configuration, like a start of a run."""
    config = configured(*overrides)
    with localized(config, print) as names:
        Path("run").mkdir(exist_ok=True)
        replace_config(with_remote_names(config, names), Path("run"))
    return config


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("Qwen/Qwen3-30B-A3B", "model", HubName("model", "Qwen/Qwen3-30B-A3B")),
        ("Qwen/Qwen3@refs/pr/1", "model", HubName("model", "Qwen/Qwen3", "refs/pr/1")),
        ("hf://Qwen/Qwen3@v1", "model", HubName("model", "Qwen/Qwen3", "v1", as_url=True)),
        (f"{SET}@refs%2Fpr%2F1/a/*.csv", "dataset", HubName("dataset", "o/set", "refs/pr/1", "a/*.csv", as_url=True)),
        *((path, "dataset", None) for path in ("a/train.jsonl", "a/*.csv", "/a/b", "./a", "~/a", "a", "a/b/c", "../a")),
        ("here/model", "model", None),
    ],
)  # fmt: skip
def test_parse_hub_name_separates_ids_from_paths(
    text: str, kind: str, expected: HubName | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "model").mkdir(parents=True)
    name = parse_hub_name("k", text, kind)  # type: ignore[arg-type]
    assert name == expected
    assert name is None or str(name) == text


@pytest.mark.parametrize("text", ["hf://o/n/file.json", "hf://datasets/o/n", "hf://o"])
def test_parse_hub_name_rejects_urls_of_another_kind(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^k=hf://o?.* names no model on the hub; write hf://OWNER/NAME\[@REVISION\]$"
    ):
        parse_hub_name("k", text, "model")


def test_localize_model_downloads_top_level_files_and_pins_commit(hub: Hub) -> None:
    hub.repos["o/model"] = {OLD: MODEL, NEW: MODEL}
    keys = ["model.hf_path=o/model@v1", "reference.hf_path=hf://o/model", "model.tokenizer_path=o/model@v1"]
    config = start(*keys, "algorithm.kl.in_loss=0.1")
    folder = Path(config.model.hf_path)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder.name, Path(str(config.reference.hf_path)).name) == (OLD, NEW)
    recorded = load_config("run/config.yaml")
    assert recorded.model.hf_path == recorded.model.tokenizer_path == f"o/model@{OLD}"
    assert recorded.reference.hf_path == f"hf://o/model@{NEW}"


def test_localize_resumed_run_keeps_recorded_commit_of_plain_id(hub: Hub) -> None:
    hub.repos["o/model"], hub.branch = {OLD: MODEL, NEW: MODEL}, OLD
    hub.repos["datasets/o/set"] = {OLD: {"train.jsonl": ROWS}, NEW: {"train.jsonl": ROWS * 2}}
    keys = ["model.hf_path=o/model", "data.train=[o/set]", "data.weights={o/set: 2}"]
    start(*keys)
    hub.branch = NEW
    config = start(*keys)
    assert OLD in config.model.hf_path
    files = find_files(config.data.train, "data.train")
    assert [file.read_bytes() for file in files] == [ROWS]
    assert file_weights(config.data.weights, config.data.train) == (2.0,)
    assert NEW in start("model.hf_path=o/model@main").model.hf_path


def test_localize_weights_are_left_out_of_plans_and_random_models(hub: Hub) -> None:
    hub.repos["o/model"] = {NEW: MODEL}
    config = configured("model.hf_path=o/model", "data.train=o/absent")
    with localized(config, print, weights=False, data=False):
        pass
    with localized(configured("model.hf_path=o/model", "model.random_init=true", "data.train=t.jsonl"), print):
        pass
    assert sorted(hub.downloads) == ["config.json", "tokenizer.json"]
    assert config.data.train == ["o/absent"]


def test_localize_data_id_takes_shards_of_the_only_split(hub: Hub) -> None:
    hub.repos["datasets/o/set"] = {NEW: SHARDS}
    files = find_files(start("data.train=o/set").data.train, "data.train")
    assert [file.name for file in files] == [name.rpartition("/")[2] for name in SHARDS if "train" in name]


def test_localize_data_url_takes_one_file_glob_or_folder(hub: Hub) -> None:
    hub.repos["datasets/o/set"] = {NEW: {**SHARDS, "data/test.jsonl": ROWS, "easy/x.csv": b"a"}}
    data = start(f"data.train={SET}/data/train-*", f"data.val={{e: {SET}/easy, t: {SET}/data/test.jsonl}}").data
    found = {key: [file.name for file in find_files(names, key)] for key, names in data.validation.items()}
    assert found == {"data.val.e": ["x.csv"], "data.val.t": ["test.jsonl"]}
    assert len(find_files(data.train, "data.train")) == 2
    assert load_config("run/config.yaml").data.train == [f"{SET}@{NEW}/data/train-*"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("o/set", rf"^data\.train=o/set has several splits .* {SET}/data/test\.jsonl, {SET}/data/train-\*\.p"),
        ("hf://datasets/o/set/none/*.jsonl", r"has no file none/\*\.jsonl at commit b{40}"),
        ("o/text", "the data set has no .jsonl, .parquet, .csv file"),
    ],
)  # fmt: skip
def test_localize_data_without_one_set_is_rejected(hub: Hub, name: str, message: str) -> None:
    hub.repos |= {"datasets/o/set": {NEW: {**SHARDS, "data/test.jsonl": ROWS}}, "datasets/o/text": {NEW: {"a.md": b""}}}
    with pytest.raises(DataError, match=message):
        start(f"data.train={name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("o/other", r"^model\.hf_path=o/other: there is no such directory, and http://.* has no such model.* HF_TOKEN"),
        ("o/gated", r"access to the model is restricted; accept its terms at http://127.*/o/gated and set HF_TOKEN"),
        ("o/model@v9", "the model has no revision v9; name another one"),
    ],
)  # fmt: skip
def test_localize_name_that_the_hub_rejects_names_the_reason(hub: Hub, name: str, message: str) -> None:
    hub.repos, hub.gated = {"o/model": {NEW: MODEL}, "o/gated": {NEW: MODEL}}, {"o/gated"}
    with pytest.raises(ConfigError, match=message) as caught:
        start(f"model.hf_path={name}")
    assert caught.value.exit_code == 2


def test_localize_without_network_uses_the_cache_or_names_remedies(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    hub.repos |= {"o/model": {NEW: MODEL}, "datasets/o/set": {NEW: SHARDS}}
    start("model.hf_path=o/model", "model.random_init=true", "data.train=o/set")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (Path("run") / "config.yaml").unlink()
    config = start("model.hf_path=o/model", "model.random_init=true", "data.train=o/set")
    assert (Path(config.model.hf_path).name, len(find_files(config.data.train, "data.train"))) == (NEW, 2)
    # The weights have not been downloaded: an incomplete copy is not used.
    with pytest.raises(
        ConfigError, match=rf"^model\.hf_path=o/model@{NEW}: .*HF_HUB_OFFLINE is set.*hf download o/model"
    ):
        start("model.hf_path=o/model")


def test_localize_hub_that_cannot_be_reached_is_one_message(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ConfigError, match=r"http://127\.0\.0\.1:9 cannot be reached \(ConnectError: .*HF_ENDPOINT to a"
    ):
        start("critic.hf_path=o/model")


def test_localize_cache_in_its_documented_layout_needs_no_listing(cache: Path) -> None:
    """A cache that another machine or an older version wrote has no listing of files."""
    folder = cache / "datasets--o--set"
    (folder / "snapshots" / NEW / "data").mkdir(parents=True)
    (folder / "snapshots" / NEW / "data" / "train.jsonl").write_bytes(ROWS)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(NEW)
    config = start("data.train=o/set")
    assert [file.name for file in find_files(config.data.train, "data.train")] == ["train.jsonl"]


def test_localize_checks_other_keys_before_a_download(hub: Hub) -> None:
    hub.repos["o/model"] = {NEW: MODEL}
    with pytest.raises(ConfigError, match=r"^rollout\.top_k=0"):
        start("model.hf_path=o/model", "rollout.top_k=0")
    assert not hub.downloads


def test_pinned_overrides_set_commits_for_a_job(hub: Hub) -> None:
    hub.repos |= {"o/model": {NEW: MODEL}, "datasets/o/set": {NEW: {"t.jsonl": ROWS}}}
    keys = ["model.hf_path=o/model", "data.train=[o/set]", "data.val={a: o/set}", "data.weights={o/set: 2}"]
    config = configured(*keys)
    with localized(config, print) as names:
        pinned = configured(*keys, *pinned_overrides(config, names))
    assert pinned.model.hf_path == f"o/model@{NEW}"
    assert pinned.data.train == pinned.data.validation["data.val.a"] == [f"o/set@{NEW}"]


def test_slurm_job_names_the_commits(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repos |= {"o/model": {NEW: MODEL}, "datasets/o/set": {NEW: {"t.jsonl": ROWS}}}
    configured()
    keys = ["cluster.device=cpu", "model.hf_path=o/model", "data.train=o/set"]
    assert main(["slurm", "config.yaml", "--force", *keys]) == 0
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("run="))
    # The last override of a key wins.
    assert command.rindex(f"model.hf_path=o/model@{NEW}") > command.index("model.hf_path=o/model ")
    assert f"data.train=[o/set@{NEW}]" in command


def test_plan_unknown_id_is_one_line_and_exit_code_2(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configured()
    assert main(["plan", "config.yaml", "model.hf_path=o/other"]) == 2
    *notes, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: model.hf_path=o/other: there is no such directory, HF_HUB_OFFLINE is set, and")
    assert notes == ["model.hf_path: looking up o/other on the Hugging Face hub"]


def test_pieces_of_run_find_tokenizer_of_a_hub_id(hub: Hub) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({"word": 0}, unk_token="word"))
    hub.repos["o/model"] = {NEW: {**MODEL, "tokenizer.json": tokenizer.to_str().encode()}}
    start("model.hf_path=o/model")
    notes: list[str] = []
    recorded = load_config("run/config.yaml").model.hf_path
    assert Pieces.of_run({"model.hf_path": recorded}, notes).split([0]) == ["word"]
    assert (notes, json.loads(tokenizer.to_str())["model"]["vocab"]) == ([], {"word": 0})


@pytest.mark.parametrize("key", ["run.dir", "model.hf_path", "actor.lora.path", "data.cache_dir"])
def test_localize_urls_are_rejected_where_a_path_is_needed(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"^{key}=s3://b/x must be a path on this machine.*, not a URL"):
        check_domains(configured(f"{key}=s3://b/x"))
