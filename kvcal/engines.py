"""What each serving engine really loads, as data: one frozen row per engine version.

An engine is a row here, a renaming module in ``export`` and a contract in ``check``. Facts come from the
engine's source; each field names the file it was read from.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcal.arch import LayerSpec, ModelSpec
from kvcal.errors import UsageError
from kvcal.formats import KVFormat
from kvcal.granularity import Granularity


@dataclass(frozen=True)
class EngineSpec:
    """Capabilities of one engine version.

    Attributes:
        cache_dtype: kvcal format name -> value of the engine's cache dtype flag.
        granularities: static granularities the loader accepts.
        head_dim_multiple: the attention kernels' alignment of one cached vector, in elements.
        per_head_max_head_dim: largest head size of a backend that takes one scale per head.
        base_quant_methods: ``quant_method`` of base weights the KV scheme can be merged into.
        scale_suffixes: side -> suffix of the tensor, appended to the attention module's path.
        backends: granularity -> attention backends that consume it, for the user to read.
    """

    name: str
    version: str
    cache_dtype: dict[str, str]
    granularities: tuple[str, ...]
    head_dim_multiple: int
    per_head_max_head_dim: int
    base_quant_methods: tuple[str, ...]
    scale_suffixes: dict[str, str]
    backends: dict[str, str]

    def scale_name(self, layer: LayerSpec, side: str) -> str:
        """Name of the tensor that holds the scale of k, v or q."""
        return f"{layer.module}.{self.scale_suffixes[side]}"

    def refusals(self, model: ModelSpec, fmt: KVFormat, granularity: Granularity) -> list[str]:
        """Why this engine would not consume the scales; empty if it would."""
        reasons = []
        if fmt.name not in self.cache_dtype:
            reasons.append(
                f"{self.name} {self.version} loads no static scales for {fmt.name};"
                f" it does for {', '.join(self.cache_dtype)}"
            )
        if granularity.name not in self.granularities:
            reasons.append(
                f"{self.name} {self.version} takes no {granularity.name} scales;"
                f" use {' or '.join(self.granularities)}"
            )
        if model.quant_method is not None and model.quant_method not in self.base_quant_methods:
            reasons.append(
                f"base weights with quant_method {model.quant_method!r} cannot carry a KV scheme for"
                f" {self.name} yet; use the unquantized model or {' or '.join(self.base_quant_methods)}"
            )
        for head_dim in sorted({layer.head_dim for layer in model.layers}):
            if head_dim % self.head_dim_multiple:
                reasons.append(
                    f"head size {head_dim} is not a multiple of {self.head_dim_multiple}, which {self.name}'s"
                    f" {fmt.name} attention kernels need; keep the 16-bit cache for this model"
                )
            elif granularity.name == "per_head" and head_dim > self.per_head_max_head_dim:
                reasons.append(
                    f"head size {head_dim} exceeds {self.per_head_max_head_dim}, the largest for which"
                    f" {self.name} has a kernel with per_head scales; use per_tensor"
                )
        return reasons


VLLM = EngineSpec(
    name="vllm",
    version="0.33",
    # vllm/config/cache.py CacheDType; fp8_e5m2 is refused together with scales
    # (model_executor/layers/attention, _init_kv_cache_quant), int8/int4 are dynamic only.
    cache_dtype={"fp8_e4m3": "fp8"},
    # compressed_tensors.py CompressedTensorsKVCacheMethod.validate_kv_cache_scheme
    granularities=("per_tensor", "per_head"),
    # FlashAttention-3: an FP8 row must be a multiple of 16 bytes (hopper/flash_api.cpp)
    head_dim_multiple=16,
    per_head_max_head_dim=256,
    base_quant_methods=("compressed-tensors",),
    # layers/quantization/base_config.py get_cache_scale_mapper: `X.k_scale` -> `X.attn.k_scale`
    scale_suffixes={"k": "k_scale", "v": "v_scale", "q": "q_scale"},
    backends={
        "per_tensor": "FlashAttention-3/4, FlashInfer, Triton (compute capability 8.9 and up), ROCm",
        "per_head": "FlashAttention-3 (compute capability 9.0) or FlashAttention-4 (10.0) only",
    },
)

ENGINES: tuple[EngineSpec, ...] = (VLLM,)


def names() -> list[str]:
    return [e.name for e in ENGINES]


def get(name: str) -> EngineSpec:
    """Look an engine up by name."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    raise UsageError(f"unknown engine {name!r}; known: {', '.join(names())}")
