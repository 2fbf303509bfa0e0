"""K and V of a layer in pages, as the paged kernels read and write them: shapes, and what they refuse.

A page holds ``page_size`` tokens of every KV head. Position ``p`` of a sequence lies in slot
``p % page_size`` of page ``table[sequence, p // page_size]``. Codes of a token lie as
:func:`kvcal.kernels.codes.pack` packs them, lowest channel in the lowest bits; 8-bit codes are therefore the
bytes that engines store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvcal.formats import KVFormat

Sharing = Literal["head", "channel", "token_head", "group"]

FORMATS = ("fp8_e4m3", "fp8_e5m2", "int8", "int4", "int2", "nvfp4")
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
LARGEST_GROUP = 16
SMALLEST_PAGE = 16


@dataclass(frozen=True)
class Pages:
    """K or V of one layer.

    Attributes:
        codes: ``(pages, kv_heads, page_size, row)``, the last dimension contiguous, others in any order:
            float16 or bfloat16 with ``row = head_dim``, float8 or int8 likewise, or uint8 of packed codes
            (integers moved by :func:`kvcal.kernels.codes.to_unsigned`, or unsigned where there is ``low``).
        head_dim: channels of a head.
        fmt: the storage format; None for 16-bit floats.
        scale: what a code of 1 stands for. Static: ``(1,)``, ``(kv_heads, 1, 1)`` or ``(kv_heads, 1,
            head_dim)``, float32. With the tokens: ``(pages, kv_heads, page_size, 1)`` float32, or one per
            group of channels, ``(pages, kv_heads, page_size, groups)``: float16, of NVFP4 float8_e4m3fn.
        low: what code 0 stands for, integers only; shape and dtype of ``scale``. Codes are then unsigned.
        tensor_scale: of NVFP4 only, ``(1,)`` or ``(kv_heads, 1, 1)`` float32.
    """

    codes: torch.Tensor
    head_dim: int
    fmt: KVFormat | None = None
    scale: torch.Tensor | None = None
    low: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.codes.dim() != 4 or self.codes.stride(-1) != 1:
            raise ValueError(
                f"codes are {tuple(self.codes.shape)} with strides {self.codes.stride()}; pages are"
                " (pages, kv_heads, page_size, row), the last dimension contiguous"
            )
        if self.page_size < SMALLEST_PAGE or self.page_size & (self.page_size - 1):
            raise ValueError(f"pages of {self.page_size} tokens; a power of two from {SMALLEST_PAGE} works")
        if self.fmt is None:
            self._require_16_bits()
        else:
            self._require_codes(self.fmt)

    @property
    def kv_heads(self) -> int:
        return self.codes.shape[1]

    @property
    def page_size(self) -> int:
        return self.codes.shape[2]

    @property
    def per_byte(self) -> int:
        """Codes in a byte; 1 for those of 8 and 16 bits."""
        return 1 if self.fmt is None else 8 // self.fmt.bits

    @property
    def sharing(self) -> Sharing:
        """Who shares a scale. 16-bit floats count as ``head``: they have none."""
        if self.scale is None:
            return "head"
        if self.scale.dim() < 4:
            return "head" if self.scale.shape[-1] == 1 else "channel"
        return "token_head" if self.scale.shape[-1] == 1 else "group"

    @property
    def channels_per_scale(self) -> int:
        """Channels of a token that share a scale, of ``group``."""
        assert self.scale is not None
        return self.head_dim // self.scale.shape[-1]

    @property
    def bytes_per_token_head(self) -> float:
        """Codes, scales and offsets of one token and head that lie in memory beside them."""
        total = self.codes.shape[-1] * self.codes.element_size()
        for beside in (self.scale, self.low):
            if beside is not None and beside.dim() == 4:
                total += beside.shape[-1] * beside.element_size()
        return total

    def _require_16_bits(self) -> None:
        if self.codes.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"codes are {self.codes.dtype}; without a format they are float16 or bfloat16")
        if self.codes.shape[-1] != self.head_dim or self.scale is not None or self.low is not None:
            raise ValueError("16-bit pages have rows of head_dim, and neither scale nor low")

    def _require_codes(self, fmt: KVFormat) -> None:
        if fmt.name not in FORMATS:
            raise ValueError(f"no paged kernel reads {fmt.name}; they read {', '.join(FORMATS)}")
        storage = getattr(torch, fmt.storage_dtype)
        row = self.head_dim * fmt.bits // 8
        unsigned = self.low is not None and self.codes.dtype == torch.uint8
        if (self.codes.dtype != storage and not unsigned) or self.codes.shape[-1] != row:
            raise ValueError(
                f"codes are {self.codes.dtype} in rows of {self.codes.shape[-1]}; {fmt.name} with heads of"
                f" {self.head_dim} has {storage} in rows of {row}"
            )
        if self.scale is None:
            raise ValueError(f"{fmt.name} needs a scale")
        of_tokens = (self.codes.shape[0], self.kv_heads, self.page_size)
        shapes = [(1,), (self.kv_heads, 1, 1), (self.kv_heads, 1, self.head_dim), (*of_tokens, 1)]
        shapes += [(*of_tokens, self.head_dim // size) for size in (16, 32, 64) if self.head_dim % size == 0]
        if fmt.block:
            shapes = [(*of_tokens, self.head_dim // fmt.block)]
        if tuple(self.scale.shape) not in shapes:
            raise ValueError(f"scale has shape {tuple(self.scale.shape)}; {fmt.name} takes one of {shapes}")
        wanted = _scale_dtype(fmt, self.sharing)
        if self.scale.dtype != wanted:
            raise ValueError(f"scale is {self.scale.dtype}; of {fmt.name} per {self.sharing} it is {wanted}")
        if self.sharing in ("token_head", "group") and self.scale.stride(-1) != 1:
            raise ValueError("scales that come with the tokens are contiguous in their last dimension")
        if self.low is not None:
            if not fmt.integer:
                raise ValueError(f"{fmt.name} has no zero point; leave low out")
            if self.low.shape != self.scale.shape or self.low.dtype != self.scale.dtype:
                raise ValueError("low has the shape and dtype of scale")
            if self.low.stride() != self.scale.stride():
                raise ValueError("low has the strides of scale")
        if (self.tensor_scale is not None) != bool(fmt.block):
            raise ValueError("tensor_scale belongs to nvfp4, and nvfp4 needs it")


@dataclass(frozen=True)
class Segment:
    """Tokens of every sequence that are stored alike: the quantized part, 16-bit sinks, a recent window.

    Attributes:
        k: keys.
        v: values, in pages of the same size.
        table: ``(sequences, width)`` int32, page of each ``page_size`` positions.
        first: ``(sequences,)`` int32, position of the first token stored here; None for 0.
        stop: ``(sequences,)`` int32, position after the last one; None for the length of the sequence.
        ring: pages are reused: position ``p`` lies in page ``table[sequence, p // page_size % width]``.
    """

    k: Pages
    v: Pages
    table: torch.Tensor
    first: torch.Tensor | None = None
    stop: torch.Tensor | None = None
    ring: bool = False


def allocate(
    fmt: KVFormat | None,
    *,
    pages: int,
    kv_heads: int,
    page_size: int,
    head_dim: int,
    sharing: Sharing = "head",
    scale: torch.Tensor | None = None,
    low: torch.Tensor | None = None,
    group: int = 0,
    asymmetric: bool = False,
    tensor_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Pages:
    """Unwritten pages, a head's tokens of a page side by side.

    Args:
        fmt: the format; None for 16-bit floats of ``dtype``.
        pages: how many.
        kv_heads: heads of K and V.
        page_size: tokens of a page.
        head_dim: channels of a head.
        sharing: whose scale it is. Static ones (``head``, ``channel``) are given, others are allocated.
        scale: a static scale.
        low: a static offset.
        group: channels that share a scale, of ``group``.
        asymmetric: allocate ``low`` too.
        tensor_scale: of NVFP4.
        dtype: of 16-bit pages.
        device: where they lie.
    """
    of_tokens = (pages, kv_heads, page_size)
    if fmt is None:
        return Pages(torch.empty(*of_tokens, head_dim, dtype=dtype, device=device), head_dim)
    if sharing in ("token_head", "group"):
        scales = 1 if sharing == "token_head" else head_dim // (fmt.block or group)
        scale = torch.empty(*of_tokens, scales, dtype=_scale_dtype(fmt, sharing), device=device)
        low = torch.empty_like(scale) if asymmetric else None
    storage = torch.uint8 if low is not None else getattr(torch, fmt.storage_dtype)
    codes = torch.empty(*of_tokens, head_dim * fmt.bits // 8, dtype=storage, device=device)
    return Pages(codes, head_dim, fmt, scale, low, tensor_scale)


def _scale_dtype(fmt: KVFormat, sharing: Sharing) -> torch.dtype:
    """Scales of groups inside a head take room, and are stored in 16 bits, or as the format has it."""
    if fmt.block:
        found: torch.dtype = getattr(torch, fmt.block_scale_dtype)
        return found
    return torch.float16 if sharing == "group" else torch.float32


def require(q: torch.Tensor, segments: Sequence[Segment], lengths: torch.Tensor) -> None:
    """Refuse what the kernels cannot read.

    Args:
        q: ``(sequences, heads, queries, head_dim)``.
        segments: at least one.
        lengths: ``(sequences,)`` int32.
    """
    if q.dim() != 4 or q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"q is {q.dtype} {tuple(q.shape)}; it is (sequences, heads, queries, head_dim)")
    if not segments:
        raise ValueError("no segment to attend to")
    if lengths.shape != q.shape[:1]:
        raise ValueError(f"lengths are {tuple(lengths.shape)} for {q.shape[0]} sequences")
    for segment in segments:
        heads = segment.k.kv_heads
        if segment.v.kv_heads != heads or q.shape[1] % heads:
            raise ValueError(f"{q.shape[1]} heads over {heads} heads of K and {segment.v.kv_heads} of V")
        if q.shape[1] // heads > LARGEST_GROUP:
            raise ValueError(f"{q.shape[1] // heads} heads share a KV head; at most {LARGEST_GROUP} do")
        if not segment.k.head_dim == segment.v.head_dim == q.shape[3]:
            raise ValueError("Q, K and V differ in head_dim")
        if segment.k.head_dim not in HEAD_DIMS:
            raise ValueError(f"heads of {segment.k.head_dim}; the kernels know {HEAD_DIMS}")
        if segment.k.page_size != segment.v.page_size:
            raise ValueError("K and V have pages of different sizes")
        if segment.table.dim() != 2 or segment.table.shape[0] != q.shape[0]:
            raise ValueError(f"table is {tuple(segment.table.shape)} for {q.shape[0]} sequences")
