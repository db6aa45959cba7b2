"""Use of devices by trainer ranks and engines."""

from __future__ import annotations

from mcore_rl.config.models import OffloadConfig
from mcore_rl.config.schema import ClusterConfig


def shares_device(cluster: ClusterConfig, offload: OffloadConfig, *, cuda: bool) -> bool:
    """Return whether engines and trainer ranks use the device in turns: colocated on GPUs, or with offloading.
    Engines then discard their weights before the update of a step."""
    if cluster.placement != "colocated":
        return False
    return cuda or offload.params or offload.grads or offload.optimizer
