"""Default values of slime's and Megatron's arguments that have a counterpart.

Source: slime 0.3.1 (August 2026), slime/utils/arguments.py.
"""

from __future__ import annotations

DEFAULTS: dict[str, object] = {
    "actor-num-nodes": 1,
    "actor-num-gpus-per-node": 8,
    "num-gpus-per-node": 8,
    "rollout-num-gpus-per-engine": 1,
    "rollout-temperature": 1.0,
    "rollout-top-p": 1.0,
    "rollout-top-k": -1,
    "rollout-seed": 42,
    "n-samples-per-prompt": 1,
    "n-samples-per-eval-prompt": 1,
    "input-key": "input",
    "micro-batch-size": 1,
    "eps-clip": 0.2,
    "value-clip": 0.2,
    "kl-coef": 0.0,
    "kl-loss-coef": 0.0,
    "kl-loss-type": "k1",
    "loss-type": "policy_loss",
    "advantage-estimator": "grpo",
    "entropy-coef": 0.0,
    "gamma": 1.0,
    "lambd": 1.0,
    "tis-clip": 2.0,
    "tis-clip-low": 0,
    "num-critic-only-steps": 0,
    "lr": 1e-6,
    "clip-grad": 1.0,
    "mtp-loss-scaling-factor": 0.2,
    # Megatron's.
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "weight-decay": 0.01,
    "adam-beta1": 0.9,
    "adam-beta2": 0.999,
    "adam-eps": 1e-8,
    "min-lr": 0.0,
    "lr-decay-style": "linear",
    "lr-warmup-iters": 0,
    "moe-aux-loss-coeff": 0.0,
    "optimizer": "adam",
}
