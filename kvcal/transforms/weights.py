"""Folds a transform into the weights of an attention block.

With weights ``(out, in)`` as torch keeps them, ``y = W x + b``, per KV head ``j`` and the query heads ``h``
that read it::

    W_k <- T (W_k / s)      b_k <- T ((b_k - o) / s)    rows of head j; s and o one number per row
    W_q <- T (W_q * s)      b_q <- T (b_q * s)          rows of each head h
    W_v <- N W_v            b_v <- N b_v                rows of head j
    W_o <- W_o N^-1                                     columns of each head h

Where a QK-norm stands between projection and RoPE it would undo a scale of its input, so ``s`` goes into its
gains instead: ``g_k <- T (g_k / s)``, ``g_q <- T (g_q * s)`` with a diagonal ``T``, of ``1 + w`` where the
class multiplies by that. Weights that are kept ``(in, out)`` are turned around first. What is done to a
cached latent stands in ``latent_scale``. All arithmetic is float64, rounded once to the tensor's own dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvcal.arch import LayerSpec, ModelSpec
from kvcal.errors import ModelError
from kvcal.transforms.record import LayerTransform

Fold = Callable[[torch.Tensor], torch.Tensor]


def folds(model: ModelSpec, layer: LayerSpec, transform: LayerTransform) -> dict[str, Fold]:
    """Tensor name -> function from the tensor to the folded one, of the same shape and dtype.

    Names that a checkpoint may lack, such as biases, are among them.
    """
    if layer.latent is not None:
        return {} if transform.latent_scale is None else _latent_folds(layer, transform.latent_scale)
    changes = _Changes(model, layer, transform)
    names = model.projections
    if names is None:
        raise ModelError(f"which weights of {model.model_type} make Q, K and V is not known")
    turned = _transposed if names.transposed else _as_kept
    found: dict[str, Fold] = {}
    if changes.touch_projections:
        for module in dict.fromkeys((names.q, names.k, names.v)):
            sides = [s for s in ("q", "k", "v") if getattr(names, s) == module and changes.touches(s)]
            if sides:
                found[f"{layer.module}.{module}.weight"] = turned(changes.rows_of(sides, bias=False))
                found[f"{layer.module}.{module}.bias"] = changes.rows_of(sides, bias=True)
    if transform.value_map is not None:
        found[f"{layer.module}.{names.o}.weight"] = turned(changes.columns)
    if changes.multiplies and model.qk_norm != "none":
        found[f"{layer.module}.{model.k_norm}.weight"] = changes.gains("k")
        found[f"{layer.module}.{model.q_norm}.weight"] = changes.gains("q")
    return found


def _latent_folds(layer: LayerSpec, scale: torch.Tensor) -> dict[str, Fold]:
    """Rows and gains that one factor touches are left out where it is 1."""
    of, module = layer.latent, layer.module
    assert of is not None
    latent, rotary = scale.tolist()
    found: dict[str, Fold] = {}
    if latent != 1:
        found[f"{module}.{of.norm}.weight"] = lambda gains: _times(gains, 1 / latent)
        found[f"{module}.{of.up}.weight"] = lambda rows: _times(rows, latent)
    if rotary != 1:

        def down(rows: torch.Tensor) -> torch.Tensor:  # of the latent, then of the rotary key
            return torch.cat([rows[: of.rank], _times(rows[of.rank :], 1 / rotary)])

        def query(rows: torch.Tensor) -> torch.Tensor:
            heads = rows.reshape(layer.heads, of.key + of.rotary, -1)
            turned = torch.cat([heads[:, : of.key], _times(heads[:, of.key :], rotary)], 1)
            return turned.reshape(rows.shape)

        found |= {f"{module}.{of.down}.{leaf}": down for leaf in ("weight", "bias")}
        found[f"{module}.{of.query}.weight"] = query
    return found


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return (tensor.double() * factor).to(tensor.dtype)


def _as_kept(fold: Fold) -> Fold:
    return fold


def _transposed(fold: Fold) -> Fold:
    return lambda tensor: fold(tensor.T).T.contiguous()


class _Changes:
    def __init__(self, model: ModelSpec, layer: LayerSpec, transform: LayerTransform):
        self._model, self._layer, self._transform = model, layer, transform

    @property
    def touch_projections(self) -> bool:
        return any(self.touches(side) for side in ("q", "k", "v"))

    @property
    def multiplies(self) -> bool:
        """Whether channels of K and Q get factors."""
        return self._transform.key_scale is not None or self._transform.key_turn is not None

    def touches(self, side: str) -> bool:
        """Whether the rows of a projection change."""
        transform = self._transform
        if side == "v":
            return transform.value_map is not None
        multiplied = self.multiplies and self._model.qk_norm == "none"
        return multiplied or (side == "k" and transform.key_offset is not None)

    def rows_of(self, sides: list[str], *, bias: bool) -> Fold:
        def fold(tensor: torch.Tensor) -> torch.Tensor:
            # A bias is a weight with one input.
            work = tensor.double().reshape(tensor.shape[0], -1).clone()
            for side, rows in self._heads(work).items():
                if side in sides:
                    heads = rows.flatten(0, -3)  # a copy where query heads lie in groups
                    self._change(side, heads, bias)
                    if heads.data_ptr() != rows.data_ptr():
                        rows.copy_(heads.view_as(rows))
            return work.reshape(tensor.shape).to(tensor.dtype)

        return fold

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        layer, value_map = self._layer, self._value_map(tensor)
        group = layer.heads // layer.kv_heads
        work = tensor.double().reshape(tensor.shape[0], layer.heads, layer.head_dim)
        diagonal = _diagonal_of(value_map)
        if diagonal is not None:
            work = work / diagonal.repeat_interleave(group, dim=0)
        else:
            inverse = torch.linalg.inv(value_map).repeat_interleave(group, dim=0)
            work = torch.matmul(work.unsqueeze(2), inverse)
        return work.reshape(tensor.shape).to(tensor.dtype)

    def gains(self, side: str) -> Fold:
        def fold(tensor: torch.Tensor) -> torch.Tensor:
            factor = self._factor(side, tensor) * self._signs(side, tensor)
            if self._model.qk_norm == "head":
                if not torch.equal(factor, factor[:1].expand_as(factor)):
                    raise ModelError(
                        f"layer {self._layer.index}: heads that share QK-norm gains must share scales"
                    )
                factor = factor[0]
            added = 1.0 if self._model.norm_adds_one else 0.0
            work = (tensor.double() + added) * factor.reshape(tensor.shape) - added
            return work.to(tensor.dtype)

        return fold

    def _change(self, side: str, rows: torch.Tensor, bias: bool) -> None:
        """``rows`` is ``(heads, head_dim, in)`` and a view."""
        transform = self._transform
        if side == "v":
            value_map = self._value_map(rows)
            diagonal = _diagonal_of(value_map)
            if diagonal is not None:
                rows.mul_(diagonal.unsqueeze(-1))
            else:
                rows.copy_(torch.matmul(value_map, rows))
            return
        if side == "k" and bias and transform.key_offset is not None:
            rows.sub_(transform.key_offset.to(rows).unsqueeze(-1))
        if self._model.qk_norm == "none":
            rows.mul_(self._factor(side, rows).unsqueeze(-1))
            self._turn(side, rows)

    def _factor(self, side: str, like: torch.Tensor) -> torch.Tensor:
        """``(heads, head_dim)`` of K or Q."""
        shape = (self._layer.kv_heads, self._layer.head_dim)
        scale = self._transform.key_scale
        scale = torch.ones(shape, dtype=torch.float64) if scale is None else scale
        scale = scale.to(like.device, torch.float64)
        return 1 / scale if side == "k" else self._of_query_heads(scale)

    def _turn(self, side: str, rows: torch.Tensor) -> None:
        """Exchange rows and change signs; a product with zeros would lose the signs of zeros."""
        if self._transform.key_turn is None:
            return
        turn = self._transform.key_turn.to(rows.device)
        turn = turn if side == "k" else self._of_query_heads(turn)
        source = turn.abs().argmax(-1)  # (heads, head_dim)
        sign = turn.sum(-1, keepdim=True)
        rows.copy_(rows.gather(1, source.unsqueeze(-1).expand_as(rows)) * sign)

    def _signs(self, side: str, like: torch.Tensor) -> torch.Tensor | float:
        """Diagonal of the turn, ``(heads, head_dim)``: behind a QK-norm it has nothing else."""
        if self._transform.key_turn is None:
            return 1.0
        diagonal = self._transform.key_turn.diagonal(dim1=-2, dim2=-1).to(like.device)
        return diagonal if side == "k" else self._of_query_heads(diagonal)

    def _of_query_heads(self, per_kv_head: torch.Tensor) -> torch.Tensor:
        return per_kv_head.repeat_interleave(self._layer.heads // self._layer.kv_heads, dim=0)

    def _value_map(self, like: torch.Tensor) -> torch.Tensor:
        assert self._transform.value_map is not None
        return self._transform.value_map.to(like.device, torch.float64)

    def _heads(self, work: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views ``([KV heads,] heads, head_dim, in)`` of the rows of each side that lies in the tensor."""
        names = self._model.projections
        assert names is not None
        layer, fused = self._layer, names.fused
        counts = {side: layer.heads_of(side) for side in ("q", "k", "v")}
        if fused == "groups":
            split = work.view(layer.kv_heads, layer.heads // layer.kv_heads + 2, layer.head_dim, -1)
            return {"q": split[:, :-2], "k": split[:, -2], "v": split[:, -1]}
        if fused == "blocks":
            sizes = [count * layer.head_dim for count in counts.values()]
            blocks = torch.split(work, sizes)
        else:
            # Unfused: every side that asks finds its own tensor here, told apart by the caller.
            blocks = (work, work, work)
        return {
            side: block.view(count, layer.head_dim, -1)
            for (side, count), block in zip(counts.items(), blocks, strict=True)
            if block.shape[0] == count * layer.head_dim
        }


def _diagonal_of(value_map: torch.Tensor) -> torch.Tensor | None:
    """``(heads, head_dim)`` of a scale per channel; products with zeros lose signs of zeros."""
    diagonal = value_map.diagonal(dim1=-2, dim2=-1)
    return diagonal if torch.equal(value_map, torch.diag_embed(diagonal)) else None
