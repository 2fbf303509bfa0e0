"""Triton twin of ``paged_reference.paged_attention``: decode and prefill over a paged, quantized cache.

Each segment is a launch of :mod:`kvcal.kernels.paged_programs`, cut into spans of keys as :mod:`tuning` found
fastest; a second launch merges the spans. A lone span writes the result itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs

from kvcal.kernels import paged, paged_programs, tuning, words
from kvcal.kernels.paged import Pages, Segment
from kvcal.kernels.quantize import scale_per_head
from kvcal.kernels.tuning import Tuning


def paged_attention(
    q: torch.Tensor,
    segments: Sequence[Segment],
    lengths: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    hadamard: bool = False,
) -> torch.Tensor:
    """Causal attention over pages; arguments as in :func:`kvcal.kernels.paged_reference.paged_attention`."""
    paged.require(q, segments, lengths)
    q = q.contiguous()
    out = torch.empty_like(q)
    if not q.numel():
        return out
    options = _Options(scaling, window, softcap, sinks, q_scale, hadamard)
    launches = [_Launch(q, segment, lengths, options) for segment in segments]
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        planned = [
            (each, tuning.choose(each.key, each.bytes, functools.partial(each.alone, out)))
            for each in launches
        ]
        _run(planned, out)
    return out


@dataclass(frozen=True)
class _Options:
    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    q_scale: torch.Tensor | None
    hadamard: bool


def _run(planned: Sequence[tuple[_Launch, Tuning]], out: torch.Tensor) -> None:
    """Write attention over all segments to ``out``."""
    splits = [launch.splits(how) for launch, how in planned]
    total = sum(splits)
    partial, lse = out, out
    if total > 1:
        partial = torch.empty(*out.shape[:3], total, out.shape[3], device=out.device)
        lse = torch.empty(*out.shape[:3], total, device=out.device)
    begin = 0
    for (launch, how), count in zip(planned, splits, strict=True):
        launch(partial, lse, how, begin, count, total)
        begin += count
    if total > 1:
        _merge_splits(partial, lse, planned[0][0].options.sinks, out)


class _Launch:
    """One segment's arguments, ready for any tuning."""

    def __init__(self, q: torch.Tensor, segment: Segment, lengths: torch.Tensor, options: _Options) -> None:
        self.q, self.segment, self.lengths, self.options = q, segment, lengths, options
        k, v = segment.k, segment.v
        self.k_side, self.v_side = _Side(k), _Side(v)
        group = q.shape[1] // k.kv_heads
        # Below 64 rows Triton multiplies by mma.sync. With wgmma, Triton 3.6 read beyond memory or gave wrong
        # results on an H200 where K and V are of different kinds, or Q is turned.
        rows = 16 if group * q.shape[2] <= 16 else 32
        block_q = rows // group
        self.query_blocks = triton.cdiv(q.shape[2], block_q)
        self.constants: dict[str, Any] = {
            "HEAD_DIM": k.head_dim,
            "GROUP": group,
            "ROWS": rows,
            # A Hadamard transform is a dot, and has all rows.
            "Q_ROWS": rows if options.hadamard else min(rows, triton.next_power_of_2(group * q.shape[2])),
            "BLOCK_Q": block_q,
            "PAGE": k.page_size,
            "WINDOWED": options.window is not None,
            "SOFTCAPPED": options.softcap is not None,
            "QUANTIZED_Q": options.q_scale is not None,
            # The largest power of two in head_dim: the order of the blocks that turn it.
            "TURNED": k.head_dim & -k.head_dim if options.hadamard else 0,
            "RING": segment.ring,
            "PTX": not knobs.runtime.interpret,
            **_constants("K", k),
            **_constants("V", v),
        }
        self.key = tuning.Key.of(q, self.constants)

    @property
    def bytes(self) -> float:
        """Of the pages in the table: about what a call reads."""
        k, v = self.segment.k, self.segment.v
        tokens = self.segment.table.numel() * k.page_size
        return tokens * k.kv_heads * (k.bytes_per_token_head + v.bytes_per_token_head)

    @property
    def programs(self) -> int:
        return int(self.q.shape[0] * self.segment.k.kv_heads * self.query_blocks)

    def splits(self, how: Tuning) -> int:
        """As many spans as fill the card, and none shorter than two tiles."""
        tokens = self.segment.table.shape[1] * self.segment.k.page_size
        wanted = tuning.processors(self.q.device) * how.programs_per_processor // self.programs
        return max(1, min(wanted, tokens // (2 * how.keys)))

    def alone(self, out: torch.Tensor, how: Tuning) -> None:
        """This segment as if there were no other: what tuning times."""
        _run([(self, how)], out)

    def __call__(
        self, partial: torch.Tensor, lse: torch.Tensor, how: Tuning, begin: int, splits: int, total: int
    ) -> None:
        q, segment, options = self.q, self.segment, self.options
        k_side, v_side = self.k_side, self.v_side
        heads = q.shape[1]
        q_scale = q if options.q_scale is None else scale_per_head(options.q_scale, heads, "q_scale")
        paged_programs.spans[(self.query_blocks * splits, segment.k.kv_heads, q.shape[0])](
            q,
            q_scale,
            *k_side.tensors,
            *v_side.tensors,
            segment.table,
            self.lengths,
            self.lengths if segment.first is None else segment.first,
            self.lengths if segment.stop is None else segment.stop,
            q if options.sinks is None else options.sinks.float(),
            partial,
            lse,
            *k_side.strides,
            *v_side.strides,
            segment.table.stride(0),
            segment.table.shape[1],
            heads,
            q.shape[2],
            splits,
            begin,
            total,
            options.scaling,
            0 if options.window is None else options.window,
            0.0 if options.softcap is None else options.softcap,
            K_TOKEN=k_side.token_stride,
            K_SCALE_TOKEN=k_side.scale_token_stride,
            V_TOKEN=v_side.token_stride,
            V_SCALE_TOKEN=v_side.scale_token_stride,
            SAME_PLACES=k_side.codes_strides == v_side.codes_strides,
            FIRST_GIVEN=segment.first is not None,
            SINKS=options.sinks is not None,
            ALONE=total == 1,
            KEYS=how.keys,
            STAGES=how.stages,
            num_warps=how.warps,
            maxnreg=how.registers or None,
            **self.constants,
        )


class _Side:
    """K or V as the kernel takes it: codes as words, scales float32 per head or channel, or as stored."""

    def __init__(self, side: Pages) -> None:
        words_ = side.codes if side.fmt is None else side.codes.view(torch.int16)
        # What a kernel does not read is given as words: nothing is made for it.
        static = low = self.dynamic = self.dynamic_low = words_
        if side.sharing in ("head", "channel") and side.scale is not None:
            static = _static(side.scale, side)
            low = words_ if side.low is None else _static(side.low, side)
        elif side.scale is not None:
            self.dynamic = side.scale
            if side.tensor_scale is not None:
                static = scale_per_head(side.tensor_scale, side.kv_heads, "tensor_scale")
                self.dynamic = side.scale.view(torch.uint8)
            self.dynamic_low = self.dynamic if side.low is None else side.low
        self.tensors = (words_, static, low, self.dynamic, self.dynamic_low)
        self.codes_strides = words_.stride()
        self.token_stride = words_.stride(2)
        self.scale_token_stride = self.dynamic.stride(2)
        self.strides = (*words_.stride()[:2], *self.dynamic.stride()[:2])


def _static(scale: torch.Tensor, side: Pages) -> torch.Tensor:
    if side.sharing == "channel":
        return scale.float().reshape(side.kv_heads, side.head_dim).contiguous()
    return scale_per_head(scale, side.kv_heads, "scale")


def _constants(name: str, side: Pages) -> dict[str, Any]:
    kind = str(side.codes.dtype).removeprefix("torch.")
    if side.fmt is not None:
        kind = ("u" if side.low is not None else "") + side.fmt.name
    per_word = words.per_word(kind)
    return {
        f"{name}_KIND": kind,
        f"{name}_WORDS": max(16, triton.next_power_of_2(side.head_dim // per_word)),
        f"{name}_SHARING": "none" if side.scale is None else side.sharing,
        f"{name}_LOW": side.low is not None,
        f"{name}_WORDS_PER_SCALE": side.channels_per_scale // per_word if side.sharing == "group" else 1,
    }


def _merge_splits(
    partial: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor
) -> None:
    sequences, heads, queries, total, head_dim = partial.shape
    channels = 32
    # Hopper starts the programs of a dependent launch while those before it end.
    overlap = not knobs.runtime.interpret and torch.cuda.get_device_capability(out.device) >= (9, 0)
    paged_programs.merge[(sequences * heads * queries, triton.cdiv(head_dim, channels))](
        partial,
        lse,
        out if sinks is None else sinks.float(),
        out,
        total,
        heads,
        queries,
        HEAD_DIM=head_dim,
        CHANNELS=channels,
        SPLITS=min(128, triton.next_power_of_2(total)),
        SINKS=sinks is not None,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
