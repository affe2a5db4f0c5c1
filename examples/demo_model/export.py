"""Writes a trained state as a Hugging Face directory: one safetensors file in bfloat16.

python -m examples.demo_model.export --run RUN --to examples/demo_model/checkpoint
"""

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from echokv.models.byte_tokenizer import BOS, END_OF_TURN, EOS, PAD
from examples.demo_model.card import model_card
from examples.demo_model.data import load_tokenizer
from examples.demo_model.model import Shapes
from examples.demo_model.recipe import PRESETS, Preset

_FLOAT32 = ("e_score_correction_bias",)


def hf_config(shapes: Shapes, bos: int, eos: list[int]) -> dict[str, Any]:
    """`config.json` for transformers' and echokv's DeepseekV32."""
    sizes = asdict(shapes)
    rope_theta = sizes.pop("rope_theta")
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        **sizes,
        "num_key_value_heads": shapes.num_attention_heads,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "dtype": "bfloat16",
    }


def hf_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A `DemoModel`'s state dict in HF's names, stacked experts taken apart."""
    weights: dict[str, Tensor] = {}
    for name, value in state.items():
        target = name if name.startswith("lm_head") else f"model.{name}"
        dtype = torch.float32 if name.endswith(_FLOAT32) else torch.bfloat16
        head, _, projection = target.partition(".mlp.experts.")
        if projection:
            for expert, matrix in enumerate(value):
                part = f"{head}.mlp.experts.{expert}.{projection}.weight"
                weights[part] = matrix.to(dtype).contiguous()
        else:
            weights[target] = value.to(dtype).contiguous()
    return weights


def export(run: Path, to: Path, preset: Preset) -> None:
    """Write config, generation_config, weights, tokenizer and card of `run`'s state into `to`.

    The logs go beside `to`; a run without them gets no card.
    """
    to.mkdir(parents=True, exist_ok=True)
    state = torch.load(run / "state.pt", map_location="cpu", weights_only=True)
    save_file(hf_weights(state["model"]), to / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_tokenizer(run)
    bos, eos, end, pad = map(tokenizer.token_to_id, (BOS, EOS, END_OF_TURN, PAD))
    _write(to / "config.json", hf_config(preset.shapes, bos, [eos, end]))
    generation = {"bos_token_id": bos, "eos_token_id": [eos, end], "pad_token_id": pad}
    _write(to / "generation_config.json", {**generation, "do_sample": False})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(run / name, to / name)
    if (run / "eval.jsonl").exists():
        parameters = sum(v.numel() for k, v in state["model"].items() if not k.endswith(_FLOAT32))
        (to / "README.md").write_text(model_card(run, preset, parameters))
        for log in ("train.csv", "eval.jsonl"):
            shutil.copy(run / log, to.parent / log)


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Parse and export."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--to", type=Path, required=True, help="directory to write")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="full")
    args = parser.parse_args()
    export(args.run, args.to, PRESETS[args.preset])


if __name__ == "__main__":
    main()
