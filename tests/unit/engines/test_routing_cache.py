"""Experts in a paged cache, with a small scheduler: chunked prompts, shared prefixes, preemption."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mcore_rl.engines.routing_cache import RoutingCache

LAYERS, TOPK, BLOCK, NUM_BLOCKS = 3, 2, 4, 24


def experts_of(prefix: tuple[int, ...], num_experts: int) -> np.ndarray:
    """Choose experts for the last token of `prefix`, depending on the whole prefix. Shapes: [layers, k]."""
    generator = np.random.default_rng([1, *prefix])
    return np.stack([generator.permutation(num_experts)[:TOPK] for _ in range(LAYERS)])


class Paged:
    """Scheduler of an engine: requests take, share and return blocks, in passes with rows of several requests."""

    def __init__(self, cache: RoutingCache, num_experts: int, seed: int) -> None:
        self.cache, self.num_experts = cache, num_experts
        self.random = np.random.default_rng(seed)
        self.free = list(self.random.permutation(NUM_BLOCKS))
        self.blocks: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.rows_computed = 0
        self.shared: set[int] = set()
        self.known: dict[tuple[int, ...], int] = {}
        """Complete blocks by the prefix that they end. They stay cached for other requests."""

    def begin(self, request: int, tokens: tuple[int, ...]) -> None:
        blocks: list[int] = []
        while len(tokens) > (size := BLOCK * (len(blocks) + 1)) and tokens[:size] in self.known:
            blocks.append(self.known[tokens[:size]])
        self.blocks[request], self.computed[request] = blocks, len(blocks) * BLOCK

    def forward(self, counts: dict[int, int], tokens: dict[int, tuple[int, ...]]) -> None:
        """Run one pass of counts[request] further tokens of each request, in that order, plus two padding rows."""
        slots, chosen = [], []
        for request, count in counts.items():
            for place in range(self.computed[request], self.computed[request] + count):
                if place == BLOCK * len(self.blocks[request]):
                    self.blocks[request].append(int(self.free.pop()))
                slots.append(self.blocks[request][place // BLOCK] * BLOCK + place % BLOCK)
                chosen.append(experts_of(tokens[request][: place + 1], self.num_experts))
            self.computed[request] += count
            self.rows_computed += count
            for end in range(BLOCK, self.computed[request] + 1, BLOCK):
                block = self.known.setdefault(tokens[request][:end], self.blocks[request][end // BLOCK - 1])
                self.shared.add(block)
        padded = torch.tensor([*slots, -1, -1])
        for layer in range(LAYERS):
            rows = np.stack([*(c[layer] for c in chosen), [7, 7], [7, 7]])
            self.cache.write(layer, padded, torch.from_numpy(rows).to(torch.int32))

    def preempt(self, request: int) -> None:
        """Return a request's own blocks; cached blocks stay."""
        self.free = [*(b for b in self.blocks[request] if b not in self.shared), *self.free]
        del self.blocks[request], self.computed[request]


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (256, np.uint8), (300, np.int16)])
def test_read_returns_experts_of_pass_that_computed_each_token(num_experts: int, dtype: type) -> None:
    cache = RoutingCache(NUM_BLOCKS, BLOCK, num_layers=LAYERS, topk=TOPK, num_experts=num_experts)
    paged = Paged(cache, num_experts, seed=num_experts)
    common = (5, 6, 7, 8, 9, 10)  # requests 0, 1 and 2 share one and a half blocks
    tokens = {0: (*common, 1, 1, 2), 1: (*common, 2), 2: (*common, 1, 1, 2, 3, 4, 5), 3: (4, 4, 4, 4, 4)}
    paged.begin(0, tokens[0])
    paged.begin(3, tokens[3])
    paged.forward({3: 2, 0: 3}, tokens)  # both prompts in pieces
    paged.forward({0: 4, 3: 2}, tokens)
    paged.begin(1, tokens[1])
    paged.begin(2, tokens[2])
    assert paged.computed[1] == paged.computed[2] == BLOCK
    paged.forward({2: 5, 0: 1, 1: 3}, tokens)
    paged.preempt(2)
    paged.forward({0: 1}, tokens)
    paged.begin(2, tokens[2])
    assert paged.computed[2] == 2 * BLOCK  # it finds the shared block and its own second one, not the third
    paged.forward({3: 1, 2: 4}, tokens)
    assert paged.rows_computed < sum(map(len, tokens.values())) + 5
    for request, sequence in tokens.items():
        found = cache.read(paged.blocks[request], len(sequence))
        expected = [experts_of(sequence[: end + 1], num_experts) for end in range(len(sequence))]
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.stack(expected))


def test_read_unrouted_token_raises() -> None:
    cache = RoutingCache(2, BLOCK, num_layers=1, topk=TOPK, num_experts=8)
    cache.write(0, torch.tensor([4, 5]), torch.tensor([[0, 0], [1, 2]]))
    assert cache.read([1], 2).tolist() == [[[0, 0]], [[1, 2]]]
    with pytest.raises(RuntimeError, match="routed 2 of a sequence's 3 tokens"):
        cache.read([1], 3)
    with pytest.raises(RuntimeError, match="routed 2 of a sequence's 5 tokens"):
        cache.read([1], 5)


def test_write_more_rows_than_slots_raises() -> None:
    cache = RoutingCache(2, BLOCK, num_layers=1, topk=TOPK, num_experts=8)
    with pytest.raises(ValueError, match="3 rows were routed, but the pass has slots for 2"):
        cache.write(0, torch.tensor([4, 5]), torch.zeros(3, TOPK, dtype=torch.int32))
