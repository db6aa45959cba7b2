"""What a LoRA run leaves behind: weights under adapters that no update touches, merged weights for engines and exports,
adapters that PEFT reads, checkpoints that go on in any layout, and a reference without weights of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mcore_rl.config.models import OffloadConfig
from tests.dist import lora, policy_batch
from tests.dist.launch import launch
from tests.dist.two_steps import train_two_steps

Layout = tuple[int, dict[str, Any]]
SMALL = 24


@dataclass(frozen=True)
class Case:
    """Saved by ranks in `layout`, loaded in each of `into`: (ranks, layout)."""

    model: str
    layout: Layout
    into: tuple[Layout, ...] = ()
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.model} {self.dtype} {describe(self.layout)}"


def describe(layout: Layout) -> str:
    return "".join(f"{key}{size}" for key, size in layout[1].items()) + f"of{layout[0]}"


CASES = [
    Case("dense", (1, {}), ((2, {"tp": 2}), (2, {"pp": 2}), (2, {}))),
    Case("dense", (2, {"tp": 2}), ((1, {}), (2, {"pp": 2, "vpp": 2}))),
    Case("some", (2, {}), ((2, {"tp": 2}),)),
    Case("moe", (2, {"ep": 2}), ((1, {}), (2, {"cp": 2}))),
    Case("v3", (2, {"tp": 2, "ep": 2}), ((1, {}), (2, {"pp": 2}))),
    Case("dense", (2, {"tp": 2}), ((2, {}),), dtype="bfloat16"),
]
EMBEDDING_APART = Case("dense", (2, {"pp": 2, "pipeline_layout": "E|ttttL"}))
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offloaded": {"offload": OffloadConfig(params=True, grads=True, optimizer=True)},
    "optimizer on the host": {"cpu_offload": True},
    "overlapped": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "replicated": {"distributed_optimizer": False},
}
ALL_CASES = [pytest.param(case, id=str(case)) for case in CASES]
RESUMED = [pytest.param(case, into, id=f"{case} to {describe(into)}") for case in CASES for into in case.into]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    lora.write_models(root, sorted({case.model for case in CASES}))
    return root


@pytest.fixture(scope="module")
def saved(root: Path) -> dict[str, dict[str, Any]]:
    """By case: what _train found on all ranks, put together."""
    joined = {}
    for size in (1, 2):
        cases = [case for case in CASES if case.layout[0] == size]
        ranks = launch(_train, size, str(root), cases, timeout_seconds=150)
        joined |= {str(case): _joined([rank[index] for rank in ranks]) for index, case in enumerate(cases)}
    return joined


@pytest.fixture(scope="module")
def loaded(root: Path, saved: Any) -> dict[tuple[str, str], dict[str, Any]]:
    joined = {}
    for size in (1, 2):
        chosen = [(case, into) for case in CASES for into in case.into if into[0] == size]
        ranks = launch(_resume, size, str(root), chosen, timeout_seconds=150)
        for index, (case, into) in enumerate(chosen):
            joined[str(case), describe(into)] = _joined([rank[index] for rank in ranks])
    return joined


def _joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, value in ranks[0].items():
        parts = [rank[name] for rank in ranks]
        if name.startswith("state"):
            found[name] = _whole(parts)
        elif isinstance(value, list):
            found[name] = policy_batch.assemble(parts)
        else:
            found[name] = parts
    return found


def _whole(ranks: list[Any]) -> dict[str, torch.Tensor]:
    """Checkpoint tensors from the blocks that ranks hold."""
    whole: dict[str, torch.Tensor] = {}
    for key, shape, box, values in (block for blocks in ranks for block in blocks):
        target = whole.setdefault(key, torch.full(tuple(shape), torch.nan, dtype=torch.float64))
        box.view(target).copy_(torch.from_numpy(values))
    return whole


@pytest.mark.parametrize("case", ALL_CASES)
def test_new_adapters_change_nothing_and_are_the_same_in_every_layout(case: Case, saved: Any) -> None:
    found = saved[str(case)]
    same = next(other for other in CASES if (other.model, other.dtype) == (case.model, case.dtype))
    for name, tensor in found["base"].items():
        assert torch.equal(found["merged before"][name], tensor), name
    for name, tensor in found["adapters before"].items():
        if ".lora_B." in name:
            assert not tensor.any(), name
            continue
        bound = tensor.shape[1] ** -0.5
        assert 0.8 * bound < tensor.abs().max() <= bound * (1 + 2**-8), name
        assert torch.equal(tensor, saved[str(same)]["adapters before"][name]), name


@pytest.mark.parametrize("case", ALL_CASES)
def test_updates_move_the_adapters_alone(case: Case, saved: Any) -> None:
    found = saved[str(case)]
    assert all(found["base is unchanged"])
    before, after = found["adapters before"], found["adapters"]
    assert before.keys() == after.keys()
    assert len(after) == 2 * len({name.partition(".lora_")[0] for name in after})
    for name, tensor in after.items():
        assert not torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("case", ALL_CASES)
def test_merged_weights_are_w_plus_scale_b_a(case: Case, saved: Any) -> None:
    found, model = saved[str(case)], lora.MODELS[case.model]
    scale = model.alpha / (model.rank**0.5 if model.rslora else model.rank)
    adapted = 0
    for name, base in found["base"].items():
        merged = found["merged"][name]
        prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{prefix}A.weight" not in found["adapters"]:
            assert torch.equal(merged, base), name
            continue
        adapted += 1
        expected = base + scale * found["adapters"][f"{prefix}B.weight"] @ found["adapters"][f"{prefix}A.weight"]
        tolerance = 2**-8 if case.dtype == "bfloat16" else 1e-6
        assert (merged - expected).abs().max() <= tolerance * expected.abs().max(), name
        assert not torch.equal(merged, base)
    assert adapted == len(found["adapters"]) // 2


@pytest.mark.parametrize("case", [case for case in CASES if case.model != "v3"], ids=str)
def test_peft_computes_with_the_exported_adapter_what_the_merged_model_does(case: Case, root: Path, saved: Any) -> None:
    """Not of v3: preparation refuses to export what PEFT would read as the routed experts'."""
    import peft

    base = policy_batch.reference_model(root / case.model)
    adapted = peft.PeftModel.from_pretrained(base, root / f"{case} adapter").double()
    merged = policy_batch.reference_model(root / f"{case} merged")
    tokens = torch.from_numpy(policy_batch.sequence(2).astype(np.int64))[None]
    with torch.no_grad():
        ours, theirs = merged(tokens).logits, adapted(tokens).logits
        with adapted.disable_adapter():
            without = adapted(tokens).logits
    tolerance = 0.15 if case.dtype == "bfloat16" else 2e-5  # merged weights are rounded
    assert (ours - theirs).abs().max() <= tolerance
    assert (without - theirs).abs().max() > 3 * tolerance


@pytest.mark.parametrize("case", ALL_CASES)
def test_the_converter_merges_what_was_exported(case: Case, root: Path, saved: Any) -> None:
    from model_converters.io import HFCheckpoint

    exported = load_file(root / f"{case} adapter" / "adapter_model.safetensors")
    assert exported.keys() == saved[str(case)]["adapters"].keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor.double(), saved[str(case)]["adapters"][name]), name
    merged = load_file(root / f"{case} merged" / "model.safetensors")
    tolerance = 2**-8 if case.dtype == "bfloat16" else 1e-6
    with HFCheckpoint(root / case.model, lora=root / f"{case} adapter") as checkpoint:
        for name, tensor in merged.items():
            found = checkpoint.read(name)
            assert (found - tensor.float()).abs().max() <= tolerance * max(1.0, float(found.abs().max())), name


@pytest.mark.parametrize("case", ALL_CASES)
def test_engines_are_handed_the_merged_weights(case: Case, root: Path, saved: Any) -> None:
    from mcore_rl.weights.verify import digest

    digests = saved[str(case)]["digests"][0]
    merged = load_file(root / f"{case} merged" / "model.safetensors")
    assert digests == {name: digest(tensor) for name, tensor in merged.items()}


@pytest.mark.parametrize("case", ALL_CASES)
def test_the_reference_is_the_model_under_the_adapters(case: Case, root: Path, saved: Any) -> None:
    model = policy_batch.reference_model(root / case.model)
    tolerance = 0.2 if case.dtype == "bfloat16" else 2e-5
    seen = set()
    for ref, before, after in saved[str(case)]["reference"]:
        for sample, (held, logp) in ref.items():
            with torch.no_grad():
                expected = policy_batch.reference_logp(model, sample)[0].numpy()[held]
            assert np.abs(logp - expected).max(initial=0) <= tolerance
            seen.add(sample)
            # The policy's own before and after that pass: adapters are on again.
            assert np.array_equal(before[sample], after[sample])
            assert case.dtype == "bfloat16" or np.abs(before[sample] - logp).max(initial=1) > 1e-3
    assert seen == {sample for update in policy_batch.UPDATES for sample in update}


@pytest.mark.parametrize(("case", "into"), RESUMED)
def test_a_checkpoint_goes_on_in_another_layout(case: Case, into: Layout, saved: Any, loaded: Any) -> None:
    start, found = saved[str(case)], loaded[str(case), describe(into)]
    assert found["state"].keys() == start["state"].keys()
    assert any("exp_avg_sq" in key for key in start["state"])
    # The adapters and their optimizer, and nothing of what is under them.
    assert all("base_model.model." in key for key in start["state"])
    for key, tensor in start["state"].items():
        assert not torch.isnan(tensor).any()
        assert torch.equal(found["state"][key], tensor), key
    assert {name: tensor.shape for name, tensor in found["merged"].items()} == {
        name: tensor.shape for name, tensor in start["merged"].items()
    }
    moments = {key: tensor for key, tensor in start["state later"].items() if "exp_avg" in key}
    errors = {key: found["state later"][key] - tensor for key, tensor in moments.items()}
    if case.dtype == "bfloat16":  # activations are rounded: all tensors are judged together, as in test_resharding
        whole, error = (torch.cat([t.flatten() for t in named.values()]).norm() for named in (moments, errors))
        assert error <= 0.1 * whole
        return
    for key, tensor in moments.items():
        assert errors[key].abs().max() <= 1e-5 * tensor.abs().max(), key


def test_memory_and_overlap_change_nothing(root: Path) -> None:
    ranks = launch(_with_settings, 2, str(root), timeout_seconds=150)
    found = {
        name: tuple(policy_batch.assemble([rank[name][kind] for rank in ranks]) for kind in (0, 1)) for name in SETTINGS
    }
    start = policy_batch.assemble([rank["start"] for rank in ranks])
    for name, (adapters, merged) in found.items():
        for kind, tensors in enumerate((adapters, merged)):
            for key, tensor in tensors.items():
                if name != "replicated":
                    assert torch.equal(tensor, found["plain"][kind][key]), f"{name}: {key}"
                    continue
                # The norm that clips is summed in another order, and bfloat16 rounds.
                torch.testing.assert_close(tensor, found["plain"][kind][key], rtol=2**-6, atol=1e-3)
        assert all(not torch.equal(tensor, start[key]) for key, tensor in adapters.items())


def test_a_rank_without_a_layer_has_nothing_to_train(root: Path, saved: Any) -> None:
    """The stage of the embedding alone: it steps and saves with the others."""
    ranks = launch(_train, 2, str(root), [EMBEDDING_APART], timeout_seconds=100)
    found, one = _joined([rank[0] for rank in ranks]), saved[str(CASES[0])]
    assert all(found["base is unchanged"])
    for key, tensor in one["adapters"].items():
        assert (found["adapters"][key] - tensor).abs().max() <= 1e-5 * tensor.abs().max(), key
    assert found["state"].keys() == one["state"].keys()


def test_a_checkpoint_of_other_adapters_is_refused(root: Path, saved: Any) -> None:
    (found,) = launch(_refusals, 1, str(root))
    assert found["rank"].endswith(
        "was saved with adapters; set actor.lora.rank=3, actor.lora.alpha=7.0, actor.lora.rslora=False, "
        "actor.lora.target_modules=['down_proj', 'gate_proj', 'k_proj', 'o_proj', 'q_proj', 'up_proj', 'v_proj'], or "
        "continue in another run.dir"
    )
    assert found["alpha"] == found["targets"] == found["full"] == found["rank"]
    assert found["of a full run"].endswith(
        "was saved without adapters; set actor.lora.rank=0, or continue in another run.dir"
    )
    assert found["untouched"]


def test_a_run_may_start_from_an_adapter_only_of_its_own_kind(root: Path) -> None:
    from mcore_rl.errors import ConfigError
    from mcore_rl.megatron.lora_table import check_adapter
    from model_converters.hf_config import read_hf_config

    directory = str(root / "dense")
    given, hf_config = lora.lora_config("dense", directory, {}, SMALL).actor.lora, read_hf_config(directory)
    assert len(check_adapter(given, hf_config).updates) == 4 * 7
    wrong = {
        "has rank 3; set actor.lora.rank to it": {"rank": 4},
        "scales by 2.3333333333333335, but actor.lora.alpha=8.0": {"alpha": 8.0},
        "set them to lora_alpha and use_rslora of its": {"rslora": True},
        "has 28 modules, called down_proj.*asks for 4, called q_proj": {"target_modules": ["q_proj"]},
        "nothing/adapter_config.json does not exist": {"path": f"{root}/nothing"},
    }
    for message, change in wrong.items():
        with pytest.raises(ConfigError, match=rf"^actor\.lora\.path=.*{message}"):
            check_adapter(replace(given, **change), hf_config)


def _actor(process: int, root: str, model: str, layout: Layout, dtype: str = "float32", **changes: Any) -> Any:
    import torch.distributed as dist

    from mcore_rl.megatron.actor import MegatronActor

    config = lora.lora_config(model, f"{root}/{model}", layout[1], SMALL, path=False)
    config.model.dtype = dtype
    config.algorithm.kl.in_loss = 0.1
    optimizer = config.actor.optimizer
    # eps as in test_actor_update.
    optimizer.lr, optimizer.eps, optimizer.clip_grad = 4e-2, 1e-2, 0.5
    for key, value in changes.items():
        setattr(config.actor.lora, key, value)
    return MegatronActor(config, process, dist.get_world_size(), None)


def _update(actor: Any, index: int) -> None:
    dp = actor.layout.coordinates(actor.rank).dp
    share = policy_batch.share(policy_batch.UPDATES[index % 2], dp, actor.layout.dp)
    actor.annotate([share], policy_batch.chunks())
    actor.refer([share], policy_batch.chunks())
    actor.update(share, policy_batch.chunks(), 0)


def _state(actor: Any) -> list[Any]:
    from mcore_rl.megatron.train_state import blocks_to_load

    return [
        (block.chunk.key, block.chunk.global_shape, block.chunk.stored, block.view.float().numpy().copy())
        for block in blocks_to_load(actor.chunks, actor.optimizer)
    ]


def _base(actor: Any) -> list[Any]:
    from mcore_rl.megatron.names import canonical_tensors
    from model_converters.plan import export_pieces

    held = canonical_tensors(actor.chunks)
    return [
        (plan.hf_name, plan.shape, piece.dim, piece.start, view.detach().float().numpy().copy())
        for plan, piece, view in export_pieces(actor.export_plan(), held, actor.rank)
    ]


def _train(rank: int, root: str, cases: list[Case]) -> list[dict[str, Any]]:
    return [_train_one(rank, root, case) for case in cases]


def _train_one(rank: int, root: str, case: Case) -> dict[str, Any]:
    """Two updates, exports, a checkpoint, a third update."""
    import torch.distributed as dist

    from mcore_rl.megatron.checkpoint import save_checkpoint
    from mcore_rl.megatron.export import export_hf
    from mcore_rl.megatron.lora_weights import export_adapter
    from mcore_rl.megatron.names import canonical_tensors

    actor = _actor(rank, root, case.model, case.layout, case.dtype)
    base = {name: tensor.clone() for name, tensor in canonical_tensors(actor.chunks).items()}
    found: dict[str, Any] = {
        "base": _base(actor),
        "merged before": policy_batch.hf_pieces(actor),
        "adapters before": lora.adapter_pieces(actor),
    }
    _update(actor, 0)
    _update(actor, 1)
    actor.gather_parameters()
    now = canonical_tensors(actor.chunks)
    found |= {
        "base is unchanged": all(torch.equal(now[name], tensor) for name, tensor in base.items()),
        "merged": policy_batch.hf_pieces(actor),
        "adapters": lora.adapter_pieces(actor),
        "reference": _reference(actor),
        "state": _state(actor),
        "digests": _digests(actor),
    }
    export_hf(actor, f"{root}/{case} merged", f"{root}/{case.model}")
    export_adapter(actor, f"{root}/{case} adapter", f"{root}/{case.model}")
    directory = Path(root, f"{case} checkpoint")
    if rank == 0:
        directory.mkdir()
    dist.barrier()
    save_checkpoint(str(directory), actor)
    _update(actor, 2)
    return found | {"state later": _state(actor)}


def _reference(actor: Any) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any]]:
    dp, chunks = actor.layout.coordinates(actor.rank).dp, policy_batch.chunks()
    shares = [policy_batch.share(samples, dp, actor.layout.dp) for samples in policy_batch.UPDATES]

    def policy() -> dict[int, np.ndarray]:
        found = {}
        for share in shares:
            for batch, logp in actor.model.infer(actor.model.microbatches(share, chunks), actor._annotation):
                found |= zip(batch.samples, (part.numpy() for part in logp.split(batch.trained_counts)), strict=True)
        return found

    before = policy()
    actor.refer(shares, chunks)
    held = {s: (policy_batch.held(s, actor.layout, actor.rank), logp.numpy()) for s, logp in actor.ref_logp.items()}
    return held, before, policy()


def _digests(actor: Any) -> dict[str, str]:
    """What a certificate says of the weights in the buckets; of the rank that reads them."""
    import torch.distributed as dist

    from mcore_rl.weights.buckets import SharedBuckets, plan_buckets
    from mcore_rl.weights.publish import BucketWriter
    from mcore_rl.weights.verify import BucketDigests

    plans, holder = actor.sync_plan(), [None]
    if actor.rank == 0:
        holder = [SharedBuckets.create(plan_buckets(plans, 1 << 14, 2))]
        specs: list[Any] = [holder[0].spec]  # type: ignore[union-attr]
    else:
        specs = [None]
    dist.broadcast_object_list(specs)
    buckets: Any = holder[0] or SharedBuckets.attach(specs[0])
    writer, digests = BucketWriter(specs[0], buckets, plans, actor.rank), BucketDigests(buckets)
    for index in range(specs[0].num_buckets):
        writer.write(index, actor.tensors())
        dist.barrier()
        if actor.rank == 0:
            digests.add(index)
        dist.barrier()
    if actor.rank == 0:
        buckets.unlink()
    buckets.close()
    return digests.result() if actor.rank == 0 else {}


def _resume(rank: int, root: str, chosen: list[tuple[Case, Layout]]) -> list[dict[str, Any]]:
    from mcore_rl.megatron.checkpoint import load_checkpoint

    found = []
    for case, into in chosen:
        actor = _actor(rank, root, case.model, into, case.dtype)
        load_checkpoint(f"{root}/{case} checkpoint", actor)
        first = {"state": _state(actor), "merged": policy_batch.hf_pieces(actor)}
        _update(actor, 2)
        found.append(first | {"state later": _state(actor)})
    return found


def _with_settings(rank: int, root: str) -> dict[str, Any]:
    """Two steps on two data-parallel ranks with each of SETTINGS: adapters, and what they are merged to."""
    from mcore_rl.megatron.actor import MegatronActor

    found: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        config = lora.lora_config("dense", f"{root}/dense", {}, SMALL, path=False)
        config.model.dtype, config.actor.optimizer.lr = "bfloat16", 4e-2
        for key, value in settings.items():
            setattr(config.actor.optimizer if key == "cpu_offload" else config.actor, key, value)
        actor = MegatronActor(config, rank, 2, None)
        found.setdefault("start", lora.adapter_pieces(actor))
        train_two_steps(actor, actor.memory.offload)
        merged = policy_batch.hf_pieces(actor)
        found[name] = lora.adapter_pieces(actor), merged
    return found


def _refusals(rank: int, root: str) -> dict[str, Any]:
    from mcore_rl.errors import CheckpointError
    from mcore_rl.megatron.checkpoint import load_checkpoint, save_checkpoint

    def refused(actor: Any, directory: str) -> str:
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(directory, actor)
        return str(caught.value)

    layout: Layout = (1, {})
    directory = f"{root}/{CASES[0]} checkpoint"
    full = _actor(rank, root, "dense", layout, rank=0)
    Path(root, "full").mkdir()
    save_checkpoint(f"{root}/full", full)
    actor = _actor(rank, root, "dense", layout)
    before = _state(actor)
    found: dict[str, Any] = {"of a full run": refused(actor, f"{root}/full"), "full": refused(full, directory)}
    for key, value in {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}.items():
        found[key.removesuffix("_modules").replace("target", "targets")] = refused(
            _actor(rank, root, "dense", layout, **{key: value}), directory
        )
    found["untouched"] = all(np.array_equal(a[3], b[3]) for a, b in zip(before, _state(actor), strict=True))
    return found
