"""The basis in which vectors are stored: ``y = M (x - offset)`` per KV head, and back.

``hadamard``, ``random_hadamard``, ``random_orthogonal``: orthonormal, know nothing of the model (QuaRot,
SpinQuant's R3, TurboQuant).

``balanced`` knows what an error costs. With second moments ``C`` of what is stored and ``E`` of what reads
it, an error that spreads evenly over the channels of ``y`` costs ``tr(M C Mᵀ) tr(M^-ᵀ E M^-1)``. Over all
invertible ``M`` the minimum is ``‖C^½ E^½‖_*²`` (nuclear norm), reached at ``M = H P^½`` where ``P`` is the
matrix geometric mean ``C^-1 # E``, the solution of ``P C P = E``, and ``H`` the Hadamard transform that
spreads the error. For K, ``E`` is the second moment of the queries that read the head. For V,
``E = Σ_h W_o^(h)ᵀ W_o^(h)`` over its query heads, and ``C`` weights each token by ``Σ p²``, the attention
that it gets. No engine rotates K so online; V's map commutes with attention and folds into the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvcal import objectives
from kvcal.arch import ModelSpec
from kvcal.errors import ModelError
from kvcal.kernels import reference
from kvcal.recipe import Side
from kvcal.scheme import CacheSide, SideScheme
from kvcal.statistics import SideStatistics

# A direction is stretched at most so much more than another: beyond it, noise of the moments is amplified.
_CONDITION = 100.0
# Added to the diagonal of second moments, relative to its mean.
_RIDGE = 1e-4


@dataclass(frozen=True)
class Basis:
    """``y = forward (x - offset)``, ``x = back y + offset``.

    Attributes:
        offset: ``(kv_heads, 1, head_dim)`` float32, or None.
        forward: ``(kv_heads, head_dim, head_dim)`` float32, or None for the identity.
        back: its inverse.
        rms: of the channels of ``y``, ``(kv_heads, 1, 1)`` float32.
    """

    offset: torch.Tensor | None
    forward: torch.Tensor | None
    back: torch.Tensor | None
    rms: torch.Tensor

    def into(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, kv_heads, tokens, head_dim)`` to what is stored, float32."""
        y = x.float() if self.offset is None else x.float() - self.offset
        return y if self.forward is None else y @ self.forward.mT

    def out(self, y: torch.Tensor) -> torch.Tensor:
        """What is stored to the original basis."""
        x = y if self.back is None else y @ self.back.mT
        return x if self.offset is None else x + self.offset

    def to(self, device: torch.device) -> Basis:
        parts = (self.offset, self.forward, self.back)
        offset, forward, back = (part if part is None else part.to(device) for part in parts)
        return Basis(offset, forward, back, self.rms.to(device))


def choose(
    scheme: SideScheme,
    side: CacheSide,
    seen: dict[Side, SideStatistics],
    output: torch.Tensor | None,
    seed: int,
) -> Basis:
    """The basis that a scheme asks for, from distributions of one layer.

    Args:
        scheme: of this side.
        side: k or v.
        seen: statistics of the layer, distributions included.
        output: ``Σ_h W_o^(h)ᵀ W_o^(h)`` per KV head, ``(kv_heads, head_dim, head_dim)``; None if not known.
        seed: of random signs and rotations.
    """
    mine = seen[side]
    assert mine.moments is not None
    kv_heads, head_dim, _ = mine.moments.shape
    mean = mine.total / int(mine.tokens)
    moments = mine.moments / int(mine.tokens)
    if scheme.center:
        moments = moments - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    forward: torch.Tensor | None = None
    back: torch.Tensor | None = None
    if scheme.basis == "balanced":
        forward, back = _balanced(*_cost(side, seen, moments, output))
    elif scheme.basis != "none":
        forward = orthogonal(scheme.basis, head_dim, seed).expand(kv_heads, -1, -1)
        back = forward.mT
    turned = moments if forward is None else forward @ moments @ forward.mT
    rms = turned.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=torch.finfo(torch.float32).tiny).sqrt()
    return Basis(
        offset=mean.unsqueeze(1).float() if scheme.center else None,
        forward=None if forward is None else forward.float().contiguous(),
        back=None if back is None else back.float().contiguous(),
        rms=rms.float()[:, None, None],
    )


def read_by(projection: torch.Tensor, kv_heads: int, head_dim: int) -> torch.Tensor:
    """``Σ_h W_o^(h)ᵀ W_o^(h)`` over the query heads of each KV head, float64 on the CPU.

    ``projection`` is the output projection's weight, ``(hidden, heads * head_dim)``.
    """
    weight = projection.detach().double().cpu()
    grouped = weight.reshape(len(weight), kv_heads, -1, head_dim)
    return torch.einsum("ohgd,ohge->hde", grouped, grouped)


def readers(model: Any, spec: ModelSpec) -> dict[int, torch.Tensor]:
    """:func:`read_by` of every layer of a model as its weights are now; empty where they are not known."""
    if spec.projections is None:
        return {}
    return {
        layer.index: read_by(output, layer.kv_heads, layer.head_dim)
        for layer, output in zip(spec.layers, objectives.output_weights(model, spec), strict=True)
    }


def _cost(
    side: CacheSide, seen: dict[Side, SideStatistics], moments: torch.Tensor, output: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Second moments of what is stored and of what reads it."""
    if side == "k":
        queries = seen["q"].moments
        assert queries is not None
        return moments, queries
    weighted, weight = seen["v"].weighted_moments, seen["v"].weight
    assert weighted is not None
    assert weight is not None
    if output is None:
        raise ModelError("what reads V is not known, so errors of V cannot be weighted")
    return weighted / weight.clamp(min=1e-30)[:, None, None], output


def _balanced(stored: torch.Tensor, reading: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``H P^½`` and its inverse, ``P = C^-1 # E``."""
    c, e = _regular(stored), _regular(reading)
    root, inverse_root = _power(c, 0.5), _power(c, -0.5)
    values, vectors = torch.linalg.eigh(inverse_root @ _power(root @ e @ root, 0.5) @ inverse_root)
    values = torch.maximum(values, values.amax(-1, keepdim=True) / _CONDITION**2).unsqueeze(-2)
    hadamard = orthogonal("hadamard", c.shape[-1], 0)
    return (
        hadamard @ (vectors * values.sqrt()) @ vectors.mT,
        (vectors * values.rsqrt()) @ vectors.mT @ hadamard.mT,
    )


def _regular(moments: torch.Tensor) -> torch.Tensor:
    """Scaled to a mean diagonal of 1, with a ridge; a head that is always zero becomes the identity."""
    size = moments.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    eye = torch.eye(moments.shape[-1], dtype=moments.dtype)
    scaled = torch.where(size == 0, eye, moments / torch.where(size == 0, 1.0, size))
    return (scaled + scaled.mT) / 2 + _RIDGE * eye


def _power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    floor = 1e-12 * values.amax(-1, keepdim=True)
    powers = torch.maximum(values, floor).pow(exponent)
    found: torch.Tensor = (vectors * powers.unsqueeze(-2)) @ vectors.mT
    return found


def orthogonal(kind: str, head_dim: int, seed: int) -> torch.Tensor:
    """``(head_dim, head_dim)`` float64, orthonormal; ``seed`` is that of the two random kinds.

    ``kind``: ``hadamard``, ``random_hadamard`` or ``random_orthogonal``.
    """
    eye = torch.eye(head_dim, dtype=torch.float64)
    if kind == "random_orthogonal":
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(drawn)
        # Signs make every rotation as likely as any other.
        drawn.copy_(q * r.diagonal().sign())
        return drawn
    if kind == "random_hadamard":
        signs = reference.random_signs(head_dim, seed).double()
        eye = eye * signs
    # Rows of what comes back are H e_i, so the matrix is its transpose.
    return reference.hadamard(eye.T).T.contiguous()
