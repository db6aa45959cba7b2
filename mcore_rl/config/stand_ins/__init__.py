"""Replacements of verl's modules for users' files if verl is not installed."""

from mcore_rl.config.stand_ins.modules import MODULES, MissingVerlName, provide_verl_names

__all__ = ["MODULES", "MissingVerlName", "provide_verl_names"]
