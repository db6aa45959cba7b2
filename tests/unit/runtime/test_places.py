"""Deaths of processes whose host or exit status is unknown here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayError

from mcore_rl.runtime.roles import places
from mcore_rl.runtime.roles.places import Places
from mcore_rl.weights.transports.hosts import Host
from tests.unit.runtime.fake_ray import Process, Ray

SYSTEM_EXIT = (
    "The actor died unexpectedly before finishing this task.\n\tpid: 7\nThe actor is dead because its worker process "
    "has died. Worker exit type: INTENDED_USER_EXIT Worker exit detail: Worker exits by SystemExit. Exit code: 3."
)


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (RayActorError(error_msg=SYSTEM_EXIT), "exit code 3"),
        (ActorDiedError(), "The actor died unexpectedly before finishing this task."),
        (OutOfMemoryError("Task was killed due to the node running low on memory"), "Task was killed due to the node"),
    ],
)
def test_death_on_another_host_has_the_status_that_ray_knows(
    error: RayError, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Ray()
    monkeypatch.setattr(places, "ray", SimpleNamespace(wait=ray.wait, get=ray.get))
    process = Process(ray, "trainer rank 1")
    process.where = lambda: process.ended((Host("node7", ("another boot", 1)), 12))  # type: ignore[method-assign]
    found = Places("run/logs")
    assert found.described([process]) == " (log run/logs/trainer_rank_1.log)"
    found.ask([process])
    assert found.death(process, error).startswith(how)
    assert found.described([process]) == " (host node7, log run/logs/trainer_rank_1.log)"
    process.name = "trainer rank 1 on node7"
    assert found.described([process]) == " (log run/logs/trainer_rank_1.log)"
    assert Places().described([process]) == ""
