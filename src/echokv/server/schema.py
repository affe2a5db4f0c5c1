"""Request bodies, declared: OpenAI's fields and the sampling fields that vLLM adds.

Only types are checked here. Ranges are checked by `SamplingParams`, which has the same names;
fields that are known but not supported are refused by `parameters`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_STOP_STRINGS = 16
MAX_PROMPTS = 1024  # of one request; each is an engine request of its own

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Strings = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[
    list[int], Field(fail_fast=True)
]  # any size: the message names id and vocabulary
StopStrings = Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)]


class RequestBody(BaseModel):
    """Base: JSON types are not converted into one another; unknown fields are kept aside."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = Field(None, description="The served model; may be left out.")


class StreamOptions(BaseModel):
    """What a stream carries besides the text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = Field(False, description="Send a last chunk with the usage.")
    continuous_usage_stats: bool = Field(False, description="Send the usage in every chunk.")


class GenerationBody(RequestBody):
    """Fields that completions and chat completions share; null means the default."""

    max_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | StopStrings | None = None
    stop_token_ids: list[Int32] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Accepted and ignored.")

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream carries the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationBody):
    """Body of /v1/completions. Several prompts give several choices, in order."""

    prompt: str | Strings | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: Int32 | None = 16
    logprobs: Int32 | None = Field(None, description="Alternatives to report a token, 0 to 20.")
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    add_special_tokens: bool = Field(True, description="Add the tokenizer's BOS to text prompts.")


class TextPart(BaseModel):
    """A piece of a message."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message; which roles exist is up to the model's chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[TextPart]

    def for_template(self) -> dict[str, Any]:
        """As chat templates want it: content in one string, other fields as they came."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content}


class ChatCompletionRequest(GenerationBody):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Int32 | None = Field(None, description="Wins over max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Int32 | None = Field(None, description="0 to 20; needs logprobs.")
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables of the chat template."
    )


class TokenizeRequest(RequestBody):
    """Body of /tokenize: either a prompt or messages."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(None, description="Default: only for a prompt.")
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody):
    """Body of /detokenize."""

    tokens: TokenIds
