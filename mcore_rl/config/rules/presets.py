"""Presets of algorithm.corrections, with the names that users of verl and SkyRL know.

verl: the methods of RolloutCorrectionConfig, with their default thresholds. decoupled: the trainer's policy before the
first update in the weight (policy=old). bypass: the engine's log-probabilities as the old policy, and the policy at the
update in the weight (policy=current); ppo: the loss's ratio contains the weight, so that corrections only reject; pg:
REINFORCE, with the weights of the list.
SkyRL: the options of off_policy_correction one by one, with the values of its guide, and the combination that it
recommends.

Source: verl of January 2026, verl/trainer/config/algorithm.py, of November 2025 (ppo_is_bypass, pg_is, pg_rs) and later
(IcePop); SkyRL of August 2026, off_policy_correction.mdx. Both do not count dropped tokens in the denominator of the
loss, unlike algorithm.corrections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Entry = Mapping[str, str | float | None]


@dataclass(frozen=True)
class CorrectionPreset:
    """Values that a preset stands for: entries of algorithm.corrections, algorithm.old_logp, and a policy loss without
    options (None: any)."""

    corrections: tuple[Entry, ...]
    old_logp: str = "trainer"
    policy_loss: str | None = None


_TOKEN: Entry = {"kind": "truncate", "level": "token", "high": 2.0}
_ICEPOP: Entry = {"kind": "mask", "level": "token", "low": 0.5, "high": 5.0}
_SEQUENCE: Entry = {"kind": "truncate", "level": "sequence", "high": 2.0}
_SEQUENCE_RS: Entry = {"kind": "reject", "level": "sequence", "low": 0.5, "high": 2.0}
_GEOMETRIC_RS: Entry = {"kind": "reject", "level": "geometric", "low": 0.999, "high": 1.001}
_RECIPROCAL_RS: Entry = {"kind": "reject", "level": "geometric", "low": 1 / 1.001, "high": 1.001}
_K3_RS: Entry = {"kind": "reject", "level": "geometric", "measure": "k3", "high": 0.01}
_VETO: Entry = {"kind": "reject", "level": "any_token", "low": 1e-4, "high": None}

_GEOMETRIC_MASK: Entry = {"kind": "reject", "level": "geometric", "low": 0.99, "high": 1.01}
_TOKEN_MASK: Entry = {"kind": "reject", "level": "token", "low": 0.5, "high": 2.0}
_OUTLIER_MASK: Entry = {"kind": "reject", "level": "any_token", "low": 1e-4, "high": 100.0}


def _decoupled(*entries: Entry) -> CorrectionPreset:
    return CorrectionPreset(entries)


def _ppo(*entries: Entry) -> CorrectionPreset:
    return CorrectionPreset(tuple({**entry, "policy": "current"} for entry in entries), old_logp="rollout")


def _pg(*entries: Entry) -> CorrectionPreset:
    return CorrectionPreset(tuple({**entry, "policy": "current"} for entry in entries), policy_loss="reinforce")


PRESETS: dict[str, CorrectionPreset] = {
    "disabled": _decoupled(),
    "decoupled_token_is": _decoupled(_TOKEN),
    "decoupled_token_icepop": _decoupled(_ICEPOP),
    "decoupled_seq_is": _decoupled(_SEQUENCE),
    "decoupled_seq_is_rs": _decoupled(_SEQUENCE, _SEQUENCE_RS),
    "decoupled_geo_rs": _decoupled(_GEOMETRIC_RS),
    "decoupled_geo_rs_seq_tis": _decoupled(_SEQUENCE, _GEOMETRIC_RS),
    "decoupled_geo_rs_token_tis": _decoupled(_TOKEN, _GEOMETRIC_RS),
    "decoupled_k3_rs": _decoupled(_K3_RS),
    "decoupled_k3_rs_seq_tis": _decoupled(_SEQUENCE, _K3_RS),
    "decoupled_k3_rs_token_tis": _decoupled(_TOKEN, _K3_RS),
    "bypass_ppo_clip": _ppo(),
    "bypass_ppo_clip_geo_rs": _ppo(_GEOMETRIC_RS),
    "bypass_ppo_clip_k3_rs": _ppo(_K3_RS),
    "bypass_pg_is": _pg(_SEQUENCE),
    "bypass_pg_token_icepop": _pg(_ICEPOP),
    "bypass_pg_geo_rs": _pg(_GEOMETRIC_RS),
    "bypass_pg_geo_rs_seq_tis": _pg(_SEQUENCE, _GEOMETRIC_RS),
    "bypass_pg_geo_rs_token_tis": _pg(_TOKEN, _GEOMETRIC_RS),
    # Of verl before 0.7. Its weights of ppo_is_bypass are 1: both policies of the ratio are the engine's.
    "ppo_is_bypass": _ppo(),
    "pg_is": _pg(_SEQUENCE),
    "pg_rs": _pg(_RECIPROCAL_RS, _VETO),
    "skyrl_token_tis": _decoupled(_TOKEN),
    "skyrl_sequence_tis": _decoupled({**_SEQUENCE, "high": 5.0}),
    "skyrl_geometric_mask": _decoupled(_GEOMETRIC_MASK),
    "skyrl_product_mask": _decoupled(_SEQUENCE_RS),
    "skyrl_token_mask": _decoupled(_TOKEN_MASK),
    "skyrl_outlier_mask": _decoupled(_OUTLIER_MASK),
    "skyrl_recommended": _decoupled(_TOKEN, _GEOMETRIC_MASK, _TOKEN_MASK, _OUTLIER_MASK),
}
