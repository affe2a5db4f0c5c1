"""Every generated answer against a solver that only reads the prompt."""

import re
from random import Random

import pytest

from echokv.bench.filler import SPLITS, filler_lines, is_held_out, library_files
from echokv.bench.tasks import MOST_RECORDS, TASKS, kv_prompt, make_document, make_task
from echokv.errors import ConfigError


def count(text: str) -> int:
    """A tokenizer's stand-in: words, numbers in pairs of digits, and punctuation."""
    return len(re.findall(r"\d\d?|[^\W\d]+|[^\w\s]|\n", text))


def solve(task: str, prompt: str) -> str:
    text, _, question = prompt.rpartition("\n")
    if task.startswith("kv_"):
        (key,) = re.findall(r'"([^"]+)"', question)
        (value,) = re.findall(rf'^"{key}": "([^"]+)",?$', text, re.MULTILINE)
        return value
    if task == "passkey":
        return ", ".join(re.findall(r"^The passkey is (\d+)\.$", text, re.MULTILINE))
    if task == "sorting":
        numbers = re.findall(r"^Add (\d+) to the list\.$", text, re.MULTILINE)
        return ", ".join(sorted(numbers, key=int))
    if task == "variables":
        values = dict(re.findall(r"^(var_\d+) = (\w+)$", text, re.MULTILINE))
        (name,) = re.findall(r"var_\d+", question)
        while name in values:
            name = values[name]
        return name
    numbers = dict(re.findall(r"^The secret number of ([a-z-]+) is (\d+)\.$", text, re.MULTILINE))
    return ", ".join(numbers[name] for name in re.findall(r"[a-z]+-[a-z]+", question))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("target", [600, 4096])
def test_the_answer_follows_from_the_prompt(task: str, target: int) -> None:
    for seed in range(3):
        prompt, answer = make_task(task, target, count, seed)
        assert solve(task, prompt) == answer
        assert answer == answer.strip() != ""
        assert 0.8 * target - 100 <= count(prompt) <= target


@pytest.mark.parametrize("task", TASKS)
def test_an_instance_is_its_seed(task: str) -> None:
    assert make_task(task, 600, count, 1) == make_task(task, 600, count, 1)
    assert make_task(task, 600, count, 1) != make_task(task, 600, count, 2)


@pytest.mark.parametrize("task", TASKS)
def test_every_question_of_a_document_has_its_answer(task: str) -> None:
    document = make_document(task, 2000, count, Random(3), questions=5)
    assert 1 <= len(document.questions) <= 5
    for number, (_, answer) in enumerate(document.questions):
        assert solve(task, document.prompt(number)) == answer


def test_training_and_evaluation_read_different_files() -> None:
    train, held_out = (set(filler_lines(split)) for split in SPLITS)
    names = [file.name for file in library_files()]
    assert 0.1 < sum(map(is_held_out, names)) / len(names) < 0.3
    long_lines = {line for line in held_out if len(line) > 60}
    assert len(long_lines - train) > 0.9 * len(long_lines)


def test_names_run_out_without_hanging() -> None:
    document = make_document("kv_names", 10**6, count, Random(0))
    assert document.text.count('": "') == MOST_RECORDS


def test_records_from_elsewhere_become_the_same_format() -> None:
    records = [("a-1", "b-2"), ("c-3", "d-4")]
    assert kv_prompt(records, "c-3") == (
        '{\n"a-1": "b-2",\n"c-3": "d-4"\n}\n\nWhat is the value of "c-3"?'
    )


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="not one of passkey"):
        make_task("juggling", 600, count, 0)
    with pytest.raises(ConfigError, match="no room"):
        make_task("kv_uuid", 100, count, 0)
    with pytest.raises(ConfigError, match="no room"):
        make_task("sorting", 110, count, 0)
    with pytest.raises(ConfigError, match="not one of train"):
        filler_lines("test")
