"""Reading of tool files, and the example tool that searches a text file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from mcore_rl.config.functions import load_object
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.tools.limits import ToolLimits
from mcore_rl.rollout.tools.load import read_entries
from tests.unit.rollout.tools.made import answers_of

VERLS = """
tools:
  - class_name: "my.tools.Search"
    config: {type: native, url: here}
    tool_schema: {type: function, function: {name: search}}
  - class_name: verl.tools.mcp_search_tool.MCPSearchTool
    config: {type: mcp, rate_limit: 120, timeout: 15}
    mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [find]}
  - function: mine.py:add
    processes: 2
    max_running: 5
    retries: 0
    rate_per_second: 0.5
    timeout_seconds: 3
"""


def written(folder: Path, text: str) -> str:
    path = folder / "tools.yaml"
    path.write_text(text)
    return str(path)


def test_read_entries_accepts_every_kind(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    (tmp_path / "servers.json").touch()
    search, servers, add = read_entries(written(tmp_path, VERLS), 30.0)
    assert (search.form, search.target) == ("class_name", "my.tools:Search")
    assert (search.config["url"], search.lifecycle) == ("here", "call")
    assert search.schema["function"]["name"] == "search"
    assert search.limits == ToolLimits(30.0)
    assert (servers.form, servers.target, servers.selected) == ("mcp", f"{tmp_path}/servers.json", ("find",))
    assert servers.limits == ToolLimits(15, rate_per_second=120)
    assert (add.target, add.processes) == (f"{tmp_path}/mine.py:add", 2)  # relative to the YAML file, in any process
    assert add.limits == ToolLimits(3, max_running=5, retries=0, rate_per_second=0.5)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tools: [", "is not YAML"),
        ("tools: []", "must hold `tools:`, a list of at least one tool"),
        ("- a", "must hold `tools:`"),
        ("tools: [x]", r"tools\[0\] must be a mapping with function: "),
        ("tools: [{config: {}}]", r"tools\[0\] must have function: "),
        ("tools: [{function: a.py:f, timeout: 3}]", r"tools\[0\] has no key timeout; the keys are: function"),
        ("{tools: [{function: a.py:f}], more: 1}", "has no key more"),
        ("tools: [{function: f}]", r"tools\[0\].function=f must be module_or_file.py:name"),
        ("tools: [{builtin: ruby}]", r"tools\[0\].builtin=ruby must be one of python, shell"),
        ("tools: [{class_name: Search}]", r"tools\[0\].class_name=Search must be"),
        ("tools: [{class_name: a.B, config: {type: sse}}]", r"config.type=sse must be native or mcp"),
        ("tools: [{class_name: a.B, lifecycle: run}]", r"lifecycle=run must be one of call, episode"),
        ("tools: [{function: a.py:f, max_running: 0}]", r"max_running=0 must be a whole number of at least 1"),
        ("tools: [{function: a.py:f, retries: -1}]", r"retries=-1 must be a whole number of at least 0"),
        ("tools: [{function: a.py:f, timeout_seconds: 0}]", r"timeout_seconds=0 must be a number above 0"),
        ("tools: [{function: a.py:f, timeout_seconds: .inf}]", r"timeout_seconds=inf must be a number above 0"),
        ("tools: [{function: a.py:f, rate_per_second: fast}]", r"rate_per_second=fast must be a number above 0"),
        ("tools: [{config: {type: mcp}}]", r"tools\[0\].mcp.mcp_servers_config_path must name a JSON file"),
        ("tools: [{mcp: {mcp_servers_config_path: a, tool_selected_list: b}}]", "tool_selected_list must be a list"),
    ],
)
def test_read_entries_errors_name_file_and_key(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout.tools={tmp_path}/tools.yaml.*{told}"):
        read_entries(written(tmp_path, text), 30.0)


def test_read_entries_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml cannot be read: .*; set it to a YAML file of tools, or to"):
        read_entries(str(tmp_path / "none.yaml"), 30.0)


def test_read_entries_paths_expand_home_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLACE", str(tmp_path))
    text = "tools: [{function: ~/mine.py:add}, {class_name: $PLACE/mine.py:Add}, {mcp: {mcp_servers_config_path: ~/s}}]"
    function, kind, servers = read_entries(written(tmp_path, text), 30.0)
    assert (function.target, kind.target) == (f"{tmp_path}/mine.py:add", f"{tmp_path}/mine.py:Add")
    assert servers.target == f"{tmp_path}/s"
    with pytest.raises(ConfigError, match=r"tools\[0\]\.function=\$NOWHERE/a\.py: the environment variable NOWHERE"):
        read_entries(written(tmp_path, "tools: [{function: $NOWHERE/a.py:f}]"), 30.0)


EXAMPLE = Path(__file__).parents[4] / "configs" / "tools"
TEXTS = [
    "The cat sat on the mat.",
    "A dog and a cat.",
    "Birds sing in the morning; the dog sleeps.",
    "",
    "Cat cat cat.",
]


def test_search_scores_follow_the_formula(tmp_path: Path) -> None:
    """Okapi BM25 written out for one word of one text: tf 3 in 3 words, 4 words on average, in 3 of 5 texts."""
    index = load_object("example", f"{EXAMPLE}/search.py:Index")(TEXTS)
    mean = (6 + 5 + 8 + 0 + 3) / 5
    weight = math.log(1 + (5 - 3 + 0.5) / (3 + 0.5))
    wanted = weight * 3 * 2.5 / (3 + 1.5 * (0.25 + 0.75 * 3 / mean))
    found = index.search("CAT?", 2)
    assert found[0] == (pytest.approx(wanted, rel=1e-12), "Cat cat cat.")
    assert index.search("dog cat", 9)[0][1] == "A dog and a cat."
    assert index.search("fish", 3) == []


def test_search_example_file_runs(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    entries = yaml.safe_load((EXAMPLE / "search.yaml").read_text())
    entries["tools"][0]["class_name"] = f"{EXAMPLE}/search.py:SearchTool"
    entries["tools"][0]["config"]["path"] = str(tmp_path / "texts.jsonl")
    (tmp_path / "search.yaml").write_text(yaml.safe_dump(entries))
    found = answers_of(str(tmp_path / "search.yaml"), *(("search", {"query": q}) for q in ("morning birds", "fish")))
    assert [answer.text for answer in found] == [f"[1] {TEXTS[2]}", "Nothing was found."]
