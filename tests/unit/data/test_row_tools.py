"""Tools of rows, unsupported options of rows, and ignored columns."""

from __future__ import annotations

import copy
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.loading import load_prompts, load_supervised
from mcore_rl.data.prompts import PromptSet
from mcore_rl.errors import DataError
from tests.unit.data.chat import made
from tests.unit.data.rows import jsonl, parquet

SHOWN = made.STABLE.replace("{{ t.function.name }}", "{{ t | tojson }}")
"""Chat template that shows the whole schemas of tools."""


def schema(name: str, *arguments: str, **more: Any) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, "description": f"{name}s", "parameters": parameters}}


RUN = [schema("search", "query", required=["query"]), schema("add", "a", "b"), schema("python", "code")]
ROW = {"prompt": "1+1?", "answer": "2"}


def load(
    tmp_path: Path, rows: list[dict[str, Any]], *, kind: str = "jsonl", runs: bool = True, **data: Any
) -> tuple[PromptSet, str]:
    path = (parquet if kind == "parquet" else jsonl)(tmp_path / f"rows.{kind}", rows)
    tokenizer, rollout = made.tokenizer(SHOWN), RolloutConfig(max_prompt_tokens=10_000)
    tools = RUN if runs else []
    prompts, report = load_prompts(path, tokenizer, DataConfig(**data), rollout, runs_tools=runs, tools=tools)
    return prompts, str(report)


def names(tools: Any) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_load_prompts_tool_selection_restricts_the_tools_of_a_row(tmp_path: Path, kind: str) -> None:
    chosen = {**ROW, "extra_info": {"tool_selection": ["add", "search"]}}
    every = {**ROW, "extra_info": {"tool_selection": []}}
    prompts, _ = load(tmp_path, [chosen, every, {**ROW, "extra_info": {"tool_selection": None}}], kind=kind)
    assert names(prompts[0].tools) == ["add", "search"]
    assert (prompts[1].tools, prompts[2].tools) == (None, None)
    assert '"add"' in prompts[0].text
    assert '"python"' not in prompts[0].text
    assert '"python"' in prompts[1].text
    with pytest.raises(DataError, match=r"line 1: tool_selection names 'serch', .*has: search, add.*mean search\?"):
        load(tmp_path, [{**ROW, "tool_selection": ["serch"]}])


@pytest.mark.parametrize("form", ["openai", "structs", "text", "texts", "flat", "names"])
def test_load_prompts_tools_column_takes_each_published_form(tmp_path: Path, form: str) -> None:
    wanted = [RUN[1], schema("search", "query", required=["query"])]
    given: Any = {
        "openai": wanted,
        "structs": wanted,  # Arrow adds nulls for the arguments of the other tool
        "text": json.dumps(wanted),
        "texts": [json.dumps(each) for each in wanted],
        "flat": [each["function"] for each in wanted],
        "names": ["add", "search"],
    }[form]
    kind = "parquet" if form == "structs" else "jsonl"
    prompts, _ = load(tmp_path, [{**ROW, "tools": given}, {**ROW, "tools": []}, ROW], kind=kind)
    assert prompts[0].tools == wanted
    assert "null" not in prompts[0].text
    assert '"python"' not in prompts[0].text
    assert prompts[1].tools == []
    assert '"add"' not in prompts[1].text
    assert prompts[2].tools is None


def test_load_prompts_single_turn_shows_tools_and_reports_it(tmp_path: Path) -> None:
    mine = schema("get_weather", "city")
    prompts, report = load(tmp_path, [{**ROW, "tools": [mine]}], runs=False)
    assert '"get_weather"' in prompts[0].text
    assert "1 rows have tools, shown in prompts: calls are text for the reward, nothing is executed" in report
    supervised, _ = load_supervised(
        tmp_path / "rows.jsonl", made.tokenizer(SHOWN), DataConfig(), RolloutConfig(max_prompt_tokens=10_000)
    )
    assert supervised.prompts[0].text == prompts[0].text
    with pytest.raises(DataError, match=r"line 1 has tools, which need a chat template"):
        load(tmp_path, [{**ROW, "tools": [mine]}], runs=False, template="plain")


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([schema("get_weather")], r"tools\[0\] names 'get_weather', which has no implementation \(rollout\.tools has"),
        ([RUN[1], schema("add", "a", "b")], "two tools 'add'"),
        ([schema("add", "a", "c")], r"tools\[0\]: add has the argument 'c', which its implementation lacks"),
        ([schema("search")], r"search lacks the argument 'query', which its implementation requires"),
        ([{"type": "web_search", "name": "add"}], "is of type 'web_search'; only functions"),
        ([{"function": {"description": "x"}}], r"tools\[0\] must be \{type: function"),
        ([3], r"tools\[0\] must be"),
        (3, "tools is int, not a list of schemas"),
        ("hammer", "tools is not valid JSON"),
        (["hammer"], r"tools\[0\] names 'hammer'"),
        ([{**schema("add"), "function": {"name": "add", "parameters": {"properties": 3}}}], "not a JSON schema"),
        ([{"name": "add", "parameters": True}], "parameters of add is bool, not a JSON schema"),
        ([{"name": "add", "parameters": [1]}], "parameters of add is list, not a JSON schema"),
        ([{"name": "add", "parameters": "{"}], "parameters of add is not valid JSON"),
    ],
)
def test_load_prompts_tools_that_cannot_be_called_are_rejected(tmp_path: Path, tools: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"^data\.train: .*rows\.jsonl, line 2: .*{message}"):
        load(tmp_path, [ROW, {**ROW, "tools": copy.deepcopy(tools)}])


def test_load_prompts_ignored_columns_are_listed_once(tmp_path: Path) -> None:
    row = {**ROW, "data_source": "a", "ability": "math", "uid": 1, "question": "?", "empty": None, "extra_info": {}}
    _, report = load(tmp_path, [row, {**ROW, "other": 0}, row])
    assert report.count("ignored columns") == 1
    assert "ignored columns: ability, uid, question, other (reward functions and tools receive" in report
    assert "ignored columns" not in load(tmp_path, [{**ROW, "image": []}])[1]
    assert "ignored columns: prompt (" in load(tmp_path, [{**ROW, "text": "?"}], prompt_key="text")[1]


def test_load_prompts_ground_truth_that_json_lacks_becomes_plain(tmp_path: Path) -> None:
    truths = [[Decimal("1.5")], [Decimal("2.0")]]
    rows = [{"prompt": "?", "reward_model": {"ground_truth": truth}} for truth in truths]
    prompts, _ = load(tmp_path, rows, kind="parquet")
    assert prompts.columns["ground_truth"] == [[1.5], [2.0]]
    with pytest.raises(DataError, match="has no ground truth"):
        load(tmp_path, [{"prompt": "?", "answer": math.nan}], kind="parquet")


def test_load_prompts_tools_of_rows_survive_the_cache(tmp_path: Path) -> None:
    rows = [{**ROW, "tools": [RUN[1]]}, {**ROW, "extra_info": {"tool_selection": ["python"]}}, ROW]
    first, _ = load(tmp_path, rows, cache_dir=str(tmp_path / "cache"))
    second, report = load(tmp_path, rows, cache_dir=str(tmp_path / "cache"))
    assert "read from data.cache_dir" in report
    assert first.columns["tools"] == second.columns["tools"] == [[RUN[1]], [RUN[2]], None]


def test_load_prompts_parquet_bytes_are_utf8_or_rejected(tmp_path: Path) -> None:
    def row(content: bytes) -> dict[str, Any]:
        return {**ROW, "prompt": [{"role": "user", "content": content}]}

    prompts, _ = load(tmp_path, [row("é?".encode())], kind="parquet", runs=False)
    assert prompts[0].messages == [{"role": "user", "content": "é?"}]
    with pytest.raises(DataError, match=r"rows\.parquet, row 2: the prompt has binary data that is not UTF-8"):
        load(tmp_path, [row(b"a"), row(b"\xff")], kind="parquet", runs=False)


def test_load_prompts_parquet_map_becomes_arguments_of_a_call(tmp_path: Path) -> None:
    arguments = pa.map_(pa.string(), pa.string())
    call = pa.struct({"function": pa.struct({"name": pa.string(), "arguments": arguments})})
    message = pa.struct({"role": pa.string(), "content": pa.string(), "tool_calls": pa.list_(call)})
    rows = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": [("a", "1")]}}]},
        {"role": "tool", "content": "2"},
    ]
    path = tmp_path / "map.parquet"
    pq.write_table(pa.table({"prompt": pa.array([rows], pa.list_(message)), "answer": ["2"]}), path)
    prompts, _ = load_prompts(path, made.tokenizer(SHOWN), DataConfig(), RolloutConfig(max_prompt_tokens=10_000))
    assert prompts[0].messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": "1"}}
