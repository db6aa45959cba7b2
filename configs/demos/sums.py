"""A task of Inspect: sums of two digits, for any model with a chat template."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def sums(num_samples: int = 20) -> Task:
    """Return the task."""
    pairs = [(number % 10, number * 7 % 10) for number in range(num_samples)]
    samples = [Sample(input=f"{a} + {b} =", target=str(a + b)) for a, b in pairs]
    return Task(dataset=MemoryDataset(samples), solver=generate(), scorer=includes())
