"""What a decode step costs beside the model: CPU time, GPU idle time, sampling; writes JSON.

    python benchmarks/device/engine_step.py --output step.json

Runs the engine on a small checkpoint, where the CPU is what limits, with and without async
scheduling, after checking that both give the same tokens. Then times drawing alone at
DeepSeek-V3.2's vocabulary. `--small` proves the script on a CPU; its timings mean nothing.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from echokv.bench.report import environment
from echokv.config import EngineConfig
from echokv.engine.draw import MAX_ENDS, DrawInputs, Method, draw
from echokv.engine.engine import Engine
from echokv.engine.sampling_params import SamplingParams
from echokv.kernels.registry import load_kernels

VOCAB = 129_280
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-k, top-p": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "top-p": {"temperature": 1.0, "top_p": 0.95},
}
METHODS = dict(zip(WAYS, (Method.GREEDY, Method.PLAIN, Method.LIMITED, Method.SORTED), strict=True))


@dataclass(kw_only=True)
class Watch:
    """Times of captured steps, noted from outside while an engine runs."""

    engine: Engine
    waited_s: float = 0.0
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def __post_init__(self) -> None:
        runner = self.engine._parts.runner
        launch, graphs = runner.launch, runner._graphs

        def watched_launch(scheduled: Any) -> Any:
            step = launch(scheduled)
            read = step.read

            def watched_read() -> Any:
                start = time.perf_counter()
                result = read()
                self.waited_s += time.perf_counter() - start
                return result

            step.read = watched_read  # type: ignore[method-assign]
            return step

        runner.launch = watched_launch  # type: ignore[method-assign]
        if graphs is not None:
            self._watch_replays(graphs)

    def _watch_replays(self, graphs: Any) -> None:
        run, fill = graphs.run, graphs._inputs.fill

        def watched_fill(*args: Any) -> None:
            fill(*args)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.events.append((begin, end))

        def watched_run(*args: Any) -> None:
            run(*args)
            self.events[-1][1].record()

        graphs._inputs.fill, graphs.run = watched_fill, watched_run

    def gpu_us(self) -> dict[str, float | None]:
        """Medians: GPU time of a replay, and from its end to the begin of the next."""
        if not self.events:
            return {"gpu_busy_us": None, "gpu_idle_us": None}
        torch.cuda.synchronize()
        busy = [begin.elapsed_time(end) * 1e3 for begin, end in self.events]
        idle = [
            before[1].elapsed_time(after[0]) * 1e3
            for before, after in zip(self.events, self.events[1:], strict=False)
        ]
        return {"gpu_busy_us": statistics.median(busy), "gpu_idle_us": statistics.median(idle)}


def make_engine(options: argparse.Namespace, batch: int, ahead: bool) -> Engine:
    """An engine for exactly so many requests, with room for the rows of all of them."""
    return Engine(
        EngineConfig(
            model=str(options.model),
            host_pool_gib=options.host_pool_gib,
            device_pool_tokens=options.device_pool_tokens,
            max_model_len=options.prompt_tokens + options.steps + 64,
            max_num_seqs=batch,
            max_num_batched_tokens=max(2048, batch),
            enable_prefix_caching=False,
            async_scheduling=ahead,
        )
    )


def run_steps(
    engine: Engine, options: argparse.Namespace, batch: int, params: SamplingParams
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Decode with a constant batch: medians a step, and what was said."""
    watch = Watch(engine=engine)
    generator = torch.Generator().manual_seed(1)
    for index in range(batch):
        prompt = torch.randint(5, 250, (options.prompt_tokens,), generator=generator).tolist()
        engine.add_request(str(index), prompt, params)
    tokens: dict[str, list[int]] = {str(index): [] for index in range(batch)}
    walls, busy = [], []
    while engine.has_work:
        watch.waited_s, start = 0.0, time.perf_counter()
        outputs = engine.step()
        wall = time.perf_counter() - start
        for output in outputs:
            tokens[output.request_id] += output.token_ids
        shortest = min(len(one) for one in tokens.values())
        if shortest > 8 and max(len(one) for one in tokens.values()) < options.steps:
            walls.append(wall * 1e6)
            busy.append((wall - watch.waited_s) * 1e6)
        elif not walls:
            watch.events.clear()
    report = {
        "steps": len(walls),
        "step_us": statistics.median(walls),
        "cpu_us": statistics.median(busy),
    }
    return report | watch.gpu_us(), tokens


def engine_steps(options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Every batch, way to sample and mode; False when the modes disagree on a token."""
    results, same = [], True
    for batch in options.batches:
        said = {}
        for ahead in (True, False):
            for way in options.sampling:
                params = SamplingParams(
                    max_tokens=options.steps, ignore_eos=True, seed=1, **WAYS[way]
                )
                engine = make_engine(options, batch, ahead)
                report, said[way, ahead] = run_steps(engine, options, batch, params)
                engine.close()
                results.append(
                    {"batch": batch, "sampling": way, "async_scheduling": ahead} | report
                )
                print(json.dumps(results[-1]), flush=True)
        same &= all(said[way, True] == said[way, False] for way in options.sampling)
    return results, same


def draw_times(device: torch.device, batches: list[int], vocab: int) -> list[dict[str, Any]]:
    """Microseconds of drawing alone, from logits to tokens, as a captured graph."""
    kernels = load_kernels("auto", device)
    results = []
    for batch in batches:
        logits = torch.randn(batch, vocab, device=device) * 3
        for way, values in WAYS.items():
            asked = SamplingParams(**values)
            row = (asked.temperature, asked.top_k or 2**31 - 1, asked.top_p, asked.min_p, 0.5)
            inputs = DrawInputs(
                torch.tensor([row] * batch, dtype=torch.float64, device=device).T.contiguous(),
                torch.full((batch, MAX_ENDS), -1, dtype=torch.int32, device=device),
            )
            took = median_us(
                device,
                lambda: draw(logits, inputs, METHODS[way], kernels),  # noqa: B023
            )
            results.append({"batch": batch, "vocab": vocab, "sampling": way, "draw_us": took})
            print(json.dumps(results[-1]), flush=True)
    return results


def median_us(device: torch.device, run: Callable[[], object], repeats: int = 30) -> float:
    """Median of graph replays on a GPU, of calls elsewhere."""
    if device.type != "cuda":
        times = []
        for _ in range(3):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(4):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 4)
    return statistics.median(times)


def main() -> int:
    """Run, write JSON, say where; 1 when the modes disagreed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="of the code that runs; default: the git checkout's")
    parser.add_argument("--model", type=Path, default=Path("examples/demo_model/checkpoint"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 13, 64])
    parser.add_argument(
        "--sampling", nargs="+", choices=WAYS, default=list(WAYS), help="in the engine's steps"
    )
    parser.add_argument("--steps", type=int, default=160, help="output tokens of each request")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--host-pool-gib", type=float, default=1.0)
    parser.add_argument("--device-pool-tokens", type=int, default=20_000)
    parser.add_argument("--small", action="store_true", help="toy sizes, for a CPU")
    options = parser.parse_args()
    if options.small:
        options.batches, options.steps, options.prompt_tokens = [2], 16, 40
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = environment(options.commit)
    sizes = ("batches", "steps", "prompt_tokens", "device_pool_tokens")
    report["sizes"] = {name: getattr(options, name) for name in sizes}
    report["draw"] = draw_times(device, options.batches, 1000 if options.small else VOCAB)
    report["steps"], report["same_tokens"] = engine_steps(options)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {options.output}; same tokens: {report['same_tokens']}")
    return 0 if report["same_tokens"] else 1


if __name__ == "__main__":
    sys.exit(main())
