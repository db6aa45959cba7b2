"""Pure torch and numpy: advantages, policy losses, KL estimates, aggregation, filters."""

from mcore_rl.algorithms.aggregation import aggregate_loss, loss_weights
from mcore_rl.algorithms.corrections import Correction
from mcore_rl.algorithms.filters import groups_with_variance
from mcore_rl.algorithms.interface import Estimator, Needs, PolicyLossInputs, PolicyLossResult
from mcore_rl.algorithms.kl import kl_penalty
from mcore_rl.algorithms.registry import (
    advantage_options,
    compute_advantages,
    compute_policy_loss,
    estimator,
    policy_loss,
    policy_loss_options,
)
from mcore_rl.algorithms.value_loss import compute_value_loss
