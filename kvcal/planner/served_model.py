"""A model as a server of it sees it: caches, weights, and how much of both a decode step reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcal import arch
from kvcal.arch import ModelSpec
from kvcal.errors import ModelError, PlanRefused, UsageError
from kvcal.model_config import positive_int
from kvcal.planner import layer_cache, layer_state, parameters
from kvcal.planner.layer_cache import LayerCache
from kvcal.planner.layer_state import LayerState
from kvcal.planner.parameters import Parameters


@dataclass(frozen=True)
class Kept:
    """What a model keeps of a request.

    Attributes:
        caches: per layer that attends, in their order.
        states: per layer with a recurrence or a convolution; some attend too.
        max_context: tokens that it was made for.
    """

    caches: tuple[LayerCache, ...]
    states: tuple[LayerState, ...]
    max_context: int


@dataclass(frozen=True)
class ServedModel:
    """What is served.

    Attributes:
        name: for people.
        caches: per layer that attends.
        weights_bytes: of the whole model.
        weight_bits: per weight of linear layers.
        parameters: None if they are not known; then every weight counts as read by every step.
        max_context: of the model.
        states: per layer that keeps one.
    """

    name: str
    caches: tuple[LayerCache, ...]
    weights_bytes: float
    weight_bits: float
    parameters: Parameters | None
    max_context: int
    states: tuple[LayerState, ...] = ()

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


def kept(config: Mapping[str, Any], spec: Callable[[Mapping[str, Any]], ModelSpec] = arch.read) -> Kept:
    """From a ``config.json``; ``spec`` says how its model is known.

    Raises:
        ModelError: a field is missing or cannot be meant.
        PlanRefused: what some layer keeps is not known.
    """
    if config.get("is_encoder_decoder"):
        raise PlanRefused(
            [
                f"model_type {config.get('model_type')!r} is an encoder-decoder, whose two caches grow with"
                " different texts; capacity is planned for decoders alone"
            ]
        )
    if layer_cache.caches_latents(config):
        longest = positive_int(config, "max_position_embeddings")
        return Kept(layer_cache.latents(config), (), longest)
    if config.get("model_type") == "zamba2":
        longest = positive_int(config, "max_position_embeddings")
        return Kept(layer_cache.in_shared_blocks(config), layer_state.read(config, "zamba2", 0), longest)
    model = spec(config)
    states = layer_state.read(config, model.model_type, model.layers_without_attention)
    return Kept(layer_cache.of_model(model), states, model.max_context)


def of(
    config: Mapping[str, Any],
    name: str,
    weights_gib: float | None = None,
    weights_bits: float | None = None,
    spec: Callable[[Mapping[str, Any]], ModelSpec] = arch.read,
) -> ServedModel:
    """The same with the weights, whose size is counted unless it is given.

    Raises:
        UsageError: both a size and bits are given.
        ModelError: a field is missing or cannot be meant.
        PlanRefused: caches or weights of this model are not known.
    """
    if weights_gib is not None and weights_bits is not None:
        raise UsageError("--weights-gib and --weights-bits say the same; give one of them")
    cached = kept(config, spec)
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
        caches=cached.caches,
        weights_bytes=size,
        weight_bits=bits,
        parameters=counted,
        max_context=cached.max_context,
        states=cached.states,
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
