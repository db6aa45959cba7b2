"""Output of `mcore-rl doctor`: checks, implementation of models on this machine, and completeness of each path."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mcore_rl.doctor import checks as machine
from mcore_rl.doctor.checks import Check, Need
from mcore_rl.doctor.kernels import present, trials
from mcore_rl.doctor.network import check_network
from mcore_rl.doctor.trackers import check_trackers
from mcore_rl.errors import ConfigError
from mcore_rl.resolved import installed as packages
from mcore_rl.resolved.attention import BACKENDS
from mcore_rl.resolved.implementation import USUAL, Implementation, choose
from mcore_rl.resolved.installed import Installed


def check_installation(*, only_missing: bool) -> int:
    """Print the report. Returns 0 if the CPU or GPU path is complete, otherwise 1."""
    checks = machine.report() if only_missing else [*machine.report(), *check_network(), *check_trackers()]
    missing = {path: [c for c in checks if not c.ok and c.need in (Need.BOTH, path)] for path in (Need.CPU, Need.GPU)}
    complete = not all(missing.values())
    if only_missing:
        print_plain([] if complete else missing[Need.CPU])
    else:
        print_table(checks) if sys.stdout.isatty() else print_plain(checks)
        complete = print_models() and complete
        print()
    for path, device in ((Need.CPU, "cpu"), (Need.GPU, "cuda")):
        names = ", ".join(check.name for check in missing[path])
        print(f"{path.value}: {f'missing {names}' if names else f'complete (cluster.device={device})'}")
    return 0 if complete else 1


def print_models() -> bool:
    """Print how models are built here, and try the kernels of a GPU. Returns whether models can be built and run."""
    try:
        installed = packages.here()
        print_implementation(installed)
        return not installed.cuda or print_trials()
    except ConfigError as error:
        print(f"no model can be built with the installed packages: {error}")
        return False


def implementation(installed: Installed) -> Implementation:
    """Choose the implementation of a mixture-of-experts model whose experts are on several nodes.

    Raises: ConfigError if no implementation works with these packages.
    """
    return choose(installed, USUAL)


def print_implementation(installed: Installed) -> None:
    """Print each choice and its reason; with TransformerEngine also the usable attention backends."""
    print("\nImplementation of a mixture-of-experts model on several nodes with these packages:")
    if installed.cuda and installed.transformer_engine:
        for backend in BACKENDS:
            lacks = backend.lacks(installed, USUAL.heads)
            print(f"{backend.name:24}{'no' if lacks else 'yes':20}{lacks or 'needs ' + backend.needs}")
    for name, choice in implementation(installed).choices():
        print(f"{name:24}{choice.value:20}{choice.why}")


def print_trials() -> bool:
    """Call each installed kernel once on the first GPU. Returns whether all succeeded."""
    print("\nKernels on this machine's GPU:")
    well = True
    for name, error in trials("cuda", present()):
        well = well and not error
        print(f"{name:32}{error or 'ok'}", flush=True)
    return well


def print_plain(checks: Sequence[Check]) -> None:
    for check in checks:
        print(f"{'ok' if check.ok else 'missing':8}{check.name:20}{check.found}  [{check.need.value}: {check.feature}]")
        if not check.ok:
            print(f"{'':8}{'':20}-> {check.remedy}")


def print_table(checks: Sequence[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in ("", "what", "found", "for", "what to do"):
        table.add_column(title)
    for check in checks:
        needed = check.need is not Need.EXTRA
        mark = Text("✓", "green") if check.ok else Text("✗", "red") if needed else Text("·", "dim")
        remedy = "" if check.ok else check.remedy
        # Text instead of str: rich would parse "[cpu]" in a version or a path as markup.
        table.add_row(mark, *map(Text, (check.name, check.found, f"{check.feature} ({check.need.value})", remedy)))
    Console().print(table)
