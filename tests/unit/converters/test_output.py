"""Output of `python -m model_converters families` and `show`, and their arguments."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest

from model_converters.cli import build_parser, main
from model_converters.errors import ConversionError
from model_converters.families import FAMILIES, family_for
from model_converters.families.refusals import REFUSED
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import local_shapes
from model_converters.output import BEGIN, END, families_markdown
from tests.unit.converters.hf_models import bound_rows

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config_file(tmp_path, moe_config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(moe_config))
    return path


def test_families_page_equals_generated_tables():
    page = (ROOT / "docs" / "families.md").read_text()
    found = page.partition(BEGIN)[2].partition(END)[0].strip()
    assert found == families_markdown(), "run: python -m model_converters families --into docs/families.md"


def test_families_command_lists_every_family_once(capsys):
    assert main(["families"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert names == [*sorted(FAMILIES), *sorted(REFUSED)]
    assert all(name == family.model_type for name, family in FAMILIES.items())


def test_families_into_rewrites_only_between_markers(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"above\n{BEGIN}\nstale\n{END}\nbelow\n")
    for _ in range(2):
        assert main(["families", "--into", str(page)]) == 0
        assert page.read_text() == f"above\n{BEGIN}\n{families_markdown()}\n{END}\nbelow\n"
    page.write_text(f"{END}\n{BEGIN}\n")
    assert main(["families", "--into", str(page)]) == 2
    assert "in this order" in capsys.readouterr().err
    assert page.read_text() == f"{END}\n{BEGIN}\n"


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("deepseek_v4", ["hc_mult", "num_hash_layers"]),
        ("nemotron_h", ["hybrid_override_pattern", "mamba_ssm"]),
    ],
)
def test_family_for_known_unsupported_type_lists_missing_parts(model_type, named):
    with pytest.raises(ConversionError, match=f"'{model_type}'") as caught:
        family_for({"model_type": model_type})
    assert [what for what in named if what not in str(caught.value)] == []


def test_show_unsupported_model_exits_with_message(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "deepseek_v4"}')
    assert main(["show", "--config", str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert REFUSED["deepseek_v4"].models in shown.err
    assert len(shown.err.splitlines()) == 1


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
    bound, layout = bound_rows(moe_config), TrainLayout(16, tp=2, pp=2, ep=2, etp=2)
    for rank in range(16):
        held = [(row, shard) for row in shown["rows"] for shard in row["shards"] if rank in shard["ranks"]]
        assert {row["mcore"]: tuple(shard["shape"]) for row, shard in held} == local_shapes(bound, layout, rank)


def test_show_table_names_ranks_and_slices(config_file, capsys):
    assert main(["show", "--config", str(config_file.parent), "--tp", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    qkv = [line.split() for line in lines if line.startswith("decoder.layers.0.self_attention.linear_qkv")]
    assert [line[4] for line in qkv] == ["0", "1"]
    assert "".join(qkv[1][7:]) == "dim024:48|6:12|6:12"
    assert any("self_attn.{q_proj,k_proj,v_proj}.weight" in line for line in lines)


def test_show_bad_input_exits_with_2(config_file, capsys):
    for flags, message in (
        (["--ep", "3"], "8 experts are not a multiple of ep 3"),
        (["--tp", "2", "--world-size", "3"], "world size 3 is not a multiple of tp 2"),
        (["--config", "nothing.json"], "nothing.json does not exist"),
    ):
        assert main(["show", "--config", str(config_file), *flags]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert message in captured.err
        assert captured.err.count("\n") == 1


def test_module_closed_stdout_exits_quietly(config_file, moe_config, monkeypatch):
    # So many experts that the table exceeds the buffer of a pipe.
    config_file.write_text(json.dumps(moe_config | {"num_experts": 512}))
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "argv", ["model_converters", "show", "--config", str(config_file), "--pp", "4"])
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit) as exited:
            runpy.run_module("model_converters", run_name="__main__")
        closed.write("Python flushes stdout again at its end.")
    assert exited.value.code == 0


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
