"""CUDA packages whose Python code tests/contract/cuda reads and tests/te runs, and the folders to which
scripts/setup_contracts.py downloads them. Versions are from locks/gpu.txt, plus neighbouring ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".peers" / "contracts"


@dataclass(frozen=True)
class Package:
    """Distribution with the top-level package `module`."""

    distribution: str
    version: str
    module: str

    @property
    def folder(self) -> Path:
        return FOLDER / f"{self.distribution}-{self.version}"


VLLM = Package("vllm", "0.32.0", "vllm")
TRANSFORMER_ENGINES = tuple(
    Package("transformer-engine", version, "transformer_engine") for version in ("2.9.0", "2.10.0", "2.11.0")
)
DEEP_EP_1 = Package("deep-ep", "1.0.0", "deep_ep")  # an archive of sources
DEEP_EP_2 = Package("sgl-deep-ep", "0.1.2.post1", "deep_ep")  # SGLang's build of 2.1.0
PACKAGES = (VLLM, *TRANSFORMER_ENGINES, DEEP_EP_1, DEEP_EP_2)
