from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from model_converters.cli import build_parser, main

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config_file(tmp_path, moe_config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(moe_config))
    return path


def test_show_json_slices_tile_every_hf_tensor(config_file, capsys, moe_config):
    flags = ["--tp", "2", "--pp", "2", "--ep", "2", "--etp", "2", "--world-size", "16", "--json"]
    assert main(["show", "--config", str(config_file), *flags]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["layout"]["dp"] == 4
    for row in shown["rows"]:
        sizes = dict(zip(row["hf"], (shape[row["dim"]] for shape in row["shapes"]), strict=True))
        covered = {name: set() for name in sizes}
        for shard in row["shards"]:
            assert shard["ranks"]
            padding = shard["shape"][row["dim"]] - sum(piece["length"] for piece in shard["slices"])
            assert padding == (row["transform"] == "Vocabulary" and shard == row["shards"][-1])
            for piece in shard["slices"]:
                covered[piece["hf"]] |= set(range(piece["start"], piece["start"] + piece["length"]))
        assert covered == {name: set(range(size)) for name, size in sizes.items()}
    held = sum(len(shard["ranks"]) * prod(shard["shape"]) for row in shown["rows"] for shard in row["shards"])
    # Replicas: norms and router 8 (all ranks of a stage), dense matrices 4, experts 2.
    hidden, heads, vocab = 12, 48, 24  # one row of the vocabulary is padding
    per_layer = 2 * hidden * heads + 2 * hidden * 12
    norms = 8 * (4 * (2 * hidden + 2 * 6) + hidden) + 8 * 3 * 8 * hidden
    dense = 4 * (2 * vocab * hidden + 4 * per_layer + 3 * hidden * 20)
    assert held == norms + dense + 2 * 3 * 8 * 3 * hidden * 4


def test_show_table_names_ranks_and_slices(config_file, capsys):
    assert main(["show", "--config", str(config_file.parent), "--tp", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    qkv = [line.split() for line in lines if line.startswith("decoder.layers.0.self_attention.linear_qkv")]
    assert [line[4] for line in qkv] == ["0", "1"]
    assert "".join(qkv[1][7:]) == "dim024:48|6:12|6:12"
    assert any("self_attn.{q_proj,k_proj,v_proj}.weight" in line for line in lines)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ep", "3"], "8 experts are not a multiple of ep 3"),
        (["--tp", "2", "--world-size", "3"], "world size 3 is not a multiple of tp 2"),
        (["--vpp", "2"], "set pp > 1"),
    ],
)
def test_show_bad_layout_exits_with_2(flags, message, config_file, capsys):
    assert main(["show", "--config", str(config_file), *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_module_closed_stdout_exits_quietly(tmp_path, moe_config):
    # So many experts that the table exceeds the buffer of a pipe.
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps(moe_config | {"num_experts": 512}))
    command = [sys.executable, "-m", "model_converters", "show", "--config", str(config_file), "--pp", "4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "qwen3_moe: 3104 rows on 4 ranks\n"
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert errors == ""


def test_show_missing_file_exits_with_2(tmp_path, capsys):
    assert main(["show", "--config", str(tmp_path / "nothing.json")]) == 2
    assert "nothing.json does not exist" in capsys.readouterr().err


def test_show_path_flags_expand_home_and_variables(tmp_path, monkeypatch, config_file, capsys):
    monkeypatch.setenv("HOME", str(config_file.parent))
    monkeypatch.setenv("PLACE", str(config_file.parent))
    for written in ("~", "$PLACE", "${PLACE}"):
        assert main(["show", "--config", f"{written}/{config_file.name}"]) == 0
    parsed = build_parser().parse_args(["to-mcore", "--hf", "~/a b", "--out", "$PLACE/out", "--lora", "~/l"])
    home = config_file.parent
    assert (parsed.hf, parsed.out, parsed.lora) == (home / "a b", home / "out", home / "l")


@pytest.mark.parametrize("path", ["$NOWHERE/x", "~nobody_here/x", "a\udcff", ""])
def test_to_hf_path_that_cannot_expand_exits_with_2(path, capsys):
    for flag in ("--ckpt", "--out", "--hf"):
        words = ["to-hf", "--ckpt", "a", "--out", "b", "--hf", "c", flag, path]
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
        assert f"argument {flag}: " in capsys.readouterr().err
