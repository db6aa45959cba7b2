"""Keys of a first configuration, with values for the machine and an explanation of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mcore_rl.config.document import commented_yaml
from mcore_rl.config.load import load_text
from mcore_rl.config.schema import Config
from mcore_rl.doctor.machine import Machine
from mcore_rl.remote.localize import localized
from mcore_rl.starter.answers import Answers


class Line(NamedTuple):
    """Value of a key, and its explanation: the comment of the line."""

    value: object
    why: str


Draft = dict[str, Line]
"""Lines by key."""


class Scale(NamedTuple):
    """Sizes of a run: tokens per prompt and response, responses per prompt, prompts per step, steps."""

    prompt_tokens: int
    response_tokens: int
    samples: int
    prompts: int
    steps: int


ON_GPUS = Scale(1024, 4096, 8, 64, 200)
ON_CPU = Scale(512, 256, 4, 8, 20)
"""Small enough for minutes per step."""


def drafted(answers: Answers, machine: Machine) -> Draft:
    """Return all keys except the layout of engines and trainer ranks."""
    scale = fitted(ON_GPUS if machine.num_gpus else ON_CPU, answers.positions)
    lines = {
        **dict(_inputs(answers)),
        **dict(_rollout(scale, answers.positions)),
        **dict(_algorithm(answers.algorithm, scale)),
        **dict(_training(scale, machine)),
        **dict(_cluster(machine)),
    }
    if answers.val:
        lines["trainer.validate_every_steps"] = Line(10, "interval between validations; also before and after training")
    return lines


def as_text(draft: Draft, title: str) -> str:
    """Format the draft as a configuration file."""
    values = {key: line.value for key, line in draft.items()}
    return commented_yaml(values, {key: line.why for key, line in draft.items()}, title)


def loaded(draft: Draft) -> Config:
    """Load the draft like a configuration file, for plans. Raises: ConfigError."""
    config = load_text(as_text(draft, "draft"), needs_data=False)
    # The block keeps only files of data.
    with localized(config, lambda line: None, weights=False, data=False):
        return config


def fitted(scale: Scale, positions: int | None) -> Scale:
    """Shorten prompts and responses until both fit into the model's positions."""
    if positions is None or scale.prompt_tokens + scale.response_tokens <= positions:
        return scale
    prompt = min(scale.prompt_tokens, positions // 2)
    return scale._replace(prompt_tokens=prompt, response_tokens=positions - prompt)


def _inputs(answers: Answers) -> Iterator[tuple[str, Line]]:
    yield "model.hf_path", Line(answers.model, "policy at the start: config.json, safetensors and tokenizer")
    yield "data.train", Line(answers.train, "rows of question and answer, or verl's columns; see docs/data.md")
    if answers.val:
        yield "data.val", Line(answers.val, "prompts of val/accuracy, which no update uses")
    why = "grader of a response; see docs/rewards.md"
    yield "reward.function", Line(answers.reward, why)


def _rollout(scale: Scale, positions: int | None) -> Iterator[tuple[str, Line]]:
    limit = "" if positions is None else f"; prompt and response may have {positions} tokens with this model"
    yield "rollout.samples_per_prompt", Line(scale.samples, "responses to a prompt; they are compared with each other")
    yield "rollout.max_prompt_tokens", Line(scale.prompt_tokens, "longer prompts are dropped")
    yield "rollout.max_response_tokens", Line(scale.response_tokens, f"longer responses are cut{limit}")


def _algorithm(name: str, scale: Scale) -> Iterator[tuple[str, Line]]:
    """Yield the lines of an algorithm. Sources: DeepSeekMath (GRPO), arXiv 2503.14476 (DAPO), 2507.18071 (GSPO)."""
    yield "algorithm.advantage", Line("grpo", "reward minus the mean of the prompt's responses, divided by their std")
    if name == "gspo":
        yield "algorithm.policy_loss.name", Line("gspo", "one probability ratio per response")
        yield "algorithm.policy_loss.clip_low", Line(3e-4, "GSPO's paper; ratios of responses are close to 1")
        yield "algorithm.policy_loss.clip_high", Line(4e-4, "GSPO's paper")
    else:
        yield "algorithm.policy_loss.clip_low", Line(0.2, "ratios below 0.8 get no gradient")
        high = 0.28 if name == "dapo" else 0.2
        why = "DAPO's higher bound keeps the entropy up" if name == "dapo" else "ratios above 1.2 get no gradient"
        yield "algorithm.policy_loss.clip_high", Line(high, why)
    if name != "dapo":
        yield "algorithm.loss_aggregation", Line("seq-mean-token-mean", "each response has the same weight")
        return
    yield "algorithm.loss_aggregation", Line("token-mean", "each token has the same weight")
    why = "prompts whose responses are all right or all wrong are replaced"
    yield "algorithm.dynamic_sampling.enable", Line(True, why)
    yield "reward.overlong.enable", Line(True, "responses close to the limit lose reward")
    yield "reward.overlong.buffer_tokens", Line(max(1, scale.response_tokens // 4), "length of this range")


def _training(scale: Scale, machine: Machine) -> Iterator[tuple[str, Line]]:
    longest = scale.prompt_tokens + scale.response_tokens
    why = f"tokens of a packed row; at least the longest prompt and response ({longest})"
    yield "actor.tokens_per_microbatch", Line(max(longest, 8192 if machine.num_gpus else 2048), why)
    yield "actor.optimizer.lr", Line(1e-6, "usual for full training; about 1e-5 with LoRA")
    yield "trainer.steps", Line(scale.steps, "each step generates responses and trains on them")
    yield "trainer.prompts_per_step", Line(scale.prompts, f"with {scale.samples} responses each")
    yield "trainer.prompts_per_update", Line(scale.prompts, "one optimizer update per step; a divisor makes more")


def _cluster(machine: Machine) -> Iterator[tuple[str, Line]]:
    if not machine.num_gpus:
        yield "cluster.device", Line("cpu", "this machine has no GPU")
        return
    yield "cluster.device", Line("cuda", machine.describe())
    yield "cluster.gpus_per_node", Line(machine.num_gpus, "all GPUs of the machine")
    yield "cluster.gpu_memory_gib", Line(machine.gpu_memory_gib, "`mcore-rl plan` checks the memory against it")
    if machine.host_memory_gib is not None:
        yield "cluster.host_memory_gib", Line(machine.host_memory_gib, "limit of offloaded state, checked by plan")
