"""The Triton kernel, in Triton's interpreter on the CPU, samples the tokens of noise.sample_tokens."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.readme import ROOT

SCRIPT = """
import json
import numpy as np
import torch
from mcore_rl.engines import noise, noise_kernel

generator, found = torch.Generator().manual_seed(0), []
for rows, columns in ((12, 9000), (3, 4096), (5, 7), (4, 1), (0, 5)):
    probabilities = (torch.randn(rows, columns, generator=generator) * 3).softmax(-1)
    probabilities[:, 1::3] = 0  # truncated by top-k
    probabilities = probabilities.t().contiguous().t()  # not contiguous by rows
    seeds = [2**64 - 1 - row for row in range(rows)]
    keys = noise.noise_keys(seeds, np.arange(rows))
    sampled = (sample(probabilities, keys).tolist() for sample in (noise.sample_tokens, noise_kernel.sample_tokens))
    found.append([list(each) for each in sampled])
print(json.dumps(found))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_noise_kernel_samples_the_tokens_of_torch() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for expected, ours in json.loads(done.stdout):
        assert ours == expected
    assert len(set(json.loads(done.stdout)[0][0])) > 8
