"""Tasks of EleutherAI's lm-evaluation-harness that generate text."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from typing import TYPE_CHECKING, cast

from mcore_rl.config.functions import describe
from mcore_rl.data.json_text import to_plain
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.rollout.connectors.client import Endpoint, reply
from mcore_rl.rollout.connectors.interface import RowRequest, row_of
from mcore_rl.rollout.connectors.libraries import import_library
from mcore_rl.types.chat import ChatMessage
from mcore_rl.types.json import JsonObject, JsonValue

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task

KIND = "lm_eval"
GENERATES = "generate_until"
INCLUDE = "include_path"
"""Entry of --arguments: folder with the YAML files of tasks, in place of the library's."""
import_library(KIND)


class LmEvalSuite:
    """Plays documents of tasks: one reply, which the task's filters and metrics evaluate. A task is loaded once per
    process.

    Tasks are loaded and replies evaluated in one thread: both block, and the event loop serves all sessions.
    """

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str | None], dict[str, Task]] = {}
        self._thread = ThreadPoolExecutor(1, "lm_eval")

    def rows(self, request: RowRequest) -> Iterator[JsonObject]:
        """Same as Rows.rows. `name`: task or group; documents of its evaluation, with the examples in the prompt."""
        if unknown := sorted(set(request.arguments) - {INCLUDE}):
            raise ConfigError(f"--arguments has {', '.join(unknown)}; lm_eval takes {INCLUDE} only")
        include = cast("str | None", request.arguments.get(INCLUDE))
        include = None if include is None else os.path.abspath(include)  # processes may run in other folders
        for name, task in self._load(request.name, include).items():
            task.build_all_requests(limit=request.limit)
            for instance in task.instances:
                prompt, options = instance.args
                task_part = {"task": request.name, "name": name, INCLUDE: include}
                part = {**task_part, "prompt": prompt, "doc": to_plain(instance.doc), "options": to_plain(options)}
                yield row_of(KIND, name, [{"role": "user", "content": prompt}], part)

    async def run(self, part: JsonObject, endpoint: Endpoint) -> dict[str, object]:
        """Same as Suite.run. The score is the task's first metric with a number."""
        from lm_eval.api.instance import Instance

        run_in_thread = asyncio.get_running_loop().run_in_executor
        include = cast("str | None", part[INCLUDE])
        tasks = await run_in_thread(self._thread, self._load, str(part["task"]), include)
        task = tasks[str(part["name"])]
        doc, prompt = cast("dict[str, JsonValue]", part["doc"]), str(part["prompt"])
        options = cast("dict[str, JsonValue]", part["options"])
        messages: list[ChatMessage] = [{"role": "user", "content": prompt}]
        text = await reply(endpoint, messages, _stop_strings(options), _max_tokens(options))
        instance = Instance(GENERATES, doc, (prompt, options), 0, (str(part["name"]), 0, 1), resps=[text])
        metrics = await run_in_thread(self._thread, _metrics, task, instance)
        if not metrics:
            raise DataError(
                f"the task {part['name']} has no metric of a single document; use a task with such a metric, or "
                "evaluate it with `lm_eval` and `mcore-rl serve`"
            )
        return {"score": next(iter(metrics.values())), "metrics": metrics}

    def _load(self, name: str, include: str | None) -> dict[str, Task]:
        """Return the tasks of a name.

        Raises: ConfigError if there is none, its documents cannot be read, or a task needs log-likelihoods, several
        replies to a document, or runs code of the model.
        """
        key = name, include
        if key not in self._tasks:
            self._tasks[key] = _loaded(name, include)
        return self._tasks[key]


def _loaded(name: str, include: str | None) -> dict[str, Task]:
    from lm_eval.tasks import TaskManager

    try:
        # Reading the index of the library's own tasks takes seconds.
        manager = TaskManager(include_path=include, include_defaults=include is None)
        tasks = cast("dict[str, Task]", manager.load(name)["tasks"])
    except Exception as error:  # errors of the library, of the task's own code and of its data
        raise ConfigError(
            f"lm_eval cannot load the task {name}: {describe(error)}; list tasks with `lm_eval ls tasks`, and set "
            f'--arguments to {{"{INCLUDE}": FOLDER}} for your own'
        ) from error
    for task_name, task in tasks.items():
        if task.OUTPUT_TYPE != GENERATES:
            raise ConfigError(
                f"the task {task_name} needs log-likelihoods of given texts ({task.OUTPUT_TYPE}), which programs of "
                f"sessions cannot compute; use a task with {GENERATES}"
            )
        if getattr(task, "UNSAFE_CODE", False):
            raise ConfigError(
                f"the task {task_name} runs the model's code in this process (unsafe_code); evaluate it with "
                "`lm_eval run --confirm_run_unsafe_code` in a sandbox and `mcore-rl serve`"
            )
        if (repeats := int(task.config.repeats or 1)) > 1:
            raise ConfigError(
                f"the task {task_name} evaluates {repeats} replies to a document (repeats), and a row has one; use a "
                "task with repeats: 1"
            )
    return tasks


def _stop_strings(options: Mapping[str, JsonValue]) -> list[str]:
    """Return the strings that end a reply. options: of the task, where one string is allowed, too."""
    until = options.get("until") or []
    return [until] if isinstance(until, str) else [str(each) for each in cast("Sequence[JsonValue]", until)]


def _max_tokens(options: Mapping[str, JsonValue]) -> int | None:
    """Return the task's limit of a reply in tokens, None if it has none."""
    limit = options.get("max_gen_toks", options.get("max_tokens"))
    return None if limit is None else int(cast(int, limit))


def _metrics(task: Task, instance: Instance) -> dict[str, float]:
    """Return the numbers that a task computes from one document; with several filters, also by the filter's name."""
    filters = task._filters
    found: dict[str, float] = {}
    for number, each in enumerate(filters):
        each.apply([instance])
        filtered = instance.filtered_resps[each.name]
        results = cast("Mapping[str, object]", task.process_results(instance.doc, [filtered]))
        for name, value in results.items():
            if isinstance(value, Real):  # others, such as pairs for BLEU, are no values of one document
                found[name if number == 0 else f"{name}_{each.name}"] = float(value)
    return found
