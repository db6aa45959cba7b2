"""A rendezvous store for all fakes of a module: objects in reference cycles keep a store of their own open."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from mcore_rl.weights.transports.link import open_store


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return open_store("127.0.0.1")
