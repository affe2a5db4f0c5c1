"""A tokenizer whose ids are bytes, for random checkpoints: every byte string has an encoding.

Ids 0 to 255 are the bytes themselves, special tokens follow. Built with the `tokenizers` library
in the byte-level alphabet of GPT-2, which gives each byte a printable character.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS, USER, ASSISTANT, END_OF_TURN, PAD = (
    "<|bos|>",
    "<|eos|>",
    "<|user|>",
    "<|assistant|>",
    "<|end_of_turn|>",
    "<|pad|>",
)
SPECIAL_TOKENS = (BOS, EOS, USER, ASSISTANT, END_OF_TURN, PAD)
"""In the order of their ids, from 256 on."""

TOKEN_IDS = {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}{{ '<|end_of_turn|>' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'] + '<|end_of_turn|>' }}"
    "{% else %}{{ '<|user|>' + message['content'] + '<|end_of_turn|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_characters() -> list[str]:
    """The character that stands for each byte: itself where printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(0x100 + i) for i in range(256 - len(printable)))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def build_tokenizer() -> Tokenizer:
    """The tokenizer; encoding puts bos first unless add_special_tokens is False."""
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, TOKEN_IDS[BOS])]
    )
    return tokenizer


def write_tokenizer(directory: Path, max_length: int, tokenizer: Tokenizer | None = None) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template within.

    Args:
        directory: exists.
        max_length: tokens, what tokenizer_config.json says of the model.
        tokenizer: another one with these special tokens; None: `build_tokenizer`'s.
    """
    if tokenizer is None:
        tokenizer = build_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [USER, ASSISTANT, END_OF_TURN],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
