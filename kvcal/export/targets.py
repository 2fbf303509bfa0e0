"""Engine by engine: which form its checkpoints have, and how it is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from string import Template
from typing import Any

from kvcal.export import compressed_tensors, kernel, modelopt, plain
from kvcal.export.bundle import Bundle
from kvcal.plan import Plan
from kvcal.scales import Scales


@dataclass(frozen=True)
class Target:
    """One engine's form and start.

    ``serve`` is the command line; ``$folder``, ``$dtype`` and ``$model`` (the folder's GGUF file) stand for
    what they say. ``before`` is what has to be done first, in words.
    """

    to_bundle: Callable[[Scales | None, Plan, dict[str, Any] | None], Bundle]
    serve: str
    before: str | None = None


_VLLM = "vllm serve $folder --kv-cache-dtype $dtype"

TARGETS = {
    "vllm": Target(compressed_tensors.to_bundle, _VLLM),
    "vllm-modelopt": Target(modelopt.to_bundle, _VLLM),
    "sglang": Target(
        compressed_tensors.to_bundle,
        "python -m sglang.launch_server --model-path $folder --kv-cache-dtype $dtype",
    ),
    "tgi": Target(
        compressed_tensors.to_bundle, "text-generation-launcher --model-id $folder --kv-cache-dtype $dtype"
    ),
    "transformers": Target(compressed_tensors.to_bundle, "transformers serve $folder"),
    "kernel": Target(kernel.to_bundle, ""),
    "trtllm": Target(
        plain.to_bundle,
        "trtllm-serve $folder --extra_llm_api_options kv-cache.yaml",
        "write kv-cache.yaml with kv_cache_config: {dtype: $dtype}",
    ),
    "lmdeploy": Target(plain.to_bundle, "lmdeploy serve api_server $folder --quant-policy $dtype"),
    "llamacpp": Target(
        plain.to_bundle,
        "llama-server --model $model --flash-attn on --cache-type-k $dtype --cache-type-v $dtype",
        "convert_hf_to_gguf.py $folder --outfile $model",
    ),
}


def of(plan: Plan) -> Target:
    """The target that a plan writes for."""
    return TARGETS[plan.engine.name]


def serve_command(folder: str, plan: Plan) -> list[str]:
    """The command that serves the checkpoint over the quantized cache.

    Skipped layers are no matter of the checkpoint: vLLM reads them from its command line alone.
    """
    command = [_filled(word, folder, plan) for word in of(plan).serve.split()]
    if plan.skipped_layers:
        command += ["--kv-cache-dtype-skip-layers", *map(str, plan.skipped_layers)]
    return command


def before_serving(folder: str, plan: Plan) -> str | None:
    """What has to be done before :func:`serve_command`; None if nothing."""
    before = of(plan).before
    return None if before is None else _filled(before, folder, plan)


def _filled(template: str, folder: str, plan: Plan) -> str:
    dtype = plan.engine.cache_dtype[plan.format.name]
    return Template(template).substitute(folder=folder, model=f"{folder}/model.gguf", dtype=dtype)
