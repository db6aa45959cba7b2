"""verl's names for users' files where verl is not installed: modules with this project's functions."""

from mcore_rl.config.stand_ins.modules import MODULES, MissingVerlName, provide_verl_names

__all__ = ["MODULES", "MissingVerlName", "provide_verl_names"]
