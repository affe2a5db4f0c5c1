"""Decoding at full model scale on one GPU: step times, the price of offloading, throughput.

    python benchmarks/device/decode.py --output decode.json                 # on a GPU
    python benchmarks/device/decode.py --small --output small.json          # anywhere

One process makes the model once (61 layers, 32 of 256 experts, block fp8) and runs every case in
the product's engine: KV filled at random, selections replayed at a given hit rate after the real
indexer was paid for. Variants of a case take turns. A comparison counts only if both decode the
same tokens. The result is written after every case. `--small` runs the same code at toy sizes; its
times mean nothing.
"""

import argparse
import dataclasses
import itertools
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from echokv.attention import sparse_mla
from echokv.bench import decode_report, report
from echokv.bench.decode import name_of
from echokv.bench.decode_engine import LoadedModel, PoolSizes, SharedRows
from echokv.bench.decode_preset import preset_config
from echokv.bench.decode_replay import SelectionSource, Turnover, hit_rates, turnover_rows
from echokv.bench.decode_run import Steps, run_steps, run_throughput
from echokv.bench.decode_sizes import TokenBytes, sizes_for_batch, sizes_for_bytes
from echokv.config import EngineConfig
from echokv.errors import CapacityError, EchoKVError
from echokv.memory.slots import BLOCK_TOKENS, blocks_for


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What is measured: real sizes, or toy ones for a machine without a GPU."""

    preset: str
    layers: int
    dense_layers: int  # of "dense", which peers run too: all layers, in bf16
    long: int  # context of the comparisons
    short: int  # context of the light load, below the smallest device pool
    device_pool: int
    peer_cases: tuple[tuple[int, int], ...]  # batch, context
    peer_hbm_bytes: int  # for KV of the offloaded side there
    batch: int
    throughput_contexts: tuple[int, int]
    output_len: int
    budgets_gb: tuple[float, ...]
    host_tokens: int  # most that host memory holds
    paper_host_tokens: int
    row_pools: tuple[int, ...]  # tokens: equal row pools, the paper's accounting


REAL = Scale(
    preset="deepseek-v3.2-dp8-slice",
    layers=61,
    dense_layers=10,
    long=32_768,
    short=4096,
    device_pool=200_000,
    peer_cases=((1, 8192), (13, 8192), (13, 24_576)),
    peer_hbm_bytes=2 * 2**30,
    batch=13,
    throughput_contexts=(80_000, 100_000),
    output_len=256,
    budgets_gb=(27.0, 5.3, 19.0, 15.0, 9.6),
    host_tokens=2_200_000,
    paper_host_tokens=1_800_000,
    row_pools=(325_000, 200_000, 110_000),
)
SMALL = Scale(
    preset="small",
    layers=2,
    dense_layers=2,
    long=700,
    short=150,
    device_pool=400,
    peer_cases=((1, 200), (2, 200)),
    peer_hbm_bytes=1_600_000,
    batch=2,
    throughput_contexts=(800, 1000),
    output_len=3,
    budgets_gb=(0.006, 0.0045),
    host_tokens=10_000,
    paper_host_tokens=4_000,
    row_pools=(2000, 1200),
)


class Bench:
    """One loaded model and the cases that run on it.

    Args:
        options: the command line.
        scale: sizes.
        loaded: the model.
        save: takes a case's name and what is known of it so far.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        scale: Scale,
        loaded: LoadedModel,
        save: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._options = options
        self._scale = scale
        self._loaded = loaded
        self._save = save
        self._shared: SharedRows | None = None
        self._measured: dict[PoolSizes, dict[str, Any]] = {}  # throughput, by side
        self._how = Steps(
            steps=options.steps, rounds=options.rounds, warmup_steps=3, profile=options.profile
        )

    def peers(self) -> dict[str, Any]:
        """Steps by the real indexer, resident and offloaded: what peers' steps are compared with.

        The offloaded side has `peer_hbm_bytes` for rows, index keys and metadata.
        """
        cases = {}
        for batch, context in self._scale.peer_cases:
            longest = context + self._how.room
            variants = [
                self._batch(batch, longest, offload=False, device=None),
                self._few_bytes(batch, longest),
            ]
            try:
                figures = run_steps(
                    self._loaded, variants, lambda _: None, [context] * batch, self._how
                )
            except EchoKVError as error:  # the other cases still say something
                figures = {"error": str(error)}
            cases[f"{batch} x {context}"] = figures
        return cases

    def _few_bytes(self, batch: int, longest: int) -> PoolSizes:
        loaded = self._loaded
        host_tokens = batch * blocks_for(longest) * BLOCK_TOKENS
        sizes = sizes_for_bytes(
            loaded.config,
            TokenBytes.of(loaded.config, loaded.row_format, loaded.index_key_format),
            offload=True,
            hbm_bytes=self._scale.peer_hbm_bytes,
            lengths=[longest] * batch,
            max_host_tokens=host_tokens,
        )
        if sizes.batch < batch:
            raise CapacityError(
                f"{self._scale.peer_hbm_bytes} bytes of HBM are enough for {sizes.batch} of"
                f" {batch} requests of {longest} tokens"
            )
        return dataclasses.replace(sizes, device_tokens=min(sizes.device_tokens, host_tokens))

    def offload(self) -> dict[str, Any]:
        """A batch of long contexts at hit rate 0.98, offloaded against resident."""
        return self._compare(self._scale.batch, self._scale.long, "0.98", self._scale.device_pool)

    def few_misses(self) -> dict[str, Any]:
        """The same with 37 rows of a layer's 26,624 missing, what the paper recalls."""
        return self._compare(self._scale.batch, self._scale.long, "0.9986", self._scale.device_pool)

    def offload_inline(self) -> dict[str, Any]:
        """The offloaded side of that with rows recalled where attention asks, not beside."""
        scale = self._scale
        longest = scale.long + self._how.room
        sizes = self._batch(scale.batch, longest, offload=True, device=scale.device_pool)
        beside, sparse_mla.RECALL_BESIDE = sparse_mla.RECALL_BESIDE, False
        try:
            figures = run_steps(
                self._loaded, [sizes], _source("0.98"), [scale.long] * scale.batch, self._how
            )
        finally:
            sparse_mla.RECALL_BESIDE = beside
        return {"variants": figures, "ratio": {}}

    def paper_rates(self) -> dict[str, Any]:
        """The same at the hit rates that the paper reports, a layer."""
        return self._compare(self._scale.batch, self._scale.long, "paper", self._scale.device_pool)

    def light(self) -> dict[str, Any]:
        """One short request, every row of it resident in either case."""
        room = blocks_for(self._scale.short + self._how.room) * BLOCK_TOKENS
        pool = max(room, 2 * self._loaded.config.index_topk)
        return self._compare(1, self._scale.short, "0.98", pool)

    def equal_bytes(self) -> dict[str, Any]:
        """Throughput at equal bytes of HBM for rows, index keys and metadata."""
        return self._throughput("equal-bytes", self._byte_pools())

    def equal_rows(self) -> dict[str, Any]:
        """Throughput at equal row pools, index keys not counted: the paper's accounting."""
        return self._throughput("equal-rows", self._row_pools())

    def close(self) -> None:
        """Give back what cases shared."""
        if self._shared is not None:
            self._shared.close()

    def _byte_pools(self) -> dict[str, list[PoolSizes]]:
        loaded, scale = self._loaded, self._scale
        each = TokenBytes.of(loaded.config, loaded.row_format, loaded.index_key_format)
        return {
            f"{gigabytes} GB": [
                sizes_for_bytes(
                    loaded.config,
                    each,
                    offload=offload,
                    hbm_bytes=int(gigabytes * 1e9),
                    lengths=self._totals,
                    max_host_tokens=scale.host_tokens,
                )
                for offload in (True, False)
            ]
            for gigabytes in self._options.budgets or scale.budgets_gb
        }

    def _row_pools(self) -> dict[str, list[PoolSizes]]:
        topk, host = self._loaded.config.index_topk, self._scale.paper_host_tokens
        return {
            f"{pool} tokens": [
                self._first_requests(host, device=pool, most=pool // topk - 1),
                self._first_requests(pool, device=None, most=len(self._totals)),
            ]
            for pool in self._options.row_pools or self._scale.row_pools
        }

    def _first_requests(self, room: int, *, device: int | None, most: int) -> PoolSizes:
        """The first requests that fit so many slots; offloaded where `device` slots are given."""
        taken = [blocks_for(total) * BLOCK_TOKENS for total in self._totals[:most]]
        batch = sum(slots <= room for slots in itertools.accumulate(taken))
        slots = sum(taken[:batch])
        return PoolSizes(
            offload=device is not None,
            batch=batch,
            max_model_len=max(self._totals[:batch]),
            host_tokens=slots,
            device_tokens=device or slots,
        )

    @property
    def _contexts(self) -> list[int]:
        """Tokens of each request of the throughput cases, in the order in which all come."""
        lengths = random.Random(0)
        return [lengths.randint(*self._scale.throughput_contexts) for _ in range(64)]

    @property
    def _totals(self) -> list[int]:
        return [context + self._output_len for context in self._contexts]

    @property
    def _output_len(self) -> int:
        return self._options.output_len or self._scale.output_len

    def _shared_rows(self) -> SharedRows:
        """Host memory for the largest host pool of every throughput case that was asked for."""
        if self._shared is None:
            pools = {"equal-bytes": self._byte_pools, "equal-rows": self._row_pools}
            cases = [pools[case]() for case in pools if case in self._options.cases]
            tokens = max(
                sizes.host_tokens
                for case in cases
                for sides in case.values()
                for sizes in sides
                if sizes.offload
            )
            self._shared = SharedRows(self._loaded, tokens)
            print(f"{tokens} tokens of host memory in {self._shared.seconds:.1f} s", flush=True)
        return self._shared

    def _compare(
        self, batch: int, context: int, rate: str | None, device_pool: int
    ) -> dict[str, Any]:
        longest = context + self._how.room
        variants = [
            self._batch(batch, longest, offload=offload, device=device_pool if offload else None)
            for offload in (True, False)
        ]
        lengths = [context] * batch
        figures = run_steps(self._loaded, variants, _source(rate), lengths, self._how)
        return {"variants": figures, "ratio": decode_report.ratios(figures)}

    def _throughput(self, case: str, pools: dict[str, list[PoolSizes]]) -> dict[str, Any]:
        """Both sides of every pool, saved after each."""
        shared, found = self._shared_rows(), {}
        pinned = {"pinned_bytes": shared.memory.numel(), "pinned_s": shared.seconds}
        for name, variants in pools.items():
            # Two cases may have a side in common, without offload: as many requests fit both.
            fresh = [one for one in variants if one not in self._measured]
            contexts = [self._contexts[: one.batch] for one in fresh]
            try:
                taken = run_throughput(
                    self._loaded, fresh, _source("paper"), contexts, self._output_len, shared
                )
                self._measured |= zip(fresh, taken.values(), strict=True)
                figures = {name_of(one): self._measured[one] for one in variants}
                found[name] = {"variants": figures, "ratio": decode_report.ratios(figures)} | pinned
            except EchoKVError as error:  # the other pools still say something
                found[name] = {"error": str(error)}
            print(f"{case}, {name}: {found[name].get('ratio', found[name])}", flush=True)
            self._save(case, found)
        return found

    def _batch(self, batch: int, longest: int, *, offload: bool, device: int | None) -> PoolSizes:
        return sizes_for_batch(
            self._loaded.config,
            offload=offload,
            batch=batch,
            longest=longest,
            device_tokens=device,
            host_tokens=None,
        )


def _source(rate: str | None) -> Callable[[LoadedModel], SelectionSource | None]:
    def make(loaded: LoadedModel) -> SelectionSource | None:
        if rate is None:
            return None
        topk, layers = loaded.config.index_topk, len(loaded.config.index_layers)
        return Turnover(turnover_rows(hit_rates(rate, layers), topk), topk, loaded.device)

    return make


CASES = {
    "dense": Bench.peers,
    "slice": Bench.peers,
    "offload": Bench.offload,
    "few-misses": Bench.few_misses,
    "offload-inline": Bench.offload_inline,
    "light": Bench.light,
    "paper-rates": Bench.paper_rates,
    "equal-rows": Bench.equal_rows,
    "equal-bytes": Bench.equal_bytes,
}
"""In the order they run; "dense" has a model of its own: dense layers in bf16."""


def main() -> int:
    """Run the cases, writing JSON after each; 1 when one failed."""
    options = _options()
    scale = SMALL if options.small else REAL
    result: dict[str, Any] = report.environment(options.commit) | {
        "scale": dataclasses.asdict(scale)
    }
    failed = False
    for group in (["dense"], [case for case in CASES if case != "dense"]):
        wanted = [case for case in group if case in options.cases]
        if wanted:
            failed |= not _run_group(options, scale, wanted, result)
    return 1 if failed else 0


def _run_group(
    options: argparse.Namespace, scale: Scale, cases: list[str], result: dict[str, Any]
) -> bool:
    dense = cases == ["dense"]
    raw = preset_config(
        scale.preset,
        num_layers=scale.dense_layers if dense else options.layers or scale.layers,
        dense_layers=scale.dense_layers if dense else None,
        weights="bf16" if dense or options.small else "fp8",
    )
    good = True
    with TemporaryDirectory(prefix="echokv-decode-") as folder:
        config = EngineConfig(
            model=folder, backend=options.backend, max_waiting_requests=2**20, seed=1
        )
        loaded = LoadedModel.make(raw, Path(folder), config)
        result["dense model" if dense else "model"] = decode_report.run_figures(
            loaded, scale.preset
        )

        def save(case: str, figures: dict[str, Any]) -> None:
            result[case] = figures
            report.write_json(options.output, result)

        bench = Bench(options, scale, loaded, save)
        for case in cases:
            start = time.perf_counter()
            try:
                result[case] = CASES[case](bench)
            except EchoKVError as error:
                result[case] = {"error": str(error)}
            errors = _errors(result[case])
            good &= not errors
            for error in errors:
                print(f"{case}: {error}", file=sys.stderr)
            print(f"== {case}: {time.perf_counter() - start:.1f} s", flush=True)
            _show(case, result, options)
            report.write_json(options.output, result)
        bench.close()
    return good


def _errors(figures: dict[str, Any]) -> list[str]:
    """What went wrong in a case, or in one of the cases that it consists of."""
    parts = (figures, *(one for one in figures.values() if isinstance(one, dict)))
    return [part["error"] for part in parts if "error" in part]


def _show(case: str, result: dict[str, Any], options: argparse.Namespace) -> None:
    figures = result[case]
    model = result["dense model" if case == "dense" else "model"]
    cases = {case: figures} if "variants" in figures or "error" in figures else figures
    for name, one in cases.items():
        if "error" in one:
            continue
        variants = one.get("variants", one)
        print(f"-- {name}")
        shown = {**model, "variants": variants, "ratio": one.get("ratio", {})}
        decode_report.render(shown, Console(width=options.width))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="of the code that runs; default: the git checkout's")
    parser.add_argument("--small", action="store_true", help="toy sizes, for a CPU")
    parser.add_argument("--backend", default="auto", help="auto, reference, triton or cuda")
    parser.add_argument("--layers", type=int, help="layers of the fp8 slice; default: all")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--budgets", nargs="+", type=float, help="GB of equal-bytes")
    parser.add_argument("--row-pools", nargs="+", type=int, help="tokens of equal-rows")
    parser.add_argument("--output-len", type=int, help="tokens a request of the throughput cases")
    parser.add_argument("--steps", type=int, default=20, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant")
    parser.add_argument("--profile", type=int, help="kernels to print after step cases")
    parser.add_argument("--width", type=int, default=100, help="columns of the tables")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
