"""TRL's side of benchmarks.whole_step.step: GRPOTrainer with Hugging Face generate. Runs in .venv-trl.

    python -m benchmarks.whole_step.trl_peer MODEL_DIR PROMPTS.jsonl WORKLOAD_INDEX

Every line on stdin starts one step; every step prints one JSON object to stdout: seconds by phase.
A logits processor forces the lengths: a row ends exactly at its length. The batch decodes until its longest row has
ended, and the trainer masks the tokens after each end, as it would with lengths that the model chooses.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.whole_step.task import (
    CLIP_HIGH,
    CLIP_LOW,
    LEARNING_RATE,
    LONGEST,
    RESPONSES,
    SAMPLES,
    WORKLOADS,
    LengthWorkload,
    digit_share,
    lengths,
)


class ForcedLengthProcessor(LogitsProcessor):
    """Ends row i after exactly lengths[i] tokens, including the end token."""

    def __init__(self, lengths: np.ndarray, eos: int) -> None:
        self._lengths = torch.from_numpy(lengths)
        self._eos = eos
        self._generated = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._generated += 1
        scores[:, self._eos] = -torch.inf  # a row must not end earlier
        ends = self._lengths <= self._generated
        scores[ends] = -torch.inf
        scores[ends, self._eos] = 0.0
        return scores


class Stopwatch:
    """Measures the seconds of a step by phase; wraps one method per phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: object, method: str, phase: str) -> None:
        inner: Callable[..., object] = getattr(owner, method)

        def timed(*args: object, **kwargs: object) -> object:
            started = time.perf_counter()
            result = inner(*args, **kwargs)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started
            return result

        setattr(owner, method, timed)


class OnCommand(TrainerCallback):
    """Callback that starts a step for a line on stdin and prints a line to stdout at its end."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._started = 0.0

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        if not sys.stdin.readline():  # the other side takes its step first
            raise SystemExit("the other side has ended")
        self._stopwatch.seconds.clear()
        self._started = time.perf_counter()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        seconds = {"step": time.perf_counter() - self._started, **self._stopwatch.seconds}
        print(json.dumps(seconds), flush=True)


def settings(directory: str, workload: LengthWorkload) -> GRPOConfig:
    """Return TRL's fastest settings for this machine: one update per batch, plain fp32, no recomputation."""
    return GRPOConfig(
        output_dir=directory,
        max_steps=workload.steps,
        per_device_train_batch_size=workload.peer_microbatch,
        # Together one update of all responses.
        gradient_accumulation_steps=RESPONSES // workload.peer_microbatch,
        num_generations=SAMPLES,
        max_completion_length=LONGEST,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="dapo",
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )


def rewards(completions: list[str], **_: object) -> list[float]:
    return [digit_share(completion) for completion in completions]


def main(model_dir: str, prompts: str, index: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    workload = WORKLOADS[int(index)]
    drawn = iter(range(workload.steps))
    generate = model.generate

    def generate_to_length(*args: object, **kwargs: object) -> object:
        wanted = lengths(workload, next(drawn))
        forced = LogitsProcessorList([ForcedLengthProcessor(wanted, tokenizer.eos_token_id)])
        return generate(*args, logits_processor=forced, **kwargs)

    # GRPOTrainer calls generate itself and has no option for a logits processor.
    model.generate = generate_to_length
    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    stopwatch = Stopwatch()
    stopwatch.wrap(model, "generate", "generate")
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=rewards,
        args=settings(str(Path(model_dir).with_name("trl_output")), workload),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[OnCommand(stopwatch)],
    )
    stopwatch.wrap(trainer, "_generate_and_score_completions", "generate and score")
    print(json.dumps({"threads": torch.get_num_threads()}), flush=True)
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
