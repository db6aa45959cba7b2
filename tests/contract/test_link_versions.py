"""Trainer and SGLang have environments with their own torch, whose gloo and TCPStore must understand each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from mcore_rl.config.rules.engine_support import sglang_python
from mcore_rl.weights.transports.link import open_store
from tests.readme import ROOT


@pytest.mark.skipif(not sglang_python().is_file(), reason="SGLang is not installed: make sglang")
def test_link_connects_torch_of_trainer_and_sglang() -> None:
    store = open_store("127.0.0.1")  # the driver has the trainer's torch
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    members = [
        subprocess.Popen(
            [python, "-m", "tests.contract.link_member", str(store.port), str(member)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for member, python in enumerate((sys.executable, str(sglang_python())))
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120) for process in members]
    finally:
        for process in members:
            process.kill()
    assert [process.returncode for process in members] == [0, 0], outputs
    answers = [json.loads(output) for output, _ in outputs]
    assert [(answer["number"], answer["equal"]) for answer in answers] == [(101, True), (100, True)]
    assert answers[0]["torch"] == torch.__version__
