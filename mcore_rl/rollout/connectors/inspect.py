"""Tasks of Inspect (inspect-ai): the solver and the scorers of a task on one sample.

`inspect_ai.eval` runs one evaluation per process at a time. Sessions are concurrent, so this module calls solver and
scorers itself, as `inspect_ai._eval.task.run` of 0.3.285 does for a sample.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

from mcore_rl.config.functions import absolute_spec, describe, load_function
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.rollout.connectors.client import MODEL, Endpoint
from mcore_rl.rollout.connectors.interface import RowRequest, row_of
from mcore_rl.rollout.connectors.libraries import import_library
from mcore_rl.types.json import JsonObject, JsonValue

if TYPE_CHECKING:
    from inspect_ai import Task
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ChatMessage, GenerateConfig, GenerateConfigArgs, Model
    from inspect_ai.scorer import Score
    from inspect_ai.solver import Generate, TaskState

logger = logging.getLogger(__name__)

CLEANUP_SECONDS = 30.0
"""Time limit of a task's cleanup, which also runs after the session's own time limit."""
UNSUPPORTED = ("working_limit", "cost_limit", "approval", "review", "sentinel", "early_stopping", "sample_source")
"""Arguments of a task that would change its samples or their scores, and have no effect in a session."""
KIND = "inspect"
import_library(KIND)


class InspectSuite:
    """Plays samples of tasks. A task is loaded once per process and arguments; its solver and scorers are shared."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}

    def rows(self, request: RowRequest) -> Iterator[JsonObject]:
        """Same as Rows.rows. `name`: module_or_file.py:task."""
        name = absolute_spec(request.name)
        task = self._load(name, request.arguments)
        shown = request.name.rpartition(":")[2]
        for number, sample in enumerate(task.dataset):
            part: JsonObject = {
                "name": name,
                "arguments": dict(request.arguments),
                "number": number,
                # The sample itself: a task that shuffles its dataset has other samples in other processes.
                "sample": _dumped(sample, request.name),
            }
            messages = [{"role": each.role, "content": each.text} for each in _messages(sample)]
            target = sample.target if isinstance(sample.target, str) else " ".join(sample.target)
            yield row_of(KIND, shown, messages, part, target)

    async def run(self, part: JsonObject, endpoint: Endpoint) -> dict[str, object]:
        """Same as Suite.run. The score is the value of the first scorer, where a correct answer counts 1."""
        from inspect_ai.model import get_model

        sample = _sample_of(part)
        task = self._load(str(part["name"]), cast("Mapping[str, JsonValue]", part["arguments"]))
        # The provider reads no environment variables if both are given. Without memoize, its client is closed here.
        service = f"openai-api/{MODEL}/{MODEL}"
        async with get_model(service, base_url=endpoint.url, api_key=endpoint.key, memoize=False) as model:
            try:
                scores = await _scored(task, sample, int(cast(int, part["number"])), model)
            finally:
                _forget_connections(model)
        return _result(scores, str(part["name"]))

    def _load(self, name: str, arguments: Mapping[str, JsonValue]) -> Task:
        """Return a task.

        Raises: ConfigError if it cannot be constructed, has no scorer, or needs a sandbox of Inspect.
        """
        key = repr((name, sorted(arguments.items())))
        if key not in self._tasks:
            self._tasks[key] = _loaded(name, arguments)
        return self._tasks[key]


async def _scored(task: Task, sample: Sample, number: int, model: Model) -> list[Score]:
    """Solve a sample within the task's limits, and return its scores; then run the task's cleanup, if it has one."""
    from inspect_ai.model import GenerateConfig
    from inspect_ai.model._model import init_active_model, init_model_roles, init_sample_model_data
    from inspect_ai.solver._task_state import sample_state, set_sample_state
    from inspect_ai.util._store import init_subtask_store

    # The gateway repeats requests of a lost engine itself, and a refused request stays refused.
    config = task.config.merge(GenerateConfig(max_retries=0))
    # Variables of the context, for solvers and scorers that call get_model(); every session has a context of its own.
    init_active_model(model, config)
    init_model_roles(task.model_roles or {})
    init_sample_model_data()
    state = _state_of(task, sample, number, model)
    set_sample_state(state)
    init_subtask_store(state.store)
    try:
        return await _scores_within_limits(task, sample, state, _generate_of(model, config))
    finally:
        await _cleaned_up(task, sample_state() or state)


async def _cleaned_up(task: Task, state: TaskState) -> None:
    """Run the task's cleanup, also when the session is cancelled. Its errors do not change the scores, as in `inspect
    eval`."""
    import anyio

    if task.cleanup is None:
        return
    with anyio.move_on_after(CLEANUP_SECONDS, shield=True) as scope:
        try:
            await task.cleanup(state)
        except Exception as error:  # any error of the task's code
            logger.warning("the cleanup of the task %s failed: %s", task.name, describe(error))
    if scope.cancelled_caught:
        logger.warning("the cleanup of the task %s took more than %g s", task.name, CLEANUP_SECONDS)


async def _scores_within_limits(task: Task, sample: Sample, state: TaskState, generate: Generate) -> list[Score]:
    """Solve and score a sample. One that reaches a limit is scored, too."""
    from inspect_ai._util.exception import TerminateSampleError
    from inspect_ai.scorer import Target
    from inspect_ai.solver._task_state import sample_state, set_sample_state
    from inspect_ai.util import LimitExceededError, time_limit
    from inspect_ai.util._limit import turn_limit

    try:
        with state._token_limit, state._message_limit, turn_limit(task.turn_limit), time_limit(task.time_limit):
            state = await _solved(task, state, generate)
    except (LimitExceededError, TerminateSampleError):
        state = sample_state() or state
    state.completed = True
    set_sample_state(state)
    # Scoring has half of the time, as in `inspect eval`; a sample that needs more fails.
    with time_limit(task.time_limit / 2 if task.time_limit else None):
        scores = [await scorer(state, Target(sample.target)) for scorer in task.scorer or []]
    return [score for score in scores if score is not None]


def _state_of(task: Task, sample: Sample, number: int, model: Model) -> TaskState:
    from inspect_ai.model import ModelName
    from inspect_ai.scorer import Target
    from inspect_ai.solver import TaskState

    return TaskState(
        model=ModelName(model),
        sample_id=sample.id if sample.id is not None else number,
        epoch=1,
        input=sample.input,
        messages=_messages(sample),
        target=Target(sample.target),
        choices=sample.choices,
        message_limit=task.message_limit,
        token_limit=task.token_limit,
        token_limit_type=task.token_limit_type or "all",
        metadata=sample.metadata,
    )


async def _solved(task: Task, state: TaskState, generate: Generate) -> TaskState:
    """Return the state after the task's solvers."""
    from inspect_ai.solver._task_state import set_sample_state

    setup = task.setup or []
    for solver in [*(setup if isinstance(setup, Sequence) else [setup]), task.solver]:
        if not state.completed:
            state = await solver(state, generate)
            set_sample_state(state)  # solvers may return another object
    return state


def _forget_connections(model: Model) -> None:
    """Remove the semaphores of a model. The library keeps them by API key, and each session has its own key."""
    from inspect_ai.model._model import model_concurrency_key
    from inspect_ai.util import _concurrency

    semaphores = _concurrency._concurrency_registry._semaphores
    for mode in ("static", "adaptive"):
        semaphores.pop(f"{model_concurrency_key(model.api)}#{mode}", None)


def _generate_of(model: Model, config: GenerateConfig) -> Generate:
    """Return the function with which solvers call the model and its tools."""
    from inspect_ai._eval.task.generate import task_generate
    from inspect_ai._util.notgiven import NOT_GIVEN

    async def generate(
        state: TaskState,
        tool_calls: Literal["loop", "single", "none"] = "loop",
        **options: object,
    ) -> TaskState:
        return await task_generate(
            model, state, tool_calls, NOT_GIVEN, config.merge(cast("GenerateConfigArgs", options))
        )

    return generate


def _messages(sample: Sample) -> list[ChatMessage]:
    from inspect_ai.model import ChatMessageUser

    return [ChatMessageUser(content=sample.input)] if isinstance(sample.input, str) else list(sample.input)


def _loaded(name: str, arguments: Mapping[str, JsonValue]) -> Task:
    from inspect_ai import Task
    from inspect_ai._util.registry import is_registry_object

    function = load_function("task", name)
    # Rows name the function: others than tasks, such as os.system, must not be called.
    if not is_registry_object(function, "task"):
        raise ConfigError(f"{name} is no task of Inspect; decorate the function with @task of inspect_ai")
    try:
        task = function(**arguments)
    except Exception as error:  # errors of the task's own code
        raise ConfigError(f"the task {name} cannot be constructed: {describe(error)}; check --arguments") from error
    if not isinstance(task, Task):
        raise ConfigError(f"{name} returned {type(task).__name__} instead of an inspect_ai.Task")
    if not task.scorer:
        raise ConfigError(f"the task {name} has no scorer, so its samples have no reward; add one")
    if needs := _unsupported(task):
        raise ConfigError(
            f"the task {name} needs {needs}, which sessions do not have; evaluate it with `inspect eval` and "
            "`mcore-rl serve`"
        )
    return task


def _unsupported(task: Task) -> str | None:
    """Return a feature of a task that this module does not have, None if it has all."""
    if task.sandbox is not None or any(sample.sandbox is not None for sample in task.dataset):
        return "a sandbox of Inspect"
    for name in ("setup", "files"):
        if any(getattr(sample, name) for sample in task.dataset):
            return f"{name} of a sample in a sandbox of Inspect"
    for name in UNSUPPORTED:
        if getattr(task, name) is not None:
            return f"{name} of Inspect"
    return None


def _dumped(sample: Sample, name: str) -> JsonObject:
    """Return a sample as JSON.

    Raises: ConfigError if its metadata has other objects.
    """
    try:
        return cast(JsonObject, sample.model_dump(mode="json", exclude_none=True))
    except ValueError as error:
        raise ConfigError(
            f"a sample of {name} cannot be written as JSON: {describe(error)}; use numbers, texts, lists and dicts in "
            "its metadata"
        ) from error


def _sample_of(part: JsonObject) -> Sample:
    """Return the sample of a row; each session has an object of its own, which solvers may change.

    Raises: DataError if the row has none.
    """
    from inspect_ai.dataset import Sample

    try:
        # The validated sample may share lists and dicts with the row.
        return Sample.model_validate(copy.deepcopy(part["sample"]))
    except ValueError as error:
        raise DataError(
            f"the row has no sample of Inspect: {describe(error)}; write the rows with `mcore-rl rows {KIND}`"
        ) from error


def _result(scores: Sequence[Score], name: str) -> dict[str, object]:
    """Return score and metrics of a sample.

    Raises: DataError if no scorer gave a number.
    """
    from inspect_ai.scorer import value_to_float

    as_number = value_to_float()
    metrics: dict[str, float] = {}
    for number, score in enumerate(scores):
        values = score.value if isinstance(score.value, Mapping) else {"score": score.value}
        suffix = f"_{number}" if number else ""
        metrics |= {f"{key}{suffix}": as_number(value) for key, value in values.items() if value is not None}
    finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
    if not finite:
        raise DataError(f"the scorers of {name} gave no number for this sample")
    answers = {"answer": scores[0].answer, "explanation": scores[0].explanation}
    return {"score": next(iter(finite.values())), "metrics": finite, **answers}
