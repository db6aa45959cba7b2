"""The responses of one batch, for a terminal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.console import Console

from mcore_rl.observe.terminal_text import shortened, visible
from mcore_rl.types.json import JsonObject, JsonValue

MAX_GROUPS, MAX_SAMPLES = 8, 8
"""Groups, and responses of a group, that are shown; the file has all of them."""
PROMPT_CHARS, RESPONSE_CHARS, PART_CHARS, ERROR_CHARS = 1200, 2400, 400, 600
"""Characters of a text that are shown."""
MAX_ERRORS = 5
"""Different errors that the summary lists, the most frequent first."""
FACTS = ("reward", "accuracy", "tokens", "finish_reason", "turns", "tool_calls")
_NO_PARTS = {
    *(*FACTS, "prompt", "response", "group", "sample", "ground_truth", "error", "scores"),
    *(
        "version",
        "versions",
        "submitted_version",
        "digest",
        "messages",
        "mask",
        "temperatures",
        "turn_rewards",
        "images",
    ),
}
"""Fields that every record may have; all others are parts of the score, which graders and judges add."""


def print_batch(records: Iterable[JsonObject], console: Console) -> None:
    """Print prompt, response, reward, parts and error of the first responses, then a summary of all.

    records: lines of a rollout file, group by group. Each text is printed on one line, without control characters.
    """
    totals, shown = _Totals(), Counter[str]()
    for record in records:
        totals.add(record)
        group = str(record.get("group"))
        if group not in shown and len(shown) == MAX_GROUPS:
            continue
        shown[group] += 1
        if shown[group] == 1:
            _print_line(console, f"group {group}", "bold")
            _print_text(console, "prompt", record.get("prompt"), PROMPT_CHARS)
            _print_text(console, "ground truth", record.get("ground_truth"), PART_CHARS)
        if shown[group] <= MAX_SAMPLES:
            _print_response(console, record)
    for line in totals.lines(num_shown=sum(min(count, MAX_SAMPLES) for count in shown.values())):
        _print_line(console, line)


@dataclass
class _Totals:
    """Sums over all responses of a batch."""

    num_responses: int = 0
    groups: set[str] = field(default_factory=set)
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sums of rewards, accuracies, tokens and numeric parts, by name."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of responses with a number under each name of `sums`."""
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, record: JsonObject) -> None:
        self.num_responses += 1
        self.groups.add(str(record.get("group")))
        numbers = {name: record.get(name) for name in ("reward", "accuracy", "tokens")} | _parts(record)
        for name, value in numbers.items():
            if isinstance(value, int | float):
                self.sums[name] += value
                self.counts[name] += 1
        if (error := record.get("error")) is not None:
            self.errors[str(error)] += 1

    def lines(self, *, num_shown: int) -> list[str]:
        counts = _count(self.num_responses, "response"), _count(len(self.groups), "group")
        lines = [f"{counts[0]} in {counts[1]}, {num_shown} shown"]
        means = [f"{name} {total / self.counts[name]:.4g}" for name, total in self.sums.items()]
        lines += [f"mean: {'  '.join(means)}"] if means else []
        for error, count in self.errors.most_common(MAX_ERRORS):
            lines.append(shortened(f"error of {_count(count, 'response')}: {error}", ERROR_CHARS))
        if len(self.errors) > MAX_ERRORS:
            lines.append(f"and {_count(len(self.errors) - MAX_ERRORS, 'other error')}")
        return lines


def _print_response(console: Console, record: JsonObject) -> None:
    facts = [f"{name} {_short(value)}" for name in FACTS if (value := record.get(name)) is not None]
    error = record.get("error")
    style = "bold red" if error is not None else "bold"
    _print_line(console, "  ".join([f"  sample {_short(record.get('sample'))}", *facts]), style)
    for name, value in _parts(record).items():
        _print_text(console, name, value, PART_CHARS)
    _print_text(console, "error", error, ERROR_CHARS)
    _print_text(console, "response", record.get("response"), RESPONSE_CHARS)


def _parts(record: JsonObject) -> dict[str, JsonValue]:
    """Return the parts of the score and the judge's answers, then the scores of reward model and judge."""
    parts = {name: value for name, value in record.items() if name not in _NO_PARTS}
    scores = record.get("scores")
    return parts | ({f"{name} score": score for name, score in scores.items()} if isinstance(scores, dict) else {})


def _print_text(console: Console, name: str, value: JsonValue, num_chars: int) -> None:
    """Print `name: value` on one indented line; nothing for null."""
    if value is not None:
        _print_line(console, f"    {name}: {shortened(_short(value), num_chars)}")


def _print_line(console: Console, text: str, style: str = "") -> None:
    # soft_wrap: the terminal breaks long lines, so that a copied text has no line breaks.
    console.print(visible(text, style), soft_wrap=True, highlight=False)


def _short(value: JsonValue) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
