"""Files of pinned versions in locks/, read for a given machine."""

from __future__ import annotations

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.readme import ROOT

ENVIRONMENTS = [{"python_version": v, "python_full_version": f"{v}.5", "sys_platform": "linux", "extra": "",
                 "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix",
                 "implementation_name": "cpython", "platform_python_implementation": "CPython"}
                for v in ("3.11", "3.12")]  # fmt: skip


def requirements(name: str) -> list[Requirement]:
    """Return the requirements in a file of locks/."""
    text = (ROOT / "locks" / name).read_text()
    lines = [line.partition(" #")[0].strip() for line in text.splitlines() if not line.startswith(("#", " "))]
    return [Requirement(line) for line in lines if line]


def locked(name: str, environment: dict[str, str]) -> dict[str, str]:
    """Return the version of each package that a machine with this environment installs."""
    versions: dict[str, str] = {}
    for each in requirements(name):
        if each.marker is None or each.marker.evaluate(environment):
            package, (pin,) = canonicalize_name(each.name), each.specifier
            assert pin.operator == "==", each
            assert package not in versions, f"{package} twice for {environment}"
            versions[package] = pin.version
    return versions


def unsatisfied(requirements: list[Requirement], versions: dict[str, str]) -> dict[str, str | None]:
    """Return the locked version of each requirement that it does not satisfy; None without one."""
    found = {str(each): versions.get(canonicalize_name(each.name)) for each in requirements}
    return {text: version for text, version in found.items()
            if version is None or not Requirement(text).specifier.contains(version, prereleases=True)}  # fmt: skip
