"""Workloads: exact lengths, shared prefixes where a trace says so, errors that name the file."""

import json
from pathlib import Path

import pytest

from echokv.bench.workload import (
    BenchRequest,
    TraceShape,
    file_workload,
    random_workload,
    trace_workload,
)
from echokv.errors import ConfigError


def write_trace(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_random_prompts_have_the_lengths_asked_for() -> None:
    requests = random_workload(5, input_len=63, output_len=7, prefix_len=10, vocab_size=17, seed=3)
    assert [len(request.prompt) for request in requests] == [73] * 5
    assert {request.output_len for request in requests} == {7}
    assert len({request.prompt[:10] for request in requests}) == 1
    assert len({request.prompt for request in requests}) == 5
    assert all(token in range(17) for request in requests for token in request.prompt)


def test_random_lengths_stay_in_their_range_and_vary() -> None:
    requests = random_workload(200, input_len=100, output_len=10, range_ratio=0.5, seed=1)
    lengths = {len(request.prompt) for request in requests}
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(lengths) > 20
    assert {request.output_len for request in requests} == set(range(5, 16))


def test_the_same_seed_gives_the_same_workload() -> None:
    first, again, other = (random_workload(3, input_len=9, output_len=2, seed=s) for s in (5, 5, 6))
    assert first == again
    assert first != other


def test_mooncake_requests_share_what_their_hash_ids_share(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "trace.jsonl",
        [
            {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
            {"timestamp": 40, "input_length": 1000, "output_length": 6, "hash_ids": [0, 3]},
            {"timestamp": 277, "input_length": 9, "output_length": 1, "hash_ids": [4]},
        ],
    )
    first, second, third = trace_workload(trace, None, shape=TraceShape())
    assert [len(request.prompt) for request in (first, second, third)] == [1030, 1000, 9]
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:1000] != second.prompt[512:1000]
    assert [request.output_len for request in (first, second, third)] == [5, 6, 1]
    assert [request.arrival_s for request in (first, second, third)] == [0.0, 0.04, 0.277]
    assert trace_workload(trace, 2, shape=TraceShape()) == [first, second]


def test_a_scaled_trace_keeps_its_sharing(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "trace.jsonl",
        [
            {"timestamp": 0, "input_length": 1024, "output_length": 64, "hash_ids": [7, 8]},
            {"timestamp": 0, "input_length": 1024, "output_length": 3, "hash_ids": [7, 9]},
        ],
    )
    shape = TraceShape(length_scale=1 / 16, max_input_len=40)
    first, second = trace_workload(trace, None, shape=shape)
    assert len(first.prompt) == len(second.prompt) == 40  # 64, cut
    assert first.prompt[:32] == second.prompt[:32]
    assert first.prompt[32:] != second.prompt[32:]
    assert (first.output_len, second.output_len) == (4, 1)


def test_azure_traces_give_lengths_and_arrivals(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,48,10\n"
        "2023-11-16 18:17:04.9799600,31,8\n"
    )
    first, second = trace_workload(trace, None, shape=TraceShape())
    assert (len(first.prompt), first.output_len, first.arrival_s) == (48, 10, 0.0)
    assert (len(second.prompt), second.output_len, second.arrival_s) == (31, 8, 1.0)


def test_files_of_prompts(tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("one\n\ntwo words\n")
    assert file_workload(text, None, output_len=4) == [
        BenchRequest(prompt="one", output_len=4),
        BenchRequest(prompt="two words", output_len=4),
    ]
    jsonl = tmp_path / "prompts.jsonl"
    jsonl.write_text('{"prompt": "a"}\n{"prompt": [1, 2], "output_len": 9}\n')
    assert file_workload(jsonl, None, output_len=4) == [
        BenchRequest(prompt="a", output_len=4),
        BenchRequest(prompt=(1, 2), output_len=9),
    ]
    assert len(file_workload(jsonl, 1, output_len=4)) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trace.jsonl", '{"timestamp": 0}\n'),
        ("trace.jsonl", "not json\n"),
        ("trace.jsonl", ""),
        ("trace.csv", "A,B\n1,2\n"),
        ("trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n"),
        ("trace.jsonl", None),
    ],
)
def test_a_bad_trace_is_an_error_that_names_it(
    tmp_path: Path, name: str, content: str | None
) -> None:
    trace = tmp_path / name
    if content is not None:
        trace.write_text(content)
    with pytest.raises(ConfigError, match=name):
        trace_workload(trace, None, shape=TraceShape())


def test_a_bad_file_of_prompts_is_an_error_that_names_it(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.txt"):
        file_workload(latin, None, output_len=1)


def test_a_range_ratio_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1\.0"):
        random_workload(1, input_len=1, output_len=1, range_ratio=1.0)
