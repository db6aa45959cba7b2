"""What is appended to a model's program before it runs in a sandbox. None of it runs here."""

from __future__ import annotations

_CALL = """

def _call_function():
    import json, sys
    arguments = [json.loads(line) for line in sys.stdin.read().splitlines() if line.strip()]
    owner = globals()["Solution"]() if "Solution" in globals() and hasattr(globals()["Solution"], {name!r}) else None
    function = getattr(owner, {name!r}) if owner is not None else globals()[{name!r}]
    result = function(*arguments)
    print()
    print(json.dumps(result))


_call_function()
"""


def calls_function(program: str, name: str) -> str:
    """The program, which then calls its function of that name, or class Solution's, with the JSON values of standard
    input, one on a line, and prints what it returns as the last line."""
    return program + _CALL.format(name=name)


def ends_with_mark(program: str, mark: str) -> str:
    """The program, which prints `mark` where it gets to its end."""
    half = len(mark) // 2
    return f"{program}\nprint({mark[:half]!r} + {mark[half:]!r})\n"
