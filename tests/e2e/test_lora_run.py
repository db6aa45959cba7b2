"""A LoRA run: engines use merged weights, the base model is the reference, and PEFT reads the export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.e2e.runs import metrics, train
from tests.tiny_models import reference_logits

pytestmark = pytest.mark.slow

LORA = (
    "actor.lora.rank=4",
    "actor.lora.alpha=16",
    "actor.optimizer.lr=1e-2",
    "actor.offload.params=true",
    "algorithm.kl.in_loss=0.01",
    "trainer.steps=2",
    "trainer.validate_every_steps=0",
    "trainer.validate_before=false",
    "data.val=null",
    "weights.verify_every=1",
)
TOKENS = [5, 8, 12, 4, 9]


@pytest.fixture(scope="module")
def lora_run(task: Path) -> Path:
    directory, out = task.parent / "lora", task.parent / "lora_out"
    train(task, directory, *LORA, f"trainer.export_hf={out / 'merged'}", f"trainer.export_adapter={out / 'adapter'}")
    return directory


def test_engines_have_the_merged_weights_and_the_reference_stays(lora_run: Path) -> None:
    rows = metrics(lora_run)
    with safe_open(lora_run.parent / "lora_out" / "merged" / "model.safetensors", "pt") as merged:
        num_tensors = len(merged.keys())
    for step in (1, 2):
        assert rows[step]["rollout/logp_diff_max"] < 1e-4  # float32 on both sides
        assert rows[step]["weights/tensors_verified"] == num_tensors
        assert rows[step]["actor/grad_norm"] > 0
    assert 0 < rows[1]["actor/kl_reference"] < rows[2]["actor/kl_reference"]


def test_peft_reads_the_adapter_and_computes_what_was_merged(lora_run: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    out = lora_run.parent / "lora_out"
    base = AutoModelForCausalLM.from_pretrained(
        lora_run.parent / "model", dtype=torch.float32, attn_implementation="eager"
    )
    (merged,), (plain,) = (reference_logits(path, [TOKENS]) for path in (out / "merged", lora_run.parent / "model"))
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(base, out / "adapter").eval()(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(adapted, merged, rtol=1e-5, atol=1e-5)
    assert (adapted - plain).abs().max() > 1e-3


def test_a_checkpoint_holds_adapters_only(lora_run: Path) -> None:
    """Compare sizes: the whole model would take at least as many bytes as model.safetensors."""
    saved = sorted((lora_run / "checkpoints").glob("step_*"))
    assert saved
    tensors = sum(file.stat().st_size for file in saved[-1].rglob("*.distcp"))
    assert tensors < (lora_run.parent / "model" / "model.safetensors").stat().st_size
