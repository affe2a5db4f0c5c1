"""Response bodies, declared: OpenAI's objects with the few fields that vLLM adds."""

from typing import Literal

from pydantic import BaseModel

FinishReasonName = Literal["stop", "length", "abort"]


class PromptTokensDetails(BaseModel):
    """How much of the prompt was not computed again."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """Parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One prompt's output, or a piece of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReasonName | None
    stop_reason: str | int | None = None


class CompletionResponse(BaseModel):
    """Body of /v1/completions, or one chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """The token that was, and the most likely alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry a token."""

    content: list[ChatTokenLogprob]


class AssistantMessage(BaseModel):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """The output of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReasonName
    stop_reason: str | int | None = None


class ChatCompletionResponse(BaseModel):
    """Body of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """What a chunk adds to the message; unset fields are left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """A piece of a streamed choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None
    stop_reason: str | int | None = None


class ChatCompletionChunk(BaseModel):
    """One chunk of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Model(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["echokv"] = "echokv"
    max_model_len: int


class ModelList(BaseModel):
    """Body of /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeResponse(BaseModel):
    """Body of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """Body of /detokenize."""

    prompt: str


class HealthResponse(BaseModel):
    """Body of /health; the status is 200 only when requests are accepted."""

    status: Literal["ready", "unavailable"]
    phase: str


class VersionResponse(BaseModel):
    """Body of /version."""

    version: str
