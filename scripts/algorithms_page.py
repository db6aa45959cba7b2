"""Generate docs/algorithms.md: formula, source, options and cost of every advantage and policy loss, and formulas of
corrections and other terms.

python scripts/algorithms_page.py
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path

from mcore_rl.algorithms import (
    aggregation,
    configured,
    corrections,
    entropy_controller,
    kl,
    kl_controller,
    length_penalty,
    selection,
    terms,
)
from mcore_rl.algorithms.advantages import user as user_advantage
from mcore_rl.algorithms.interface import Estimator, Needs, PolicyLoss
from mcore_rl.algorithms.losses import user as user_loss
from mcore_rl.algorithms.registry import ADVANTAGES, POLICY_LOSSES, policy_loss
from mcore_rl.config.rules import presets
from mcore_rl.config.rules.presets import PRESETS

Entry = type[Estimator] | type[PolicyLoss]
ROOT = Path(__file__).parent.parent
PAGE, PAPERS = ROOT / "docs" / "algorithms.md", ROOT / "docs" / "papers.md"
STEP = ROOT / "mcore_rl" / "megatron" / "step"
STEP_PARTS = {
    "Teachers: `teacher.in_advantage`, `teacher.in_loss`": "distillation",
    "Sampled sets: `rollout.keep_sampling_mask`": "logprobs",
}
"""Modules that are read, not imported: their package needs Megatron."""
COSTS = {
    "values": "a critic with its own weights and optimizer, one forward pass and one update per step",
    "baseline_rewards": "one additional greedy response per prompt",
    "score_norms": "a forward pass of the policy before the updates",
    "reference": "a frozen reference model, one forward pass per step",
    "prox_logp": "a forward pass of the policy before the updates",
    "pairs": "a forward pass of the policy, and of the reference if there is one, before each update",
    "selection": "a forward pass over the tokens of each update before it",
    "whole_group": "a forward pass over the tokens of each update before it, except for the first of a batch",
    "whole_sequence": "context-parallel ranks exchange the log-probabilities of their tokens",
}
HEADER = """\
# Advantages and policy losses

After reading this page you can select an advantage estimator and a policy loss, set their options, and use your own.

## Example

```yaml
algorithm:
  advantage: grpo
  normalize_by_std: false
  loss_aggregation: token-mean
  policy_loss:
    name: ppo_clip
    clip_low: 0.2
    clip_high: 0.28
```

The options of an advantage are keys of `algorithm`, the options of a policy loss are keys of `algorithm.policy_loss`.
An unsupported option is an error. Instead of a name, `module_or_file.py:function` selects your own function (see
"User-defined advantage" and "User-defined policy loss"). It receives the options that are set, and further ones from
`algorithm.advantage_kwargs.NAME=VALUE` or `algorithm.policy_loss.kwargs.NAME=VALUE`.

The objectives on pairs are in [Preference training](preference.md).

This page is generated from `mcore_rl/algorithms` and the presets of corrections by `python scripts/algorithms_page.py`.
"""


def page() -> str:
    """Render the page."""
    # The registries' order is the order of the page. Needs of losses are with default options.
    lines = [HEADER, "## Advantages: `algorithm.advantage`", ""]
    for name, entry in ADVANTAGES.items():
        lines += _section(name, entry, entry.needs)  # type: ignore[arg-type]  # a class attribute of estimators
    lines += ["## Policy losses: `algorithm.policy_loss.name`", ""]
    for name, loss in POLICY_LOSSES.items():
        lines += _section(name, loss, policy_loss(name).needs)
    rest = {
        "User-defined advantage: `algorithm.advantage`": user_advantage,
        "User-defined policy loss: `algorithm.policy_loss.name`": user_loss,
        "Losses by data source: `algorithm.per_source`": configured,
        "Aggregation: `algorithm.loss_aggregation`": aggregation,
        "Corrections: `algorithm.correction`, `algorithm.corrections`": corrections,
        "Tokens that a loss, correction or `algorithm.high_entropy_share` chooses": selection,
        "Length penalty: `algorithm.length_penalty`": length_penalty,
        "KL estimators: `algorithm.kl.loss_kind`, `algorithm.kl.reward_kind`": kl,
        "Terms added to the loss: `algorithm.kl.in_loss`, `algorithm.drift_penalty.coefficient`": terms,
        "Entropy bonus: `algorithm.entropy_control.target`": entropy_controller,
        "KL in the reward: `algorithm.kl.controller`": kl_controller,
    }
    for title, module in rest.items():
        lines += [f"## {title}", "", *_fenced(module.__doc__ or ""), ""]
    for title, name in STEP_PARTS.items():
        text = ast.get_docstring(ast.parse((STEP / f"{name}.py").read_text(encoding="utf-8")))
        lines += [f"## {title}", "", *_fenced(text or ""), ""]
    lines += ["## Presets of corrections: `algorithm.correction_preset`", "", *_fenced(presets.__doc__ or ""), ""]
    lines += ["| preset | keys |", "|---|---|", *map(_preset_row, PRESETS), ""]
    lines += [
        "## Papers",
        "",
        "[Papers](papers.md) has the differences from each.",
        "",
        "| paper | keys |",
        "|---|---|",
    ]
    for row in PAPERS.read_text(encoding="utf-8").splitlines():
        paper, *others = row.split(" | ")
        if len(others) == 2 and paper != "| paper":
            lines.append(f"{paper} | {others[0]} |")
    return "\n".join(lines).rstrip() + "\n"


def _preset_row(name: str) -> str:
    """Format the keys that a preset sets, as a row of a table."""
    preset = PRESETS[name]
    entries = (", ".join(f"{key}: {_value(value)}" for key, value in entry.items()) for entry in preset.corrections)
    keys = [f"algorithm.corrections=[{', '.join(f'{{{entry}}}' for entry in entries)}]"]
    if preset.old_logp != "trainer":
        keys.append(f"algorithm.old_logp={preset.old_logp}")
    if preset.policy_loss is not None:
        keys.append(f"algorithm.policy_loss.name={preset.policy_loss}")
    return f"| `{name}` | {' '.join(f'`{key}`' for key in keys)} |"


def _value(value: str | float | None) -> str:
    """Format a value as in YAML, numbers with six digits."""
    return "null" if value is None else value if isinstance(value, str) else f"{value:.6g}"


def _section(name: str, entry: Entry, needs: Needs) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    yield from _fenced(inspect.getdoc(entry) or "")
    yield ""
    options = [f"`{field.name}` = {_default(field)}" for field in fields(entry)]  # type: ignore[arg-type]  # both protocols are dataclasses
    yield f"Options: {', '.join(options) if options else 'none'}."
    costs = list(_costs(entry, needs))
    yield f"Additional cost: {'; '.join(costs) if costs else 'none'}."
    yield ""


def _costs(entry: Entry, needs: Needs) -> Iterator[str]:
    # Policy losses have no such attribute: they always run on the ranks.
    if getattr(entry, "per_response", None) is False:
        yield "computed on the ranks, token by token"
    yield from (cost for need, cost in COSTS.items() if getattr(needs, need, False))


def _default(field: Field[object]) -> str:
    return "required" if field.default is MISSING else f"`{field.default}`"


def _fenced(text: str) -> list[str]:
    """Format a docstring: the first line as text, the rest as a code block."""
    first, _, rest = text.strip().partition("\n")
    return [first, "", "```text", *rest.strip("\n").splitlines(), "```"] if rest.strip() else [first]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
