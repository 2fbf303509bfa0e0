"""What each serving engine really loads, as data: one frozen row per engine version.

An engine is a row here, a renaming module in ``export`` and a contract in ``check``. Facts come from the
engine's source; each field names the file it was read from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvcal import formats
from kvcal.arch import LayerSpec, ModelSpec
from kvcal.errors import UsageError
from kvcal.formats import KVFormat
from kvcal.granularity import Granularity

Deliver = Literal["metadata", "fold", "both"]


@dataclass(frozen=True)
class EngineSpec:
    """Capabilities of one engine version.

    Attributes:
        cache_dtype: kvcal format name -> value of the engine's cache dtype flag.
        loads_scales: formats whose static scales it takes from a checkpoint.
        granularities: static granularities the loader accepts.
        head_dim_multiple: format -> the attention kernels' alignment of one cached vector, in elements.
        smallest_head_dim: format -> smallest head size of a backend that has it.
        per_head_max_head_dim: largest head size of a backend that takes one scale per head.
        base_quant_methods: ``quant_method`` of base weights the KV scheme can be merged into.
        scale_suffixes: side -> suffix of the tensor, appended to the attention module's path.
        backends: granularity -> attention backends that consume it, for the user to read.
        decode_time: format -> time of decode attention relative to the 16-bit cache, each on its fastest
            backend; measured on one GPU at one long context, so an order of magnitude.
        executes_online: whether it runs rotations of K and Q, or adds an offset to K, that a checkpoint asks
            for; every engine so far ignores them.
        skips_layers: whether it can keep single layers in 16 bits, and their Q with them.
    """

    name: str
    version: str
    cache_dtype: dict[str, str]
    loads_scales: tuple[str, ...]
    granularities: tuple[str, ...]
    head_dim_multiple: dict[str, int]
    smallest_head_dim: dict[str, int]
    per_head_max_head_dim: int
    base_quant_methods: tuple[str, ...]
    scale_suffixes: dict[str, str]
    backends: dict[str, str]
    decode_time: dict[str, float]
    executes_online: bool
    skips_layers: bool

    def scale_name(self, layer: LayerSpec, side: str) -> str:
        """Name of the tensor that holds the scale of k, v or q."""
        return f"{layer.module}.{self.scale_suffixes[side]}"

    def deliveries(self, fmt: KVFormat) -> tuple[Deliver, ...]:
        """Ways by which a calibration for this format reaches the engine, the usual one first.

        Of a static format that the engine lacks, those that it would have; :meth:`refusals` refuses it.
        """
        lacking = fmt.name not in self.cache_dtype and not fmt.dynamic
        return ("metadata", "fold", "both") if lacking or fmt.name in self.loads_scales else ("fold",)

    def refusals(
        self, model: ModelSpec, fmt: KVFormat, granularity: Granularity | None, deliver: Deliver
    ) -> list[str]:
        """Why this engine would not serve the outcome; empty if it would.

        ``granularity`` is None where no static scales are written.
        """
        reasons = []
        known = fmt.name in self.cache_dtype
        if not known:
            reasons.append(self._about_missing_format(fmt))
        elif deliver not in self.deliveries(fmt):
            reasons.append(
                f"{self.name} {self.version} loads no static scales for {fmt.name}, which it scales itself;"
                " only --deliver fold reaches it, through the weights"
            )
        if granularity is not None and granularity.name not in self.granularities:
            why = "" if granularity.static else " from a checkpoint, since they come with the tokens"
            reasons.append(
                f"{self.name} {self.version} takes no {granularity.name} scales{why};"
                f" use {' or '.join(self.granularities)}"
            )
        reasons += self._about_weights(model, deliver)
        for head_dim in sorted({layer.head_dim for layer in model.layers}) if known else []:
            reasons += self._about_head_dim(head_dim, fmt, granularity)
        return reasons

    def _about_missing_format(self, fmt: KVFormat) -> str:
        def distance(name: str) -> tuple[float, bool, float]:
            other = formats.get(name)
            return abs(other.bits - fmt.bits), other.integer != fmt.integer, -other.bits

        nearest = min(self.cache_dtype, key=distance)
        others = ", ".join(name for name in self.cache_dtype if name != nearest)
        also = f"; others are {others}" if others else ""
        return f"{self.name} {self.version} has no {fmt.name} cache; the nearest it has is {nearest}{also}"

    def _about_weights(self, model: ModelSpec, deliver: Deliver) -> list[str]:
        method = model.quant_method
        if method is None:
            return []
        if deliver != "metadata":
            return [
                f"base weights are quantized already ({method}), and folding would round"
                " them a second time;"
                " fold into the unquantized model first and quantize its weights after that"
                " (a recipe with weights: does both)"
            ]
        if method not in self.base_quant_methods:
            return [
                f"base weights with quant_method {method!r} cannot carry a KV scheme for"
                f" {self.name} yet; use the unquantized model or {' or '.join(self.base_quant_methods)}"
            ]
        return []

    def _about_head_dim(self, head_dim: int, fmt: KVFormat, granularity: Granularity | None) -> list[str]:
        multiple, smallest = self.head_dim_multiple[fmt.name], self.smallest_head_dim[fmt.name]
        if head_dim % multiple:
            return [
                f"head size {head_dim} is not a multiple of {multiple}, which {self.name}'s"
                f" {fmt.name} attention kernels need; keep the 16-bit cache for this model"
            ]
        if head_dim < smallest:
            return [
                f"head size {head_dim} is below {smallest}, the smallest of {self.name}'s {fmt.name} kernels;"
                " use fp8"
            ]
        per_head = granularity is not None and granularity.name == "per_head"
        if per_head and head_dim > self.per_head_max_head_dim:
            return [
                f"head size {head_dim} exceeds {self.per_head_max_head_dim}, the largest for which"
                f" {self.name} has a kernel with per_head scales; use per_tensor"
            ]
        return []


VLLM = EngineSpec(
    name="vllm",
    version="0.33",
    # vllm/config/cache.py CacheDType; fp8_e5m2 is refused together with scales
    # (model_executor/layers/attention, _init_kv_cache_quant), int8/int4 are dynamic only.
    cache_dtype={
        "fp8_e4m3": "fp8",
        "int8_per_token_head": "int8_per_token_head",
        "fp8_per_token_head": "fp8_per_token_head",
        "int4_per_token_head": "int4_per_token_head",
    },
    loads_scales=("fp8_e4m3",),
    # compressed_tensors.py CompressedTensorsKVCacheMethod.validate_kv_cache_scheme
    granularities=("per_tensor", "per_head"),
    # FlashAttention-3: an FP8 row must be a multiple of 16 bytes (hopper/flash_api.cpp);
    # int4_per_token_head.py packs two codes into a byte.
    head_dim_multiple={
        "fp8_e4m3": 16,
        "int8_per_token_head": 1,
        "fp8_per_token_head": 1,
        "int4_per_token_head": 2,
    },
    # v1/attention/backends/triton_attn.py supports_head_size
    smallest_head_dim={
        "fp8_e4m3": 1,
        "int8_per_token_head": 32,
        "fp8_per_token_head": 32,
        "int4_per_token_head": 32,
    },
    per_head_max_head_dim=256,
    base_quant_methods=("compressed-tensors",),
    # layers/quantization/base_config.py get_cache_scale_mapper: `X.k_scale` -> `X.attn.k_scale`
    scale_suffixes={"k": "k_scale", "v": "v_scale", "q": "q_scale"},
    backends={
        "per_tensor": "FlashAttention-3/4, FlashInfer, Triton (compute capability 8.9 and up), ROCm",
        "per_head": "FlashAttention-3 (compute capability 9.0) or FlashAttention-4 (10.0) only",
        "per_token_head": "Triton only",
    },
    # `python -m tests.gpu_engine_speed` on one H200, vLLM 0.26.0, one sequence of 131,072 tokens, 32/8 heads
    # of 128: FlashAttention-3 137 us in BF16, 109 in FP8; Triton 1166, 1217 and 1268.
    decode_time={
        "fp8_e4m3": 0.79,
        "int8_per_token_head": 8.5,
        "fp8_per_token_head": 8.9,
        "int4_per_token_head": 9.2,
    },
    # compressed_tensors/transform/linear.py makes transforms of linear layers alone
    executes_online=False,
    # config/cache.py kv_cache_dtype_skip_layers; layers/attention/attention.py then takes "auto" for a layer
    skips_layers=True,
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
