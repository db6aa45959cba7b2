"""SGLang's internals are checked before use."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from mcore_rl.config.rules.engine_support import sglang_packages
from mcore_rl.processes.compile_caches import DEEP_GEMM, DEEP_GEMM_OF_SGLANG
from tests.contract.engines import SGLANG, WITH_SGLANG

ROOT = Path(__file__).parents[2]
CHANGED = """
from types import SimpleNamespace
from mcore_rl.engines.sglang.devices import cpu_patches
cpu_patches.prepare()
from sglang.srt.managers.scheduler import Scheduler
cpu_patches.patch()
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
def test_deep_gemm_directory_is_overwritten_with_sglangs_own() -> None:
    (packages,) = sglang_packages()
    source = (packages / "sglang/srt/layers/deep_gemm_wrapper/compile_utils.py").read_text()
    assert f'os.environ["{DEEP_GEMM}"] = envs.{DEEP_GEMM_OF_SGLANG}.get()' in source
    variables = (packages / "sglang/srt/environ.py").read_text()
    assert f'{DEEP_GEMM_OF_SGLANG} = EnvStr(lambda: _default_cache_subdir("deep_gemm"))' in variables
