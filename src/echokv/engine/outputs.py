"""What the engine hands back: one `RequestOutput` a request and step, holding only what is new."""

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request ended, in OpenAI's words; `abort` is ours (vLLM's too)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of one sampled token and of the most likely alternatives.

    Natural logarithms of the softmax of the raw logits, before penalties and temperature (vLLM).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What one step added to one request.

    `text` is withheld while it could be the beginning of a stop string or half a character; what
    is withheld comes with a later output, at the latest with the one that has a finish_reason.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]  # one a token when asked for, else empty
    finish_reason: FinishReason | None
    stop_reason: str | int | None  # the stop string or token id that matched
    num_prompt_tokens: int
    num_output_tokens: int  # so far
    num_cached_tokens: int  # prompt tokens taken from the prefix cache

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None
