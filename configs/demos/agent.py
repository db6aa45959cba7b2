"""The agent of `make demo TASK=agent`: a loop over OpenAI's client that knows nothing of the trainer."""

import functools
import json

from openai import AsyncOpenAI

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes a product.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "two whole numbers with a star between them, such as 12*34",
                }
            },
            "required": ["expression"],
        },
    },
}
MAX_TURNS = 3


async def solve(row: dict, base_url: str, api_key: str) -> None:
    """Answer a row's question, with a calculator. The rule of the run's reward grades the text of the model."""
    client = _client().with_options(base_url=f"{base_url}/v1", api_key=api_key)
    messages = list(row["messages"])
    for _ in range(MAX_TURNS):
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=[CALCULATOR], max_tokens=16
        )
        said = reply.choices[0].message
        if not said.tool_calls:
            return
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            result = _calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


@functools.cache
def _client() -> AsyncOpenAI:
    """Return the client whose connections all sessions share."""
    return AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0)


def _calculate(arguments: str) -> str:
    try:
        a, _, b = json.loads(arguments)["expression"].partition("*")
        return str(int(a) * int(b))
    except (ValueError, KeyError, TypeError) as error:
        return f"Error: {error}"
