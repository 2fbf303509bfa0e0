"""Phase sensitivity: what the error of cached K costs in logits, by frequency band and distance.

RoPE turns each pair of channels by an angle that grows with the position, so that a logit is a sum over
pairs, ``q_i · k_j = Σ_p |q_p| |k_p| cos(φ_p + ω_p (i - j))``. An error of the cached key enters pair by pair
too, ``e_ij = Σ_p q_i,p · (k̂_j,p - k_j,p)``; pairs of high frequency swing with the distance, those of low
frequency hold their sign over the whole context. Bands are runs of pairs by frequency, and the channels that
do not rotate. Measured on captured Q and K, scaled as softmax gets them, over all pairs of tokens that meet;
what all keys of a query have in common, and softmax ignores, is counted too.

Whether a band should stay in 16 bits is a matter of price: in ``b`` bits with a share ``f`` of K's channels
it costs ``f (16 - b)`` bits per element of K and takes its errors out. As many bits spread over all channels
would leave ``4^-f(16 - b)`` of the variance, as one bit halves a step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcal import capture, forward, rotary
from kvcal.arch import LayerSpec
from kvcal.cache import QuantizedCache
from kvcal.data import TokenSet
from kvcal.errors import PlanRefused, StatisticsError
from kvcal.formats import REFERENCE_BITS, KVFormat

_QUERIES = 128  # at a time: scores of a whole long sample would not fit


@dataclass(frozen=True)
class Band:
    """Channels of a head whose errors are looked at together.

    Attributes:
        channels: of the cached key, or of the cached latent and rotary key.
        pairs: first and last in order of falling frequency; None of channels that do not rotate.
        wavelengths: the shortest and longest, in tokens for one turn; None likewise.
    """

    channels: tuple[int, ...]
    pairs: tuple[int, int] | None = None
    wavelengths: tuple[float, float] | None = None


@dataclass(frozen=True)
class BandError:
    """What one band costs, over one or several layers of the same bands.

    Attributes:
        pairs: as in :class:`Band`.
        wavelengths: as in :class:`Band`, over all layers.
        rms: of its logit error, one for each distance; None where no query sees a key so far away.
        share: of the variance of all logit errors, ``E[e_band e] / E[e²]``; shares sum to 1, and one whose
            errors cancel another's is below 0.
        left: of that variance, once the band has no error.
        bits: per element of K, that keeping the band in 16 bits costs.
        left_evenly: of the variance, if those bits were spread over all channels.
    """

    pairs: tuple[int, int] | None
    wavelengths: tuple[float, float] | None
    rms: list[float | None]
    share: float
    left: float
    bits: float
    left_evenly: float

    @property
    def pays(self) -> bool:
        """Whether keeping the band in 16 bits is worth its bits."""
        return self.left < self.left_evenly


@dataclass(frozen=True)
class PhaseErrors:
    """Bands of some layers from high to low frequency, channels without rotation last."""

    layers: tuple[int, ...]
    bands: list[BandError]

    @property
    def best(self) -> BandError:
        """The band whose bits do most beside spreading them."""
        return min(self.bands, key=lambda band: band.left / band.left_evenly)


@dataclass(frozen=True)
class Phase:
    """The analysis of a model.

    Attributes:
        distances: least and largest distance of each column of ``rms``, powers of two apart.
        layers: each layer with RoPE on its own.
        pooled: layers with the same bands together.
        tokens: how many queries were measured.
    """

    distances: list[tuple[int, int]]
    layers: list[PhaseErrors]
    pooled: list[PhaseErrors]
    tokens: int


def refuse(layers: Sequence[LayerSpec], fmt: KVFormat) -> None:
    """Refuse a model or format that has no bands.

    Raises:
        PlanRefused: saying why.
    """
    if all(layer.rope == "none" for layer in layers):
        raise PlanRefused(["no layer of this model rotates its keys, so there are no phases"])
    if fmt.rotated:
        raise PlanRefused(
            [f"{fmt.name} mixes all channels before it rounds, so no band has errors of its own"]
        )
    if fmt.latent_only:
        raise PlanRefused(
            [f"{fmt.name} keeps the rotary key in 16 bits already; use fp8 to see what that saves"]
        )


@torch.inference_mode()
def measure(
    model: Any,
    layers: Sequence[LayerSpec],
    cache: QuantizedCache,
    tokens: TokenSet,
    bands: int,
    *,
    on_tokens: Callable[[float], None] = lambda _: None,
) -> Phase:
    """Run each sample alone and add up the errors of every layer with RoPE as it passes.

    ``bands``: runs of pairs per layer, as equal as they can be; one pair each if there are no more.

    Raises:
        ModelError: a layer was called without its angles.
        StatisticsError: K has no error anywhere.
    """
    specs = {layer.index: layer for layer in layers if layer.rope != "none"}
    on = functools.cache(cache.to)
    tokens = dataclasses.replace(tokens, chunk=None)  # every query with all of its keys, from the first on
    buckets = _bucket(max(map(len, tokens.samples)) - 1) + 1
    found: dict[int, tuple[list[Band], torch.Tensor]] = {}

    def observe(call: capture.AttentionCall) -> None:
        layer = specs.get(call.layer)
        if layer is None:
            return
        if layer.index not in found:
            of = _bands(layer, rotary.frequencies(layer, call.rotary), bands)
            found[layer.index] = of, torch.zeros(len(of), 4, buckets, dtype=torch.float64)
        of, sums = found[layer.index]
        sums += _sums(call, on(call.query.device), of, buckets)

    with capture.intercept(model, observe, rotary=True):
        for part in forward.parts(model, tokens.batches(1)):
            for step in forward.steps(model, part):
                step.run()
                on_tokens(step.tokens)
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for index, (of, _) in sorted(found.items()):
        alike.setdefault(tuple(band.channels for band in of), []).append(index)
    return Phase(
        distances=[(0, 0)] + [(2**n, 2 ** (n + 1) - 1) for n in range(buckets - 1)],
        layers=[_errors({index: found[index]}, cache.format) for index in sorted(found)],
        pooled=[_errors({index: found[index] for index in group}, cache.format) for group in alike.values()],
        tokens=tokens.tokens,
    )


def _bands(layer: LayerSpec, frequencies: torch.Tensor, count: int) -> list[Band]:
    """``frequencies`` are those of the pairs, in radians per token; one that stands still does not rotate."""
    ties = layer.channel_ties
    turning = [pair for pair in frequencies.argsort(descending=True).tolist() if frequencies[pair] > 0]
    edges = torch.linspace(0, len(turning), min(count, len(turning)) + 1).round().long().tolist()
    found = []
    for first, stop in itertools.pairwise(edges):
        pairs = turning[first:stop]
        waves = [2 * math.pi / float(frequencies[pair]) for pair in (pairs[0], pairs[-1])]
        channels = tuple(channel for channel, tie in enumerate(ties) if tie in pairs)
        found.append(Band(channels, (first, stop - 1), (waves[0], waves[1])))
    still = tuple(channel for channel, tie in enumerate(ties) if tie not in turning)
    return [*found, Band(still)] if still else found


def _sums(
    call: capture.AttentionCall, cache: QuantizedCache, bands: Sequence[Band], buckets: int
) -> torch.Tensor:
    """``(bands, 4, buckets)`` float64: Σ e_band², Σ e_band e, Σ e² and how many products, by distance."""
    given_back = cache.give_back(call.layer, call.query, call.key, call.value)
    error = given_back[1].float() - call.key.float()
    if call.expansion is not None:  # the rotary key is a part of the cached vector
        error = torch.cat([error, given_back[2].float() - call.value.float()], -1)
    kv_heads, tokens = error.shape[1], error.shape[2]
    queries = call.query[0].float().reshape(kv_heads, -1, tokens, error.shape[-1]) * call.scaling
    distance = torch.arange(tokens, device=error.device)
    bucket = torch.frexp(distance.float()).exponent.long()  # 0, then one more at each power of two
    found = torch.zeros(len(bands), 4, buckets + 1, dtype=torch.float64, device=error.device)
    for start in range(0, tokens, _QUERIES):
        part = queries[:, :, start : start + _QUERIES]
        away = distance[start : start + _QUERIES].unsqueeze(1) - distance
        hidden = away < 0 if call.window is None else (away < 0) | (away >= call.window)
        place = bucket[away.clamp(min=0)].masked_fill(hidden, buckets).flatten()
        each = [_products(part[..., band.channels], error[0][..., band.channels]) for band in bands]
        whole = torch.stack(each).sum(0)
        energy = whole.square().sum(0)
        count = torch.full_like(energy, len(whole))
        for index, of_band in enumerate(each):
            values = of_band.square().sum(0), (of_band * whole).sum(0), energy, count
            for row, value in enumerate(values):
                found[index, row].index_add_(0, place, value.flatten().double())
    return found[..., :buckets].cpu()


def _products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """``(heads, queries, tokens)`` of Q ``(kv_heads, group, queries, channels)`` and K's error."""
    return torch.matmul(q, k.unsqueeze(1).mT).flatten(0, 1)


def _errors(found: Mapping[int, tuple[list[Band], torch.Tensor]], fmt: KVFormat) -> PhaseErrors:
    bands = next(iter(found.values()))[0]
    sums = torch.stack([each for _, each in found.values()]).sum(0)
    total = float(sums[0, 2].sum())
    if not math.isfinite(total) or total == 0:
        raise StatisticsError(
            f"layer {', '.join(map(str, found))}: K has {'no' if total == 0 else 'no finite'} error in this"
            " format, so no band has a share of it"
        )
    size = sum(len(band.channels) for band in bands)
    rows = []
    for index, band in enumerate(bands):
        own, with_all, _, count = sums[index]
        waves = [each[index].wavelengths for each, _ in found.values()]
        bits = (REFERENCE_BITS - fmt.bits) * len(band.channels) / size
        rows.append(
            BandError(
                pairs=band.pairs,
                wavelengths=_around([each for each in waves if each is not None]),
                rms=[
                    math.sqrt(e / n) if n else None for e, n in zip(own.tolist(), count.tolist(), strict=True)
                ],
                share=float(with_all.sum()) / total,
                left=1 + (float(own.sum()) - 2 * float(with_all.sum())) / total,
                bits=bits,
                left_evenly=4.0**-bits,
            )
        )
    return PhaseErrors(tuple(found), rows)


def _around(ranges: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


def _bucket(distance: int) -> int:
    """Index among the distances 0, 1, 2 to 3, 4 to 7, and so on."""
    return distance.bit_length()
