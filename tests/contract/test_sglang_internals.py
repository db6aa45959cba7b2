"""SGLang's internals are checked before use, and a rejected start leaves no files behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.contract.engines import DIVIDED_BY_TWO, LATENT, SGLANG, WITH_SGLANG
from tests.tiny_models import tiny_model

ROOT = Path(__file__).parents[2]
CHANGED = """
from types import SimpleNamespace
from mcore_rl.engines.sglang import cpu
cpu.prepare()
from sglang.srt.managers.scheduler import Scheduler
cpu.patch()
from mcore_rl.engines.sglang.internals import check_scheduler, check_signatures
check_signatures()
run_batch = Scheduler.run_batch
for changed in (lambda self: None, lambda self, batch, pp_proxy: None):
    changed.__qualname__, changed.__module__ = "Scheduler.run_batch", "sglang"
    import mcore_rl.engines.sglang.internals as internals
    internals.CALLS = tuple((changed if call[0] is run_batch else call[0], *call[1:]) for call in internals.CALLS)
    try:
        check_signatures()
    except RuntimeError as error:
        print(error)
    run_batch = changed
try:
    check_scheduler(SimpleNamespace(output_streamer=SimpleNamespace()))
except RuntimeError as error:
    print(error)
"""


@WITH_SGLANG
def test_internals_changed_signature_or_attribute_is_named() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run([SGLANG, "-c", CHANGED], env=environment, capture_output=True, text=True, check=False)
    not_called, too_few, lacking = done.stdout.splitlines()[-3:]
    differs = "sglang.Scheduler.run_batch differs from SGLang's release"
    assert not_called == f"{differs} (too many positional arguments)"
    assert too_few == f"{differs} (missing a required argument: 'pp_proxy')"
    assert lacking.startswith("SGLang's scheduler lacks output_streamer.send_to_detokenizer.send_output (")


@WITH_SGLANG
def test_start_rejected_model_reports_reason_and_leaves_no_files(tmp_path: Path) -> None:
    """Latent attention without YaRN fails on CPU with an assertion without message."""
    tiny_model("deepseek_v3", hidden_size=128, **(DIVIDED_BY_TWO | LATENT)).save_pretrained(tmp_path)
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom mcore_rl.config.schema import RolloutConfig\n"
        "from mcore_rl.engines.settings import EngineSettings\nfrom mcore_rl.errors import ConfigError\n"
        "from mcore_rl.engines.sglang.engine import SglangEngine\n"
        "started = []\nfrom mcore_rl.engines.sglang import processes\nstart = processes.start_rank\n"
        "processes.start_rank = lambda *given: started.append(start(*given)) or started[-1]\n"
        "config = RolloutConfig(engine='sglang', max_prompt_tokens=8, max_response_tokens=8, kv_cache_gib=0.03)\n"
        "try: SglangEngine(EngineSettings(sys.argv[1], config, dtype='float32', seed=1, timeout_seconds=60))\n"
        "except ConfigError as error: print(error)\n"
        "(rank,) = started\n"
        "print([path.name for path in Path('/dev/shm').glob(f'sglang_loads_mcore{rank.pid}_*')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    reason, left = done.stdout.splitlines()[-2:]
    assert reason == "SGLang cannot run this: AssertionError: assert rope_scaling is not None", done.stderr[-2000:]
    assert left == "[]"
