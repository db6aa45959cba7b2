"""A Verifiers environment: products of 3-digit numbers with a calculator, for the model of `make demo TASK=agent`."""

import random

import verifiers as vf
from datasets import Dataset


def calculator(expression: str) -> str:
    """Compute a product.

    Args:
        expression: two whole numbers with a star between them, such as 12*34
    """
    a, _, b = expression.partition("*")
    return str(int(a) * int(b))


def has_product(completion: list, answer: str) -> float:
    """Return 1 if the last message ends with the product."""
    return float(str(completion[-1]["content"]).endswith(f"#{answer}"))


def load_environment(num_examples: int = 256, seed: int = 0) -> vf.Environment:
    """Return the environment. Validation has 64 other products."""
    drawn = random.Random(seed).sample(range(900 * 900), num_examples + 64)
    pairs = [(100 + number // 900, 100 + number % 900) for number in drawn]
    rows = [{"question": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows[:num_examples]),
        eval_dataset=Dataset.from_list(rows[num_examples:]),
        tools=[calculator],
        max_turns=3,
        rubric=vf.Rubric(funcs=[has_product]),
    )
