"""Stop conditions and withheld text, with a detokenizer that maps ids to letters."""

from typing import Any

import pytest

from echokv.engine.output_stream import OutputStream
from echokv.engine.outputs import FinishReason, RequestOutput
from echokv.engine.request import Request
from echokv.engine.sampler import Sampled
from echokv.engine.sampling_params import SamplingParams

EOS = 0


class LetterDetokenizer:
    """Token 97 is "a"; nothing is ever incomplete."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


def run(text: str, *, total: int = 1000, **params: Any) -> list[RequestOutput]:
    request = Request("r", [1, 2], SamplingParams(**params), max_total_tokens=total, seed=0)
    stream = OutputStream(request, LetterDetokenizer(), (EOS,))  # type: ignore[arg-type]
    outputs = []
    for letter in text:
        outputs.append(stream.push(Sampled(token_id=ord(letter), logprobs=None)))
        if outputs[-1].finished:
            break
    return outputs


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def test_end_of_sequence_stops_and_adds_no_text() -> None:
    outputs = run("ab\0cd")
    assert text_of(outputs) == "ab"
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].num_output_tokens == 3


def test_ignore_eos_goes_on() -> None:
    assert text_of(run("ab\0c", ignore_eos=True)) == "ab\0c"


def test_max_tokens_ends_with_length() -> None:
    outputs = run("abcdef", total=5)
    assert text_of(outputs) == "abc"
    assert outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("stop", ["c", "cd", "bcde", "abcd"])
def test_a_stop_string_is_cut_and_never_seen(stop: str) -> None:
    outputs = run("xxabcdefgh", stop=(stop,))
    assert text_of(outputs) == "xxabcdefgh".split(stop, maxsplit=1)[0]
    assert outputs[-1].stop_reason == stop
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_the_earliest_of_several_stop_strings_wins() -> None:
    assert text_of(run("hello world", stop=("wor", "o w"))) == "hell"


def test_text_that_only_began_a_stop_string_is_handed_on() -> None:
    outputs = run("ababx", stop=("abc",))
    assert text_of(outputs) == "ababx"
    assert [output.text for output in outputs] == ["", "", "ab", "", "abx"]


def test_withheld_text_comes_with_the_last_output() -> None:
    assert text_of(run("xab", total=5, stop=("abc",))) == "xab"


def test_stop_token_ids_stop_and_are_named() -> None:
    outputs = run("abcd", stop_token_ids=(ord("c"),))
    assert text_of(outputs) == "abc"
    assert outputs[-1].stop_reason == ord("c")


def test_min_tokens_outlasts_every_stop() -> None:
    outputs = run("ab\0bb", min_tokens=4, stop=("b",), stop_token_ids=(ord("a"),))
    assert len(outputs) == 4
    assert outputs[-1].finish_reason is FinishReason.STOP
