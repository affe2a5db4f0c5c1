"""Text to token ids and back, for tokenizers whose tokens are byte strings (byte-level BPE).

Knows the checkpoint's `tokenizer.json` and chat template; knows nothing of requests or models.
A token's bytes are looked up, not decoded by the library, so that a stream of ids becomes text
in constant work a token and half a character is held back instead of shown as U+FFFD.
"""

import codecs
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from echokv.errors import CheckpointError, RequestError

_RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {
        "self",
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "processor_kwargs",
    }
)


def _bytes_of_characters() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2).

    Printable Latin-1 bytes stand for themselves; the other 68 for U+0100 onwards, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return table


def _bytes_of_tokens(backend: BackendTokenizer) -> list[bytes | None]:
    """The bytes of every token, by id; None where an id is unused."""
    byte_of = _bytes_of_characters()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        try:
            table[token_id] = bytes(byte_of[character] for character in token)
        except KeyError:  # an added token whose characters stand for themselves
            table[token_id] = token.encode()
    return table


class Detokenizer:
    """Turns one stream of token ids into text; made by `Tokenizer.detokenizer`."""

    def __init__(self, token_bytes: list[bytes | None], skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Take one more token.

        Returns:
            The characters that it completes, maybe none. Bytes that can't be part of any
            character come out as U+FFFD as soon as that is certain. Ids that name no token
            (a model's padded vocabulary) add nothing.
        """
        if token_id in self._skipped or not 0 <= token_id < len(self._token_bytes):
            return ""
        return self._decoder.decode(self._token_bytes[token_id] or b"")

    def flush(self) -> str:
        """End the stream: an unfinished character comes out as U+FFFD. Ready for a new stream."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Immutable, so safe to use from any thread.

    Attributes:
        vocab_size: the highest token id plus one; the model's may be larger (padding).
        eos_token_ids: ids that end an output, from the tokenizer and `generation_config.json`.
    """

    def __init__(self, hf: PreTrainedTokenizerFast, eos_token_ids: tuple[int, ...] = ()) -> None:
        backend = hf.backend_tokenizer
        if not isinstance(backend.decoder, decoders.ByteLevel):
            raise CheckpointError(
                f"{hf.name_or_path}: the tokenizer's decoder is {backend.decoder};"
                " echokv supports byte-level tokenizers (DeepSeek's and GLM's are)"
            )
        backend.no_truncation()
        backend.no_padding()
        self._hf = hf
        self._backend = backend
        self._token_bytes = _bytes_of_tokens(backend)
        self._special_ids = frozenset(
            token_id for token_id, t in backend.get_added_tokens_decoder().items() if t.special
        )
        self.vocab_size = len(self._token_bytes)
        own_eos = () if hf.eos_token_id is None else (int(hf.eos_token_id),)
        self.eos_token_ids = tuple(sorted({*own_eos, *eos_token_ids}))

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """Load `tokenizer.json` and what lies beside it from a checkpoint directory.

        The class that `tokenizer_config.json` names is not used: DeepSeek's names LlamaTokenizer,
        whose own pre-tokenizer would replace the one in `tokenizer.json`.

        Raises:
            CheckpointError: no such file, unreadable, or not a byte-level tokenizer.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist: a checkpoint needs its tokenizer")
        try:
            hf = PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # the library raises bare Exception on a malformed file
            raise CheckpointError(f"{file} can't be loaded: {error}") from error
        return cls(hf, _generation_eos(directory / "generation_config.json"))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it are recognised.

        Args:
            text: any text that is valid Unicode.
            add_special_tokens: add what the tokenizer puts around a text (a BOS, or nothing).

        Raises:
            RequestError: the text holds a lone surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X}"
                f" at character {error.start}",
                param="prompt",
            ) from error
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 come out as U+FFFD."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id that names no token."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        return self._token_bytes[token_id] or b""

    def token_string(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (`Ġworld`); None for an id that names none."""
        spelling: str | None = self._backend.id_to_token(token_id)
        return spelling

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh stream from token ids to text."""
        return Detokenizer(
            self._token_bytes, self._special_ids if skip_special_tokens else frozenset()
        )

    def render_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The conversation as the text that the model was trained on.

        Args:
            messages: dictionaries with `role` and `content`.
            add_generation_prompt: end with what opens the assistant's turn.
            **kwargs: further variables of the template.

        Raises:
            RequestError: the checkpoint has no template, the template refuses the messages,
                or an argument is not a template variable.
        """
        reserved = sorted(_RESERVED_TEMPLATE_ARGUMENTS.intersection(kwargs))
        if reserved:
            raise RequestError(
                f"{reserved[0]} can't be passed to the chat template", param="chat_template_kwargs"
            )
        if self._hf.chat_template is None:
            raise RequestError(
                "the model has no chat template: use /v1/completions", param="messages"
            )
        try:
            text = self._hf.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except Exception as error:  # a template is a program: on strange messages it can fail
            # with any error (raise_exception, missing keys, operators on wrong types)
            raise RequestError(
                f"the chat template refused the messages: {error}", param="messages"
            ) from error
        return str(text)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Token ids of a conversation; the template writes its own special tokens.

        Arguments and errors as of `render_chat_template`.
        """
        text = self.render_chat_template(messages, add_generation_prompt, **kwargs)
        return self.encode(text, add_special_tokens=False)


def _generation_eos(file: Path) -> tuple[int, ...]:
    """`eos_token_id` of `generation_config.json`: an id, a list of ids, or absent."""
    if not file.is_file():
        return ()
    try:
        value = json.loads(file.read_text()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a JSON object: {error}") from error
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
