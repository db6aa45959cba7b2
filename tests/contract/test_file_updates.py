"""Updates of real engines with weights.transport=files: exact, fetched before the pause, and complete after a loss."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.errors import StorageError, WorkerDiedError
from mcore_rl.weights.transports.files.run_files import RunFiles
from tests.contract.engines import DIVIDED_BY_TWO, MARKS, RemoteEngine
from tests.contract.hf_trainer import HFTrainer
from tests.contract.update_checks import check_greedy, rank_processes
from tests.selection import on_demand_unless
from tests.tiny_models import tiny_model

BUCKET = 100 << 10
"""Bucket size in bytes: an update has several rounds."""
ENGINES = [
    pytest.param((kind, tp), id=f"{kind}-tp{tp}", marks=[*MARKS[kind], *on_demand_unless((kind, tp) == ("sglang", 1))])
    for kind in MARKS
    for tp in (1, 2)
]
"""tests/e2e/test_files_run.py always tests vLLM."""


class Session:
    """An engine that starts with random weights. `start` replaces it by a new one."""

    def __init__(self, process: RemoteEngine, tp: int, directory: Path) -> None:
        self.engine, self.tp, self.directory = process, tp, directory
        self.model(seed=99).save_pretrained(directory)
        self.start()

    def start(self) -> None:
        self.engine.start(self.directory, load_weights=False, tp=self.tp)

    def model(self, seed: int) -> Any:
        return tiny_model("qwen3_moe", seed=seed, **DIVIDED_BY_TWO)

    def trainer(self, seed: int, directory: Path, *, delta: bool) -> HFTrainer:
        files = RunFiles(f"{directory}/run")
        return HFTrainer(self.model(seed), self.engine, BUCKET, 2, "files", delta=delta, files=files)


@pytest.fixture(scope="module", params=ENGINES)
def session(
    request: pytest.FixtureRequest,
    process_of: Callable[[str], RemoteEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> Session:
    kind, tp = request.param
    return Session(process_of(kind), tp, tmp_path_factory.mktemp("model"))


def fetch(engine: RemoteEngine) -> None:
    engine.call("fetch_update")
    while not engine.call("is_fetched"):
        time.sleep(0.02)


def transfers_in(directory: Path) -> set[int]:
    """Return the numbers of the transfers that have files."""
    return {int(path.name.partition(".")[0]) for path in directory.rglob("*.*") if path.is_file()}


@pytest.mark.parametrize("delta", [False, True])
def test_updates_through_files_equal_transformers(session: Session, delta: bool, tmp_path: Path) -> None:
    trainer = session.trainer(1, tmp_path, delta=delta)
    trainer.publish(1)
    for version in (2, 3, 4):
        earlier = copy.deepcopy(trainer.model)
        trainer.perturb(version)
        with trainer.sending():
            fetch(session.engine)
            check_greedy(session.engine, earlier, version - 1)  # the engine generates until the update begins
            session.engine.call("begin_update")
            trainer.receive(range(trainer.plan.num_rounds))
            session.engine.call("finish_update", version)
        check_greedy(session.engine, trainer.model, version)
        assert trainer.certify() > 10
        # An update and its comparison are two transfers; the newest two are kept.
        assert transfers_in(tmp_path) == {2 * version - 3, 2 * version - 2}


def test_lost_file_names_file_and_engine_and_next_connection_is_complete(session: Session, tmp_path: Path) -> None:
    trainer = session.trainer(5, tmp_path, delta=True)
    trainer.publish(1)
    trainer.perturb(2)
    with trainer.sending():
        pass  # all files are written
    lost = next(path for path in tmp_path.rglob("1.*.weights.*"))
    lost.unlink()
    with pytest.raises(StorageError, match=rf"^weights\.directory: \S*{lost.name}: FileNotFoundError.*") as caught:
        fetch(session.engine)
    if session.engine.kind == "sglang":  # the driver adds the name to errors of vLLM
        assert "the engine" in str(caught.value)
    trainer.connect()
    trainer.publish(3)
    check_greedy(session.engine, trainer.model, 3)
    assert trainer.certify() > 10


def test_restarted_engine_gets_a_whole_update_after_deltas(session: Session, tmp_path: Path) -> None:
    trainer = session.trainer(6, tmp_path, delta=True)
    for version in (1, 2):
        trainer.publish(version)
        trainer.perturb(version)
    if session.engine.kind == "sglang":
        for process in session.engine.call(rank_processes):
            os.kill(process, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            trainer.publish(3)
    session.start()
    trainer.connect()
    trainer.publish(4)
    check_greedy(session.engine, trainer.model, 4)
    assert trainer.certify() > 10
