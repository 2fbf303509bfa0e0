"""Error of the quantized attention against full precision, on held-out Q, K and V of every layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvcal import calibrate, capture, forward, models, paged_cache
from kvcal.cache import QuantizedCache
from kvcal.data import Batch, TokenSet
from kvcal.errors import StatisticsError
from kvcal.kernels import dispatch, reference


@dataclass(frozen=True)
class LayerError:
    """Per query head of one layer.

    Attributes:
        cache: ``‖ô - o‖ / ‖o‖`` of the attention output with K and V quantized.
        attention: the same with Q and P quantized too, as FlashAttention-3 does; None for formats that no
            kernel computes attention in.
        logit_snr_db: ``10 log10(Σ(q·k)² / Σ(q·k̂ - q·k)²)`` over visible pairs; None where no logit is in
            error, as for a head whose K is always zero.
    """

    cache: list[float]
    attention: list[float] | None
    logit_snr_db: list[float | None]


@dataclass(frozen=True)
class Validation:
    """Errors per layer, and which implementation computed them."""

    layers: dict[int, LayerError]
    implementation: str
    tokens: int

    @property
    def worst(self) -> tuple[int, float]:
        """Layer with the largest error over its heads (K and V quantized), and that error."""
        return max(((i, max(e.cache)) for i, e in self.layers.items()), key=lambda pair: pair[1])

    @property
    def mean(self) -> float:
        """Mean relative error over layers and heads (K and V quantized)."""
        each = [error for layer in self.layers.values() for error in layer.cache]
        return sum(each) / len(each)


@torch.inference_mode()
def validate(
    model: Any,
    cache: QuantizedCache,
    tokens: TokenSet,
    *,
    on_tokens: Callable[[float], None] = lambda _: None,
) -> Validation:
    """Run each sample alone through the model and compare attention layer by layer as it passes.

    Raises:
        ModelError: a layer attends to images otherwise than kvcal's definition of attention.
    """
    backend = dispatch.choose(models.device_of(model))
    on = functools.cache(cache.to)
    sums: dict[int, list[torch.Tensor]] = {}
    used: set[str] = set()

    def compare(call: capture.AttentionCall) -> None:
        held = on(call.query.device)
        found = _squared_errors(call, held, backend)
        if call.layer not in held.skipped:
            used.add(backend.name if paged_cache.reads(call, held) else dispatch.REFERENCE)
        before = sums.get(call.layer)
        sums[call.layer] = found if before is None else [a + b for a, b in zip(before, found, strict=True)]

    running: list[Batch] = []

    def examine(call: capture.AttentionCall, output: torch.Tensor) -> None:
        if running[-1].images is not None:  # calibration has seen to text, and may have had no images
            calibrate.require_emulated(call, output, running[-1])

    with capture.intercept(model, compare, after=examine):
        for part in forward.parts(model, tokens.batches(1)):
            for step in forward.steps(model, part):
                running.append(step.batch)
                step.run()
                on_tokens(step.tokens)
    for index, total in sorted(sums.items()):
        if not all(bool(part.isfinite().all()) for part in total):
            raise StatisticsError(f"layer {index}: its Q, K and V are too large to compute attention with")
    return Validation(
        layers={index: _layer_error(total) for index, total in sorted(sums.items())},
        implementation=" and ".join(sorted(used)) or "none: every layer is kept in 16 bits",
        tokens=tokens.tokens,
    )


def _squared_errors(
    call: capture.AttentionCall, cache: QuantizedCache, backend: dispatch.Backend
) -> list[torch.Tensor]:
    """Sums per query head: o², (q·k)², (q·k̂ - q·k)², (ô - o)² of the cache and, if there is, of attention.

    A skipped layer has no errors: its kernel reads 16 bits.
    """
    q, k, v = (x.float() for x in call.attended())
    exact = reference.attention(q, k, v, **call.geometry)
    given_back = cache.give_back(call.layer, call.query, call.key, call.value)
    _, k_hat, v_hat = (x.float() for x in call.attended(given_back))
    if call.layer in cache.skipped:
        output = exact
    elif paged_cache.reads(call, cache):
        output = paged_cache.attend(call, cache, backend)
    else:
        output = reference.attention(q, k_hat, v_hat, **call.geometry)
    outputs = [output]
    if cache.format.rounds_query:
        outputs.append(exact if call.layer in cache.skipped else _in_fp8(call, cache, backend))
    signal, noise = (_logit_energy(q, keys, call) for keys in (k, k_hat - k))
    return [
        exact.double().square().sum((0, 2, 3)),
        signal,
        noise,
        *((output - exact).double().square().sum((0, 2, 3)) for output in outputs),
    ]


def _in_fp8(call: capture.AttentionCall, cache: QuantizedCache, backend: dispatch.Backend) -> torch.Tensor:
    """Output with Q and probabilities quantized too."""
    assert cache.scales is not None
    if call.expansion is not None:
        return _absorbed_in_fp8(call, cache)
    of, fmt = cache.scales.layers[call.layer], cache.format
    attend = backend.quantized_attention if call.plain else reference.quantized_attention
    return attend(
        call.query,
        backend.quantize(call.key, of["k"], fmt),
        backend.quantize(call.value, of["v"], fmt),
        k_scale=of["k"],
        v_scale=of["v"],
        q_scale=of["q"],
        quantize_probabilities=True,
        fmt=fmt,
        **call.geometry,
    )


def _absorbed_in_fp8(call: capture.AttentionCall, cache: QuantizedCache) -> torch.Tensor:
    """The same where K is a cached latent with its rotary key, V the latent, and Q has absorbed the rest."""
    assert call.expansion is not None
    given_back = cache.give_back(call.layer, call.query, call.key, call.value, with_query=True)
    q, latent, rotary = (x.float() for x in given_back)
    one = torch.ones(1, device=q.device)
    over_latents = reference.quantized_attention(
        q,
        torch.cat([latent, rotary], -1),  # rounded already, each part with its scale
        latent,
        k_scale=one,
        v_scale=one,
        fmt=cache.format,
        quantize_probabilities=True,
        **call.geometry,
    )
    return call.expansion.values(over_latents)


def _logit_energy(q: torch.Tensor, k: torch.Tensor, call: capture.AttentionCall) -> torch.Tensor:
    """Energy per query head of the visible products of Q and K, or of Q and K's error."""
    batch, heads, queries, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, queries, head_dim)
    logits = torch.matmul(grouped, k.unsqueeze(2).transpose(-1, -2))
    squares = logits.square()
    if not call.cross:
        visible = reference.visible(queries, keys, call.window, q.device)
        squares = squares.masked_fill(~visible, 0.0)
    return squares.double().sum((0, 3, 4)).flatten()


def _layer_error(sums: list[torch.Tensor]) -> LayerError:
    output, signal, noise, *errors = (total.tolist() for total in sums)
    cache, *attention = ([_relative(e, o) for e, o in zip(each, output, strict=True)] for each in errors)
    return LayerError(
        cache=cache,
        attention=attention[0] if attention else None,
        logit_snr_db=[_decibel(s, n) for s, n in zip(signal, noise, strict=True)],
    )


def _relative(error: float, output: float) -> float:
    return math.sqrt(error / output) if output else (0.0 if error == 0 else math.inf)


def _decibel(signal: float, noise: float) -> float | None:
    return 10 * math.log10(signal / noise) if signal and noise else None
