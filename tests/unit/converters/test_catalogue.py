"""Catalogue of families: supported ones and known unsupported ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_converters.cli import main
from model_converters.errors import ConversionError
from model_converters.families import FAMILIES, family_for
from model_converters.families.refusals import REFUSED
from model_converters.output import BEGIN, END, families_markdown

ROOT = Path(__file__).parents[3]
HUB = ROOT.parent / "shared" / "data" / "hf_configs"


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
        ("gpt_oss", ["self_attn.sinks", "sliding_window", "attention_bias", "swiglu_limit", "MXFP4", "gate_up_proj"]),
        ("deepseek_v32", ["index_topk", "self_attn.indexer"]),
        ("glm_moe_dsa", ["index_topk", "self_attn.indexer"]),
    ],
)
def test_family_for_known_unsupported_type_lists_missing_parts(model_type, named):
    with pytest.raises(ConversionError, match=f"'{model_type}'") as caught:
        family_for({"model_type": model_type})
    assert [what for what in named if what not in str(caught.value)] == []


@pytest.mark.skipif(not HUB.is_dir(), reason="needs the hub's own config.json files")
@pytest.mark.parametrize("name", ["openai--gpt-oss-20b", "openai--gpt-oss-120b", "zai-org--GLM-5"])
def test_show_unsupported_published_model_exits_with_message(name, capsys):
    file = HUB / f"{name}_config.json"
    assert main(["show", "--config", str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert REFUSED[json.loads(file.read_text())["model_type"]].models in shown.err
    assert len(shown.err.splitlines()) == 1
