"""Simulate TransformerEngine in this process and build every model from its layers. Must be imported first.

With MCORE_RL_TE=1, tests/distributed/launch.py preloads this module in its ranks, so all of tests/distributed uses it.
"""

from __future__ import annotations

from tests.te.simulation import VERSION, install

install()

from mcore_rl.megatron.cpu.registry import FIXES  # noqa: E402
from mcore_rl.megatron.model import model  # noqa: E402
from mcore_rl.resolved.installed import Installed  # noqa: E402

ENGINE = Installed(cuda=True, capability=(9, 0), transformer_engine=VERSION, flash_attention="2.8.3")

model.here = lambda: ENGINE
# The simulated optimizer and its kernels work on the CPU.
for name in ("torch_adam", "torch_multi_tensor:clip_grads", "torch_multi_tensor:optimizer"):
    del FIXES[name]
