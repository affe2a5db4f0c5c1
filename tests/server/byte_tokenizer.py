"""A tokenizer with one token a byte, four special tokens and a strict chat template."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS_ID, EOS_ID, USER_ID, ASSISTANT_ID = 256, 257, 258, 259
SPECIALS = {BOS_ID: "⟦bos⟧", EOS_ID: "⟦eos⟧"}
ADDED = {USER_ID: "⟦user⟧", ASSISTANT_ID: "⟦assistant⟧"}

CHAT_TEMPLATE = """\
{{ bos_token }}{% if shout is defined and shout %}!{% endif %}
{% for message in messages %}
{% if message.role == 'system' %}{{ '[' + message['content'] + ']' }}
{%- elif message.role == 'user' %}{{ '⟦user⟧' + message['content'] }}
{%- elif message.role == 'assistant' %}{{ '⟦assistant⟧' + message['content'] + eos_token }}
{%- else %}{{ raise_exception('unknown role ' + message.role) }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}⟦assistant⟧{% endif %}
"""


def write_byte_tokenizer(directory: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`; token id i < 256 is the byte i."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {
        chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS.values()])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED.values()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIALS[BOS_ID]} $A", special_tokens=[(SPECIALS[BOS_ID], BOS_ID)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, object] = {
        "bos_token": SPECIALS[BOS_ID],
        "eos_token": SPECIALS[EOS_ID],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
