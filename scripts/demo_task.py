"""Tasks of the demo: problems, a small tokenizer and a tiny random model, generated from one seed.

There are three kinds of single-turn problems; episode_tasks has the multi-turn tasks, image_tasks the task with images.
`work3`: 3-digit addition, digit by digit, then the answer after `#` (`347+285=` is continued by
`7+5+0=12;4+8+1=13;3+2+1=6#632`). `latent` and `dense`: the same problems for a DeepSeek-V3 and a dense Qwen3; models
of other tasks are Qwen3-MoE. `think2`: 2-digit addition. Most of its warm-start targets are a wrong answer without
working; a few show the working (`<7+5+0=12;3+8+1=12>#122`). Learning is therefore visible as growing length. `dpo`:
pairs for the problems of work3: the right working, and a response without working or with a wrong column.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import episode_tasks
import image_tasks
from episode_tasks import Problem
from tiny_processor import write_processor

from model_converters.durable_files import durable_write

if TYPE_CHECKING:
    from transformers import DeepseekV3Config, PretrainedConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

ALPHABET = "0123456789+-*/=;|<>()#.,:? \n_"
NUM_HELD_OUT = 256
"""Number of validation rows."""
MAX_TARGET_TOKENS = 32
"""Longest target of any task with its end token; configs/demo_*.yaml must allow as many response tokens."""
COMMON_FIELDS: dict[str, object] = {
    "hidden_size": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "dtype": "float32",
}
QWEN3_SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
NO_WORKING_FRACTION = 0.5
"""Fraction of the pairs of `dpo` whose rejected response has no working; the others are harder to tell apart."""
COMPLETE = "complete.json"
FORMAT = 2
"""Version of the target format. In version 1 the grader misread `|` and `>` before the answer."""


def columns(a: int, b: int, errors: Mapping[int, int] | None = None) -> str:
    """Return the written addition of a and b: one `digit+digit+carry=sum` per column, from the right. `errors` are
    added to the sums of columns, by their number."""
    steps: list[str] = []
    carry = 0
    while a or b:
        total = a % 10 + b % 10 + carry + (errors or {}).get(len(steps), 0)
        steps.append(f"{a % 10}+{b % 10}+{carry}={total}")
        a, b, carry = a // 10, b // 10, total // 10
    return ";".join(steps)


def work3(a: int, b: int, _: random.Random) -> Problem:
    return Problem(f"{a}+{b}=", f"{columns(a, b)}#{a + b}", str(a + b))


def dpo(a: int, b: int, rng: random.Random) -> Problem:
    """Return a work3 problem with a rejected response: the answer without working, or one column that is off by one and
    the rest that follows from it."""
    problem = work3(a, b, rng)
    if rng.random() < NO_WORKING_FRACTION:
        return problem._replace(rejected=f"#{a + b}")
    place = rng.randrange(3)
    # The sum of a column must stay at least 0.
    error = 1 if place == 0 and (a + b) % 10 == 0 else rng.choice([-1, 1])
    return problem._replace(rejected=f"{columns(a, b, {place: error})}#{a + b + error * 10**place}")


def think2(a: int, b: int, rng: random.Random, working_fraction: float = 0.2) -> Problem:
    if rng.random() < working_fraction:
        return Problem(f"{a}+{b}=", f"<{columns(a, b)}>#{a + b}", str(a + b))
    # Near the answer, but never right, so that only the working is rewarded.
    guess = a + b + rng.choice([-1, 1]) * rng.randrange(1, 10)
    return Problem(f"{a}+{b}=", str(guess), str(a + b))


def additions(
    make: Callable[[int, int, random.Random], Problem], low: int, high: int, seed: int, sizes: dict[str, int]
) -> dict[str, list[Problem]]:
    """Return single-turn problems by split; operands are sampled from [low, high)."""
    rng = random.Random(f"{make.__name__}/{seed}")
    width = high - low
    # Without replacement, so that no problem is in two splits.
    pairs = iter(rng.sample(range(width * width), sum(sizes.values())))
    splits = {}
    for split, size in sizes.items():
        drawn = [divmod(next(pairs), width) for _ in range(size)]
        splits[split] = [make(low + a, low + b, rng) for a, b in drawn]
    return splits


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character."""
    return episode_tasks.word_tokenizer(ALPHABET)


def qwen3_moe_config(vocabulary: int) -> Qwen3MoeConfig:
    """Return a Qwen3-MoE configuration of 1.8 M parameters whose sizes are divisible by 2 on every parallel axis."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=vocabulary,
        intermediate_size=256,
        moe_intermediate_size=128,
        **QWEN3_SIZES,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,
        **COMMON_FIELDS,
    )


def deepseek_v3_config(vocabulary: int) -> DeepseekV3Config:
    """Return a DeepSeek-V3 configuration of 1.7 M parameters: latent attention, one dense layer, a shared expert."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        vocab_size=vocabulary,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        num_nextn_predict_layers=0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        **COMMON_FIELDS,
    )


def qwen3_config(vocabulary: int) -> Qwen3Config:
    """Return a dense Qwen3 configuration of 1.2 M parameters."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocabulary,
        intermediate_size=640,
        **QWEN3_SIZES,
        **COMMON_FIELDS,
    )


@dataclass(frozen=True)
class DemoTask:
    """Generator of a task, from a seed and the number of problems per split, and the sizes of its splits.

    num_tokens: upper bound of the tokens of a target.
    model: configuration of the model for a number of tokens.
    """

    draw: Callable[[int, dict[str, int]], dict[str, list[Problem]]]
    num_warm_start: int
    num_train: int
    tokenizer: Callable[[], PreTrainedTokenizerFast] = build_tokenizer
    num_tokens: Callable[[str], int] = len
    model: Callable[[int], PretrainedConfig] = qwen3_moe_config
    reads_images: bool = False


TASKS = {
    "work3": DemoTask(partial(additions, work3, 100, 1000), 16384, 8192),
    "latent": DemoTask(partial(additions, work3, 100, 1000), 16384, 8192, model=deepseek_v3_config),
    "dense": DemoTask(partial(additions, work3, 100, 1000), 16384, 8192, model=qwen3_config),
    "think2": DemoTask(partial(additions, think2, 10, 100), 4096, 3072),
    "tool": DemoTask(episode_tasks.tool_rows, 16384, 4096, episode_tasks.tool_tokenizer, episode_tasks.num_tokens),
    "game": DemoTask(episode_tasks.game_rows, 16384, 4096, episode_tasks.game_tokenizer, episode_tasks.num_tokens),
    "dpo": DemoTask(partial(additions, dpo, 100, 1000), 16384, 8192),
    "see": DemoTask(
        image_tasks.see_rows,
        8192,
        4096,
        image_tasks.see_tokenizer,
        model=image_tasks.qwen3_vl_config,
        reads_images=True,
    ),
}


def problems(name: str, seed: int = 1) -> dict[str, list[Problem]]:
    """Sample the splits `warm_start`, `train` and `val`. Validation problems are in no other split, except for games,
    which all have the same prompt."""
    task = TASKS[name]
    sizes = {"val": NUM_HELD_OUT, "train": task.num_train, "warm_start": task.num_warm_start}
    splits = task.draw(seed, sizes)
    targets = [text for split in splits.values() for p in split for text in (p.target, p.rejected or "")]
    longest = max(map(task.num_tokens, targets)) + 1  # with its end token
    assert longest <= MAX_TARGET_TOKENS, f"{name}: a target takes {longest} tokens, the limit is {MAX_TARGET_TOKENS}"
    return splits


def write_rows(path: Path, rows: Iterable[tuple[Problem, str]]) -> None:
    """Write problems with the text of their column `answer`, or their pair of responses, to a jsonl file atomically."""
    with durable_write(path) as file:
        for problem, answer in rows:
            row: dict[str, object] = {"prompt": problem.prompt, "answer": answer}
            if problem.rejected is not None:
                row = {"prompt": problem.prompt, "chosen": problem.target, "rejected": problem.rejected}
            if problem.image is not None:
                row["images"] = [image_tasks.image_uri(problem.image)]
            file.write(json.dumps(row).encode() + b"\n")


def write_model(directory: Path, task: DemoTask, seed: int) -> int:
    """Write a random model and the tokenizer of a task as an HF checkpoint; returns the number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = task.tokenizer()
    # The caller's random state stays as it is.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loader = AutoModelForImageTextToText if task.reads_images else AutoModelForCausalLM
        model = loader.from_config(task.model(len(tokenizer)))
    model.save_pretrained(directory)
    if task.reads_images:
        sizes = {"patch_size": image_tasks.PATCH_SIZE, "max_pixels": image_tasks.EDGE**2}
        write_processor(directory, tokenizer, model.config.model_type, **sizes)
    else:
        tokenizer.save_pretrained(directory)
    return int(model.num_parameters())


def is_prepared(directory: Path, name: str, seed: int) -> bool:
    """Return whether `prepare` has finished in `directory` with the same task, seed and format."""
    try:
        record = json.loads((directory / COMPLETE).read_text())
    except (OSError, ValueError):
        return False
    return bool((record.get("task"), record.get("seed"), record.get("format")) == (name, seed, FORMAT))


def prepare(directory: Path, name: str = "work3", seed: int = 1) -> bool:
    """Write model/, warm_start.jsonl, train.jsonl and val.jsonl; returns False if they exist already.

    All files are written to a temporary directory, which is then renamed, so a crash leaves nothing incomplete.

    Raises: FileExistsError if the directory contains something else.
    """
    if is_prepared(directory, name, seed):
        return False
    if directory.exists() and any(directory.iterdir()) and not (directory / COMPLETE).exists():
        raise FileExistsError(f"{directory} exists and is not a demo task: choose another directory or remove it")
    # Beside the directory, so that the rename stays on one file system.
    staging = directory.with_name(f"{directory.name}.{os.getpid()}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        splits = problems(name, seed)
        targets = ((p._replace(rejected=None), p.target) for p in splits["warm_start"])
        write_rows(staging / "warm_start.jsonl", targets)
        for split in ("train", "val"):
            write_rows(staging / f"{split}.jsonl", ((p, p.answer) for p in splits[split]))
        num_parameters = write_model(staging / "model", TASKS[name], seed)
        record = {"task": name, "seed": seed, "format": FORMAT, "parameters": num_parameters}
        # Last: a directory with this file is complete.
        (staging / COMPLETE).write_text(json.dumps(record) + "\n")
        if directory.exists():
            shutil.rmtree(directory)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a demo task: problems, tokenizer and a tiny random model.")
    parser.add_argument("--task", choices=sorted(TASKS), default="work3")
    parser.add_argument("--out", type=Path, required=True, help="directory to write, e.g. runs/demo_task/work3")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    try:
        written = prepare(options.out, options.task, options.seed)
    except FileExistsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {'written' if written else 'exists already'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
