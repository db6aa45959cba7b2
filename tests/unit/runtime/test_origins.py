"""Origins of errors."""

from __future__ import annotations

import inspect
import pickle

import pytest

from mcore_rl.errors import ConfigError, NonFiniteError
from mcore_rl.runtime.engines.process import EngineProcess, FollowerProcess
from mcore_rl.runtime.roles.critic import CriticProcess
from mcore_rl.runtime.roles.judge import JudgeProcess
from mcore_rl.runtime.roles.origins import marks_errors, origin_of, with_origin
from mcore_rl.runtime.roles.reward_model import RewardModelProcess
from mcore_rl.runtime.roles.trainer import TrainerProcess
from mcore_rl.weights.transports.hosts import this_host

PROCESSES = (CriticProcess, EngineProcess, FollowerProcess, JudgeProcess, RewardModelProcess, TrainerProcess)


class Base:
    def __init__(self, name: str) -> None:
        self.name = name

    def fail(self, error: Exception) -> None:
        raise error


@marks_errors
class Rank(Base):
    def call(self, other: Base, error: Exception) -> None:
        """Raise an error of another process as Ray delivers it, pickled."""
        try:
            other.fail(error)
        except Exception as found:
            raise pickle.loads(pickle.dumps(found)) from None


@pytest.mark.parametrize("error", [ConfigError("key"), NonFiniteError("loss"), ValueError("bug"), OSError(28, "full")])
def test_origin_survives_pickling_and_the_innermost_counts(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        Rank("rank 0").call(Rank("rank 1"), error)
    arrived = pickle.loads(pickle.dumps(raised.value))
    assert origin_of(arrived) == f"rank 1 on {this_host().name}"
    assert str(arrived) == str(error)


def test_message_names_the_origin_once() -> None:
    assert with_origin(ConfigError("a key"), "rank 1 on h") == "a key (rank 1 on h)"
    assert with_origin(ConfigError("rank 1 on h died"), "rank 1 on h") == "rank 1 on h died"
    assert with_origin(ConfigError("a key"), None) == "a key"


@pytest.mark.parametrize("process", PROCESSES)
def test_every_public_method_of_every_process_marks_its_errors(process: object) -> None:
    methods = inspect.getmembers(process, inspect.isfunction)
    public = [(name, method) for name, method in methods if not name.startswith("_")]
    unmarked = [name for name, method in public if not hasattr(method, "__wrapped__")]
    assert len(public) > 5
    assert not unmarked
