"""TRL's side of test_trl_pairs: loss and gradients of one batch by DPOTrainer and RewardTrainer, in float64. Runs in
.venv-trl.

python trl_pairs.py SETTINGS.json
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer


def measure(form: dict[str, object], output: str) -> None:
    """Write loss, gradients and tokens of one form to `output`."""
    scores = form["reference"] is None
    load = (AutoModelForSequenceClassification if scores else AutoModelForCausalLM).from_pretrained
    arguments = (RewardConfig if scores else DPOConfig)(
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
        "model": load(form["model"], attn_implementation="eager"),
        "args": arguments,
        "train_dataset": Dataset.from_list(rows),
        "processing_class": AutoTokenizer.from_pretrained(form["model"]),
    }
    if scores:
        trainer = RewardTrainer(**given)
    else:
        trainer = DPOTrainer(**given, ref_model=load(form["reference"], attn_implementation="eager"))
        trainer.ref_model.double()
    trainer.model.double()
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    found = {name: parameter.grad.float() for name, parameter in trainer.model.named_parameters()}
    save_file(found | {"loss": loss.detach().double()[None], "input_ids": batch["input_ids"]}, output)


settings = json.loads(Path(sys.argv[1]).read_text())
rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
for name, form in settings["forms"].items():
    measure(form, f"{settings['folder']}/{name}.safetensors")
