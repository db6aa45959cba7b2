"""Checks of the teacher of a distillation run before it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_rl.algorithms import Estimator
from mcore_rl.config.roles import EngineRole
from mcore_rl.config.rules.teacher import replaces_rewards, uses_teacher
from mcore_rl.config.rules.validation import check_positions
from mcore_rl.config.schema import Config
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import ConfigError
from mcore_rl.preparation.models import check_implementation, check_weights
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.resolved.teacher import resolved_teacher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "teacher.hf_path"


def check_teacher(config: Config, policy: ResolvedModel, estimator: Estimator) -> None:
    """Check the teacher's layout and weights, if the run has one. Reads headers of weight files.

    Raises: ConfigError.
    """
    teacher, advantage = config.teacher, config.algorithm.advantage
    if not uses_teacher(teacher):
        return
    if replaces_rewards(teacher) and estimator.needs.values:
        raise ConfigError(
            f"teacher.alone=true drops the advantages of algorithm.advantage={advantage}, whose critic would be "
            "trained for nothing; set algorithm.advantage to an estimator without a critic, such as grpo"
        )
    spec = resolved_teacher(teacher, policy)
    check_implementation(config.cluster, spec)
    check_positions(EngineRole.rollout(config.rollout, config.model), spec.hf_config, f"{KEY}'s")
    check_weights(spec.role)


def check_vocabulary(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Require that the teacher, if the run has one, has the tokens of the policy's tokenizer with the same ids.

    Chat templates may differ: the teacher reads the policy's tokens.

    Raises: ConfigError naming the first different token.
    """
    if not uses_teacher(config.teacher):
        return
    path = str(config.teacher.hf_path)
    ours, theirs = tokenizer.get_vocab(), load_tokenizer(path, KEY).get_vocab()
    if ours == theirs:
        return
    different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    first = different[0]
    numbers = [f"id {ids[first]}" if first in ids else "no id" for ids in (ours, theirs)]
    raise ConfigError(
        f"{KEY}={path} has another vocabulary than the policy: {len(different)} tokens differ, such as {first!r} with "
        f"{numbers[0]} for the policy and {numbers[1]} for the teacher; set it to a model with the policy's tokenizer"
    )
