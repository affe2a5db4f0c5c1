"""Tables of docs/performance.md about peers that ran beside ours."""

from performance_tables import Row, cells, find, load, number

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


def _sglang(part: str, run: str = "peer-sglang-h200") -> list[Row]:
    rows: list[Row] = load(run).get("timings", [])
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
    """Scores, top-k and residency of both sides, ours with prefetch too."""
    rows, lines = _sglang("segment"), []
    for row in rows:
        moved, us, shape = row["rows_a_layer"], row["us"], (row["batch"], row["context"])
        peer, hidden = us["HiSparse"]["median"], _hidden(rows, row)
        lines.append((
            f"{shape[0]} x {shape[1]:,}", f"{row['missing']:.0%}",
            f"{moved['off']['recalled']:,.0f}", peer,
            *(_beside(us[name]["median"], peer) for name in row["ratio"]), _beside(hidden, peer),
            *(_early(moved[name]) for name in row["ratio"] if name != "off"),
        ))  # fmt: skip
    predicted = ("perfect", "as recorded")
    header = ("batch x context", "missing", "rows", "DeepGEMM + top-k + HiSparse", "ours",
              *(f"with prefetch, {words}" for words in predicted), "as if one were hidden",
              *(f"rows moved, {words}" for words in predicted))  # fmt: skip
    return table(header, lines) if lines else "Not measured."


def segment_managed() -> str:
    """The swap-in and the segment beside SGLang's with its host rows in managed memory too."""
    run = "peer-sglang-managed-h200"
    lines = []
    for row in _sglang("segment", run):
        where = {"batch": row["batch"], "missing": row["missing"]}
        alone, peer = find(_sglang("swap-in", run), **where), row["us"]["HiSparse"]["median"]
        assert alone is not None
        lines.append((
            f"{row['batch']} x {row['context']:,}", f"{row['missing']:.0%}",
            _beside(alone["us"]["ours"]["median"], alone["us"]["HiSparse"]["median"]), peer,
            *(_beside(row["us"][name]["median"], peer) for name in row["ratio"]),
        ))  # fmt: skip
    header = ("batch x context", "missing", "`make_resident` alone", "DeepGEMM + top-k + HiSparse",
              "ours", "with prefetch, perfect", "with prefetch, as recorded")  # fmt: skip
    return table(header, lines) if lines else "Not measured."


def segment_ratios() -> str:
    """How many times as fast as SGLang's segment ours is where rows are missing, shape by shape."""
    rows = _sglang("segment")
    shapes: dict[str, dict[str, list[float | None]]] = {}
    for row in rows:
        if row["missing"]:
            ratios = shapes.setdefault(f"{row['batch']} x {row['context']:,}", {})
            most = row["us"]["HiSparse"]["median"] / _hidden(rows, row)
            for name, ratio in (*row["ratio"].items(), ("at most", most)):
                ratios.setdefault(name, []).append(ratio)
    return "; ".join(
        f"{shape}: " + ", ".join(f"{name} {cells(found, '.2f')}x" for name, found in ratios.items())
        for shape, ratios in shapes.items()
    )


def _beside(us: float, peer: float) -> str:
    return f"{us:.1f} ({peer / us:.2f}x)"


def _hidden(rows: list[Row], row: Row) -> float:
    """The longer of selecting with nothing missing and of making resident alone, ours."""
    where = {"batch": row["batch"], "context": row["context"]}
    selecting, recall = (
        find(rows, missing=0.0, **where),
        find(_sglang("swap-in"), missing=row["missing"], **where),
    )
    assert selecting is not None and recall is not None
    return float(max(selecting["us"]["off"]["median"], recall["us"]["ours"]["median"]))


def _early(moved: Row) -> str:
    """Rows of a layer that came early and were selected + in vain, and those recalled."""
    vain = moved["prefetched"] - moved["useful"]
    return f"{moved['useful']:,.0f} + {vain:,.0f}, {moved['recalled']:,.0f}"


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
