"""Tables of docs/performance.md about peers that ran beside ours."""

from typing import Any

from performance_tables import Row, load, number

from echokv.bench.markdown import table

ENGINES = {"stock": "resident", "HiSparse": "offloaded"}
WEIGHTS = {"bf16": "10 dense layers, bf16", "fp8": "10 layers of the slice, fp8"}


def vllm_cases() -> list[tuple[str, str, str, Row]]:
    """(weights, engine, shape, figures) of every case that ran."""
    report = load("peer-vllm-h200")
    return [
        (weights, engine, shape, taken)
        for weights in WEIGHTS
        for engine in ENGINES
        for shape, taken in report.get(f"{weights} {engine}", {}).get("cases", {}).items()
    ]


def vllm() -> str:
    """Steps of vLLM and ours."""
    lines = []
    for weights, engine, shape, taken in vllm_cases():
        batch, context = shape.split(" x ")
        lines.append((
            WEIGHTS[weights], f"{batch} x {int(context):,}", f"vLLM {engine}",
            f"{taken['median']:.2f} ({taken['p10']:.2f} to {taken['p90']:.2f})", ENGINES[engine],
            number(taken.get("ours"), ".2f"), number(taken.get("ratio"), ".3f"),
        ))  # fmt: skip
    header = ("model", "batch x context", "peer", "its step, ms (10th to 90th percentile)", "ours",
              "step, ms", "ours to the peer's")  # fmt: skip
    return table(header, lines, words=5) if lines else "Not measured."


def _sglang(part: str) -> list[Row]:
    rows: list[Row] = load("peer-sglang-h200").get("timings", [])
    return [row for row in rows if row["part"] == part]


def swap_in() -> str:
    """SGLang's swap-in beside ours."""
    lines = [
        (row["batch"], f"{row['missing']:.0%}", f"{row['rows']:,}", row["us"]["HiSparse"]["median"],
         row["us"]["ours"]["median"], row["us"]["ours"]["p90"], row["us"]["begin_step too"]["mean"],
         f"{row['ratio']:.2f}")
        for row in _sglang("swap-in")
    ]  # fmt: skip
    header = ("batch", "missing", "rows", "HiSparse", "`make_resident`", "90th percentile",
              "with a quarter of `begin_step`, mean", "HiSparse to ours")  # fmt: skip
    return table(header, lines) if lines else "Not measured."


def segment() -> str:
    """Scores, top-k and residency of both sides."""
    rows = _sglang("segment")
    names = list(dict.fromkeys(name for row in rows for name in row["us"] if name != "ours"))
    lines: list[tuple[Any, ...]] = [
        (f"{row['batch']} x {row['context']:,}", f"{row['missing']:.0%}",
         *(row["us"][name]["median"] for name in names), row["us"]["ours"]["median"],
         f"{row['ratio']:.2f}")
        for row in rows
    ]  # fmt: skip
    header = ("batch x context", "missing", *(f"DeepGEMM + {name.split(', ')[1]} + HiSparse"
                                              for name in names), "ours",
              "the faster to ours")  # fmt: skip
    return table(header, lines) if lines else "Not measured."


def topk() -> str:
    """Top-k alone, of SGLang and ours."""
    rows = _sglang("top-k")
    names = list(rows[0]["us"]) if rows else []
    lines = [
        (f"{row['batch']} x {row['context']:,}", *(row["us"][name]["median"] for name in names))
        for row in rows
    ]
    return table(("rows x tokens", *names), lines) if lines else "Not measured."


def sglang_times(missing: float, side: str) -> list[float | None]:
    """Microseconds by batch 1, 13, 64 of the swap-in."""
    found = {row["batch"]: row["us"][side]["median"] for row in _sglang("swap-in")
             if row["missing"] == missing}  # fmt: skip
    return [found.get(batch) for batch in (1, 13, 64)]
