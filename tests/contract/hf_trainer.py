"""Stand-in for the trainer in weight sync tests.

Two trainer ranks, threads of the test, hold and send the tensors of a transformers model. After an update the engine
must compute exactly what the transformers model computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mcore_rl.weights.connection import Connection, TrainerSetup
from mcore_rl.weights.engine_config import engine_layout
from mcore_rl.weights.frozen import ALL_TRAINED, TrainedWeights
from mcore_rl.weights.send import WeightSender
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.arrival import Rendezvous
from mcore_rl.weights.transports.files.run_files import RunFiles
from mcore_rl.weights.transports.hosts import this_host
from mcore_rl.weights.transports.link import open_store
from mcore_rl.weights.transports.topology import Endpoint, Topology
from mcore_rl.weights.verify import require_equal
from model_converters.families.parts.hf_config import read_hf_config
from model_converters.mapping.layout import TrainLayout
from model_converters.vision_model import VISION_TYPES, tower_tensors
from tests.contract.engines import RemoteEngine
from tests.tiny_models import checkpoint_tensors
from tests.unit.weights.delivery import Tensors, trainer_tensors

LAYOUT = TrainLayout(2, pp=2)
TIMEOUT_SECONDS = 20
HERE = Endpoint(this_host(), "127.0.0.1")


def hf_tensors(model: Any) -> Tensors:
    """Return the model's tensors by HF name, one per expert."""
    state = checkpoint_tensors(model, dict(model.state_dict()))
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return dict(tower_tensors(state)) if model.config.model_type in VISION_TYPES else dict(state)


class HFTrainer:
    """Two trainer ranks that are connected to `engine`."""

    _store = open_store("127.0.0.1")
    _generations = itertools.count()

    def __init__(
        self,
        model: Any,
        engine: RemoteEngine,
        bucket_bytes: int,
        num_slots: int,
        transport: str = "auto",
        *,
        delta: bool = False,
        files: RunFiles | None = None,
        trained: TrainedWeights = ALL_TRAINED,
    ) -> None:
        """files: folder of the weights if transport is files. trained: weights that `perturb` changes; all others are
        frozen."""
        self.model, self.files = model, files
        self._engine = engine
        self._pool = ThreadPoolExecutor(32)  # threads of a broken update wait until the engine has disconnected
        self._sending: list[Future[Any]] = []
        self.setups: list[TrainerSetup] = []
        rollout = engine.settings["rollout_config"]
        layout = engine_layout(rollout)
        topology = Topology((HERE,) * LAYOUT.world_size, (HERE,) * layout.num_ranks, layout.num_ranks, transport, delta)
        hf_config, dtype = read_hf_config(Path(engine.directory)), getattr(torch, engine.settings["dtype"])
        quantization = rollout.quantization
        self.plan = replace(
            SyncPlan(hf_config, dtype, LAYOUT, layout, topology, bucket_bytes, num_slots, quantization),
            quantization_group=rollout.quantization_group,
            trained=trained,
        )
        self.connect()

    def connect(self) -> None:
        """Connect to the engine. Called before the first update, and after a broken one."""
        if self.setups:
            self._engine.call("disconnect")  # ends the waits of trainer ranks in a broken update, too
            wait(self._sending)
            for setup in self.setups:
                setup.close()
        self.setups = [TrainerSetup(self.plan, rank) for rank in range(LAYOUT.world_size)]
        segments = {number: name for setup in self.setups for number, name in setup.create_buffers().items()}
        rendezvous = Rendezvous("127.0.0.1", self._store.port, next(self._generations))
        folder = None if self.files is None else self.files.begin_connection(rendezvous.generation)
        connection = Connection(self.plan, rendezvous, segments, TIMEOUT_SECONDS, folder)
        try:
            connecting = [self._pool.submit(setup.connect, connection) for setup in self.setups]
            self._engine.call("connect", connection, 0)
            self._senders = [each.result() for each in connecting]
        finally:
            for setup in self.setups:
                setup.unlink()

    @contextmanager
    def sending(self, *, complete: bool = True, first_round: int = 0) -> Iterator[None]:
        """Send one update during the block. The end of the block waits for it, unless it is going to break."""
        sending = self._on_ranks(partial(WeightSender.send, first_round=first_round))
        yield
        if complete:
            for each in sending:
                each.result()

    def publish(self, version: int, first_round: int = 0) -> None:
        with self.sending(first_round=first_round):
            self._engine.call("begin_update", first_round)
            self.receive(range(first_round, self.plan.num_rounds))
            self._engine.call("finish_update", version)

    def receive(self, rounds: range) -> None:
        """Receive these rounds. Each rank of the engine acknowledges the planned bytes."""
        incoming = self.plan.incoming(range(len(self.plan.topology.buffers))).values()
        planned = [[sum(placed.message.num_bytes for placed in messages.at(sync_round)) for messages in incoming]
                   for sync_round in rounds]  # fmt: skip
        for sync_round, num_bytes in zip(rounds, planned, strict=True):
            assert self._engine.call("receive_bucket", sync_round) == num_bytes

    def certify(self) -> int:
        """Compare the ranks' tensors with the tensors of the engine's kernels. Returns the number of tensors.

        Raises: WeightSyncError naming tensors that differ.
        """
        sending = self._on_ranks(WeightSender.send_digests)
        ranks = self._engine.call("compare")
        for each in sending:
            each.result()
        require_equal(ranks, "the engine")
        return self.plan.num_tensors

    def perturb(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator) * 0.05
                module = name.rpartition(".")[0] + "."  # frozen experts have names of their own
                if not any(each.startswith(module) for each in self.plan.frozen_names):
                    parameter.add_(noise.to(parameter.dtype))

    def overwrite_buffers(self) -> None:
        for setup in self.setups:
            for shared in setup._owned.values():
                shared.segment.memory.fill_(63)

    def tensors(self) -> Tensors:
        """Return the HF tensors that the ranks hold."""
        return hf_tensors(self.model)

    def _on_ranks(self, method: Callable[[WeightSender, Tensors], Any]) -> list[Future[Any]]:
        checkpoint = self.tensors()
        ranks = range(LAYOUT.world_size)
        held = [trainer_tensors(self.plan.rows, LAYOUT, rank, checkpoint) for rank in ranks]
        self._sending = [
            self._pool.submit(partial(method, sender, tensors))
            for sender, tensors in zip(self._senders, held, strict=True)
        ]
        return self._sending
