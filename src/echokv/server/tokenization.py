"""/tokenize and /detokenize, in vLLM's shapes."""

from echokv.server.errors import ApiError, renamed_params
from echokv.server.prompts import chat_prompt, encode
from echokv.server.responses import DetokenizeResponse, TokenizeResponse
from echokv.server.schema import DetokenizeRequest, TokenizeRequest
from echokv.server.state import ServerState


async def tokenize(state: ServerState, request: TokenizeRequest) -> TokenizeResponse:
    """Token ids of a prompt or of a conversation."""
    engine = state.engine_for(request.model)
    tokenizer = engine.tokenizer
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if request.messages is not None:
        with renamed_params({"prompt": "messages"}):
            ids = await chat_prompt(
                tokenizer,
                request.messages,
                add_generation_prompt=request.add_generation_prompt,
                template_kwargs=request.chat_template_kwargs,
                add_special_tokens=bool(request.add_special_tokens),
            )
    else:
        wanted = request.add_special_tokens
        ids = await encode(
            tokenizer, request.prompt or "", add_special_tokens=wanted is None or wanted
        )
    strings = None
    if request.return_token_strs:
        strings = [tokenizer.token_string(token) or "" for token in ids]
    return TokenizeResponse(
        count=len(ids), max_model_len=engine.max_model_len, tokens=ids, token_strs=strings
    )


async def detokenize(state: ServerState, request: DetokenizeRequest) -> DetokenizeResponse:
    """Text of token ids, special tokens included."""
    tokenizer = state.engine_for(request.model).tokenizer
    for token in request.tokens:
        if not 0 <= token < tokenizer.vocab_size:
            raise ApiError(
                400,
                f"token id {token} is outside the vocabulary of {tokenizer.vocab_size} tokens",
                param="tokens",
            )
    return DetokenizeResponse(prompt=tokenizer.decode(request.tokens, skip_special_tokens=False))
