"""A model as a server of it sees it: caches, weights, and how much of both a decode step reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcal.errors import ModelError, PlanRefused, UsageError
from kvcal.model_config import positive_int
from kvcal.planner import layer_cache, parameters
from kvcal.planner.layer_cache import LayerCache
from kvcal.planner.parameters import Parameters


@dataclass(frozen=True)
class ServedModel:
    """What is served.

    Attributes:
        name: for people.
        caches: per layer.
        weights_bytes: of the whole model.
        weight_bits: per weight of linear layers.
        parameters: None if they are not known; then every weight counts as read by every step.
        max_context: of the model.
    """

    name: str
    caches: tuple[LayerCache, ...]
    weights_bytes: float
    weight_bits: float
    parameters: Parameters | None
    max_context: int

    @property
    def latent(self) -> bool:
        """Whether K and V are one vector in some layer."""
        return any(cache.latent for cache in self.caches)

    def weights_read(self, requests: int) -> float:
        """Bytes of weights that one step of so many requests reads."""
        if self.parameters is None:
            return self.weights_bytes
        read = self.parameters.bytes_read(self.weight_bits, requests)
        return self.weights_bytes * read / self.parameters.bytes(self.weight_bits)


def of(
    config: Mapping[str, Any], name: str, weights_gib: float | None = None, weights_bits: float | None = None
) -> ServedModel:
    """From a ``config.json``, with the size of the weights counted unless it is given.

    Raises:
        UsageError: both a size and bits are given.
        ModelError: a field is missing or cannot be meant.
        PlanRefused: caches or weights of this model are not known.
    """
    if weights_gib is not None and weights_bits is not None:
        raise UsageError("--weights-gib and --weights-bits say the same; give one of them")
    caches = layer_cache.read(config)
    bits = weights_bits or _bits(config, given=weights_gib is not None)
    counted: Parameters | None
    try:
        counted = parameters.count(config)
    except (PlanRefused, ModelError):
        if weights_gib is None:
            raise
        counted = None  # said to the user as a notice of the plan
    size = weights_gib * 2**30 if weights_gib is not None else counted.bytes(bits) if counted else 0.0
    return ServedModel(
        name=name,
        caches=caches,
        weights_bytes=size,
        weight_bits=bits,
        parameters=counted,
        max_context=positive_int(config, "max_position_embeddings"),
    )


def _bits(config: Mapping[str, Any], *, given: bool) -> float:
    """Bits per weight that the config announces; engines serve float32 checkpoints in 16."""
    section = config.get("quantization_config")
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    if section is None or given:
        return 16
    if method == "fp8":
        return 8
    raise PlanRefused(
        [f"weights of quant_method {method!r} have a size that config.json does not tell; give --weights-gib"]
    )
