"""Keys of `rollout` for sampling, in training and validation, and for drafts."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.fields import setting

NO_DRAFTS, NGRAM, MTP = "none", "ngram", "mtp"


@dataclass
class SamplingConfig:
    """Sampling keys of RolloutConfig."""

    temperature: float = setting(1.0, minimum=0, maximum=2)
    """Temperature of sampling for training, from 0.01 to vLLM's limit of 2. 0 is rejected: greedy sampling has no
    distribution to train."""
    top_p: float = setting(1.0, above=0, maximum=1)
    """Top-p of sampling for training; 1: all tokens. A value below 1 needs rollout.keep_sampling_mask=true, because the
    trainer otherwise computes the full softmax. rollout.validation_top_p is independent."""
    top_k: int = setting(-1, minimum=-1, unit="tokens")
    """Top-k of sampling for training; -1: all tokens. Other values need rollout.keep_sampling_mask=true, because the
    trainer otherwise computes the full softmax. rollout.validation_top_k is independent."""
    min_p: float = setting(0.0, minimum=0, maximum=1)
    """Min-p of sampling for training; 0: all tokens. A value above 0 needs rollout.keep_sampling_mask=true, because the
    trainer otherwise computes the full softmax. rollout.validation_min_p is independent."""
    keep_sampling_mask: bool = setting(False)
    """Record the set of tokens that truncation (top_p, top_k, min_p) or the format of a reply left for each sampled
    token, and normalize the trainer's softmax over the same set in every pass: policy, old policy and reference;
    entropies cover this set too (keep sampling mask, DeepSeek-V3.2). A set takes 4 bytes for each of its tokens, at
    most 1/8 byte for each token of the vocabulary."""
    repetition_penalty: float = setting(1.0, above=0, maximum=2)
    """Repetition penalty of sampling for training. Must be 1 (none), since the trainer computes the softmax without it.
    rollout.validation_repetition_penalty may differ."""
    stop: list[str] = setting([], one_or_more=True)
    """Strings that end a response, in training and validation. The token that completes one is the last token of the
    response and is trained; graders see the text before the string. Special tokens are matched as the text that the
    tokenizer shows."""
    validation_temperature: float = setting(0.0, minimum=0, maximum=2)
    """Temperature of sampling for validation; 0 is greedy."""
    validation_top_p: float = setting(1.0, above=0, maximum=1)
    """Top-p for validation: sample from the most likely tokens whose probabilities sum to this; 1: from all tokens."""
    validation_top_k: int = setting(-1, minimum=-1, unit="tokens")
    """Top-k for validation: sample from this many of the most likely tokens; -1: from all tokens."""
    validation_min_p: float = setting(0.0, minimum=0, maximum=1)
    """Min-p for validation: sample from the tokens with at least this fraction of the highest probability; 0: from all
    tokens."""
    validation_repetition_penalty: float = setting(1.0, above=0, maximum=2)
    """Repetition penalty for validation, also of greedy sampling: positive logits of earlier tokens are divided by it,
    negative ones multiplied; 1: none. vLLM counts tokens of prompt and response, SGLang of the response only."""
    validation_samples: int = setting(1, minimum=1)
    """Responses per validation prompt; accuracy is their mean. More than 1 needs a rollout.validation_temperature above
    0."""
    draft: str = setting(NO_DRAFTS, choices=(NO_DRAFTS, NGRAM, MTP))
    """Speculative decoding: a draft of the next tokens is verified in one pass. A draft token is accepted only if it
    equals the token that the engine would sample without a draft, so responses do not change. ngram: the draft
    continues an earlier occurrence of the last tokens of prompt and response. mtp: the model's multi-token-prediction
    layers sample the draft; needs actor.mtp_loss_coefficient above 0, which trains them. Both need
    rollout.engine=vllm."""
    draft_tokens: int = setting(4, minimum=1, maximum=32)
    """Number of tokens in a draft."""
    draft_below: int = setting(16, minimum=2, unit="requests")
    """Number of running requests from which on an engine drafts nothing: drafts speed up the last long responses of a
    step, but only add work to full batches."""
