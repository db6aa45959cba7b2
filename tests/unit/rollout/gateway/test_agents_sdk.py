"""OpenAI's Agents SDK against the server, with both of its interfaces."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.rollout.gateway.scripted import KEY, ScriptedSessions


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("interface", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def test_agents_sdk_calls_a_tool_and_answers(
    address: str, sessions: ScriptedSessions, interface: str, stream: bool
) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    called = []

    @agents.function_tool
    def add(a: int, b: int, unit: str) -> int:
        """Add two numbers."""
        called.append((a, b, unit))
        return a + b

    async def run() -> tuple[str, list[object]]:
        async with AsyncOpenAI(base_url=f"{address}/sessions/s1/v1", api_key=KEY, max_retries=0) as client:
            model = getattr(agents, interface)(model="any", openai_client=client)
            agent = agents.Agent(name="adder", instructions="Compute.", tools=[add], model=model)
            if not stream:
                result = await agents.Runner.run(agent, "2 + 3?")
                return result.final_output, []
            streamed = agents.Runner.run_streamed(agent, "2 + 3?")
            events = [event async for event in streamed.stream_events()]
            return streamed.final_output, events

    output, events = asyncio.run(run())
    assert output == "The sum is 5."
    assert called == [(2, 3, "µm")] * 2
    second = sessions.requests[1].messages
    assert [each["role"] for each in second] == ["system", "user", "assistant", "tool", "tool"]
    assert second[2]["content"] == "Let me see."
    assert len(events) > 10 or not stream
