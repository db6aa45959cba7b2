"""TRL's side of test_trl: loss and gradients of one batch by DPOTrainer, RewardTrainer and SFTTrainer, in float64. Runs
in .venv-trl.

python trl_peer.py SETTINGS.json
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

TRAINERS = {
    "dpo": (AutoModelForCausalLM, DPOConfig, DPOTrainer),
    "reward_model": (AutoModelForSequenceClassification, RewardConfig, RewardTrainer),
    "sft": (AutoModelForCausalLM, SFTConfig, SFTTrainer),
}


def measure(form: dict[str, object], output: str) -> None:
    """Write loss, gradients and tokens of one form to `output`."""
    models, config, trainer_of = TRAINERS[form["objective"]]
    rows = [json.loads(line) for line in Path(form["data"]).read_text().splitlines()]
    arguments = config(
        output_dir=settings["folder"],
        per_device_train_batch_size=len(rows),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        max_length=None,
        **form["options"],
    )
    given = {
        "model": models.from_pretrained(form["model"], attn_implementation="eager"),
        "args": arguments,
        "train_dataset": Dataset.from_list(rows),
        "processing_class": AutoTokenizer.from_pretrained(form["model"]),
    }
    if form["objective"] == "dpo":
        given["ref_model"] = models.from_pretrained(form["reference"], attn_implementation="eager").double()
    trainer = trainer_of(**given)
    trainer.model.double()
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    found = {name: parameter.grad.float() for name, parameter in trainer.model.named_parameters()}
    save_file(found | {"loss": loss.detach().double()[None], "input_ids": batch["input_ids"]}, output)


settings = json.loads(Path(sys.argv[1]).read_text())
for name, form in settings["forms"].items():
    measure(form, f"{settings['folder']}/{name}.safetensors")
