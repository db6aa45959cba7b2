"""Tool classes from verl's documentation, unchanged."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.tools.interface import EpisodeState, ToolError, ToolResult, result_of
from mcore_rl.rollout.tools.kinds import verl_names
from mcore_rl.rollout.tools.kinds.adapters import VerlTool
from mcore_rl.rollout.tools.kinds.verl_names import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from mcore_rl.rollout.tools.toolbox import ToolBox, check_tools
from tests.unit.rollout.tools.made import answers_of, with_tools

GRADER = """
import logging
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
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
        return 1.0 if state["response"] == state["ground_truth"] else 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
"""
YAML = """
tools:
  - class_name: "{class_name}"
    config:
      type: native
      scale: 3
    tool_schema:
      type: "function"
      function:
        name: "calc_reward"
        description: "Grades an answer."
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The answer"
          required: ["answer"]
"""
KWARGS = {"calc_reward": {"create_kwargs": {"ground_truth": "42"}}}


def files(folder: Path, more: str = "", class_name: str = "grader.py:Grader") -> str:
    (folder / "grader.py").write_text(GRADER)
    path = folder / "tools.yaml"
    path.write_text(YAML.format(class_name=class_name) + more)
    return str(path)


def test_verl_tool_documented_class_runs(tmp_path: Path) -> None:
    async def use(box: ToolBox) -> list[Any]:
        answers = [await box.call("e", "calc_reward", {"answer": text}, KWARGS) for text in ("41", "42")]
        other = await box.call("f", "calc_reward", {"answer": "42"}, {})
        return [box.schemas[0]["function"]["description"], *answers, other, await box.close_episode("e")]

    described, wrong, right, other, closed = with_tools(files(tmp_path), use)
    assert described == "Grades an answer."
    assert (wrong.text, wrong.reward) == ("answer=41 reward=0.0 call=1 open=1", -0.05)
    assert (right.text, right.reward) == ("answer=42 reward=1.0 call=2 open=1", 0.0)
    assert right.metrics == {"parsed": "42", "scale": 3}
    assert other.text == "answer=42 reward=0.0 call=1 open=1"  # no ground truth, and a state of its own
    assert closed.rewards == {}


def test_verl_tool_episode_lifecycle_returns_reward(tmp_path: Path) -> None:
    async def use(box: ToolBox) -> list[Any]:
        for text in ("41", "42"):
            last = await box.call("e", "calc_reward", {"answer": text}, KWARGS)
        return [last, await box.close_episode("e"), await box.call("f", "calc_reward", {"answer": "1"}, KWARGS)]

    last, closed, after = with_tools(files(tmp_path, "    lifecycle: episode\n"), use)
    assert last.text == "answer=42 reward=1.0 call=2 open=1"
    assert closed.rewards == {"calc_reward": 1.0}
    assert "open=1" in after.text  # the first instance was released


GSM8K_GRADER = GRADER.replace(
    "from verl.utils.rollout", "from verl.utils.reward_score import gsm8k\nfrom verl.utils.rollout", 1
)
GSM8K_GRADER = GSM8K_GRADER.replace(
    'return 1.0 if state["response"] == state["ground_truth"] else 0.0',
    'return gsm8k.compute_score(state["response"], state["ground_truth"], method="flexible", format_score=0.1)',
)


def test_verl_tool_can_call_verl_scores(tmp_path: Path) -> None:
    async def use(box: ToolBox) -> list[str]:
        return [
            (await box.call("e", "calc_reward", {"answer": text}, KWARGS)).text for text in ("no", "it is 41", "so 42")
        ]

    spec = files(tmp_path)
    (tmp_path / "grader.py").write_text(GSM8K_GRADER)
    none, wrong, right = with_tools(spec, use)
    assert "reward=0.0" in none
    assert "reward=0.1" in wrong
    assert "reward=1.0" in right


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
    async def use(box: ToolBox) -> list[Any]:
        told = [schema["function"] for schema in box.schemas]
        return [told, await box.call("e", "add", {"a": 2, "b": 3}, {}), await box.call("e", "times", {"x": 4}, {})]

    (tmp_path / "mine.py").write_text(DECORATED)
    told, added, times = with_tools(f"{tmp_path}/mine.py", use)
    assert [(each["name"], each["description"]) for each in told] == [("add", "Adds."), ("times", "Multiplies.")]
    assert added.text == "5"
    assert (times.text, times.reward, times.metrics) == ("8", 0.5, {"x": 4})
    assert [
        each["function"]["name"]
        for each in check_tools(RolloutConfig(tools=f"{tmp_path}/mine.py:product"), SandboxConfig())
    ] == ["times"]


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
        ("grader.py:Nothing", "class_name=.*grader.py:Nothing: .* has no function Nothing"),
        ("grader.py:logger", "is not a class"),
        ("no_such_package.tools.Grader", "no_such_package.tools does not import"),
    ],
)
def test_verl_tool_invalid_class_is_rejected_early(tmp_path: Path, class_name: str, told: str) -> None:
    rollout = RolloutConfig(tools=files(tmp_path, class_name=class_name))
    with pytest.raises(ConfigError, match=rf"rollout.tools=.*tools.yaml: tools\[0\].*{told}"):
        check_tools(rollout, SandboxConfig())


def test_verl_tool_without_a_schema_is_rejected() -> None:
    with pytest.raises(ValueError, match="BaseTool has no tool_schema, and get_openai_tool_schema gives none"):
        BaseTool({})


def test_check_tools_returns_the_schemas(tmp_path: Path) -> None:
    assert check_tools(RolloutConfig(), SandboxConfig()) == []
    names = [
        schema["function"]["name"] for schema in check_tools(RolloutConfig(tools=files(tmp_path)), SandboxConfig())
    ]
    assert names == ["calc_reward"]


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
        return f"{instance_id} {parameters}"


class NewForm(Recorded):
    async def create(self, instance_id: str | None = None, create_kwargs: Any = None) -> Any:  # type: ignore[override]
        self.seen.append(create_kwargs)
        return "new", ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: object) -> Any:
        return ToolResponse(text=f"{sorted(kwargs)}"), None, None


class EitherForm(Recorded):
    async def create(self, instance_id: str | None = None, **kwargs: object) -> Any:
        self.seen.append(kwargs.get("create_kwargs", kwargs))
        return "either", ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: object) -> Any:
        raise ValueError("no")


EPISODE = {"t": {"create_kwargs": {"truth": 7}}}


def test_verl_tool_supports_both_forms_of_create() -> None:
    old, new, either = OldForm(), NewForm(), EitherForm()
    assert asyncio.run(VerlTool(old, SCHEMA).call(EpisodeState("e", EPISODE), {"x": 1})).text == "old {'x': 1}"
    outcome = asyncio.run(VerlTool(new, SCHEMA).call(EpisodeState("e", EPISODE), {}))
    assert outcome == ToolResult("['agent_data']", None, {})
    with pytest.raises(ValueError, match="no"):
        asyncio.run(VerlTool(either, SCHEMA).call(EpisodeState("e", EPISODE), {}))
    assert old.seen == [7, ("release", "old")]
    assert new.seen == [{"truth": 7}, ("release", "new")]
    assert either.seen == [{"truth": 7}, ("release", "either")]


def test_verl_tool_execute_return_values() -> None:
    assert result_of("text") == ToolResult("text")
    assert result_of((ToolResponse(text="a"), 1, {"k": 2})) == ToolResult("a", 1.0, {"k": 2})
    assert result_of((ToolResponse(), None, None)) == ToolResult("")
    assert result_of(("b", 0.5)) == ToolResult("b", 0.5)
    with pytest.raises(ToolError, match="images"):
        result_of(ToolResponse(image=[1]))
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
