"""From sampled tokens to what the client sees: text, stop strings, the end of a request."""

from echokv.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from echokv.engine.request import Request
from echokv.engine.sampler import Sampled
from echokv.engine.tokenizer import Detokenizer


class OutputStream:
    """The output side of one request: appends tokens, decides when it ends.

    Text that could be the beginning of a stop string is withheld until it is decided.

    Args:
        request: its params hold the stop conditions.
        detokenizer: incremental decoder, fresh for this request.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    def __init__(
        self, request: Request, detokenizer: Detokenizer, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.request = request
        self._detokenizer = detokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._withheld = ""

    def push(self, sampled: Sampled) -> RequestOutput:
        """Append one sampled token to the request and say what that adds."""
        request, token = self.request, sampled.token_id
        request.token_ids.append(token)
        finish, stop_token = self._stopped_by_token(token)
        unseen = finish is not None and token in self._eos_token_ids
        text = self._withheld + ("" if unseen else self._detokenizer.push(token))
        if finish is None and request.num_output_tokens >= request.params.min_tokens:
            match = self._find_stop(text)
            if match is not None:
                return self._output((sampled,), match[0], FinishReason.STOP, match[1])
        if finish is None and request.num_tokens >= request.max_total_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            text += self._detokenizer.flush()
        else:
            text, self._withheld = self._split_withheld(text)
        return self._output((sampled,), text, finish, stop_token)

    def abort(self) -> RequestOutput:
        """The last output of a request that was cancelled."""
        return self._output((), self._withheld, FinishReason.ABORT, None)

    def _stopped_by_token(self, token: int) -> tuple[FinishReason | None, int | None]:
        params = self.request.params
        if self.request.num_output_tokens < params.min_tokens:
            return None, None
        if token in params.stop_token_ids:
            return FinishReason.STOP, token
        if token in self._eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, None
        return None, None

    def _find_stop(self, text: str) -> tuple[str, str] | None:
        """The text before the earliest stop string, and that string."""
        found = [(text.find(stop), stop) for stop in self.request.params.stop if stop in text]
        if not found:
            return None
        position, stop = min(found)
        return text[:position], stop

    def _split_withheld(self, text: str) -> tuple[str, str]:
        """Keep back the longest end of text with which a stop string begins."""
        stops = self.request.params.stop
        longest = max((len(stop) for stop in stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in stops):
                return text[:-size], tail
        return text, ""

    def _output(
        self,
        sampled: tuple[Sampled, ...],
        text: str,
        finish: FinishReason | None,
        stop_reason: str | int | None,
    ) -> RequestOutput:
        request = self.request
        logprobs: tuple[TokenLogprobs, ...] = tuple(
            item.logprobs for item in sampled if item.logprobs is not None
        )
        return RequestOutput(
            request_id=request.request_id,
            token_ids=tuple(item.token_id for item in sampled),
            text=text,
            logprobs=logprobs,
            finish_reason=finish,
            stop_reason=stop_reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            num_cached_tokens=request.num_cached_tokens,
        )
