"""Token sequences of an episode, built from its calls of session.generate. Only these sequences are trained.

A call whose tokens start with an existing sequence extends it; tokens between the sequence and the new completion were
not sampled. Any other call starts a new sequence, for which all given tokens are the prompt; tokens that an earlier
sequence sampled are trained only there. Example (s: sampled, t: token of a tool result):

    generate(p p)            -> s s      sequence 0    p p | s s
    generate(p p s s t t)    -> s        sequence 0    p p | s s t t s
    generate(p p)            -> s s s    sequence 1    p p | s s s
"""

from __future__ import annotations

import numpy as np

from mcore_rl.types import NOT_SAMPLED, Completion, PromptImages, TokenSets, Trajectory


class TokenSequence:
    """One sequence; `number` counts sequences in the order in which they started."""

    def __init__(self, number: int, prompt_ids: np.ndarray) -> None:
        self.number = number
        self.prompt_ids = prompt_ids
        self.images: PromptImages | None = None
        """Images in `tokens`."""
        self.tokens = prompt_ids
        """All tokens including the prompt, int32 [S]."""
        self._pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        """Log-probabilities, versions, temperatures, and 1 for sampled tokens, in the order of the response."""
        self._experts: np.ndarray | None = None
        self._kept: list[TokenSets | None] = []
        """Sets of the tokens of each piece."""
        self._rewards: dict[int, float] = {}
        """Rewards of turns, by the position of the turn's last token in the response."""

    def is_prefix_of(self, token_ids: np.ndarray) -> bool:
        """Return True if `token_ids` start with this sequence."""
        return len(token_ids) >= len(self.tokens) and np.array_equal(token_ids[: len(self.tokens)], self.tokens)

    def extend(self, token_ids: np.ndarray, completion: Completion, temperature: float) -> None:
        """Append the part of `token_ids` that follows this sequence (not sampled), and the completion, sampled at
        `temperature`. `token_ids` start with this sequence."""
        # Tokens between the last sampled one and the new completion: tool results, user messages, template tokens.
        said = token_ids[len(self.tokens) :]
        if len(said):
            zeros, unknown = np.zeros(len(said), np.uint8), np.full(len(said), np.nan, np.float32)
            self._pieces.append((zeros, np.full(len(said), NOT_SAMPLED), unknown, zeros))
            self._kept.append(TokenSets.empty(len(said)))
        ones, temperatures = np.ones(len(completion.logp), np.uint8), completion.sampled_at(temperature)
        self._pieces.append((completion.logp, completion.versions, temperatures, ones))
        self._kept.append(completion.kept)
        if completion.routed_experts is not None:
            # Keep the experts recorded when a token was sampled: the prefix may have been computed again with newer
            # weights.
            known = self._experts if self._experts is not None else completion.routed_experts[:0]
            self._experts = np.concatenate([known, completion.routed_experts[len(known) :]])
        self.tokens = np.concatenate([token_ids, completion.token_ids]).astype(np.int32, copy=False)

    def reward(self, value: float, end: int | None = None) -> None:
        """Add to the reward of a sampled turn: the last one, or the turn that ended at length `end` of the sequence."""
        place = (len(self.tokens) if end is None else end) - len(self.prompt_ids) - 1
        self._rewards[place] = self._rewards.get(place, 0.0) + value

    def trajectory(self, *, trained: bool = True) -> Trajectory:
        """Return the trajectory. With `trained` False, no token is trained, and turns have no rewards."""
        logp, versions, temperatures, sampled = (np.concatenate(column) for column in zip(*self._pieces, strict=True))
        rewards = np.zeros(len(sampled), np.float32)
        if trained:
            rewards[list(self._rewards)] = list(self._rewards.values())
        response = self.tokens[len(self.prompt_ids) :]
        logp, versions = logp.astype(np.float32, copy=False), versions.astype(np.int32, copy=False)
        mask = sampled if trained else np.zeros_like(sampled)
        kept = [sets for sets in self._kept if sets is not None]
        return Trajectory(
            *(self.prompt_ids, response, logp, versions, mask, rewards, self._experts, temperatures, self.images),
            # All calls of an episode keep their sets, or none does.
            kept=TokenSets.joined(kept) if len(kept) == len(self._kept) else None,
        )


class SequenceBook:
    """All sequences of an episode."""

    def __init__(self) -> None:
        self.sequences: list[TokenSequence] = []

    def find(self, token_ids: np.ndarray) -> TokenSequence | None:
        """Return the longest sequence with which `token_ids` start, or None."""
        found = [sequence for sequence in self.sequences if sequence.is_prefix_of(token_ids)]
        # The longest one: branches of an episode share their first turns.
        return max(found, key=lambda sequence: len(sequence.tokens), default=None)

    def add(
        self, token_ids: np.ndarray, completion: Completion, temperature: float, images: PromptImages | None = None
    ) -> TokenSequence:
        """Add the completion of `token_ids`, sampled at `temperature`. Returns the sequence that contains it. `images`:
        images in `token_ids`."""
        sequence = self.find(token_ids)
        if sequence is None:
            sequence = TokenSequence(len(self.sequences), token_ids)
            self.sequences.append(sequence)
        sequence.images = images
        sequence.extend(token_ids, completion, temperature)
        return sequence
