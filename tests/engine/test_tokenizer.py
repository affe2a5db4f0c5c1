"""The tokenizer against the `tokenizers` library's own decoder, and text against itself."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.byte_tokenizer import BOS_ID, EOS_ID, USER_ID, write_byte_tokenizer
from tokenizers import Tokenizer as BackendTokenizer

from echokv.engine.tokenizer import Tokenizer
from echokv.errors import CheckpointError, RequestError

DEEPSEEK = Path("/work/shared/data/tokenizer")
needs_deepseek = pytest.mark.skipif(
    not (DEEPSEEK / "tokenizer.json").is_file(), reason=f"needs the tokenizer in {DEEPSEEK}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_dir(directory)


@pytest.fixture(scope="module")
def deepseek() -> Tokenizer:
    return Tokenizer.from_dir(DEEPSEEK)


def pushed(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[str], str]:
    stream = tokenizer.detokenizer()
    return [stream.push(token) for token in ids], stream.flush()


# "�" itself and characters of 1 to 4 bytes, often at the end.
texts = st.text(st.sampled_from("a é�中😀\x00\n") | st.characters(codec="utf-8"), max_size=40)


@given(text=texts)
def test_pushing_the_ids_of_a_text_gives_the_text(tokenizer: Tokenizer, text: str) -> None:
    pieces, rest = pushed(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert rest == ""


@given(text=texts.filter(bool), cut=st.integers(1, 3))
def test_half_a_character_is_held_until_flush(tokenizer: Tokenizer, text: str, cut: int) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)[:-cut]  # a byte a token here
    data = text.encode()[: len(ids)]
    pieces, rest = pushed(tokenizer, ids)
    assert "".join(pieces) == data.decode("utf-8", "ignore")
    assert "".join(pieces) + rest == data.decode("utf-8", "replace")


@given(data=st.binary(max_size=30))
def test_any_bytes_come_out_as_the_library_decodes_them(tokenizer: Tokenizer, data: bytes) -> None:
    library = BackendTokenizer.from_str(tokenizer._backend.to_str())
    ids: list[Any] = [library.token_to_id(tokenizer.token_string(byte) or "") for byte in data]
    assert tokenizer.decode(ids) == library.decode(ids) == data.decode("utf-8", "replace")


def test_invalid_bytes_are_not_held_longer_than_needed(tokenizer: Tokenizer) -> None:
    pieces, rest = pushed(tokenizer, [0xFF] * 3 + [0xE4, 0xB8, 0x41])
    assert pieces == ["�", "�", "�", "", "", "�A"]
    assert rest == ""


def test_flush_readies_the_stream_for_another_text(tokenizer: Tokenizer) -> None:
    stream = tokenizer.detokenizer()
    assert [stream.push(0xE4), stream.flush(), stream.push(0x41), stream.flush()] == [
        *("", "�", "A", "")
    ]


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = [BOS_ID, 0x41, EOS_ID]
    assert tokenizer.decode(ids) == "A"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "⟦bos⟧A⟦eos⟧"


def test_ids_that_name_no_token_add_nothing(tokenizer: Tokenizer) -> None:
    beyond = tokenizer.vocab_size
    assert tokenizer.decode([0x41, beyond, -1, 2**40, 0x42]) == "AB"
    assert tokenizer.token_bytes(beyond) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.token_string(beyond) is None


def test_vocabulary_and_ends(tokenizer: Tokenizer, directory: Path) -> None:
    assert tokenizer.vocab_size == 260
    assert tokenizer.eos_token_ids == (EOS_ID,)
    generation = directory / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [EOS_ID, USER_ID]}))
    try:
        assert Tokenizer.from_dir(directory).eos_token_ids == (EOS_ID, USER_ID)
        generation.write_text("[1]")
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            Tokenizer.from_dir(directory)
    finally:
        generation.unlink()


def test_bos_is_added_where_the_tokenizer_says_so(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("A") == [BOS_ID, 0x41]
    assert tokenizer.encode("A", add_special_tokens=False) == [0x41]
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_a_lone_surrogate_is_the_requests_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"U\+D800 at character 1"):
        tokenizer.encode("a\ud800")


def test_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hé"}]
    text = tokenizer.render_chat_template(messages)
    assert text == "⟦bos⟧⟦user⟧hé⟦assistant⟧"
    ids = tokenizer.apply_chat_template(messages)
    assert ids[:2] == [BOS_ID, USER_ID]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == ids[:-1]
    assert tokenizer.render_chat_template(messages, shout=True).startswith("⟦bos⟧!")


@pytest.mark.parametrize(
    "messages",
    [[{"role": "alien", "content": "x"}], [{"role": "user"}], [{"role": "user", "content": 3}]],
)
def test_what_the_template_refuses_is_the_requests_fault(
    tokenizer: Tokenizer, messages: list[dict[str, object]]
) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizer.apply_chat_template(messages)
    assert caught.value.param == "messages"


def test_reserved_template_arguments_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="chat_template can't be passed"):
        tokenizer.apply_chat_template([], chat_template="{{ 1 }}")


def test_no_template_is_said(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.from_dir(tmp_path).apply_chat_template([{"role": "user", "content": "x"}])


def test_broken_directories(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="can't be loaded"):
        Tokenizer.from_dir(tmp_path)


def test_other_kinds_of_tokenizer_are_refused(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["decoder"] = {"type": "Fuse"}
    file.write_text(json.dumps(spec))
    with pytest.raises(CheckpointError, match="byte-level"):
        Tokenizer.from_dir(tmp_path)


@needs_deepseek
@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_deepseek_texts_come_back(deepseek: Tokenizer, text: str) -> None:
    ids = deepseek.encode(text, add_special_tokens=False)
    pieces, rest = pushed(deepseek, ids)
    assert "".join(pieces) + rest == deepseek._backend.decode(ids, skip_special_tokens=True)
    assert "".join(pieces).lstrip(" ") == text.lstrip(" ")  # add_prefix_space is set there


@needs_deepseek
@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 129_279), max_size=30), skip=st.booleans())
def test_deepseek_ids_come_out_as_the_library_decodes_them(
    deepseek: Tokenizer, ids: list[int], skip: bool
) -> None:
    expected = deepseek._backend.decode(ids, skip_special_tokens=skip)
    assert deepseek.decode(ids, skip_special_tokens=skip) == expected


@needs_deepseek
def test_deepseek_splits_emoji_over_tokens(deepseek: Tokenizer) -> None:
    ids = deepseek.encode("x😀", add_special_tokens=False)
    pieces, rest = pushed(deepseek, ids)
    assert len(ids) == 3
    assert pieces[1:] == ["", "😀"]
    assert rest == ""
