"""Chat templates that raise, do not end or exhaust the memory give one message."""

from __future__ import annotations

import time
from functools import partial

import pytest

from mcore_rl.config.schema import DataConfig
from mcore_rl.data.chat import limits
from mcore_rl.data.templates import PromptRenderer
from mcore_rl.errors import ConfigError, DataError
from tests.unit.data.chat import made

LOOPS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"


@pytest.fixture(autouse=True)
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 2.0)
    monkeypatch.setattr(limits, "MAX_BYTES", 256 << 20)


def test_check_limits_exceeding_template_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(bomb: str, problem: str) -> None:
        tokenizer = made.tokenizer(made.STABLE + bomb)
        with pytest.raises(ConfigError, match=rf"^model\.tokenizer_path: .*{problem}.*; set data\.template=plain, or"):
            limits.check_limits(partial(PromptRenderer, tokenizer, DataConfig()), "model.tokenizer_path")

    check("{{ 'a' * 10 ** 9 }}", "needs more than 256 MiB")
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.2)
    check(LOOPS, "did not end within 0.2 seconds")


@pytest.mark.parametrize(
    ("bomb", "problem"),
    [
        ("{{ 10 ** (10 ** 9) }}", "did not end within 2 seconds|needs more than"),
        ("{{ 'a'.ljust(10 ** 11) }}", "needs more than 256 MiB"),
        ("{{ ['a' * 10 ** 6] * 10 ** 9 }}", "needs more than 256 MiB|did not end"),
        ("{{ 'a' * 7 * 10 ** 7 }}", "writes more than 64|needs more"),
    ],
)
def test_render_all_row_beyond_limit_is_named(bomb: str, problem: str) -> None:
    """Only the message of the second row triggers it, so the check at load time passes."""
    template = f"{made.STABLE}{{% if 'boom' in messages[0].content %}}{bomb}{{% endif %}}"
    template = template.replace("10 **", "messages[0].n **")  # Jinja would compute constants when it loads the template
    renderer = PromptRenderer(made.tokenizer(template), DataConfig())
    rows = [([{"role": "user", "content": text, "n": 10}], f"row {text}") for text in ("calm", "boom", "calm")]
    rendered = renderer.render_all(rows)
    assert "calm" in next(rendered)
    with pytest.raises(DataError, match=rf"^row boom: the tokenizer's chat template ({problem})"):
        next(rendered)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('no users') }}", "no users"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ messages[9].content + '' }}", "has no element 9"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "is unsafe"),
    ],
)
def test_render_all_template_error_rejects_row(template: str, problem: str) -> None:
    renderer = PromptRenderer(made.tokenizer(template), DataConfig())
    with pytest.raises(DataError, match=rf"^row 1: the tokenizer's chat template rejects the prompt: .*{problem}"):
        list(renderer.render_all([([{"role": "user", "content": "x"}], "row 1")]))


def test_render_all_results_in_order_and_child_ends() -> None:
    assert list(limits.render_all([partial(str, number) for number in range(1000)])) == [*map(str, range(1000))]
    first = next(limits.render_all([str, partial(time.sleep, 3600)]))  # longer than the limit of a test
    assert first == ""
