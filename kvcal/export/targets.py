"""Engine by engine: which form its checkpoints have, and how it is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcal.export import compressed_tensors, kernel, modelopt, plain
from kvcal.export.bundle import Bundle
from kvcal.plan import Plan
from kvcal.scales import Scales


@dataclass(frozen=True)
class Target:
    """One engine's form and start.

    ``serve`` is the command line; ``FOLDER``, ``DTYPE`` and ``MODEL`` (the folder's GGUF file) stand for what
    they say. ``before`` is what has to be done first, in words.
    """

    to_bundle: Callable[[Scales | None, Plan, dict[str, Any] | None], Bundle]
    serve: str
    before: str | None = None


_VLLM = "vllm serve FOLDER --kv-cache-dtype DTYPE"

TARGETS = {
    "vllm": Target(compressed_tensors.to_bundle, _VLLM),
    "vllm-modelopt": Target(modelopt.to_bundle, _VLLM),
    "sglang": Target(
        compressed_tensors.to_bundle,
        "python -m sglang.launch_server --model-path FOLDER --kv-cache-dtype DTYPE",
    ),
    "tgi": Target(
        compressed_tensors.to_bundle, "text-generation-launcher --model-id FOLDER --kv-cache-dtype DTYPE"
    ),
    "transformers": Target(compressed_tensors.to_bundle, "transformers serve FOLDER"),
    "kernel": Target(kernel.to_bundle, ""),
    "trtllm": Target(
        plain.to_bundle,
        "trtllm-serve FOLDER --extra_llm_api_options kv-cache.yaml",
        "write kv-cache.yaml with kv_cache_config: {dtype: DTYPE}",
    ),
    "lmdeploy": Target(plain.to_bundle, "lmdeploy serve api_server FOLDER --quant-policy DTYPE"),
    "llamacpp": Target(
        plain.to_bundle,
        "llama-server --model MODEL --flash-attn on --cache-type-k DTYPE --cache-type-v DTYPE",
        "convert_hf_to_gguf.py FOLDER --outfile MODEL",
    ),
}


def of(plan: Plan) -> Target:
    """The target that a plan writes for."""
    return TARGETS[plan.engine.name]


def serve_command(folder: str, plan: Plan) -> list[str]:
    """The command that serves the checkpoint over the quantized cache.

    Skipped layers are no matter of the checkpoint: vLLM reads them from its command line alone.
    """
    command = _filled(of(plan).serve.split(), folder, plan)
    if plan.skipped_layers:
        command += ["--kv-cache-dtype-skip-layers", *map(str, plan.skipped_layers)]
    return command


def before_serving(folder: str, plan: Plan) -> str | None:
    """What has to be done before :func:`serve_command`; None if nothing."""
    before = of(plan).before
    return None if before is None else " ".join(_filled(before.split(" "), folder, plan))


def _filled(words: list[str], folder: str, plan: Plan) -> list[str]:
    values = {
        "FOLDER": folder,
        "MODEL": f"{folder}/model.gguf",
        "DTYPE": plan.engine.cache_dtype[plan.format.name],
    }
    filled = []
    for word in words:
        for name, value in values.items():
            word = word.replace(name, value)
        filled.append(word)
    return filled
