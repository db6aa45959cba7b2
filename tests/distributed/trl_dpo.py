"""TRL's side of test_trl_dpo: loss and gradients of one batch by DPOTrainer, in float64. Runs in .venv-trl.

python trl_dpo.py SETTINGS.json OUTPUT.safetensors
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

settings = json.loads(Path(sys.argv[1]).read_text())
rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
policy, reference = (
    AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    for path in (settings["model"], settings["reference"])
)
arguments = DPOConfig(
    output_dir=settings["output"],
    per_device_train_batch_size=len(rows),
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    report_to=[],
    max_length=None,
    **settings["options"],
)
trainer = DPOTrainer(
    model=policy,
    ref_model=reference,
    args=arguments,
    train_dataset=Dataset.from_list(rows),
    processing_class=AutoTokenizer.from_pretrained(settings["model"]),
)
trainer.model.double()
trainer.ref_model.double()
batch = next(iter(trainer.get_train_dataloader()))
loss = trainer.compute_loss(trainer.model, batch)
loss.backward()
found = {name: parameter.grad.float() for name, parameter in trainer.model.named_parameters()}
save_file(found | {"loss": loss.detach().double()[None], "input_ids": batch["input_ids"]}, sys.argv[2])
