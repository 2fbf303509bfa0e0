"""What is done to Q, K and V of each layer before the cache sees them, as one record.

Everything is linear but the offset, in this order, per KV head and for row vectors of ``head_dim``::

    k' = ((k - key_offset) / key_scale) T^T R    q' = (q * key_scale) T^T R    v' = v N^T

with ``T = key_turn`` orthogonal, ``R`` a randomized Hadamard matrix and ``N = value_map``. ``q' · k'``
differs from ``q · k`` by a number that all keys of a query share, which softmax ignores, and ``N^-1`` in the
output projection undoes ``N``: attention over the primed tensors gives what it gave before, until something
is rounded in between.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file

from kvcal.errors import ModelError
from kvcal.kernels import reference

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class LayerTransform:
    """Of one layer; None leaves out a step.

    Attributes:
        key_scale: ``(kv_heads, head_dim)`` float64, above zero.
        key_offset: ``(kv_heads, head_dim)`` float64.
        key_turn: ``(kv_heads, head_dim, head_dim)`` float64, one ±1 in each row and column.
        key_signs: ``(head_dim,)`` of ±1: K and Q go through ``H diag(signs)`` online.
        value_map: ``(kv_heads, head_dim, head_dim)`` float64, invertible.
        latent_scale: ``(2,)`` float64, above zero: what a cached latent and its rotary key are divided by, as
            the channels of Q that meet them are multiplied. Other steps are for K and V of heads.
    """

    key_scale: torch.Tensor | None = None
    key_offset: torch.Tensor | None = None
    key_turn: torch.Tensor | None = None
    key_signs: torch.Tensor | None = None
    value_map: torch.Tensor | None = None
    latent_scale: torch.Tensor | None = None

    def apply(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        """What the cache is given: q ``(batch, heads, tokens, head_dim)``; k, v with ``kv_heads``."""
        if self.key_offset is not None:
            k = k - _over_tokens(self.key_offset, k)
        if self.key_scale is not None:
            k = k / _over_tokens(self.key_scale, k)
            q = q * _over_tokens(_per_query_head(self.key_scale, q.shape[1]), q)
        if self.key_turn is not None:
            turn = self.key_turn.to(k).transpose(-1, -2)
            k, q = torch.matmul(k, turn), torch.matmul(q, _per_query_head(turn, q.shape[1]))
        if self.key_signs is not None:
            signs = self.key_signs.to(k)
            q, k = reference.random_hadamard(q, signs), reference.random_hadamard(k, signs)
        if self.value_map is not None:
            v = torch.matmul(v, self.value_map.to(v).transpose(-1, -2))
        if self.latent_scale is not None:
            q, k, v = _scaled_latent(self.latent_scale, q, k, v)
        return q, k, v

    def undo(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        """Inverse of :meth:`apply`."""
        if self.key_signs is not None:
            signs = self.key_signs.to(k)
            q = reference.random_hadamard(q, signs, inverse=True)
            k = reference.random_hadamard(k, signs, inverse=True)
        if self.key_turn is not None:
            turn = self.key_turn.to(k)
            k, q = torch.matmul(k, turn), torch.matmul(q, _per_query_head(turn, q.shape[1]))
        if self.key_scale is not None:
            k = k * _over_tokens(self.key_scale, k)
            q = q / _over_tokens(_per_query_head(self.key_scale, q.shape[1]), q)
        if self.key_offset is not None:
            k = k + _over_tokens(self.key_offset, k)
        if self.value_map is not None:
            inverse = torch.linalg.inv(self.value_map.double())
            v = torch.matmul(v, inverse.to(v).transpose(-1, -2))
        if self.latent_scale is not None:
            q, k, v = _scaled_latent(1 / self.latent_scale, q, k, v)
        return q, k, v

    def inverse(self) -> LayerTransform:
        """The transform whose fold takes this one's fold back.

        Raises:
            ValueError: the transform is not one of weights.
        """
        if self.key_signs is not None:
            raise ValueError("an online rotation is in no weight")
        scale = offset = None
        if self.key_scale is not None:
            scale = 1 / _moved(self.key_turn, self.key_scale)
        if self.key_offset is not None:
            # k' = T ((k - o) / s), so k = T^T ((k' + s' T o) / s') with s' = 1 / |T| s
            offset = -_turned(self.key_turn, self.key_offset) * (1.0 if scale is None else scale)
        return LayerTransform(
            key_scale=scale,
            key_offset=offset,
            key_turn=None if self.key_turn is None else self.key_turn.transpose(-1, -2).contiguous(),
            value_map=None if self.value_map is None else torch.linalg.inv(self.value_map),
            latent_scale=None if self.latent_scale is None else 1 / self.latent_scale,
        )

    def then(self, other: LayerTransform) -> LayerTransform:
        """This transform and ``other`` after it.

        Raises:
            ValueError: both have an online rotation, or ``other`` scales what this one rotated.
        """
        if self.key_signs is not None and set(other.steps) - {"value_map"}:
            raise ValueError("nothing of K can follow a rotation of K")
        back = None if self.key_turn is None else self.key_turn.transpose(-1, -2)
        offset = self.key_offset
        if other.key_offset is not None:
            shift = _turned(back, other.key_offset) * (1.0 if self.key_scale is None else self.key_scale)
            offset = shift if offset is None else offset + shift
        scale = None if other.key_scale is None else _moved(back, other.key_scale)
        return LayerTransform(
            key_scale=_product(self.key_scale, scale),
            key_offset=offset,
            key_turn=_chain(self.key_turn, other.key_turn),
            key_signs=self.key_signs if self.key_signs is not None else other.key_signs,
            value_map=_chain(self.value_map, other.value_map),
            latent_scale=_product(self.latent_scale, other.latent_scale),
        )

    @property
    def steps(self) -> list[str]:
        """Names of the steps that do something."""
        return [f.name for f in fields(self) if getattr(self, f.name) is not None]

    @property
    def powers_of_two(self) -> bool:
        """Whether every number is zero or a power of two, so that a fold moves exponents only."""
        if self.key_offset is not None:
            return False
        parts = (self.key_scale, self.key_turn, self.value_map, self.latent_scale)
        return all(part is None or _powers_of_two(part) for part in parts)


@dataclass(frozen=True)
class Transforms:
    """One :class:`LayerTransform` for each layer that has any."""

    layers: dict[int, LayerTransform]

    def then(self, other: Transforms) -> Transforms:
        """These transforms and ``other`` after them."""
        found = dict(self.layers)
        for index, layer in other.layers.items():
            found[index] = found[index].then(layer) if index in found else layer
        return Transforms(dict(sorted(found.items())))

    def inverse(self) -> Transforms:
        """The transforms whose folds take these back."""
        return Transforms({i: layer.inverse() for i, layer in self.layers.items()})

    @property
    def powers_of_two(self) -> bool:
        """Whether folds move exponents only."""
        return all(layer.powers_of_two for layer in self.layers.values())

    @property
    def steps(self) -> list[str]:
        """Names of the steps that some layer has."""
        named = {step for layer in self.layers.values() for step in layer.steps}
        return [f.name for f in fields(LayerTransform) if f.name in named]

    def save(self, path: Path) -> None:
        """Write as ``layers.<index>.<step>``."""
        save_file(self._named(), path)

    @property
    def digest(self) -> str:
        """SHA-256 of all numbers."""
        return hashlib.sha256(save(self._named())).hexdigest()

    def _named(self) -> dict[str, torch.Tensor]:
        return {
            f"layers.{index}.{step}": getattr(layer, step).contiguous()
            for index, layer in self.layers.items()
            for step in layer.steps
        }

    @classmethod
    def load(cls, path: Path) -> Transforms:
        """Read what :meth:`save` wrote.

        Raises:
            ModelError: the file is broken or holds something else.
        """
        layers: dict[int, dict[str, torch.Tensor]] = {}
        try:
            for key, tensor in load_file(path).items():
                _, index, step = key.split(".")
                layers.setdefault(int(index), {})[step] = tensor
            return cls({i: LayerTransform(**steps) for i, steps in sorted(layers.items())})
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise ModelError(f"{path}: holds no transforms that can be read: {error}") from None


def _scaled_latent(scale: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """K is the latent, V the rotary key, and Q meets both."""
    of_latent, of_rotary = scale.to(k)
    sizes = torch.tensor([k.shape[-1], v.shape[-1]], device=k.device)
    return q * scale.to(q).repeat_interleave(sizes), k / of_latent, v / of_rotary


def _over_tokens(per_channel: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``(heads, head_dim)`` -> ``(heads, 1, head_dim)`` of the dtype and device of ``x``."""
    return per_channel.to(x).unsqueeze(1)


def _per_query_head(per_kv_head: torch.Tensor, heads: int) -> torch.Tensor:
    return per_kv_head.repeat_interleave(heads // per_kv_head.shape[0], dim=0)


def _turned(turn: torch.Tensor | None, per_channel: torch.Tensor) -> torch.Tensor:
    """``T x`` for each head of ``(heads, head_dim)``."""
    return per_channel if turn is None else torch.matmul(turn, per_channel.unsqueeze(-1)).squeeze(-1)


def _moved(turn: torch.Tensor | None, per_channel: torch.Tensor) -> torch.Tensor:
    """The same without the signs."""
    return per_channel if turn is None else _turned(turn.abs(), per_channel)


def _product(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a * b


def _chain(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    return second if first is None else first if second is None else second @ first


def _powers_of_two(x: torch.Tensor) -> bool:
    mantissa, _ = torch.frexp(x[x != 0].abs())
    return bool((mantissa == 0.5).all())
