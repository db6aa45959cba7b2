"""Token sequences of an episode, built from its calls of session.generate. Only these sequences are trained.

A call whose tokens start with an existing sequence of its role extends it; tokens between the sequence and the new
completion were not sampled. Any other call starts a new sequence, for which all given tokens are the prompt; tokens
that an earlier sequence sampled are trained only there. Example (s: sampled, t: token of a tool result):

    generate(p p)            -> s s      sequence 0    p p | s s
    generate(p p s s t t)    -> s        sequence 0    p p | s s t t s
    generate(p p)            -> s s s    sequence 1    p p | s s s
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcore_rl.rollout.episodes.shared_tokens import SharedTokens
from mcore_rl.types import NOT_SAMPLED, Completion, PromptImages, TokenSets, Trajectory


@dataclass
class _Piece:
    """Tokens of a completion, or the tokens before it that were not sampled.

    Shapes: logp, temperatures float32 [T]; versions int32 [T]; sampled uint8 [T].
    """

    logp: np.ndarray
    versions: np.ndarray
    temperatures: np.ndarray
    sampled: np.ndarray
    kept: TokenSets | None

    @classmethod
    def not_sampled(cls, count: int) -> _Piece:
        """Return a piece of tokens that were not sampled."""
        zeros, unknown = np.zeros(count, np.uint8), np.full(count, np.nan, np.float32)
        return cls(zeros, np.full(count, NOT_SAMPLED), unknown, zeros, TokenSets.empty(count))


@dataclass(frozen=True)
class _Before:
    """State of a sequence before a turn."""

    num_tokens: int
    num_pieces: int
    num_experts: int
    images: PromptImages | None


class TokenSequence:
    """One sequence."""

    def __init__(self, prompt: SharedTokens, role: str = "") -> None:
        self.num_prompt = len(prompt)
        self.role = role
        self.images: PromptImages | None = None
        """Images in `tokens`."""
        self._tokens = prompt
        self._pieces: list[_Piece] = []
        """Pieces in the order of the response."""
        self._experts: np.ndarray | None = None
        self._turns: dict[int, _Before] = {}
        """State before each turn, by the length at its end."""
        self._rewards: dict[int, float] = {}
        """Rewards of turns, by the position of the turn's last token in the response."""

    def is_prefix_of(self, token_ids: np.ndarray) -> bool:
        """Return True if `token_ids` start with this sequence."""
        return len(token_ids) >= len(self) and self._tokens.num_common(token_ids) == len(self)

    def __len__(self) -> int:
        """Number of tokens including the prompt."""
        return len(self._tokens)

    @property
    def tokens(self) -> np.ndarray:
        """Copy of all tokens including the prompt, int32 [S]."""
        return self._tokens.first(len(self))

    def first(self, count: int) -> np.ndarray:
        """Return a copy of the first `count` tokens, int32 [count]."""
        return self._tokens.first(count)

    def branch(self, token_ids: np.ndarray) -> SharedTokens:
        """Return `token_ids`, int32 [S], whose beginning shares the memory of this sequence."""
        made = self._tokens.branch(self._tokens.num_common(token_ids))
        made.append(token_ids[len(made) :].copy())
        return made

    def num_common(self, token_ids: np.ndarray) -> int:
        """Return the number of leading tokens that `token_ids` have in common with this sequence."""
        return self._tokens.num_common(token_ids)

    def extend(
        self, token_ids: np.ndarray, completion: Completion, temperature: float, images: PromptImages | None = None
    ) -> None:
        """Append the part of `token_ids` that follows this sequence (not sampled), and the completion, sampled at
        `temperature`. `token_ids` start with this sequence. `images`: images in `token_ids`."""
        experts = 0 if self._experts is None else len(self._experts)
        before = _Before(len(self), len(self._pieces), experts, self.images)
        # Tokens between the last sampled one and the new completion: tool results, user messages, template tokens.
        if num_new := len(token_ids) - len(self):
            self._pieces.append(_Piece.not_sampled(num_new))
            self._tokens.append(token_ids[len(self) :].copy())
        ones, temperatures = np.ones(len(completion.logp), np.uint8), completion.sampled_at(temperature)
        self._pieces.append(_Piece(completion.logp, completion.versions, temperatures, ones, completion.kept))
        if completion.routed_experts is not None:
            # Keep the experts recorded when a token was sampled: the prefix may have been computed again with newer
            # weights.
            known = self._experts if self._experts is not None else completion.routed_experts[:0]
            self._experts = np.concatenate([known, completion.routed_experts[len(known) :]])
        self._tokens.append(completion.token_ids)
        self.images = images
        self._turns[len(self)] = before

    def drop(self, end: int) -> None:
        """Remove the turn that ended at length `end`. If later turns continue it, its tokens stay, but are not
        trained."""
        before = self._turns.pop(end)
        self._rewards.pop(end - self.num_prompt - 1, None)
        if end < len(self):
            piece = self._pieces[before.num_pieces + (self._pieces[before.num_pieces].versions[0] == NOT_SAMPLED)]
            piece.sampled = np.zeros_like(piece.sampled)
            return
        self._tokens, self.images = self._tokens.branch(before.num_tokens), before.images
        del self._pieces[before.num_pieces :]
        if self._experts is not None:
            self._experts = self._experts[: before.num_experts]

    @property
    def is_empty(self) -> bool:
        """True if nothing is sampled."""
        return not self._pieces

    def reward(self, value: float, end: int | None = None) -> None:
        """Add to the reward of a sampled turn: the last one, or the turn that ended at length `end` of the sequence."""
        place = (len(self) if end is None else end) - self.num_prompt - 1
        self._rewards[place] = self._rewards.get(place, 0.0) + value

    def _joined(self, name: str) -> np.ndarray:
        columns: list[np.ndarray] = [getattr(piece, name) for piece in self._pieces]
        # Most sequences have one turn.
        return columns[0] if len(columns) == 1 else np.concatenate(columns)

    def trajectory(self, *, trained: bool = True) -> Trajectory:
        """Return the trajectory. With `trained` False, no token is trained, and turns have no rewards."""
        logp, versions, temperatures, sampled = map(self._joined, ("logp", "versions", "temperatures", "sampled"))
        rewards = np.zeros(len(sampled), np.float32)
        if trained and self._rewards:
            rewards[list(self._rewards)] = list(self._rewards.values())
        prompt_ids, response = np.split(self.tokens, [self.num_prompt])
        logp, versions = logp.astype(np.float32, copy=False), versions.astype(np.int32, copy=False)
        mask = sampled if trained else np.zeros_like(sampled)
        kept = [piece.kept for piece in self._pieces if piece.kept is not None]
        return Trajectory(
            *(prompt_ids, response, logp, versions, mask, rewards, self._experts, temperatures, self.images),
            # All calls of an episode keep their sets, or none does.
            kept=TokenSets.joined(kept) if len(kept) == len(self._pieces) else None,
            role=self.role,
        )


class SequenceBook:
    """All sequences of an episode."""

    def __init__(self) -> None:
        self.sequences: list[TokenSequence] = []

    def find(self, token_ids: np.ndarray, role: str = "") -> TokenSequence | None:
        """Return the longest sequence of a role with which `token_ids` start, or None."""
        found = [each for each in self.sequences if each.role == role and each.is_prefix_of(token_ids)]
        # The longest one: branches of an episode share their first turns.
        return max(found, key=len, default=None)

    def add(
        self,
        token_ids: np.ndarray,
        completion: Completion,
        temperature: float,
        images: PromptImages | None = None,
        *,
        role: str = "",
    ) -> TokenSequence:
        """Add the completion of `token_ids`, sampled at `temperature` by a role. Returns the sequence that contains it.
        `images`: images in `token_ids`."""
        sequence = self.find(token_ids, role)
        if sequence is None:
            sequence = TokenSequence(self._prompt(token_ids), role)
            self.sequences.append(sequence)
        sequence.extend(token_ids, completion, temperature, images)
        return sequence

    def _prompt(self, token_ids: np.ndarray) -> SharedTokens:
        """Return the prompt of a new sequence, which shares the longest beginning with another one."""
        nearest = max(self.sequences, key=lambda sequence: sequence.num_common(token_ids), default=None)
        if nearest is not None:
            return nearest.branch(token_ids)
        made = SharedTokens()
        made.append(token_ids)
        return made

    def drop(self, sequence: TokenSequence, end: int) -> None:
        """Remove the turn of a sequence that ended at length `end`, and the sequence if nothing else was sampled."""
        sequence.drop(end)
        if sequence.is_empty:
            self.sequences.remove(sequence)
