"""wandb in its offline mode: the contents of its files, parsed by wandb's own messages."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mcore_rl.observe.trackers.run_ids import RunIds
from mcore_rl.observe.trackers.wandb import WandbRun, login_problem
from tests.selection import needs_package
from tests.unit.observe.trackers.recorded import facts, response

pytestmark = needs_package("wandb", "pip install wandb")
BLOCK = 32768


def records(run_dir: Path) -> list[object]:
    """Read all records of the newest offline run."""
    from wandb.proto import wandb_internal_pb2

    newest = max(
        (run_dir / "trackers" / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns
    )
    return [wandb_internal_pb2.Record.FromString(data) for data in leveldb_records(newest.read_bytes())]


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """Read a log in LevelDB's format: blocks of 32 KiB, fragments with crc32, length and type (1: whole, 4: last)."""
    place, data = 7, b""  # after wandb's own header
    while place + 7 <= len(content):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        data += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in {1, 4}:
            yield data
            data = b""


def history(run_dir: Path) -> list[dict[str, object]]:
    rows = [record.history for record in records(run_dir) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


@pytest.mark.slow
def test_wandb_offline_records_metrics_config_and_table(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # wandb prints advice in processes that have imported openai, as vLLM does.
    monkeypatch.setitem(sys.modules, "openai", ModuleType("openai"))
    run = WandbRun(facts(tmp_path))
    run.append(0, {"val/accuracy": 0.25}, [])
    run.append(1, {"reward/mean": 0.5}, [response(), response(is_validation=True)])
    run.close(failed=True)
    first, second = history(tmp_path)
    assert (first["step"], first["val/accuracy"]) == (0, 0.25)
    assert (second["step"], second["reward/mean"]) == (1, 0.5)
    table = {name: second[f"responses/training/{name}"] for name in ("_type", "nrows", "ncols", "path")}
    assert (table["_type"], table["nrows"], table["ncols"]) == ("table-file", 1, 9)
    (path,) = tmp_path.glob(f"trackers/wandb/offline-run-*/files/{table['path']}")
    assert json.loads(path.read_text())["data"][0][-2:] == ["1+1=?", response().response]
    (started, *_) = [each.run for each in records(tmp_path) if each.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert config["actor.optimizer.lr"] == 1e-6
    assert config["environment.revision"] == "abc-dirty"
    assert (started.project, started.display_name) == ("project", "name")
    (ended,) = [each.exit for each in records(tmp_path) if each.WhichOneof("record_type") == "exit"]
    assert ended.exit_code == 1
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.rglob("wandb-metadata.json"))  # it has the command line


@pytest.mark.slow
def test_wandb_resumed_run_keeps_its_id_and_repeats_steps(tmp_path: Path) -> None:
    for first_step, lr in ((0, 1e-6), (1, 1e-5)):
        run = WandbRun(facts(tmp_path, first_step=first_step, lr=lr))
        run.append(first_step, {"loss": 1.0}, [])
        run.append(2, {"loss": 2.0}, [])
        run.close(failed=False)
    assert [row["step"] for row in history(tmp_path)] == [1, 2]
    (started, *_) = [each.run for each in records(tmp_path) if each.WhichOneof("record_type") == "run"]
    run_id = RunIds(tmp_path / "trackers").get("wandb")
    assert started.run_id == run_id
    assert len(list((tmp_path / "trackers" / "wandb").glob(f"offline-run-*-{run_id}"))) >= 1


def test_wandb_without_key_names_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert "WANDB_API_KEY" in (login_problem() or "")
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password " + "0" * 40 + "\n")
    (tmp_path / "netrc").chmod(0o600)
    assert login_problem() is None


def test_wandb_offline_mode_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert login_problem() is None
