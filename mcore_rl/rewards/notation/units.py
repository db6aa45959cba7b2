r"""Parsing of units: `35\text{ m}^2`, `5\ \text{m/s}`, `5\,\mathrm{m}\cdot\mathrm{s}^{-1}`, `30 km/h`."""

from __future__ import annotations

import re

from mcore_rl.rewards.numbers import DECIMAL, NOT_UNITS

# Names of units, the canonical name first; a plural s is removed before the lookup.
_NAMES = """
cm centimeter centimetre, mm millimeter millimetre, km kilometer kilometre, m meter metre, in inch inche, ft foot feet,
yard yd, mile mi, micrometer micrometre micron um, kg kilogram, mg milligram, g gram, microgram ug, pound lb,
liter litre l, ml milliliter millilitre, hour h hr, minute min, second s sec, microsecond us, day, week, month, year yr,
dollar usd, cent, newton n, joule j, watt w, volt v, ampere amp a, ohm, degree deg, radian rad, celsius c, fahrenheit f,
kelvin k
"""
_CANONICAL = {name: names[0] for unit in _NAMES.split(",") for names in [unit.split()] for name in names}
_SPEEDS = {"mph": "mile / hour", "kph": "km / hour", "kmh": "km / hour", "kmph": "km / hour", "mps": "m / s"}
_LETTERS = frozenset("msghlLJNWV")
# One-letter units inside a text command. Outside of one, C, F, K and A are more likely variables.
_LETTERS_OF_TEXT = _LETTERS | frozenset("CFKA")
_DIMENSIONS = {"square": 2, "sq": 2, "cubic": 3, "squared": 2, "cubed": 3}

_TEXT_COMMAND = r"\\(?:text|textrm|mathrm|mbox|textbf|operatorname)\s*\{"
_TEXT = re.compile(rf"{_TEXT_COMMAND}((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}")
_START = re.compile(rf"(?:\\[dt]?frac\s*\{{\s*)?{_TEXT_COMMAND}\s*[A-Za-z]")
_VALUE = re.compile(r"[0-9\\]")
_INSIDE = r"((?:[^{}]|\{[^{}]*\})*)"
_FRACTION = re.compile(rf"\\[dt]?frac\s*\{{{_INSIDE}\}}\s*\{{{_INSIDE}\}}")
_MICRO = re.compile(rf"(?:\\mu|\u00b5|\u03bc)\s*{_TEXT_COMMAND}\s*([msg])\s*\}}")
_OHM = re.compile(rf"(?<=[0-9 ])(?:{_TEXT_COMMAND}\s*(k|M)\s*\}})?\s*\\Omega\s*$")
_TIMES = re.compile(r"\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|[*\u00b7\u22c5]")
_TOKEN = re.compile(
    r"(?P<power>\^\s*\{?\s*(?P<exponent>-?[1-9])\s*\}?)|(?P<raised>[\u00b2\u00b3])"
    r"|(?P<word>[A-Za-z]+)\.?|(?P<divide>/)|(?P<times>[*()-])|(?P<space>\s+)|(?P<other>.)",
    re.DOTALL,
)
_PLAIN = re.compile(
    rf"(?P<body>[-+]?\s*(?:{DECIMAL}(?:/{DECIMAL})?|\\[dt]?frac\{{[0-9]+\}}\{{[0-9]+\}}))(?P<gap>\s*)(?P<unit>[A-Za-z].*)",
    re.DOTALL,
)


def split_unit(text: str) -> tuple[str, str]:
    r"""Split an answer into value and unit: ("35", "m^2") for `35\text{ m}^2`.

    The unit is empty if there is none or its name is unknown (apples), so that it cannot contradict another unit.
    """
    if text.isdecimal():  # fast path
        return text, ""
    text = _OHM.sub(r"\\text{ \1ohm}", _MICRO.sub(r"\\text{u\1}", text))
    start = next((match.start() for match in _START.finditer(text) if _VALUE.search(text[: match.start()])), None)
    if start is not None:
        unit = _parsed(text[start:], _LETTERS_OF_TEXT)
        if unit is not None:
            return text[:start].strip(), unit
    plain = _PLAIN.fullmatch(text)
    if plain is not None:
        unit = _parsed(plain["unit"], _LETTERS if plain["gap"] else frozenset())
        if unit is not None and re.search(r"[/^\u00b2\u00b3]", plain["unit"]):
            return plain["body"].strip(), unit
    return text, _last_word(text)


def _last_word(text: str) -> str:
    """Return the unit of an answer such as `5 cm`; the caller keeps the word in the answer."""
    words = text.split()
    return (_parsed(words[-1], _LETTERS) or "") if len(words) == 2 and words[0][-1].isdigit() else ""


def _parsed(text: str, letters: frozenset[str]) -> str | None:
    """Return the canonical unit, "" if one of its names is unknown, or None if the text is not a unit.

    letters: accepted one-letter units. It is empty if the text touches a number, where a letter is a variable.
    """
    text = _TIMES.sub(" * ", _TEXT.sub(r" \1 ", _FRACTION.sub(r"\1 / \2", text)))
    reader = _UnitReader(letters)
    return reader.unit() if all(map(reader.take, _TOKEN.finditer(text))) else None


class _UnitReader:
    """Parser of a product of units, from left to right."""

    def __init__(self, letters: frozenset[str]) -> None:
        self._letters = letters
        self._exponents: dict[str, int] = {}
        self._last = ""
        self._sign, self._dimension = 1, 1

    def take(self, token: re.Match[str]) -> bool:
        """Read a token; return False if a unit cannot contain it."""
        word = token["word"]
        if word is None:
            if token["divide"]:
                self._sign = -1
            power = token["exponent"] or {"\u00b2": "2", "\u00b3": "3"}.get(token["raised"] or "")
            return self._raise(int(power)) if power else not token["other"]
        name = word.lower()
        if name == "per":
            self._sign = -1
        elif name in _DIMENSIONS and name.endswith("ed"):
            return self._raise(_DIMENSIONS[name])
        elif name in _DIMENSIONS:
            self._dimension = _DIMENSIONS[name]
        else:
            return self._add(word)
        return True

    def unit(self) -> str | None:
        """Return the canonical name; None if nothing was read."""
        if not self._last:
            return None
        if not self._exponents.keys() <= _CANONICAL.keys():
            return ""
        return " ".join(f"{name}^{power}" for name, power in sorted(self._exponents.items()) if power)

    def _raise(self, power: int) -> bool:
        if not self._last:
            return False
        self._exponents[self._last] *= power
        return True

    def _add(self, word: str) -> bool:
        name = word.lower()
        if (len(word) == 1 and word not in self._letters) or name in NOT_UNITS:
            return False
        if name in _SPEEDS:
            return all(map(self.take, _TOKEN.finditer(_SPEEDS[name])))
        # An unknown word may be a unit too (apples): the exponent is kept, but the product has no canonical name.
        self._last = _CANONICAL.get(name) or _CANONICAL.get(name.removesuffix("s")) or name
        self._exponents[self._last] = self._exponents.get(self._last, 0) + self._sign * self._dimension
        self._sign, self._dimension = 1, 1
        return True
