"""Attention to the tokens that an indexer chooses, beside full attention and the indexer of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rl.megatron.model.attention import chosen, indexer, packed
from tests.tiny_models import tiny_model

LENGTHS = (11, 3, 7)


def _ours(theirs: Any, interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> indexer.Indexer:
    """Build the indexer with the weights of transformers'."""
    sizes = theirs.config
    config = SimpleNamespace(
        dsa_indexer_n_heads=sizes.index_n_heads,
        dsa_indexer_head_dim=sizes.index_head_dim,
        dsa_indexer_topk=sizes.index_topk,
        dsa_indexer_interleaved=interleaved,
        qk_pos_emb_head_dim=sizes.qk_rope_head_dim,
        q_lora_rank=sizes.q_lora_rank,
        hidden_size=sizes.hidden_size,
        params_dtype=torch.float32,
        init_method=torch.nn.init.zeros_,
    )
    monkeypatch.setattr(indexer, "QUERIES", 4)  # several blocks in a sequence
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    ours = indexer.Indexer(config, alone)  # type: ignore[arg-type]
    for name, parameter in theirs.named_parameters():
        module = name if name.startswith("k_norm") else f"linear_{name}"
        ours.get_parameter(module).copy_(parameter)
    return ours


@pytest.mark.parametrize(("kind", "interleaved"), [("deepseek_v32", False), ("glm_moe_dsa", True)])
@torch.no_grad()
def test_indexer_choices_of_packed_row_equal_transformers(
    kind: str, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(kind)
    theirs = model.model.layers[0].self_attn.indexer
    ours = _ours(theirs, interleaved, monkeypatch)
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    hidden, latent = torch.randn(sum(LENGTHS), 32), torch.randn(sum(LENGTHS), 12)
    angles = torch.outer(torch.arange(max(LENGTHS)).float(), model.model.rotary_emb.inv_freq)
    found = ours.choose(hidden, latent, torch.polar(torch.ones_like(angles), angles), LENGTHS)
    assert found is not None
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        start += length
        if length <= theirs.config.index_topk:
            continue
        positions = torch.arange(length)[None]
        causal = torch.full((1, length, length), -torch.inf).triu(1)
        rotation = model.model.rotary_emb(hidden[None], positions)
        expected = theirs(hidden[None, rows], latent[None, rows], rotation, causal, positions)[0]
        for query in range(length):
            visible = [set(row[query][row[query] <= query].tolist()) for row in (found[rows], expected)]
            assert visible[0] == visible[1], (length, query)
    assert ours.choose(hidden, latent, torch.polar(angles, angles), (3, 3, 3)) is None


def test_chosen_attention_and_gradients_equal_masked_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of 11 tokens, in blocks of three queries; a choice of all tokens is full attention."""
    monkeypatch.setattr(chosen, "QUERIES", 3)
    length, topk = 11, 5
    tensors = [torch.randn(length, 2, size, requires_grad=True) for size in (8, 8, 6)]
    scores = torch.randn(length, length).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    choices = scores.topk(topk, -1).indices.int()
    visible = torch.zeros(length, length, dtype=torch.bool).scatter(1, choices.long(), True).tril()
    query, key, value = tensors
    logits = torch.einsum("shd,thd->hst", query, key) * 0.3
    expected = torch.einsum("hst,thd->shd", logits.masked_fill(~visible, -torch.inf).softmax(-1), value)
    found = chosen.chosen_attention(*tensors, choices, scale=0.3)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((out * weights).sum(), tensors) for out in (found, expected)]
    torch.testing.assert_close(*gradients)
    every = torch.arange(length).expand(length, length)
    whole = packed.packed_attention(query, key, value, (length,), scale=0.3)
    torch.testing.assert_close(chosen.chosen_attention(*tensors, every, scale=0.3), whole)
    assert (found - whole).abs().max() > 0.1
