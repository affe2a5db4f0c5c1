"""Decode step times of vLLM, stock or with its host-resident mode, for the shapes of `decode.py`.

    python benchmarks/device/decode.py --cases dense --output ours.json
    python benchmarks/device/peer_vllm.py --model DIR/deepseek-v32-config --output peer.json

`--ours ours.json` prints both side by side; `--host-pool-gib 16 --kv-gib 2` runs HiSparse.

Needs vLLM on the path; knows nothing of echokv but the result that it is set beside. Random weights
(`load_format="dummy"`), the first layers dense in bf16, KV in fp8. A step time is the median wall
time between two steps in which every request decodes. vLLM calls its HiSparse connector, used
alone, a debug path. The first start on a machine compiles for about two minutes.
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


def main() -> int:
    """Measure every case, writing JSON after each."""
    options = _options()
    cases = [tuple(int(part) for part in case.split("x")) for case in options.cases]
    longest = max(context for _, context in cases) + options.steps + 64
    result: dict[str, Any] = {
        "layers": options.layers,
        "kv_gib": options.kv_gib,
        "host_pool_gib": options.host_pool_gib,
        "cases": {},
    }
    start = time.perf_counter()
    llm = _engine(options, longest, max(batch for batch, _ in cases))
    result |= {"startup_s": time.perf_counter() - start, **_versions()}
    print(f"started in {result['startup_s']:.0f} s", flush=True)
    for batch, context in cases:
        times = step_times(llm.llm_engine, batch, context, options.steps)
        name = f"{batch} x {context}"
        result["cases"][name] = {
            "median": statistics.median(times),
            "p10": sorted(times)[len(times) // 10],
            "p90": sorted(times)[len(times) * 9 // 10],
            "count": len(times),
        }
        print(f"{name}: {result['cases'][name]}", flush=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    if options.ours is not None:
        _beside(result["cases"], json.loads(options.ours.read_text())["dense"])
    return 0


def step_times(engine: Any, batch: int, context: int, steps: int) -> list[float]:
    """Milliseconds of each step in which all requests decode.

    Args:
        engine: vLLM's LLMEngine.
        batch: requests.
        context: tokens of each prompt.
        steps: timed.
    """
    from vllm import SamplingParams

    tokens = random.Random(batch)
    params = SamplingParams(
        temperature=0.0, max_tokens=steps + 40, ignore_eos=True, detokenize=False
    )
    for number in range(batch):
        prompt = [tokens.randrange(_VOCABULARY) for _ in range(context)]
        engine.add_request(f"{batch}-{context}-{number}", {"prompt_token_ids": prompt}, params)
    started: set[str] = set()
    while len(started) < batch:
        started |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    for _ in range(8):  # the pipeline of steps settles
        engine.step()
    times = []
    last = time.perf_counter()
    for _ in range(steps):
        engine.step()
        now = time.perf_counter()
        times.append((now - last) * 1e3)
        last = now
    while engine.has_unfinished_requests():
        engine.step()
    return times


def _engine(options: argparse.Namespace, longest: int, batch: int) -> Any:
    os.environ |= _SETTINGS
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
    return LLM(
        model=str(options.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype="fp8",
        hf_overrides={
            "num_hidden_layers": options.layers,
            "first_k_dense_replace": options.layers,
            "num_nextn_predict_layers": 0,
        },
        max_model_len=longest,
        max_num_seqs=max(batch, 16),
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=int(options.kv_gib * 2**30),
        enable_prefix_caching=False,
        **extra,
    )


def _versions() -> dict[str, str]:
    import torch
    import vllm

    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
    }


def _beside(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Print the cases that both have."""
    for name, times in theirs.items():
        if name in ours:
            own = ours[name]["resident"]["step_ms"]["median"]
            ratio = own / times["median"]
            print(f"{name}: echokv {own:.3f} ms, vLLM {times['median']:.3f} ms, ratio {ratio:.3f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of config.json")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--ours", type=Path, help="result of decode.py to set beside")
    parser.add_argument("--layers", type=int, default=10, help="decoder layers, all dense")
    parser.add_argument("--kv-gib", type=float, default=20.0, help="GiB of HBM for KV")
    parser.add_argument("--host-pool-gib", type=float, help="use HiSparse with so many GiB")
    parser.add_argument(
        "--cases", nargs="+", default=["1x8192", "13x8192", "13x24576"], help="BATCHxCONTEXT"
    )
    parser.add_argument("--steps", type=int, default=40, help="timed steps a case")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
