"""Checks of every engine after a complete or a broken weight update, and with a rank that does not answer."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.errors import WeightSyncError, WorkerDiedError
from mcore_rl.types import Completion, GenerationRequest, SamplingOptions
from tests.contract.engines import RemoteEngine
from tests.contract.hf_trainer import HFTrainer
from tests.tiny_models import VOCABULARY

TINY_BUCKET = 5 << 10
"""Bucket size in bytes: a layer spans several buckets, and the embedding (12 KiB in float32) is cut into pieces."""


def check_greedy(engine: RemoteEngine, model: Any, version: int) -> None:
    for completion, logp in _greedy(engine, model, version):
        assert completion.token_ids.tolist() == logp.argmax(-1).tolist()
        np.testing.assert_allclose(completion.logp, logp.max(-1).values, atol=1e-4)


def check_close(engine: RemoteEngine, model: Any, version: int) -> None:
    """Compare an engine in bfloat16 with a float32 model, on the engine's tokens.

    Tolerance: transformers' own bfloat16 model differs by 0.03 on average.
    """
    gaps = [
        np.asarray(completion.logp) - logp.gather(1, torch.tensor(completion.token_ids.tolist())[:, None])[:, 0].numpy()
        for completion, logp in _greedy(engine, model, version)
    ]
    assert np.abs(np.concatenate(gaps)).mean() < 0.05


def _greedy(engine: RemoteEngine, model: Any, version: int) -> Iterator[tuple[Completion, torch.Tensor]]:
    """Yield greedy completions with the model's log-probabilities at each of their tokens, [tokens, V]."""
    rng = np.random.default_rng(version)
    prompts = [rng.integers(2, VOCABULARY, size=12).astype(np.int32) for _ in range(4)]
    sampling = SamplingOptions(10, temperature=0.0)
    requests = [GenerationRequest(str(i), prompt, 0, sampling) for i, prompt in enumerate(prompts)]
    done = engine.generate(requests)
    for request in requests:
        completion = done[request.request_id]
        assert completion.versions.tolist() == [version] * len(completion.token_ids)
        ids = np.concatenate([request.token_ids, completion.token_ids]).astype(np.int64)
        with torch.no_grad():
            yield completion, model(torch.from_numpy(ids)[None]).logits[0, 11:-1].double().log_softmax(-1)


def break_update(engine: RemoteEngine, trainer: HFTrainer, received: int) -> None:
    """Break an update after `received` rounds: with an error on every rank, or silently if `received` is 0."""
    with trainer.sending(complete=False):
        engine.call("begin_update")
        trainer.receive(range(received))
        if received:
            with pytest.raises(
                WeightSyncError, match=rf"round {received + 1} was requested, but round {received} is next"
            ):
                engine.call("receive_bucket", received + 1)
            with pytest.raises(WeightSyncError, match="broken"):
                engine.call("finish_update", 9)


def check_recovery(engine: RemoteEngine, trainer: HFTrainer, received: int, *, greedy: bool = True) -> None:
    """Check that an engine rejects requests after a broken update, and works after the next complete one."""
    break_update(engine, trainer, received)
    request = GenerationRequest("0", np.array([5, 6], np.int32), 0, SamplingOptions(4))
    with pytest.raises(WeightSyncError, match="holds a part of the update"):
        engine.generate([request])
    with pytest.raises(WeightSyncError, match="holds a part of the update"):
        engine.call("compare")
    trainer.perturb(received)
    trainer.connect()
    trainer.publish(100 + received)
    if greedy:
        check_greedy(engine, trainer.model, 100 + received)
    assert trainer.certify() > 10


def rank_processes(engine: Any) -> list[int]:
    """Return the process ids of the ranks. Runs in the engine's process."""
    if hasattr(engine._ranks, "_processes"):
        return [process.pid for process in engine._ranks._processes]
    return [worker.proc.pid for worker in engine._engine.model_executor.workers]


def _call_ranks(engine: Any, method: str) -> None:
    engine._ranks.call(method)


def _set_deadline(engine: Any, seconds: float) -> None:
    engine._ranks.timeout_seconds = seconds


def check_silent_rank(engine: RemoteEngine, rank: int, method: str, unanswered: str) -> None:
    """Stop a rank, call `method`, which the others answer at once, and check that the engine is unusable afterwards."""
    process = engine.call(rank_processes)[rank]
    engine.call(_set_deadline, 3)
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(WorkerDiedError) as caught:
        engine.call(_call_ranks, method)
    os.kill(process, signal.SIGCONT)
    message = str(caught.value)
    assert f"the engine: {unanswered} `{method}` within 3 s (cluster.collective_timeout_seconds)" in message
    assert re.search(rf"(rank {rank} \(process {process}\)|it) is stopped", message)
    request = GenerationRequest("0", np.array([5, 6], np.int32), 0, SamplingOptions(4))
    for call in (lambda: engine.generate([request]), lambda: engine.call(_call_ranks, method)):
        with pytest.raises(WorkerDiedError, match=f"{unanswered} `{method}`"):
            call()
