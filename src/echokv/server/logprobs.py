"""Log-probabilities in the shapes of the two APIs."""

from collections.abc import Sequence

from echokv.engine.outputs import TokenLogprobs
from echokv.engine.tokenizer import Tokenizer
from echokv.server.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON can't say (OpenAI's and vLLM's convention)."""


def completion_token(tokenizer: Tokenizer, token_id: int) -> str:
    r"""A token as text; one that is not UTF-8 by itself as `bytes:\xe4\xb8` (OpenAI).

    That keeps the keys of `top_logprobs` distinct where U+FFFD would merge them.
    """
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobsBuilder:
    """Builds one choice's logprobs piece by piece; text offsets go on from piece to piece.

    Args:
        tokenizer: names the tokens.
        offset: characters of the choice's text before its first token (an echoed prompt).
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._offset = offset

    def piece(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """The logprobs of the next tokens."""
        name = self._tokenizer
        piece = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for entry in entries:
            token = completion_token(name, entry.token_id)
            top = {completion_token(name, other): _finite(value) for other, value in entry.top}
            top.setdefault(token, _finite(entry.logprob))
            piece.tokens.append(token)
            piece.token_logprobs.append(_finite(entry.logprob))
            piece.top_logprobs.append(top)
            piece.text_offset.append(self._offset)
            self._offset += len(self._detokenizer.push(entry.token_id))
        return piece


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """The logprobs of some tokens of a chat completion."""
    content = []
    for entry in entries:
        chosen = _top(tokenizer, entry.token_id, entry.logprob)
        content.append(
            ChatTokenLogprob(
                token=chosen.token,
                logprob=chosen.logprob,
                bytes=chosen.bytes,
                top_logprobs=[_top(tokenizer, other, value) for other, value in entry.top],
            )
        )
    return ChatLogprobs(content=content)


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    data = tokenizer.token_bytes(token_id)
    return TopLogprob(
        token=data.decode("utf-8", "replace"), logprob=_finite(logprob), bytes=list(data)
    )


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
