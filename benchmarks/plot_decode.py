"""Plots of `benchmarks/device/decode.py`'s results.

    python benchmarks/plot_decode.py benchmarks/results/decode.json --plot-dir docs/plots/decode

Draws what the file has: throughput of both sides for each budget, and step times by case.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from echokv.bench.plots import figure, save_figure

_SIDES = ("resident", "offloaded")
_STEP_CASES = ("offload", "offload-inline", "paper-rates", "light")


def main() -> int:
    """Draw and say where; 1 when the file has nothing to draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("result", type=Path, help="JSON of benchmarks/device/decode.py")
    parser.add_argument("--plot-dir", type=Path, required=True, help="folder for the PNG files")
    options = parser.parse_args()
    result = json.loads(options.result.read_text())
    drawn = []
    for case, words in (("equal-bytes", "equal HBM bytes"), ("equal-rows", "equal row pools")):
        if _complete(result.get(case, {})):
            drawn.append(_throughput(result[case], words, options.plot_dir / f"{case}.png"))
    steps = {case: result[case] for case in _STEP_CASES if "variants" in result.get(case, {})}
    if steps:
        drawn.append(_steps(steps, options.plot_dir / "steps.png"))
    for path in drawn:
        print(f"wrote {path}")
    return 0 if drawn else 1


def _complete(cases: dict[str, Any]) -> bool:
    return bool(cases) and all("variants" in case for case in cases.values())


def _throughput(cases: dict[str, Any], words: str, path: Path) -> Path:
    drawing, (axes,) = figure(columns=1)
    names = sorted(cases, key=lambda name: -float(name.split()[0]))
    for place, side in enumerate(_SIDES):
        at = [index + 0.4 * place for index in range(len(names))]
        rates = [cases[name]["variants"][side]["output_tokens_per_s"] for name in names]
        bars = axes.bar(at, rates, width=0.38, label=side)
        batches = [str(cases[name]["variants"][side]["batch"]) for name in names]
        axes.bar_label(bars, labels=[f"batch {batch}" for batch in batches], fontsize=7)
    axes.set_xticks([index + 0.2 for index in range(len(names))], names)
    axes.margins(y=0.25)
    axes.set_ylabel("output tokens/s")
    axes.set_title(f"throughput at {words}")
    axes.legend()
    return save_figure(drawing, path)


def _steps(cases: dict[str, Any], path: Path) -> Path:
    drawing, (axes,) = figure(columns=1)
    for place, side in enumerate(_SIDES):
        at = [
            index + 0.4 * place
            for index, case in enumerate(cases.values())
            if side in case["variants"]
        ]
        times = [
            case["variants"][side]["step_ms"] for case in cases.values() if side in case["variants"]
        ]
        medians = [one["median"] for one in times]
        spread = [
            [one["median"] - one["p10"] for one in times],
            [one["p90"] - one["median"] for one in times],
        ]
        bars = axes.bar(at, medians, width=0.38, yerr=spread, capsize=3, label=side)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=3)
    axes.set_xticks([index + 0.2 for index in range(len(cases))], list(cases))
    axes.margins(y=0.25)
    axes.set_ylabel("ms a decode step")
    axes.set_title("decode step, 10th to 90th percentile")
    axes.legend()
    return save_figure(drawing, path)


if __name__ == "__main__":
    sys.exit(main())
