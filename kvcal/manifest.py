"""Where a checkpoint comes from: model, text, seeds, versions, machine and time."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kvcal import __version__, models
from kvcal.data import TokenSet
from kvcal.layerwise import Layerwise
from kvcal.placement import Placement
from kvcal.plan import Plan
from kvcal.recipe import Text
from kvcal.sources import Source
from kvcal.trial import Trial

SPLIT = "encoder: first half of each sample; decoder: second half behind decoder_start_token_id"
SAMPLES = "samples.json"  # SHA-256 of each sample that the statistics hold


def compute_of(model: Any) -> dict[str, str]:
    """Where and in which dtype a model computes."""
    spread = getattr(model, "hf_device_map", {})
    spread_out = len(spread) > 1 or "disk" in spread.values()
    return {
        "device": str(models.device_of(model)),
        "device_map": "layerwise" if isinstance(model, Layerwise) else "auto" if spread_out else "one",
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
    }


def facts(
    digest: str, plan: Plan, text: TokenSet, held_out: TokenSet, where: Placement, processes: int
) -> dict[str, str]:
    """All that decides what statistics a run collects, by what a person calls it.

    ``digest`` is that of the model's files. The order of samples counts: it says which share a batch.
    """
    machine = torch.cuda.get_device_name(where.device) if where.device.type == "cuda" else _cpu_kind()
    found = versions()
    return {
        "model": digest,
        "calibration text": _sha256(" ".join(text.hashes)),
        "held-out text": _sha256(" ".join(held_out.hashes)),
        "recipe": _sha256(plan.recipe.to_yaml()),
        "version of kvcal, torch or transformers": " ".join(
            [__version__, found["torch"], found["transformers"]]
        ),
        "kind of device": machine,
        "device map": where.device_map,
        "number of processes": str(processes),
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _cpu_kind() -> str:
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


def build(
    source: Source,
    plan: Plan | Trial,
    compute: dict[str, str],
    text: TokenSet,
    held_out: TokenSet,
    stages: Mapping[str, Any],
) -> dict[str, Any]:
    """The document behind ``manifest.json``; ``stages`` are :attr:`kvcal.progress.Narrator.stages`."""
    return {
        "kvcal": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {"name": source.name, "kind": source.kind, "revision": source.revision},
        "architecture": asdict(plan.model) | {"layers": len(plan.layers)},
        "compute": compute,
        "calibration": _text_record(text, plan.recipe.calibration) | {"seed": plan.recipe.calibration.seed},
        "evaluation": _text_record(held_out, plan.recipe.evaluation),
        "stages": stages,
        "versions": versions(),
        "machine": machine(),
    }


def _text_record(found: TokenSet, wanted: Text) -> dict[str, Any]:
    return {
        "dataset": wanted.dataset,
        "samples": len(found.samples),
        "with_images": found.with_images,
        "tokens": found.tokens,
        "sha256": found.content_hash,
    } | ({"encoder_tokens": found.encoder_tokens, "split": SPLIT} if found.halves else {})


def versions() -> dict[str, str]:
    names = ("torch", "transformers", "safetensors", "compressed-tensors", "datasets", "tokenizers", "triton")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "system": platform.platform(),
        "cpu": names[0] if names else platform.processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
