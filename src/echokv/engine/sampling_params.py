"""What a request asks of the sampler and of the end of its output; checked on construction."""

from dataclasses import dataclass

from echokv.errors import RequestError

MAX_LOGPROBS = 20
"""Most alternatives a token that a request may ask for (OpenAI's chat limit)."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters in vLLM's names, meanings and defaults.

    Attributes:
        temperature: 0 is greedy; else logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches it, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens below min_p times the highest probability, in [0, 1].
        seed: same seed, prompt and parameters give the same tokens whatever shares the batch.
        presence_penalty, frequency_penalty: in [-2, 2], over output tokens (OpenAI).
        repetition_penalty: > 0, over prompt and output tokens (HF); 1 is none.
        logprobs: how many alternatives to report a token (0 to 20); None reports nothing.
        stop: strings that end the output and are cut from it.
        stop_token_ids: token ids that end the output.
        max_tokens: most output tokens; None: up to max_model_len.
        min_tokens: no stop or end-of-sequence before that many output tokens.
        ignore_eos: go on past end-of-sequence.

    Raises:
        RequestError: a value out of range; `param` names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._check("temperature", 0 <= self.temperature <= 2, "in [0, 2]")
        self._check("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._check("top_k", self.top_k >= -1, "at least 1, or 0 or -1 for all tokens")
        self._check("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        self._check("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]")
        self._check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]")
        self._check("repetition_penalty", 0 < self.repetition_penalty <= 100, "in (0, 100]")
        self._check(
            "logprobs",
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            f"in [0, {MAX_LOGPROBS}]",
        )
        self._check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        self._check("min_tokens", self.min_tokens >= 0, "at least 0")
        self._check("stop", all(self.stop), "non-empty strings")
        self._check(
            "seed",
            self.seed is None or -(2**63) <= self.seed < 2**63,
            "a 64-bit signed integer",
        )
        if self.max_tokens is not None:
            self._check(
                "min_tokens", self.min_tokens <= self.max_tokens, f"<= max_tokens {self.max_tokens}"
            )

    def _check(self, name: str, ok: bool, rule: str) -> None:
        if not ok:
            value = getattr(self, name)
            raise RequestError(f"{name} must be {rule}, got {value!r}", param=name)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    @property
    def is_penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
