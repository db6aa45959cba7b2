"""Import of torchvision's wheel for CUDA beside a CPU build of torch."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

from mcore_rl.vision.operators import declare_operators


def test_declare_operators_is_entry_point_of_torch() -> None:
    """vLLM inspects models in a subprocess in which only `import torch` can call the function."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["torch.backends"].items()
    assert EntryPoint(name, value, "torch.backends").load() is declare_operators
