"""Output of `mcore-rl doctor`: checks, implementation of models on this machine, and completeness of each path."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_rl.doctor.checks import Check, Need
from mcore_rl.doctor.kernels import present, trials
from mcore_rl.resolved.attention import BACKENDS
from mcore_rl.resolved.implementation import USUAL, Implementation, choose
from mcore_rl.resolved.installed import Installed


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


def missing(checks: Sequence[Check], path: Need) -> list[str]:
    """Return the names of the checks of this path and of every run that fail."""
    return [check.name for check in checks if not check.ok and check.need in (Need.BOTH, path)]


def verdicts(checks: Sequence[Check]) -> list[str]:
    lines = []
    for path, device in ((Need.CPU, "cpu"), (Need.GPU, "cuda")):
        names = ", ".join(missing(checks, path))
        lines.append(f"{path.value}: {f'missing {names}' if names else f'complete (cluster.device={device})'}")
    return lines


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
