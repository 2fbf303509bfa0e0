"""A scheme with its numbers: what a layer gets back for the K and V that it hands over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kvcal import codebooks, objectives, online, rotary, windows
from kvcal.arch import LayerSpec, ModelSpec
from kvcal.basis import Basis, choose
from kvcal.capture import AttentionCall, Tensors, Versions
from kvcal.errors import ModelError
from kvcal.kernels import codes, groups
from kvcal.recipe import Side
from kvcal.scales import from_amax
from kvcal.scheme import CacheSide, Scheme, SideScheme
from kvcal.statistics import SideStatistics, Statistics


@dataclass(frozen=True)
class Store:
    """One side of one layer.

    Attributes:
        scheme: how it is stored.
        basis: of dynamic scales and blocks; None where vectors are stored as they are.
        low: lower end of a static range, in the granularity's scale shape; None of a dynamic one.
        high: its upper end.
        scale: static scale of a symmetric format, or NVFP4's of the tensor.
        levels: of a codebook, ``(2 ** bits,)`` ascending.
    """

    scheme: SideScheme
    basis: Basis | None = None
    low: torch.Tensor | None = None
    high: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    levels: torch.Tensor | None = None

    def to(self, device: torch.device) -> Store:
        low, high, scale, levels = (
            part if part is None else part.to(device)
            for part in (self.low, self.high, self.scale, self.levels)
        )
        return Store(self.scheme, self.basis and self.basis.to(device), low, high, scale, levels)

    def give_back(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, kv_heads, tokens, head_dim)`` as attention would read it, float32."""
        fmt = self.scheme.number
        if fmt is None:
            return x.float()
        if fmt.dynamic:
            return online.quantize_dequantize(x, fmt).float()
        if self.scheme.static:
            return self._static(x.float())
        y = x.float() if self.basis is None else self.basis.into(x)
        y = self._blocks(y) if fmt.block else self._dynamic(y)
        return y if self.basis is None else self.basis.out(y)

    def _static(self, x: torch.Tensor) -> torch.Tensor:
        fmt = self.scheme.number
        assert fmt is not None
        if self.levels is not None and self.low is not None and self.high is not None:
            return groups.with_levels_over_range(x, self.levels, self.low, self.high)
        if self.low is not None and self.high is not None:
            step = (self.high - self.low) / (2**fmt.bits - 1)
            stored = codes.quantize_asymmetric(x, self.low, step, fmt)
            return codes.dequantize_asymmetric(stored, self.low, step)
        assert self.scale is not None
        return codes.round_to_format(x / self.scale, fmt) * self.scale

    def _blocks(self, y: torch.Tensor) -> torch.Tensor:
        assert self.scheme.number is not None
        return codes.dequantize_blocks(codes.quantize_blocks(y, self.scheme.number, self.scale))

    def _dynamic(self, y: torch.Tensor) -> torch.Tensor:
        scheme, fmt, grouping = self.scheme, self.scheme.number, self.scheme.grouping
        assert fmt is not None
        assert grouping is not None
        if scheme.codebook == "gaussian":
            assert self.levels is not None
            return groups.with_gaussian_levels(y, self.levels, grouping, scheme.scale_bits)
        if scheme.codebook == "nuq":
            assert self.levels is not None
            rows = grouping.to_canonical(y)
            low, high = rows.aminmax(dim=-1, keepdim=True)
            found: torch.Tensor = grouping.from_canonical(
                groups.with_levels_over_range(rows, self.levels, low, high), y.shape
            )
            return found
        return groups.quantize_dequantize(
            y,
            fmt,
            grouping,
            zero_point=scheme.zero_point,
            clip=scheme.clip,
            scale_bits=scheme.scale_bits,
            unit=self.basis.rms if self.basis is not None and scheme.scale_bits == 8 else None,
        )


@dataclass(frozen=True)
class StoredCache:
    """A scheme fitted to a model."""

    scheme: Scheme
    layers: Mapping[int, LayerSpec]
    stores: Mapping[int, Mapping[CacheSide, Store]]

    @property
    def needs_rotary(self) -> bool:
        return self.scheme.k is not None and self.scheme.k.before_rope

    def to(self, device: torch.device) -> StoredCache:
        moved = {
            index: {side: store.to(device) for side, store in sides.items()}
            for index, sides in self.stores.items()
        }
        return replace(self, stores=moved)

    def replace(self, call: AttentionCall, *, with_query: bool = False) -> Tensors | Versions:
        """What the layer attends with: for each query, the version of each token that it would find."""
        if with_query:
            raise ValueError("a scheme says nothing of Q")
        k, v = self._given_back(call, "k"), self._given_back(call, "v")
        scheme, tokens = self.scheme, call.key.shape[2]
        if not scheme.recent:
            return call.query, _from(scheme.sinks, call.key, k), _from(scheme.sinks, call.value, v)
        old_k, old_v = windows.quantized(
            tokens, sinks=scheme.sinks, recent=scheme.recent, flush=scheme.flush, device=k.device
        )
        return Versions(
            query=call.query,
            keys=(k, k, call.key),
            values=(v, call.value, call.value),
            seen=(old_v, old_k & ~old_v, ~old_k),
        )

    def _given_back(self, call: AttentionCall, side: CacheSide) -> torch.Tensor:
        store = self.stores[call.layer][side]
        given = call.key if side == "k" else call.value
        layer = self.layers[call.layer]
        unrotated = store.scheme.before_rope
        x = rotary.apply(given, layer, call.rotary, inverse=True) if unrotated else given
        whole = _complete(x.shape[2], self.scheme, store.scheme)
        first = self.scheme.sinks if store.scheme.by_tokens else 0
        y = x.float()
        if whole:
            y = torch.cat([y[:, :, :first], store.give_back(x[:, :, first:whole]), y[:, :, whole:]], 2)
        if unrotated:
            y = rotary.apply(y, layer, call.rotary)
        return y.to(given.dtype)


@dataclass(frozen=True)
class Extras:
    """What some schemes need beyond statistics: levels of codebooks, and averages of another observer."""

    levels: Mapping[int, Mapping[CacheSide, torch.Tensor]]
    moving_amax: Mapping[int, Mapping[CacheSide, torch.Tensor]]


NO_EXTRAS = Extras({}, {})


def fit(
    scheme: Scheme,
    spec: ModelSpec,
    readers: Mapping[int, torch.Tensor],
    statistics: Statistics,
    *,
    extras: Extras = NO_EXTRAS,
    seed: int = 0,
) -> StoredCache:
    """Every layer's stores.

    Args:
        scheme: one that is not mixed.
        spec: geometry of the model.
        readers: of V per layer, :func:`kvcal.basis.readers`.
        statistics: distributions in the view that the scheme wants: without its sinks, before RoPE or after.
        extras: see :mod:`kvcal.second_pass`.
        seed: of random rotations.
    """
    stores: dict[int, dict[CacheSide, Store]] = {}
    for layer in spec.layers:
        output, seen = readers.get(layer.index), statistics.layers[layer.index]
        stores[layer.index] = {
            side: _store(part, side, seen, output, extras, layer.index, seed)
            for side, part in scheme.sides().items()
        }
    return StoredCache(scheme, {layer.index: layer for layer in spec.layers}, stores)


def _store(
    scheme: SideScheme,
    side: CacheSide,
    seen: dict[Side, SideStatistics],
    output: torch.Tensor | None,
    extras: Extras,
    index: int,
    seed: int,
) -> Store:
    fmt = scheme.number
    if fmt is None or fmt.dynamic:
        return Store(scheme)
    levels = None
    if scheme.codebook == "gaussian":
        levels = codebooks.gaussian(fmt.bits)
    elif scheme.codebook == "nuq":
        levels = extras.levels[index][side]
    if fmt.name == "nvfp4":
        return Store(scheme, scale=codes.nvfp4_tensor_scale(seen[side].amax.max()))
    if not scheme.static:
        return Store(scheme, basis=choose(scheme, side, seen, output, seed + index), levels=levels)
    if scheme.fixed == "unit":
        return Store(scheme, scale=torch.ones(1))
    if scheme.fixed == "moving_average":
        return Store(scheme, scale=extras.moving_amax[index][side] / fmt.max)
    low, high = static_range(scheme, side, seen, output)
    if scheme.zero_point == "none" and levels is None:
        return Store(scheme, scale=from_amax(high, fmt.max, scheme.rule))
    return Store(scheme, low=low, high=high, levels=levels)


def static_range(
    scheme: SideScheme, side: CacheSide, seen: dict[Side, SideStatistics], output: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower and upper end in the granularity's scale shape."""
    weight = None
    if scheme.rule.objective == "attention":
        if side == "k":
            weight = objectives.key_weight(seen)
        else:
            if output is None:
                raise ModelError("what reads V is not known, so errors of V cannot be weighted")
            weight = output.diagonal(dim1=-2, dim2=-1)
    fmt, grouping = scheme.number, scheme.grouping
    assert fmt is not None
    assert grouping is not None
    return objectives.ranges(
        seen[side],
        grouping,
        fmt,
        scheme.rule.objective,
        symmetric=scheme.zero_point == "none" and scheme.codebook is None,
        percentile=scheme.rule.percentile,
        weight=weight,
    )


def _complete(tokens: int, scheme: Scheme, side: SideScheme) -> int:
    """Tokens that can be quantized: all, or those in complete groups after the sinks."""
    if not side.by_tokens or side.group is None:
        return tokens
    whole = max(tokens - scheme.sinks, 0) // side.group * side.group
    return scheme.sinks + whole if whole else 0


def _from(sinks: int, kept: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    return torch.cat([kept[:, :, :sinks], quantized[:, :, sinks:]], 2) if sinks else quantized
