"""/tokenize and /detokenize."""

import httpx2
from tests.server.byte_tokenizer import ASSISTANT_ID, BOS_ID, USER_ID

ASK = [{"role": "user", "content": "a"}]


def test_tokenize_a_prompt(http: httpx2.Client) -> None:
    answer = http.post("/tokenize", json={"model": "fake-model", "prompt": "aé"})
    assert answer.json() == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [BOS_ID, 97, 0xC3, 0xA9],
        "token_strs": None,
    }
    body = {"prompt": "a é", "add_special_tokens": False, "return_token_strs": True}
    assert http.post("/tokenize", json=body).json() == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [97, 32, 0xC3, 0xA9],
        "token_strs": ["a", "Ġ", "Ã", "©"],
    }
    body = {"prompt": "", "add_special_tokens": False}
    assert http.post("/tokenize", json=body).json()["tokens"] == []


def test_tokenize_a_conversation(http: httpx2.Client) -> None:
    tokens = http.post("/tokenize", json={"messages": ASK}).json()["tokens"]
    assert tokens == [BOS_ID, USER_ID, 97, ASSISTANT_ID]
    body = {"messages": ASK, "add_generation_prompt": False}
    assert http.post("/tokenize", json=body).json()["tokens"] == tokens[:-1]
    bad = http.post("/tokenize", json={"messages": [{"role": "alien", "content": ""}]})
    assert bad.status_code == 400
    assert "unknown role alien" in bad.json()["error"]["message"]


def test_there_and_back(http: httpx2.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "héllo 😀\n"}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "⟦bos⟧héllo 😀\n"}
    assert http.post("/detokenize", json={"tokens": [0xF0]}).json() == {"prompt": "�"}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
