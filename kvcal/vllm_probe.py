"""Loads a checkpoint in the real vLLM and prints, as one line of JSON, what vLLM made of it.

A script for the *engine's* interpreter, which has no kvcal: it imports the standard library and vLLM alone.

    python vllm_probe.py FOLDER --prompt-ids 504,3575,282 --max-new-tokens 16

Prompts are token ids, so that no second tokenizer takes part in a comparison. The last line of stdout is
the answer; all else that vLLM says goes to stderr. Exit code 0 comes with this document:

    {"engine": "vllm", "version": "0.32.0",
     "cache_dtype": "bfloat16",                the cache that the tokens below were generated over
     "default_cache_dtype": ["fp8"],           what the layers hold if no flag names a cache dtype
     "default_cache_dtype_unknown": null,      why the line above is empty
     "fp8_cache_unsupported": "this CPU ...",  why this machine cannot generate over an FP8 cache, or null
     "layers": {"model.layers.0.self_attn.attn": {"cache_dtype": "bfloat16",
                                                  "k": [0.1], "v": [0.2], "q": [0.3]}},
     "outputs": [[260, 1345]]}                 greedy token ids per prompt

Scales are float32 values, printed exactly. Exit code 3 with ``{"no_engine": why}``: this interpreter cannot
import vLLM. Exit code 1 with ``{"error": why}``: vLLM refuses the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from typing import Any

_KV_CACHE_BYTES = 2**30
_SIDES = ("k", "v", "q")

# Set before vLLM is imported. One process, so that the model object can be reached; no network.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # A GPU build of vLLM would compile a sampler for minutes.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def main(arguments: list[str]) -> int:
    """Run the probe; returns the exit code."""
    options = _parse(arguments)
    answer_to = os.dup(1)
    os.dup2(2, 1)  # vLLM and the libraries below it write to stdout
    code, document = _answer(options)
    os.write(answer_to, (json.dumps(document) + "\n").encode())
    return code


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What vLLM makes of a checkpoint, as one line of JSON.")
    parser.add_argument("folder", help="checkpoint folder")
    parser.add_argument(
        "--prompt-ids",
        metavar="ID,ID,...",
        action="append",
        default=[],
        type=lambda text: [int(i) for i in text.split(",")],
        help="token ids of a prompt; may be repeated",
    )
    parser.add_argument("--max-new-tokens", type=int, default=16, metavar="N")
    parser.add_argument("--cache-dtype", default="bfloat16", help="vLLM's kv_cache_dtype")
    parser.add_argument(
        "--scales-over", metavar="DTYPE", help="read the scales from a second model, loaded for this cache"
    )
    return parser.parse_args(arguments)


def _answer(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    os.environ.update(_ENVIRONMENT)
    # Python put this script's folder first, where kvcal's modules would pass for the standard library's.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]
    try:
        import vllm  # type: ignore[import-not-found]  # lives in the engine's environment
        from vllm import LLM
    except Exception as error:  # a half-installed engine fails in any way while it is imported
        return 3, {"no_engine": _reason(error)}
    try:
        llm = LLM(**_engine_arguments(options, options.cache_dtype))
        document = {
            "engine": "vllm",
            "version": vllm.__version__,
            "cache_dtype": options.cache_dtype,
            **_default_cache_dtype(options),
            "fp8_cache_unsupported": _fp8_cache_unsupported(),
            "layers": _layers(llm, options),
            "outputs": _generate(llm, options.prompt_ids, options.max_new_tokens),
        }
    except (Exception, SystemExit) as error:  # vLLM refuses with whatever its layers raise
        traceback.print_exc()
        return 1, {"error": _reason(error)}
    return 0, document


def _engine_arguments(options: argparse.Namespace, cache_dtype: str) -> dict[str, Any]:
    longest = max((len(ids) for ids in options.prompt_ids), default=1)
    return {
        "model": options.folder,
        "dtype": "bfloat16",
        "kv_cache_dtype": cache_dtype,
        "kv_cache_memory_bytes": _KV_CACHE_BYTES,
        "max_model_len": longest + options.max_new_tokens,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        # The checkpoint's generation_config.json could ask for penalties, which are not greedy.
        "generation_config": "vllm",
        "seed": 0,
    }


def _generate(llm: Any, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    if not prompts:
        return []
    greedy = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True, detokenize=False)
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def _layers(llm: Any, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    if options.scales_over is None:
        found: dict[str, dict[str, Any]] = llm.apply_model(_scales)[0]
        return found
    from vllm.config import set_current_vllm_config  # type: ignore[import-not-found]
    from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
    from vllm.model_executor.model_loader import get_model  # type: ignore[import-not-found]

    config = EngineArgs(**_engine_arguments(options, options.scales_over)).create_engine_config()
    with set_current_vllm_config(config):
        return _scales(get_model(vllm_config=config))


def _scales(model: Any) -> dict[str, dict[str, Any]]:
    """Scales of every module that holds some, by module name."""
    return {
        name: {
            "cache_dtype": module.kv_cache_dtype,
            **{side: getattr(module, f"_{side}_scale").float().flatten().tolist() for side in _SIDES},
        }
        for name, module in model.named_modules()
        if hasattr(module, "_k_scale")
    }


def _default_cache_dtype(options: argparse.Namespace) -> dict[str, Any]:
    """What ``vllm serve FOLDER`` without a cache flag would choose: a second model, built without weights."""
    try:
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.utils import initialize_model  # type: ignore[import-not-found]
        from vllm.utils.torch_utils import set_default_torch_dtype  # type: ignore[import-not-found]

        config = EngineArgs(**_engine_arguments(options, "auto")).create_engine_config()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            layers = _cache_dtypes(initialize_model(config))
    except Exception as error:  # private parts of vLLM, and a CPU that may not take an FP8 cache at all
        return {"default_cache_dtype": [], "default_cache_dtype_unknown": _reason(error)}
    return {"default_cache_dtype": sorted(layers), "default_cache_dtype_unknown": None}


def _cache_dtypes(model: Any) -> set[str]:
    return {module.kv_cache_dtype for module in model.modules() if hasattr(module, "_k_scale")}


def _fp8_cache_unsupported() -> str | None:
    import torch
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    if not current_platform.is_cpu():
        return None if current_platform.supports_fp8() else "this device has no FP8 arithmetic"
    if torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported():
        return None
    return "this CPU has neither AVX-512 nor AMX, which vLLM's FP8 cache needs"


def _reason(error: BaseException) -> str:
    """Type and message on one line; the failing source line where there is no message."""
    message = " ".join(str(error).split())
    if not message:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{frame.line} ({os.path.basename(frame.filename)}:{frame.lineno})"
    return f"{type(error).__name__}: {message}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
