"""Locations of the sources that scripts/setup_contracts.py downloads, and the mark that skips tests without them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import contract_packages
import pytest
from contract_packages import Package

from tests.contract.cuda.sources import Sources
from tests.readme import ROOT

VLLM, DEEP_EP_1, DEEP_EP_2 = contract_packages.VLLM, contract_packages.DEEP_EP_1, contract_packages.DEEP_EP_2
TRANSFORMER_ENGINES = {package.version: package for package in contract_packages.TRANSFORMER_ENGINES}
SITE_PACKAGES = Path(pytest.__file__).parents[1]
MEGATRON = SITE_PACKAGES / "megatron" / "core"
OURS = ROOT / "mcore_rl"


@cache
def sources(package: Package) -> Sources:
    return Sources(package.folder)


def needs(*packages: Package) -> pytest.MarkDecorator:
    """Return a mark that skips tests whose sources are not downloaded."""
    missing = [f"{each.distribution} {each.version}" for each in packages if not each.folder.is_dir()]
    reason = f"needs the sources of {', '.join(missing)}: run scripts/setup_contracts.py"
    return pytest.mark.skipif(bool(missing), reason=reason)
