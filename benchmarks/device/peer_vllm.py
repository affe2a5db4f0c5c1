"""Decode step times of vLLM, stock or with its host-resident mode, for the shapes of `decode.py`.

    python benchmarks/device/decode.py --cases dense --output ours.json
    python benchmarks/device/peer_vllm.py --model DIR/deepseek-v32-config --output peer.json \
        --ours ours.json

`--host-pool-gib 4 --kv-gib 2` runs HiSparse; `--weights fp8` the slice with experts (`decode.py
--cases slice --layers 10`). Each call is one engine and adds itself to the output. With `--turn
FILE` it starts up, says so in FILE.started, and measures once FILE exists, so that several engines
can compile at the same time and be measured one by one.

Needs vLLM on the path; knows nothing of echokv but the result that it is set beside. Random weights
(`load_format="dummy"`), KV in fp8. A step time is the wall time between two steps in each of which
every request got one token. vLLM calls its HiSparse connector, used alone, a debug path. The first
start on a machine compiles for about two minutes.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
}
_VOCABULARY = 129_280
_SETTLE_STEPS = 16
"""Untimed steps after every request decodes."""

_WEIGHTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {
        "n_routed_experts": 32,
        "first_k_dense_replace": 3,
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
        },
    },
}
"""What each kind of weights adds to config.json; without it the layers are dense."""


def main() -> int:
    """Measure every case, writing JSON after each."""
    options = _options()
    cases = [tuple(int(part) for part in case.split("x")) for case in options.cases]
    figures: dict[str, Any] = {
        "weights": options.weights,
        "layers": options.layers,
        "kv_gib": options.kv_gib,
        "host_pool_gib": options.host_pool_gib,
        "cases": {},
    }
    start = time.perf_counter()
    llm = _engine(options, cases)
    figures |= {"startup_s": time.perf_counter() - start, **_versions()}
    print(f"{_name(options)} started in {figures['startup_s']:.0f} s", flush=True)
    _await_turn(options.turn)
    for batch, context in cases:
        times = step_times(llm.llm_engine, batch, context, options.steps)
        if not times:
            print(f"{batch} x {context}: no two steps in which all requests decoded", flush=True)
            continue
        name = f"{batch} x {context}"
        figures["cases"][name] = _spread(times) | _beside(options, name, statistics.median(times))
        print(f"{_name(options)}, {name}: {figures['cases'][name]}", flush=True)
        _add(options.output, _name(options), figures)
    sys.stdout.flush()
    os._exit(0)  # nothing to save, and vLLM's teardown takes seconds


def step_times(engine: Any, batch: int, context: int, steps: int) -> list[float]:
    """Milliseconds of each step in which all requests decode, after one in which they do too.

    Args:
        engine: vLLM's LLMEngine.
        batch: requests.
        context: tokens of each prompt.
        steps: at most so many times.
    """
    from vllm import SamplingParams

    tokens = random.Random(batch)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=_output_len(batch, context, steps),
        ignore_eos=True,
        detokenize=False,
    )
    ids = [f"{batch}-{context}-{number}" for number in range(batch)]
    for name in ids:
        prompt = [tokens.randrange(_VOCABULARY) for _ in range(context)]
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    started: set[str] = set()
    start = time.perf_counter()
    while len(started) < batch:
        started |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    print(f"{batch} x {context}: prefilled in {time.perf_counter() - start:.1f} s", flush=True)
    for _ in range(_SETTLE_STEPS):
        engine.step()
    times = []
    whole = False  # whether the last step gave every request a token
    last = time.perf_counter()
    for _ in range(steps):
        outputs = engine.step()
        now = time.perf_counter()
        was_whole, whole = whole, len(outputs) == batch
        if was_whole and whole:
            times.append((now - last) * 1e3)
        last = now
    engine.abort_request(ids)
    while engine.has_unfinished_requests():
        engine.step()
    for _ in range(3):  # steps in flight end
        engine.step()
    return times


def _output_len(batch: int, context: int, steps: int) -> int:
    """Tokens that the first request may decode before the last has been prefilled and timed."""
    return batch * (context // _PREFILL_TOKENS + 2) + _SETTLE_STEPS + steps + 16


_PREFILL_TOKENS = 8192


def _engine(options: argparse.Namespace, cases: list[tuple[int, ...]]) -> Any:
    os.environ |= _SETTINGS
    # This folder has a kernels.py, which transformers would take for a package of that name.
    sys.path.remove(str(Path(__file__).parent.resolve()))
    from vllm import LLM

    extra: dict[str, Any] = {}
    if options.host_pool_gib is not None:
        import vllm.v1.hisparse.runtime as runtime

        # Memory of this virtual machine grows on use: its check would refuse what is there.
        runtime.check_hisparse_host_memory = lambda _: None
        extra["kv_transfer_config"] = {
            "kv_connector": "HiSparseConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_pool_gib": options.host_pool_gib},
        }
    config = {
        "num_hidden_layers": options.layers,
        "first_k_dense_replace": options.layers,
        "num_nextn_predict_layers": 0,
    }
    return LLM(
        model=str(options.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype="fp8",
        hf_overrides=config | _WEIGHTS[options.weights],
        max_model_len=max(c + _output_len(b, c, options.steps) for b, c in cases),
        max_num_seqs=max(16, *(batch for batch, _ in cases)),
        max_num_batched_tokens=_PREFILL_TOKENS,
        kv_cache_memory_bytes=int(options.kv_gib * 2**30),
        gpu_memory_utilization=options.free_share,
        enable_prefix_caching=False,
        **extra,
    )


def _await_turn(turn: Path | None) -> None:
    if turn is None:
        return
    turn.with_suffix(".started").touch()
    while not turn.exists():
        time.sleep(0.2)


def _name(options: argparse.Namespace) -> str:
    return f"{options.weights} {'stock' if options.host_pool_gib is None else 'HiSparse'}"


def _spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median": statistics.median(ordered),
        "mean": statistics.fmean(ordered),
        "p10": ordered[len(ordered) // 10],
        "p90": ordered[len(ordered) * 9 // 10],
        "count": len(ordered),
    }


def _beside(options: argparse.Namespace, case: str, theirs: float) -> dict[str, float]:
    """Our step of the same case, and its ratio to theirs; nothing where we have none."""
    if options.ours is None or not options.ours.exists():
        return {}
    ours = json.loads(options.ours.read_text())
    figures = ours.get("dense" if options.weights == "bf16" else "slice", {}).get(case, {})
    variant = figures.get("resident" if options.host_pool_gib is None else "offloaded")
    if variant is None:
        return {}
    own = variant["step_ms"]["median"]
    return {"ours": own, "ratio": own / theirs, "our_commit": ours["commit"]}


def _add(path: Path, name: str, figures: dict[str, Any]) -> None:
    """Put one engine's figures into a file that may hold others'."""
    result = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(result | {name: figures}, indent=2) + "\n")


def _versions() -> dict[str, str]:
    import torch
    import vllm

    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of config.json")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to add to")
    parser.add_argument("--ours", type=Path, help="result of decode.py to set beside")
    parser.add_argument("--weights", choices=_WEIGHTS, default="bf16", help="bf16: dense layers")
    parser.add_argument("--layers", type=int, default=10, help="decoder layers")
    parser.add_argument("--kv-gib", type=float, default=4.0, help="GiB of HBM for KV")
    parser.add_argument("--host-pool-gib", type=float, help="use HiSparse with so many GiB")
    parser.add_argument(
        "--cases", nargs="+", default=["1x8192", "13x8192", "13x24576"], help="BATCHxCONTEXT"
    )
    parser.add_argument("--steps", type=int, default=60, help="timed steps a case, at most")
    parser.add_argument("--turn", type=Path, help="wait for this file before measuring")
    parser.add_argument(
        "--free-share",
        type=float,
        default=0.15,
        help="of GPU memory that must be free at the start; KV takes --kv-gib whatever it is",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
