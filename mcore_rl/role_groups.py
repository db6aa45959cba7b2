"""Roles of a run in addition to trainer ranks and rollout engines, from the checked layouts, and their groups."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TypeVar

from mcore_rl.config.rules.judge import uses_judge
from mcore_rl.config.rules.teacher import has_own_ranks, is_served
from mcore_rl.config.schema import Config
from mcore_rl.data.batching import spread
from mcore_rl.ports import Teacher
from mcore_rl.preparation.prepare import Prepared, PreparedModels
from mcore_rl.runtime.roles.critic import critic_role
from mcore_rl.runtime.roles.groups import RankMap, Role, RoleGroup
from mcore_rl.runtime.roles.judge import judge_role
from mcore_rl.runtime.roles.reward_model import reward_model_role
from mcore_rl.runtime.roles.teacher import TeacherGroup, teacher_role
from mcore_rl.runtime.roles.teacher_ranks import TeacherRankGroup, teacher_ranks_role
from model_converters.mapping.layout import TrainLayout

G = TypeVar("G")


def roles_of(config: Config, prepared: Prepared) -> list[Role]:
    """Return the roles that need processes in addition to trainer ranks and engines."""
    roles = [judge_role(config.judge)] if uses_judge(config.judge) else []
    roles += [*teacher_roles(config, prepared), *critic_roles(prepared)]
    if prepared.reward_model is not None:
        roles.append(reward_model_role(rank_map(prepared.reward_model), config.model.dtype))
    return roles


def teacher_roles(config: Config, models: PreparedModels) -> list[Role]:
    """Return the role of teachers that are not on the actor's ranks, if the run has any."""
    teacher, num_dp_ranks = config.teacher, models.layout.dp
    if has_own_ranks(teacher):
        ranks = [rank_map(layout) for layout in models.teachers]
        return [teacher_ranks_role(teacher, ranks, num_dp_ranks, models.cost)]
    return [teacher_role(teacher, num_dp_ranks)] if is_served(teacher) else []


def critic_roles(models: PreparedModels) -> list[Role]:
    """Return the role of the critic, if the run has one."""
    layout = models.critic
    if layout is None:
        return []
    # The critic may have a different number of data-parallel ranks than the policy.
    own_batch = functools.partial(spread, num_ranks=models.layout.dp, other_ranks=layout.dp, cost=models.cost)
    return [critic_role(rank_map(layout), own_batch)]


def rank_map(layout: TrainLayout) -> RankMap:
    """Return the data-parallel ranks of a layout."""
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    # Results of a data-parallel rank are reported by one of its ranks: the first of the last pipeline stage.
    reporting = {
        place.dp: rank for rank, place in enumerate(places) if place.tp == place.cp == 0 and place.pp == layout.pp - 1
    }
    return RankMap(tuple(place.dp for place in places), tuple(reporting[dp] for dp in range(layout.dp)))


def group_of(groups: Mapping[str, RoleGroup], kind: type[G]) -> G | None:
    """Return the group of this kind, if the run has one."""
    return next((group for group in groups.values() if isinstance(group, kind)), None)


def teacher_of(groups: Mapping[str, RoleGroup]) -> Teacher | None:
    """Return the group of teachers that are not on the actor's ranks, if the run has one."""
    return group_of(groups, TeacherGroup) or group_of(groups, TeacherRankGroup)
