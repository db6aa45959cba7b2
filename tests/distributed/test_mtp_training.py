"""Training of multi-token-prediction layers: values and gradients in every layout and division into micro-batches,
compared with a float64 implementation based on transformers' layers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from model_converters.families.parts.mtp import SEPARATE, MTPNames
from tests.distributed import policy_batch
from tests.distributed.built import build
from tests.distributed.gradient_oracle import SMALL, TOLERANCE, check_gradients, launch_cases
from tests.distributed.launch import RankFailedError, launch
from tests.distributed.syncing import synced_slices
from tests.tiny_models import YARN, add_mtp_layer, checkpoint_tensors, write_tiny_model

COEFFICIENT = 0.3
LAYERS = 2  # of the policy
# Kind of model, number of depths, fields of config.json.
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "v3": ("deepseek_v3", 2, {"rope_parameters": YARN}),
    "glm": ("glm4_moe", 1, {"rope_parameters": YARN}),
    # The last decoder layer has linear attention, the layer for prediction has not.
    "linear": ("qwen3_5_moe_text", 1, {"layer_types": ["full_attention", "linear_attention"]}),
}
NAMES = {"v3": MTPNames(), "glm": MTPNames(), "linear": SEPARATE}
TOLERANCES = {"linear": 1e-4}
"""Delta nets solve triangular systems in float32; see test_model_parity. Other models have TOLERANCE."""
# By number of ranks: model, layout, tokens of a micro-batch, recomputation.
CASES: dict[int, dict[str, tuple[str, dict[str, Any], int, str]]] = {
    1: {
        "split": ("v3", {}, SMALL, "none"),
        "glm": ("glm", {}, SMALL, "none"),
        "linear": ("linear", {}, SMALL, "none"),
    },
    2: {
        "tp2": ("v3", {"tp": 2}, SMALL, "none"),
        "pp2": ("v3", {"pp": 2}, SMALL, "full"),
        "alone on a stage": ("v3", {"pp": 2, "pipeline_layout": "Ett|mmL"}, SMALL, "none"),
        "ep2": ("v3", {"ep": 2}, SMALL, "full"),
        "cp2": ("v3", {"cp": 2}, SMALL, "full"),
        "linear tp2 ep2": ("linear", {"tp": 2, "ep": 2}, SMALL, "full"),
    },
}
SAMPLES = policy_batch.UPDATES[0]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    for name, (kind, depths, fields) in MODELS.items():
        add_mtp_layer(write_tiny_model(root / name, kind, num_hidden_layers=LAYERS, **fields), num_layers=depths)
    return {name: str(root / name) for name in MODELS}


class Oracle:
    """transformers' model; its layers after the policy's layers are the MTP layers."""

    def __init__(self, directory: str, depths: int, names: MTPNames) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(directory)
        config.num_hidden_layers = LAYERS + depths
        kinds = getattr(config, "layer_types", None)
        if kinds:
            config.layer_types = [*kinds, *["full_attention"] * depths]
        options = {"attn_implementation": "eager", "experts_implementation": "eager", "local_files_only": True}
        self.decoders = {depth: names.decoder.format(layer=LAYERS + depth) for depth in range(depths)}
        renamed = {prefix: f"model.layers.{LAYERS + depth}." for depth, prefix in self.decoders.items()}
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, config=config, key_mapping={f"^{re.escape(old)}": new for old, new in renamed.items()}, **options
        ).double()
        self.model.config.num_hidden_layers = LAYERS  # the policy uses only these
        if kinds:
            self.model.config.layer_types = kinds
        self.copies, self.zero_centred = names.copies, not names.copies
        stored = load_file(Path(directory) / "model.safetensors")
        self.own: list[dict[str, torch.Tensor]] = []
        for depth in range(depths):
            parts = (names.embedding_norm, names.hidden_norm, names.projection, names.final_norm)
            full = [f"{part}.weight".format(layer=LAYERS + depth) for part in parts]
            self.own.append({name: stored[name].double().requires_grad_() for name in full})

    def logits(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Logits of every depth d = 1..: [S - d, V]; position i predicts token i + d + 1."""
        inner, found = self.model.model, []
        hidden = inner(tokens[None]).last_hidden_state[0].detach()
        for depth, weights in enumerate(self.own):
            before_embedding, before_hidden, projection, final = weights.values()
            embedded = inner.embed_tokens(tokens[depth + 1 :]).detach()
            joined = torch.cat((self._norm(embedded, before_embedding), self._norm(hidden[:-1], before_hidden)), -1)
            positions = torch.arange(len(embedded))[None]
            hidden = inner.layers[LAYERS + depth](
                (joined @ projection.t())[None],
                attention_mask=torch.full((len(embedded),) * 2, -torch.inf, dtype=torch.float64).triu(1)[None, None],
                position_embeddings=inner.rotary_emb(joined, positions),
                position_ids=positions,
            )[0]
            hidden = self._norm(hidden, final)
            found.append(hidden @ self.model.lm_head.weight.detach().t())
        return found

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        factor = weight + 1 if self.zero_centred else weight
        return factor * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps)

    def cross_entropies(self, sample: int) -> torch.Tensor:
        """Cross entropies of the trained tokens with enough tokens before them, all depths."""
        tokens = torch.from_numpy(policy_batch.sequence(sample).astype(np.int64))
        trained = policy_batch.PROMPTS[sample] + np.flatnonzero(policy_batch.trained(sample))
        parts = []
        for depth, logits in enumerate(self.logits(tokens), 1):
            targets = torch.from_numpy(trained[trained - 1 - depth >= 0])
            log_p = torch.log_softmax(logits, -1)[targets - 1 - depth]
            parts.append(-log_p.gather(1, tokens[targets][:, None])[:, 0])
        return torch.cat(parts)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of the whole update by HF name, including the copies of embedding and head."""
        with torch.no_grad():
            old = {
                s: policy_batch.reference_logp(self.model, s)[0] + torch.from_numpy(policy_batch.drift(s)).double()
                for s in SAMPLES
            }
        loss, _ = policy_batch.reference_loss(self.model, SAMPLES, old)
        trained = sum(int(policy_batch.trained(sample).sum()) for sample in SAMPLES)
        ahead = torch.cat([self.cross_entropies(sample) for sample in SAMPLES]).sum()
        (loss + COEFFICIENT / (len(self.own) * trained) * ahead).backward()
        fixed = {n: b for n, b in self.model.named_buffers() if n.endswith("correction_bias")}
        named = checkpoint_tensors(self.model, {n: p.grad for n, p in self.model.named_parameters()} | fixed)
        found = {self._stored_name(name): gradient for name, gradient in named.items()}
        for depth, weights in enumerate(self.own):
            found |= {name: weight.grad for name, weight in weights.items()}
            if self.copies:
                found[f"model.layers.{LAYERS + depth}.embed_tokens.weight"] = found["model.embed_tokens.weight"]
                found[f"model.layers.{LAYERS + depth}.shared_head.head.weight"] = found["lm_head.weight"]
        return found

    def _stored_name(self, name: str) -> str:
        for depth, prefix in self.decoders.items():
            name = name.replace(f"model.layers.{LAYERS + depth}.", prefix)
        return name


@pytest.fixture(scope="module")
def oracles(directories: dict[str, str]) -> dict[str, Oracle]:
    return {name: Oracle(directories[name], depths, NAMES[name]) for name, (_, depths, _) in MODELS.items()}


@pytest.fixture(scope="module")
def references(oracles: dict[str, Oracle]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: oracle.gradients() for name, oracle in oracles.items()}


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Results of all ranks by case."""
    return launch_cases(_worker, CASES, directories)


def _worker(rank: int, directories: dict[str, str], cases: dict[str, Any]) -> dict[str, Any]:
    return {name: _trained(rank, directories[kind], *settings) for name, (kind, *settings) in cases.items()}


def _trained(rank: int, directory: str, parallel: dict[str, int], tokens: int, recompute: str) -> dict[str, Any]:
    """Gradients and metrics of an update; parameters after two updates, and the norms of their gradients."""
    from mcore_rl.types import merge_metrics

    config = policy_batch.config(directory, parallel, tokens)
    config.actor.mtp_loss_coefficient, config.actor.recompute = COEFFICIENT, recompute
    config.actor.optimizer.lr = 1e-3
    actor = policy_batch.build_actor(config)
    batch, _ = actor.recompute_logp(policy_batch.shares(actor)[::-1], policy_batch.chunks())
    for sample, logp in batch.old_logp.items():
        logp += torch.from_numpy(policy_batch.drift(sample)[policy_batch.held(sample, actor.layout, rank)])
    with policy_batch.complete_gradients(actor):
        _, reports = actor.accumulate_gradients(batch, 1)
    ahead = merge_metrics([report.metrics for report in reports]).get("actor/mtp_loss")
    gradients = policy_batch.gradient_pieces(actor)
    norms = [actor.update(batch, 1).get("actor/grad_norm") for _ in range(2)]
    return {
        "gradients": gradients,
        "mtp_loss": (ahead.total, ahead.count) if ahead and actor.layout.coordinates(rank).tp == 0 else (0.0, 0),
        "norms": [norm.total for norm in norms if norm],
        "updated": policy_batch.hf_pieces(actor),
        "synced": {each.hf_name for each in synced_slices(actor)},
    }


def _differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Differences by tensor, relative to its largest entry."""
    assert found.keys() == expected.keys()
    return {name: float((found[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in expected.items()}


@pytest.mark.parametrize("case", [name for cases in CASES.values() for name in cases])
def test_mtp_gradients_in_every_layout_equal_reference(case: str, results: Any, references: Any, oracles: Any) -> None:
    ranks = results[case]
    kind = next(cases[case][0] for cases in CASES.values() if case in cases)
    expected = torch.cat([oracles[kind].cross_entropies(sample).detach() for sample in SAMPLES])
    assert sum(rank["mtp_loss"][1] for rank in ranks) == len(expected)
    assert sum(rank["mtp_loss"][0] for rank in ranks) == pytest.approx(float(expected.sum()), rel=1e-5)
    check_gradients([rank["gradients"] for rank in ranks], references[kind], TOLERANCES.get(kind, TOLERANCE))


@pytest.mark.parametrize("case", ["tp2", "pp2", "cp2", "alone on a stage"])
def test_mtp_updates_in_every_layout_equal_one_rank(case: str, results: Any) -> None:
    """If the layers are alone on a stage, their embedding is a copy, which must be updated equally and count once."""
    one, many = results["split"], results[case]
    norms = [norm for rank in many for norm in rank["norms"]]
    assert norms == pytest.approx(one[0]["norms"], rel=1e-5)
    start, found = (policy_batch.assemble([rank["updated"] for rank in ranks]) for ranks in (one, many))
    # Adam's first steps have the size of the learning rate for any gradient, so entries near 0 amplify rounding.
    assert max(_differences(found, start).values()) < 1e-3
    torch.testing.assert_close(found["model.layers.2.embed_tokens.weight"], found["model.embed_tokens.weight"])


def test_engines_receive_policy_without_mtp(results: Any, references: Any) -> None:
    ahead = {name for name in references["v3"] if name.startswith(("model.layers.2.", "model.layers.3."))}
    synced = set().union(*(rank["synced"] for rank in results["pp2"]))
    assert synced == references["v3"].keys() - ahead


def _values(rank: int, directory: str) -> list[np.ndarray]:
    """Logits of every depth for one packed row."""
    from mcore_rl.megatron.model import loading
    from mcore_rl.megatron.model.attention.packed import pack_sequences
    from mcore_rl.megatron.model.output import output_weight

    hf_config = json.loads((Path(directory) / "config.json").read_text())
    chunks, layout = build(hf_config, {})
    loading.load_hf(chunks, directory, layout)
    sequences = [policy_batch.sequence(sample) for sample in SAMPLES]
    row = torch.from_numpy(np.concatenate(sequences).astype(np.int64))
    packed = pack_sequences([len(sequence) for sequence in sequences])
    hidden = chunks[0](row[None], None, None, packed_seq_params=packed)
    return [(part @ output_weight(chunks[0]).t()).detach().numpy() for part in hidden[len(row) :].chunk(2)]


def test_mtp_logits_of_every_depth_equal_reference(directories: Any, oracles: Any) -> None:
    (depths,) = launch(_values, 1, directories["v3"])
    start = 0
    for sample in SAMPLES:
        tokens = torch.from_numpy(policy_batch.sequence(sample).astype(np.int64))
        with torch.no_grad():
            expected = oracles["v3"].logits(tokens)
        for found, logits in zip(depths, expected, strict=True):
            # Only positions with a token to embed; later positions are not used.
            inside = found[start : start + len(logits)]
            np.testing.assert_allclose(inside, logits.numpy(), atol=2e-5 * float(logits.abs().max()))
        start += len(tokens)


def _refused(rank: int, directory: str) -> None:
    config = policy_batch.config(directory, {}, SMALL)
    config.actor.mtp_loss_coefficient = 0.1
    policy_batch.build_actor(config)


def test_mtp_training_without_layers_names_key(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "dense", "qwen3", num_hidden_layers=2)
    with pytest.raises(RankFailedError, match=r"ConfigError: actor\.mtp_loss_coefficient=0\.1, but .* set .* to 0"):
        launch(_refused, 1, str(directory))
