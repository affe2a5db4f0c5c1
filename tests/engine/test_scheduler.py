"""Admission, chunking, preemption and the progress of every request, without a model."""

import random

import pytest

from echokv.engine.blocks import HostBlocks
from echokv.engine.request import Request, RequestStatus
from echokv.engine.sampling_params import SamplingParams
from echokv.engine.scheduler import Scheduler, SchedulerLimits
from echokv.errors import RequestError


def make_scheduler(
    num_blocks: int = 16,
    *,
    max_running: int = 4,
    max_batched_tokens: int = 128,
    max_waiting: int = 100,
    max_model_len: int = 1024,
    prefix: bool = True,
) -> Scheduler:
    limits = SchedulerLimits(
        max_running=max_running,
        max_batched_tokens=max_batched_tokens,
        max_waiting=max_waiting,
        max_model_len=max_model_len,
    )
    return Scheduler(limits, HostBlocks(num_blocks, enable_prefix_caching=prefix))


def make_request(name: str, num_tokens: int, *, first: int = 0, total: int = 1024) -> Request:
    tokens = [first + index for index in range(num_tokens)]
    return Request(name, tokens, SamplingParams(), max_total_tokens=total, seed=0)


def run_step(scheduler: Scheduler) -> dict[str, tuple[int, int]]:
    """Schedule, advance and append a token where a request samples."""
    scheduled = scheduler.schedule()
    sampling = [item.request for item in scheduled if item.samples]
    scheduler.advance(scheduled)
    for request in sampling:
        request.token_ids.append(7)
        scheduler.settle(request)
    return {item.request.request_id: (item.start, item.count) for item in scheduled}


def test_a_long_prompt_is_chunked_and_decode_goes_on_beside_it() -> None:
    scheduler = make_scheduler(max_batched_tokens=100)
    scheduler.add(make_request("short", 10))
    scheduler.add(make_request("long", 250, first=1000))
    assert run_step(scheduler) == {"short": (0, 10), "long": (0, 90)}
    assert run_step(scheduler) == {"short": (10, 1), "long": (90, 99)}
    assert run_step(scheduler) == {"short": (11, 1), "long": (189, 61)}
    assert run_step(scheduler) == {"short": (12, 1), "long": (250, 1)}


def test_requests_beyond_max_running_wait_and_start_when_one_ends() -> None:
    scheduler = make_scheduler(max_running=1)
    first, second = make_request("first", 5), make_request("second", 5, first=100)
    scheduler.add(first)
    scheduler.add(second)
    assert list(run_step(scheduler)) == ["first"]
    assert second.status is RequestStatus.WAITING
    scheduler.finish(first)
    assert list(run_step(scheduler)) == ["second"]


def test_a_request_waits_for_host_blocks_without_being_refused() -> None:
    scheduler = make_scheduler(num_blocks=4)
    big, other = make_request("big", 200), make_request("other", 100, first=1000)
    scheduler.add(big)
    scheduler.add(other)
    run_step(scheduler)
    run_step(scheduler)
    assert other.status is RequestStatus.WAITING
    scheduler.finish(big)
    assert "other" in run_step(scheduler)


def test_the_newest_request_is_preempted_and_resumes_from_the_prefix_cache() -> None:
    scheduler = make_scheduler(num_blocks=4, max_batched_tokens=256)
    old, new = make_request("old", 64), make_request("new", 64, first=1000)
    scheduler.add(old)
    scheduler.add(new)
    while scheduler.num_preemptions == 0:
        assert run_step(scheduler)
        assert max(old.num_tokens, new.num_tokens) < 200
    assert new.status is RequestStatus.WAITING and old.status is RequestStatus.RUNNING
    tokens_before = list(new.token_ids)
    scheduler.finish(old)
    step = run_step(scheduler)
    assert step["new"][0] > 0  # found again in the prefix cache, not recomputed
    assert new.token_ids[: len(tokens_before)] == tokens_before
    assert new.num_cached_tokens == 0  # what the client is told is about its prompt's admission


def test_prefix_hits_skip_computed_blocks_but_leave_a_token_to_compute() -> None:
    scheduler = make_scheduler(max_batched_tokens=512)
    first = make_request("first", 128)
    scheduler.add(first)
    run_step(scheduler)
    scheduler.finish(first)
    scheduler.add(make_request("same", 128))
    scheduler.add(make_request("longer", 140))
    assert run_step(scheduler) == {"same": (64, 64), "longer": (128, 12)}
    assert scheduler.prefix_cache_hits == 64 + 128
    assert scheduler.prefix_cache_queries == 128 + 128 + 140


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param", "numbers"),
    [
        (1024, None, "prompt", ("1024",)),
        (2000, 1, "prompt", ("2000", "1024")),
        (1000, 25, "max_tokens", ("1000", "25", "1024")),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_the_numbers(
    prompt: int, max_tokens: int | None, param: str, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(RequestError) as caught:
        make_scheduler().check_fits(prompt, max_tokens)
    assert caught.value.param == param
    assert all(number in str(caught.value) for number in numbers)


def test_the_longest_request_that_fits_is_accepted() -> None:
    assert make_scheduler().check_fits(1000, 24) == 1024
    assert make_scheduler().check_fits(1023, None) == 1024


def test_a_full_queue_refuses_with_its_limit() -> None:
    scheduler = make_scheduler(max_waiting=1)
    scheduler.add(make_request("a", 4))
    with pytest.raises(RequestError, match="--max-waiting-requests") as caught:
        scheduler.add(make_request("b", 4))
    assert caught.value.code == "queue_full"


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_random_load_always_finishes_and_returns_every_block(seed: int, prefix: bool) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=9, max_running=3, max_batched_tokens=96, prefix=prefix)
    todo = {
        f"r{index}": make_request(
            f"r{index}", rng.randint(1, 400), first=rng.choice([0, 1000]), total=500
        )
        for index in range(30)
    }
    targets = {name: request.num_tokens + rng.randint(1, 100) for name, request in todo.items()}
    for request in todo.values():
        scheduler.add(request)
    for _ in range(5000):
        if not scheduler.has_work:
            break
        assert run_step(scheduler), "work is left but nothing was scheduled"
        owned = [b for r in scheduler.running for b in set(r.block_ids)]
        if not prefix:
            assert len(owned) == len(set(owned))
        for name, request in list(todo.items()):
            if request.num_tokens >= targets[name] or rng.random() < 0.002:
                scheduler.finish(todo.pop(name))
    assert not scheduler.has_work and not todo
    assert scheduler.blocks.num_held == 0


def run_ahead(scheduler: Scheduler, in_flight: list[Request], ends: set[str]) -> list[Request]:
    """A step whose predecessor's tokens become known only afterwards, as `Engine.step` does it."""

    def collect(step: list[Request]) -> None:
        for request in step:
            if request.status is not RequestStatus.FINISHED:
                request.token_ids.append(7)
                if request.request_id in ends or request.num_tokens >= request.max_total_tokens:
                    scheduler.finish(request)
                else:
                    scheduler.settle(request)

    if not scheduler.can_run_ahead():
        collect(in_flight)
        in_flight = []
    preemptions = scheduler.num_preemptions
    scheduled = scheduler.schedule()
    assert scheduler.num_preemptions == preemptions or not in_flight
    sampling = [item.request for item in scheduled if item.samples]
    scheduler.advance(scheduled)
    collect(in_flight)
    return sampling


def test_a_request_runs_ahead_of_its_tokens_but_not_past_its_last() -> None:
    scheduler = make_scheduler()
    request = make_request("r", 5, total=8)
    scheduler.add(request)
    computed, in_flight = [], []
    while scheduler.has_work:
        in_flight = run_ahead(scheduler, in_flight, set())
        computed.append(request.num_computed_tokens)
    assert computed == [5, 6, 7, 7]  # the last of eight tokens is never computed
    assert request.num_tokens == 8 and scheduler.blocks.num_held == 0


def test_a_block_filled_ahead_is_shared_only_if_its_request_goes_on() -> None:
    for ends in (set(), {"r"}):
        scheduler = make_scheduler()
        request = make_request("r", 62)
        scheduler.add(request)
        in_flight: list[Request] = []
        for _ in range(2):
            in_flight = run_ahead(scheduler, in_flight, set())
        assert request.num_tokens == 63  # and one token pending
        in_flight = run_ahead(scheduler, in_flight, ends)  # the 64th row is being written
        assert request.num_computed_tokens == 64
        hashes = request.block_hashes()
        assert len(hashes) == 1 and bool(scheduler.blocks.find_prefix(hashes)) is not bool(ends)


def test_nothing_runs_ahead_where_a_request_would_be_preempted_or_is_penalised() -> None:
    scheduler = make_scheduler(num_blocks=3)
    request = make_request("r", 127)
    scheduler.add(request)
    run_step(scheduler)
    assert scheduler.can_run_ahead()
    run_step(scheduler)
    assert scheduler.can_run_ahead()  # one block is left for its 129th token
    scheduler.add(make_request("next", 5, first=1000))
    assert set(run_step(scheduler)) == {"r"}  # that took the last one
    scheduler.blocks.allocate(scheduler.blocks.num_available)
    for _ in range(64):
        assert scheduler.can_run_ahead() == (request.num_tokens <= 192)
        request.token_ids.append(7)
    other = make_scheduler()
    tokens = make_request("p", 5).token_ids
    params = SamplingParams(presence_penalty=1)
    other.add(Request("p", tokens, params, max_total_tokens=9, seed=0))
    run_step(other)
    assert not other.can_run_ahead()


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_random_load_ahead_of_its_tokens_finishes_too(seed: int, prefix: bool) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=9, max_running=6, max_batched_tokens=96, prefix=prefix)
    todo = {}
    for index in range(30):
        tokens, first = rng.randint(1, 150), rng.choice([0, 1000])
        request = make_request(f"r{index}", tokens, first=first, total=tokens + rng.randint(1, 300))
        todo[f"r{index}"] = request
        scheduler.add(request)
    in_flight: list[Request] = []
    for _ in range(5000):
        ends = {name for name in todo if rng.random() < 0.002}
        in_flight = run_ahead(scheduler, in_flight, ends)
        if rng.random() < 0.004 and scheduler.running:
            scheduler.finish(rng.choice(scheduler.running))  # an abort, its token in flight
        owned = [b for r in scheduler.running for b in set(r.block_ids)]
        if not prefix:
            assert len(owned) == len(set(owned))
        if not (scheduler.has_work or in_flight):
            break
    assert not scheduler.has_work
    assert all(request.status is RequestStatus.FINISHED for request in todo.values())
    assert scheduler.num_preemptions > 0
    assert scheduler.blocks.num_held == 0
