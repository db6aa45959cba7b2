"""Tool classes from verl's documentation, unchanged."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.tools.interface import EpisodeState, ToolResult, result_of
from mcore_rl.rollout.tools.kinds import verl_names
from mcore_rl.rollout.tools.kinds.adapters import VerlTool
from mcore_rl.rollout.tools.kinds.verl_names import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from mcore_rl.rollout.tools.toolbox import ToolBox, check_tools
from tests.unit.rollout.tools.made import answers_of, load, with_tools

GRADER = """
import logging
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op

logger = logging.getLogger(__name__)


class Grader(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(
        self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs
    ) -> tuple[str, ToolResponse]:
        if instance_id is None:
            instance_id = str(uuid4())
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth", None)
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        answer = parameters.get("answer", "")
        self._instance_dict[instance_id]["response"] = answer
        reward = await self.calc_reward(instance_id)
        tool_reward = 0.0 if reward > self._instance_dict[instance_id]["reward"] else -0.05
        self._instance_dict[instance_id]["reward"] = reward
        extra = kwargs["agent_data"].extra_fields
        extra["calls"] = extra.get("calls", 0) + 1
        text = f"answer={answer} reward={reward} call={extra['calls']} open={len(self._instance_dict)}"
        return ToolResponse(text=text), tool_reward, {"parsed": answer, "scale": self.config["scale"]}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        state = self._instance_dict[instance_id]
        return gsm8k.compute_score(state["response"], state["ground_truth"], method="flexible", format_score=0.1)

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
"""
ENTRY = """
  - class_name: "grader.py:Grader"
    config:
      type: native
      scale: 3
    lifecycle: {lifecycle}
    tool_schema:
      type: "function"
      function:
        name: "by_{lifecycle}"
        description: "Grades an answer."
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The answer"
          required: ["answer"]
"""


def test_verl_tool_documented_class_runs_in_both_lifecycles(tmp_path: Path) -> None:
    names, answers = ("by_call", "by_episode"), ("no", "it is 41", "it is 41", "so 42")
    kwargs = {name: {"create_kwargs": {"ground_truth": "42"}} for name in names}

    async def use(box: ToolBox) -> list[Any]:
        assert box.schemas[0]["function"]["description"] == "Grades an answer."
        found = [[await box.call(name, name, {"answer": text}, kwargs) for text in answers] for name in names]
        closed = [(await box.close_episode(name)).rewards for name in names]
        return [*found, closed, *[await box.call("f", name, {"answer": "42"}, {}) for name in names]]

    (tmp_path / "grader.py").write_text(GRADER)
    (tmp_path / "tools.yaml").write_text("tools:" + "".join(ENTRY.format(lifecycle=each[3:]) for each in names))
    by_call, by_episode, closed, *others = with_tools(f"{tmp_path}/tools.yaml", use)
    for found, rewards in ((by_call, [-0.05, 0, 0, 0]), (by_episode, [-0.05, 0, -0.05, 0])):
        assert [answer.text for answer in found] == [
            f"answer={text} reward={reward} call={number} open=1"
            for number, (text, reward) in enumerate(zip(answers, (0.0, 0.1, 0.1, 1.0), strict=True), start=1)
        ]
        assert [answer.reward for answer in found] == rewards
    assert by_call[-1].metrics == {"parsed": "so 42", "scale": 3}
    assert closed == [{}, {"by_episode": 1.0}]
    # Without ground truth, in a state of its own; the earlier instances were released.
    assert [other.text for other in others] == [f"answer=42 reward=0.1 call={number} open=1" for number in (1, 2)]


DECORATED = '''
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse

@function_tool
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Another.
    """
    return a + b

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}

@function_tool("times", schema={"type": "function", "function": {
    "name": "other", "description": "Multiplies.", "parameters": PARAMETERS}})
async def product(x):
    return ToolResponse(text=str(2 * x)), 0.5, {"x": x}

def helper(): ...
'''


def test_verl_decorated_functions_are_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DECORATED)
    tools = load(f"{tmp_path}/mine.py")
    functions = [limited.tool.schema["function"] for limited in tools.values()]
    assert [(each["name"], each["description"]) for each in functions] == [("add", "Adds."), ("times", "Multiplies.")]
    episode = EpisodeState("e", {})
    assert asyncio.run(tools["add"].call(episode, {"a": 2, "b": 3})) == ToolResult("5")
    assert asyncio.run(tools["times"].call(episode, {"x": 4})) == ToolResult("8", 0.5, {"x": 4})


def test_verl_decorated_function_runs_in_processes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DECORATED.replace("async def", "def"))
    (tmp_path / "tools.yaml").write_text("tools: [{function: 'mine.py:product', processes: 1}]")
    (times,) = answers_of(f"{tmp_path}/tools.yaml", ("times", {"x": 4}))
    assert (times.text, times.reward, times.metrics) == ("8", 0.5, {"x": 4})


def test_verl_file_without_decorator_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(): ...")
    with pytest.raises(ConfigError, match=r"rollout.tools=.*mine.py has no function with @function_tool"):
        check_tools(RolloutConfig(tools=f"{tmp_path}/mine.py"), SandboxConfig())


@pytest.mark.parametrize(
    ("class_name", "told"),
    [
        ("mine.py:Nothing", "class_name=.*mine.py:Nothing: .* has no function Nothing"),
        ("mine.py:name", "is not a class"),
        ("no_such_package.tools.Grader", "no_such_package.tools does not import"),
    ],
)
def test_verl_tool_invalid_class_is_rejected(tmp_path: Path, class_name: str, told: str) -> None:
    (tmp_path / "mine.py").write_text("name = 'a'")
    (tmp_path / "tools.yaml").write_text(f"tools: [{{class_name: '{class_name}'}}]")
    with pytest.raises(ConfigError, match=rf"rollout.tools=.*tools.yaml: tools\[0\].*{told}"):
        load(f"{tmp_path}/tools.yaml")


def test_verl_tool_without_a_schema_is_rejected() -> None:
    with pytest.raises(ValueError, match="BaseTool has no tool_schema, and get_openai_tool_schema gives none"):
        BaseTool({})


def test_check_tools_without_tools_finds_none() -> None:
    assert check_tools(RolloutConfig(), SandboxConfig()) == []


SCHEMA = {"type": "function", "function": {"name": "t", "parameters": {"type": "object", "properties": {}}}}


class Recorded(BaseTool):
    """Records the arguments of its calls."""

    def __init__(self) -> None:
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self.seen: list[Any] = []

    async def release(self, instance_id: str, **kwargs: object) -> None:
        self.seen.append(("release", instance_id))


class OldForm(Recorded):
    async def create(self, instance_id: str | None = None, *, truth: int) -> str:  # type: ignore[override]
        self.seen.append(truth)
        return "old"

    async def execute(self, instance_id: str, parameters: dict[str, Any]) -> str:  # type: ignore[override]
        return f"{instance_id} {parameters['x']}"


class NewForm(Recorded):
    async def create(self, create_kwargs: Any = None, truth: int = 0) -> Any:  # type: ignore[override]
        self.seen.append((create_kwargs, truth))
        return "new", ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: object) -> Any:
        return ToolResponse(text=f"{sorted(kwargs)}"), None, None


EPISODE = {"t": {"create_kwargs": {"truth": 7}}}


def test_verl_tool_supports_both_forms_of_create() -> None:
    old, new = OldForm(), NewForm()
    assert asyncio.run(VerlTool(old, SCHEMA).call(EpisodeState("e", EPISODE), {"x": 1})).text == "old 1"
    with pytest.raises(KeyError):
        asyncio.run(VerlTool(old, SCHEMA).call(EpisodeState("e", EPISODE), {}))
    outcome = asyncio.run(VerlTool(new, SCHEMA).call(EpisodeState("e", EPISODE), {}))
    assert outcome == ToolResult("['agent_data']", None, {})
    assert old.seen == [7, ("release", "old")] * 2
    assert new.seen == [({"truth": 7}, 7), ("release", "new")]


def test_verl_tool_execute_return_values() -> None:
    assert result_of("text") == ToolResult("text")
    assert result_of((ToolResponse(text="a"), 1, {"k": 2})) == ToolResult("a", 1.0, {"k": 2})
    assert result_of((ToolResponse(), None, None)) == ToolResult("")
    assert result_of(("b", 0.5)) == ToolResult("b", 0.5)
    with pytest.raises(TypeError, match="reward is 'x'"):
        result_of(("b", "x", {}))
    with pytest.raises(TypeError, match="reward is nan"):
        result_of(("b", float("nan"), {}))


def test_verl_names_have_the_interface_of_verl() -> None:
    nested = {"type": "array", "items": {"type": "integer"}}
    given = {"type": "function", "function": {"name": "t", "parameters": {"properties": {"x": nested}}}}
    shown = OpenAIFunctionToolSchema.model_validate(given).model_dump(exclude_none=True)
    assert shown["function"]["parameters"]["properties"]["x"] == nested
    parsed = verl_names.OpenAIFunctionParsedSchema(name="t", arguments='{"x": [1]}')
    call, wrong = verl_names.OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
    assert (call.arguments, wrong) == ({"x": [1]}, False)
    parsed = verl_names.OpenAIFunctionParsedSchema(name="t", arguments="[1")
    assert verl_names.OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)[1] is True
    with pytest.raises(ValueError, match="image of a ToolResponse must be a list"):
        ToolResponse(image="one")
    assert (ToolResponse().is_empty(), ToolResponse(text="a").is_text_only()) == (True, True)
