"""Imported first in a process, TransformerEngine is simulated in it, and every model of it is built from its layers.

tests/dist/launch.py preloads it in its ranks where MCORE_RL_TE=1 is set: then the whole of tests/dist runs so.
"""

from __future__ import annotations

from tests.te.simulation import VERSION, install

install()

from mcore_rl.megatron.build import model  # noqa: E402
from mcore_rl.spec.installed import Installed  # noqa: E402

ENGINE = Installed(cuda=True, capability=(9, 0), transformer_engine=VERSION, flash_attention="2.8.3")

model.here = lambda: ENGINE
