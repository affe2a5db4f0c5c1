"""Issue 4's goals beside what was measured, for docs/performance.md."""

from performance_decode import ratios, tokens_each
from performance_peers import sglang_times, vllm_cases
from performance_tables import (
    Row,
    cells,
    decode_case,
    decode_files,
    find,
    load,
    median,
    met,
    number,
    variants,
)

from echokv.bench.markdown import table

PCIE_BYTES_PER_US = 55e3
"""Bytes a microsecond that the copy engine moves from host to device, in an earlier run."""
PAPERS_ROWS = 37  # recalled a layer by 13 requests, in the paper
BATCHES = (1, 13, 64)
BUDGETS = ("27.0 GB", "19.0 GB", "15.0 GB", "9.6 GB", "5.3 GB")
ROW_POOLS = ("325000 tokens", "200000 tokens", "110000 tokens")
LAYERS = 61
GOAL_TOKENS = 256  # that a request of the throughput goals decodes
PAPERS_POOL_BYTES = 1_800_000 * 656 * LAYERS

Goal = tuple[str, ...]


def cache_rows() -> list[Row]:
    """Times of make_resident for rows of 656 B, and of gathers."""
    rows: list[Row] = load("cache_ops").get("make_resident_us 656", [])
    return rows


def op(variant: str, batch: int, rows: int, *, far: bool = False) -> float | None:
    """A recall with the selection in the L2 cache, from 1 GiB of host rows or from more."""
    found = [row for row in cache_rows() if (row["gib"] > 1.5) == far]
    return median(found, variant=variant, batch=batch, recalled_rows=rows, selection_in_l2=True)


def cuda(batch: int, rows: int, *, far: bool = False) -> float | None:
    """Our op."""
    return op("cuda", batch, rows, far=far)


def gather(batch: int, rows: int, *, far: bool = False) -> float | None:
    """A bare copy of as many rows in the same run."""
    return op("gather", batch, rows, far=far)


def less(first: float | None, second: float | None) -> float | None:
    """A difference, where both are known."""
    return None if first is None or second is None else first - second


def cache_goals() -> list[Goal]:
    """The goals of cache management and top-k."""
    report = load("cache_ops")
    victims = median(report.get("choose_victims_us", []), layers=LAYERS, lists="kept")
    parts = {
        "recall": cuda(13, PAPERS_ROWS),
        "append": median(report.get("append_us", []), variant="cuda", batch=13),
        "victims": None if victims is None else victims / LAYERS,
    }
    named = ", ".join(f"{name} {number(us)}" for name, us in parts.items())
    added = median(report.get("step_us", []), batch=13, recalled_rows=PAPERS_ROWS, way="beside")
    none = [cuda(batch, 0) for batch in BATCHES]
    empty = median(cache_rows(), variant="gather", batch=13, recalled_rows=0, selection_in_l2=False)
    third = dict(zip(BATCHES, (61, 799, 3932), strict=True))
    taken = [cuda(batch, rows) for batch, rows in third.items()]
    far = [cuda(batch, rows, far=True) for batch, rows in third.items()]
    floors = [gather(batch, rows) for batch, rows in third.items()]
    counts = (64, 512, 2665, 16_384)
    over = [less(cuda(13, count), gather(13, count)) for count in counts]
    over_far = [less(cuda(13, n, far=True), gather(13, n, far=True)) for n in counts]
    topk = load("cuda_cache").get("topk_us", [])
    best = median(topk, rows=13, width=98_304, variant="cuda")
    warm = median(topk, rows=13, width=98_304, variant="cuda warm")
    return [
        ("cache management, 13 requests, 37 rows a layer, us", "paper 18.8; first draft 15", "7",
         f"{number(added)} are added to a step", met([added], [7]),
         f"alone: {named}; a bare gather of as many rows {number(gather(13, PAPERS_ROWS))}"),
        ("`make_resident`, nothing missing, batch 1 / 13 / 64, us", hisparse(0.0, "17 / 19 / 22"),
         "5 / 6 / 8", cells(none), met(none, (5, 6, 8)),
         f"an empty gather takes {number(empty)}"),
        ("same, 3% missing, us", hisparse(0.03, "27 / 33 / 78"), "8 / 17 / 62", cells(taken),
         met(taken, (8, 17, 62)),
         f"a bare gather {cells(floors)}; rows from 4.4 GiB: {cells(far)}"),
        ("recall of 64 / 512 / 2,665 / 16,384 rows, less the bare gather, us", "", "3",
         cells(over), met(over, (3, 3, 3, 3)), f"rows from 4.4 GiB: {cells(over_far)}"),
        wide_rows(),
        ("exact top-k 13 x 98,304, us", "torch.topk 85", "20",
         f"{number(best)} ({number(warm)} with scores in L2)", met([best], [20]),
         "the scores are 5.1 MB"),
    ]  # fmt: skip


def recall_parts() -> str:
    """What a recall's microseconds go to, by what was measured apart in the same run."""
    goal = {(1, 61): 8.0, (13, 799): 17.0, (64, 3932): 62.0}
    empty = median(cache_rows(), variant="gather", batch=13, recalled_rows=0, selection_in_l2=False)
    lines = []
    for batch, rows in ((1, 61), (13, 64), (13, 512), (13, 799), (13, 2665), (64, 3932)):
        taken, bare = cuda(batch, rows), gather(batch, rows)
        looked_up, moved = less(cuda(batch, 0), empty), less(bare, empty)
        if taken is None or empty is None or looked_up is None or moved is None:
            continue
        floor = empty + looked_up + moved
        wanted = goal.get((batch, rows), empty + moved + 3)
        lines.append((batch, f"{rows:,}", empty, looked_up, moved, floor, taken, taken - floor,
                      wanted))  # fmt: skip
    header = (
        "batch", "rows missing", "empty launch", "looking up and claiming", "rows over PCIe",
        "sum", "`make_resident`", "the rest", "goal",
    )  # fmt: skip
    return table(header, lines)


def hisparse(missing: float, before: str) -> str:
    """SGLang HiSparse's times: of the run beside ours, and of the run that the issue quotes."""
    taken = sglang_times(missing, "HiSparse")
    if not any(taken):
        return f"HiSparse {before}, another run"
    ours = sglang_times(missing, "ours")
    return f"HiSparse {before}; beside ours {cells(taken)}, ours there {cells(ours)}"


def wide_rows() -> Goal:
    """Rows of 1152 B."""
    rows = [row for row in load("cache_ops").get("make_resident_us 1152", [])
            if row["recalled_rows"] == 16_384 and row["selection_in_l2"]]  # fmt: skip
    near, far = ([row for row in rows if (row["gib"] > 1.5) == wide] for wide in (False, True))
    rates = [(find(some, variant=variant) or {}).get("GB_per_s")
             for some in (near, far) for variant in ("cuda", "gather")]  # fmt: skip
    return ("rows of 1152 B, 16,384, GB/s", "bare gather 50.6", "at least 50", number(rates[0]),
            met(rates[:1], [50], at_least=True),
            (f"bare gather {number(rates[1])}; rows from 7.7 GiB: {number(rates[2])},"
            f" bare gather {number(rates[3])}"))  # fmt: skip


def decode_goals() -> list[Goal]:
    """The goals of whole steps and of throughput."""
    budgets, pools = ratios("equal-bytes", BUDGETS), ratios("equal-rows", ROW_POOLS)
    return [
        vllm_goal(),
        offload_goal(),
        light_goal(),
        ("output tokens/s at equal HBM, 27 / 19 / 15 / 9.6 / 5.3 GB, to without", "",
         "2.3 / 2.8 / 2.8 / 2.7 / 2.7", cells(budgets, ".2f"),
         reached("equal-bytes", budgets, (2.3, 2.8, 2.8, 2.7, 2.7)), output_tokens("equal-bytes")),
        ("same at equal row pools, 325K / 200K / 110K tokens", "paper 2.15 / 3.10 / 4.12",
         "3 / 4 / 6", cells(pools, ".2f"), reached("equal-rows", pools, (3, 4, 6)),
         output_tokens("equal-rows")),
        pinning_goal(),
    ]  # fmt: skip


def output_tokens(case: str) -> str:
    """How many tokens each request decoded, or which case is to run."""
    tokens = sorted(tokens_each(case))
    if tokens == [GOAL_TOKENS]:
        return f"{GOAL_TOKENS} tokens a request"
    run = f"`decode.py --cases {case}` with {GOAL_TOKENS} tokens a request"
    return f"{run}, not {' / '.join(map(str, tokens))}" if tokens else run


def reached(case: str, found: list[float | None], goals: tuple[float, ...]) -> str:
    """Whether throughput is what it is to be, by requests of the length that the goal names."""
    counts = tokens_each(case) == {GOAL_TOKENS}
    return met(found, goals, at_least=True) if counts else "not measured"


def vllm_goal() -> Goal:
    """Steps beside stock vLLM's."""
    rows = [(weights, shape, taken) for weights, engine, shape, taken in vllm_cases()
            if engine == "stock"]  # fmt: skip
    shown = [(f"{weights}, {shape}", taken.get("ratio"))
             for weights, shape, taken in rows]  # fmt: skip
    measured = "; ".join(f"{name}: {number(ratio, '.3f')}" for name, ratio in shown) or "-"
    found = [ratio for _, ratio in shown]
    before = ("vLLM 0.33, another run: ten dense layers, 4.26 / 4.75 / 4.82 ms at 1 x 8K, 13 x 8K,"
              " 13 x 24K")  # fmt: skip
    ours = load("decode-dense-h200").get("dense", {})
    steps = cells(one["resident"]["step_ms"]["median"] for one in ours.values()
                  if "resident" in one)  # fmt: skip
    return ("step without offload, to stock vLLM's", before, "1.05", measured,
            met(found, [1.05] * len(found)), f"ours of ten dense layers: {steps} ms")  # fmt: skip


def offload_goal() -> Goal:
    """The price of offloading at hit rate 0.98."""
    sides = variants("offload")
    ratio = decode_case("offload").get("ratio", {}).get("step_ms")
    why = ""
    if len(sides) == 2:
        one = sides["offloaded"]
        room = 0.025 * sides["resident"]["step_ms"]["median"]
        wire = sum(one["recalled_rows_by_layer"]) * 656 / one["steps"] / PCIE_BYTES_PER_US / 1e3
        bare = gather(13, 512)
        why = (f"{room:.2f} ms are allowed; the rows' bytes at PCIe's 55 GB/s are {wire:.2f},"
               f" {LAYERS} bare gathers of 512 rows"
               f" {number(None if bare is None else bare * LAYERS / 1e3, '.2f')}")  # fmt: skip
    return ("step with offload, hit rate 0.98, 13 x 32K, to without", "paper 1.027", "1.025",
            number(ratio, ".3f"), met([ratio], [1.025]), why)  # fmt: skip


def light_goal() -> Goal:
    """The price of offloading when everything is resident."""
    sides = variants("light")
    ratio = decode_case("light").get("ratio", {}).get("step_ms")
    why = ""
    if len(sides) == 2:
        room = 0.02 * sides["resident"]["step_ms"]["median"]
        one = cuda(1, 0)
        why = (f"{room:.2f} ms are allowed; {LAYERS} `make_resident` with nothing missing are"
               f" {number(None if one is None else one * LAYERS / 1e3, '.2f')}")  # fmt: skip
    return ("light load, 1 x 4K, all resident, to without", "paper up to 1.278", "1.02",
            number(ratio, ".3f"), met([ratio], [1.02]), why)  # fmt: skip


def pinning_goal() -> Goal:
    """Host memory of the paper's pool, or of a larger one."""
    found = sorted(
        (one["pinned_bytes"], one["pinned_s"])
        for name in decode_files()
        for case in ("equal-bytes", "equal-rows")
        for one in load(name).get(case, {}).values()
        if one.get("pinned_bytes", 0) >= 0.99 * PAPERS_POOL_BYTES
    )
    pin = load("cache-h200").get("pinning", {})
    small = (f"16 GiB: {number(pin.get('ours_first'))}; torch"
             f" {number(pin.get('torch_pin_memory'))}")  # fmt: skip
    if not found:
        return ("pinning 72 GB, s", "torch 43, rounded to 128 GB", "25", f"- ({small})",
                "not measured", "`decode.py --cases equal-rows`")  # fmt: skip
    size, taken = found[0]
    return ("pinning 72 GB, s", "torch 43, rounded to 128 GB", "25",
            f"{taken:.1f} for {size / 1e9:.0f} GB", met([taken], [25]), small)  # fmt: skip


def goals() -> str:
    """Every goal of issue 4."""
    header = ("what", "reference", "goal", "measured", "met", "floor, or what is missing")
    return table(header, [*cache_goals(), *decode_goals()], words=len(header))
