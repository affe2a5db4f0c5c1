"""What the user chose, as frozen dataclasses; a derived config is a new object.

`ModelConfig` is read from a checkpoint's `config.json`; `EngineConfig` from flags. Neither
allocates anything or looks at the machine: `auto` values are resolved by `engine.resolve`.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echokv.errors import CheckpointError, ConfigError

ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding, with YaRN or without (DeepSeek-V3.2's inference code).

    The MLA part is always interleaved; `indexer_interleaved` says whether the indexer's is
    (V3.2: False, GLM: True).
    """

    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    is_yarn: bool = False
    indexer_interleaved: bool = False

    @property
    def softmax_mscale(self) -> float:
        """Factor on the softmax scale: mscale squared under YaRN with mscale_all_dim, else 1."""
        if not self.is_yarn or not self.mscale_all_dim or self.factor <= 1:
            return 1.0
        return (0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0) ** 2


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of a DSA model, in the names of HF's `config.json`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    mlp_layer_types: tuple[str, ...]  # "dense" or "sparse" a layer
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[str, ...]  # "full" or "shared" a layer; shared reuses the previous top-k
    rope: RopeConfig
    rms_norm_eps: float
    max_position_embeddings: int
    torch_dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    tie_word_embeddings: bool
    quant_block_size: tuple[int, int] | None  # block-fp8 weights, else None

    @property
    def index_layers(self) -> tuple[int, ...]:
        """Layers that have an indexer and therefore an index-key cache."""
        return tuple(i for i, kind in enumerate(self.indexer_types) if kind == "full")

    @property
    def softmax_scale(self) -> float:
        """MLA softmax scale, YaRN's mscale squared included."""
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5) * (
            self.rope.softmax_mscale
        )

    @classmethod
    def from_dir(cls, path: str | Path) -> "ModelConfig":
        """Read `config.json` of a checkpoint directory.

        Raises:
            CheckpointError: no such file, not JSON, an unknown architecture or a missing key.
        """
        file = Path(path) / "config.json"
        if not file.is_file():
            raise CheckpointError(
                f"{file} does not exist: --model must name a checkpoint directory"
            )
        try:
            raw = json.loads(file.read_text())
        except ValueError as error:
            raise CheckpointError(f"{file} is not valid JSON: {error}") from error
        return cls.from_dict(raw, source=str(file))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], *, source: str = "config.json") -> "ModelConfig":
        """Build from the parsed `config.json`; `source` names the file in errors."""
        architectures = raw.get("architectures") or ["(none)"]
        if architectures[0] not in ARCHITECTURES:
            raise CheckpointError(
                f"{source}: unknown architecture {architectures[0]!r};"
                f" echokv serves {', '.join(ARCHITECTURES)}"
            )
        _check_switches(raw, source)
        glm = architectures[0] == "GlmMoeDsaForCausalLM"
        try:
            layers = int(raw["num_hidden_layers"])
            config = cls(
                architecture=architectures[0],
                num_hidden_layers=layers,
                mlp_layer_types=_mlp_layer_types(raw, layers),
                indexer_types=tuple(raw.get("indexer_types") or ["full"] * layers),
                rope=_rope(raw, glm=glm),
                n_shared_experts=int(raw.get("n_shared_experts") or 0),
                n_group=int(raw.get("n_group") or 1),
                topk_group=int(raw.get("topk_group") or 1),
                norm_topk_prob=bool(raw.get("norm_topk_prob", True)),
                routed_scaling_factor=float(raw.get("routed_scaling_factor", 1.0)),
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                torch_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"),
                bos_token_id=raw.get("bos_token_id"),
                eos_token_ids=_as_tuple(raw.get("eos_token_id")),
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                quant_block_size=_quant_block_size(raw, source),
                **{key: int(raw[key]) for key in _PLAIN_SIZES},
            )
        except KeyError as error:
            raise CheckpointError(f"{source}: missing key {error}") from error
        config._check(source)
        return config

    def _check(self, source: str) -> None:
        for name in ("mlp_layer_types", "indexer_types"):
            if len(getattr(self, name)) != self.num_hidden_layers:
                raise CheckpointError(
                    f"{source}: {name} has {len(getattr(self, name))} entries,"
                    f" num_hidden_layers is {self.num_hidden_layers}"
                )
        if self.indexer_types[0] != "full":
            raise CheckpointError(
                f"{source}: indexer_types[0] is {self.indexer_types[0]!r}:"
                " the first layer has no earlier top-k to share"
            )
        if self.qk_rope_head_dim > self.index_head_dim:
            raise CheckpointError(
                f"{source}: qk_rope_head_dim {self.qk_rope_head_dim} exceeds"
                f" index_head_dim {self.index_head_dim}"
            )


_ONLY_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "attention_bias": False,
    "mlp_bias": False,
}
"""Switches of `config.json` that have one value in every DSA model; another would be ignored."""


def _check_switches(raw: dict[str, Any], source: str) -> None:
    for key, value in _ONLY_VALUES.items():
        if raw.get(key, value) != value:
            raise CheckpointError(
                f"{source}: {key} {raw[key]!r} is not supported, only {value!r} is"
            )


_PLAIN_SIZES = (
    "vocab_size hidden_size num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim"
    " qk_rope_head_dim v_head_dim intermediate_size moe_intermediate_size n_routed_experts"
    " num_experts_per_tok index_n_heads index_head_dim index_topk max_position_embeddings"
).split()


def _as_tuple(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _mlp_layer_types(raw: dict[str, Any], layers: int) -> tuple[str, ...]:
    if raw.get("mlp_layer_types"):
        return tuple(raw["mlp_layer_types"])
    dense = min(int(raw.get("first_k_dense_replace", 0)), layers)
    return ("dense",) * dense + ("sparse",) * (layers - dense)


def _rope(raw: dict[str, Any], *, glm: bool) -> RopeConfig:
    """Both spellings: V3.2's `rope_scaling` + `rope_theta`, transformers 5's `rope_parameters`."""
    spec = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = spec.get("rope_type") or spec.get("type") or "default"
    theta = float(spec.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeConfig(theta=theta, indexer_interleaved=glm)
    if kind != "yarn":
        raise CheckpointError(f"rope type {kind!r} is not supported: default or yarn")
    return RopeConfig(
        theta=theta,
        is_yarn=True,
        indexer_interleaved=glm,
        **{key: read(spec[key]) for key, read in _YARN_KEYS.items() if spec.get(key)},
    )


_YARN_KEYS: dict[str, Any] = {
    "factor": float,
    "original_max_position_embeddings": int,
    "beta_fast": float,
    "beta_slow": float,
    "mscale": float,
    "mscale_all_dim": float,
}


def _quant_block_size(raw: dict[str, Any], source: str) -> tuple[int, int] | None:
    quant = raw.get("quantization_config")
    if not quant:
        return None
    if quant.get("quant_method") != "fp8" or not quant.get("weight_block_size"):
        raise CheckpointError(
            f"{source}: quantization {quant.get('quant_method')!r} is not supported;"
            " echokv loads bf16 and block-fp8 (weight_block_size) checkpoints"
        )
    rows, columns = quant["weight_block_size"]
    return int(rows), int(columns)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that decides how one engine runs. Sizes of None are chosen at start-up."""

    model: str  # checkpoint directory
    served_model_name: str | None = None  # None: the directory's name
    backend: str = "auto"  # auto, reference, triton or cuda
    device: str = "auto"  # auto, cpu or cuda
    dtype: str = "auto"  # compute dtype: auto, float32 or bfloat16
    kv_cache_dtype: str = "auto"  # auto or a name of memory.formats.ROW_FORMATS
    index_key_dtype: str = "auto"  # auto or a name of memory.formats.INDEX_KEY_FORMATS
    attention_kernel: str = "auto"  # of decode: a name of kernels.libraries.ATTENTION_KERNELS
    gemm_kernel: str = "auto"  # with fp8 weights: a name of kernels.libraries.GEMM_KERNELS
    indexer_kernel: str = "auto"  # a name of kernels.libraries.INDEXER_KERNELS
    host_pool_gib: float | None = None  # host pool, GiB per engine
    host_memory: str = "auto"  # of the host pool, for a GPU: auto, managed or pinned
    device_pool_tokens: int | None = None  # device pool, rows a layer
    offload: bool = True  # False: every row in HBM, no host pool (--no-offload)
    prefetch: str = "auto"  # rows move before they are selected: auto, on, in decode alone, or off
    max_model_len: int | None = None  # tokens; None: the model's
    max_num_seqs: int = 64  # running requests
    max_num_batched_tokens: int = 2048  # tokens a step; the prefill chunk
    max_waiting_requests: int = 1024  # queue length beyond which requests are refused
    enable_prefix_caching: bool = True
    enforce_eager: bool = False  # True: no CUDA graphs
    async_scheduling: bool = True  # False: the next step waits for this one's tokens
    check_cache: bool = False  # verify the cache invariants between steps
    seed: int = 0

    def __post_init__(self) -> None:
        for name, flag in (
            ("max_num_seqs", "--max-num-seqs"),
            ("max_num_batched_tokens", "--max-num-batched-tokens"),
            ("max_waiting_requests", "--max-waiting-requests"),
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag} must be at least 1, got {getattr(self, name)}")
        for name, flag in (
            ("host_pool_gib", "--host-pool-gib"),
            ("device_pool_tokens", "--device-pool-tokens"),
            ("max_model_len", "--max-model-len"),
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{flag} must be positive, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs"
                f" {self.max_num_seqs}: a step could not decode every running request"
            )
