"""The only place that chooses between the Triton kernels and their torch definitions."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcal import histogram
from kvcal.kernels import observe_reference, paged_reference, reference
from kvcal.kernels.observe_reference import Seen

REFERENCE = "torch reference"


@dataclass(frozen=True)
class Backend:
    """The implementation that runs, and its name for reports."""

    name: str
    quantize: Callable[..., torch.Tensor]
    quantized_attention: Callable[..., torch.Tensor]
    paged_attention: Callable[..., torch.Tensor]
    write: Callable[..., None]
    observe: Callable[..., Seen]
    count: Callable[..., None]


def choose(device: torch.device) -> Backend:
    """Triton on a CUDA device; the torch definition elsewhere and under ``KVCAL_EAGER=1``."""
    eager = os.environ.get("KVCAL_EAGER") == "1"
    if device.type == "cuda" and not eager and importlib.util.find_spec("triton"):
        from kvcal.kernels import attention, observe, paged_attention, paged_write, quantize

        return Backend(
            "triton",
            quantize.quantize,
            attention.quantized_attention,
            paged_attention.paged_attention,
            paged_write.write,
            observe.observe,
            observe.count,
        )
    return Backend(
        REFERENCE,
        reference.quantize,
        reference.quantized_attention,
        paged_reference.paged_attention,
        paged_reference.write,
        observe_reference.observe,
        histogram.count,
    )
