"""Decode attention of others, as ``kvcal bench attention`` calls it; each optional, imported when asked.

A peer's cache is a pair of K and V of one dtype with scale 1: in pages as its engine lays them,
``(pages, PAGE, kv_heads, head_dim)``, or without pages, ``(sequences, kv_heads, length, head_dim)``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.nn.functional as F

PAGE = 16

# FP8 kernels round the probabilities to E4M3 too, to 2 ** -4 of each.
_LIMITS = {torch.bfloat16: 1e-2, torch.float8_e4m3fn: 6e-2}

Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Decode:
    """What all copies of a cache have in common.

    Attributes:
        q: ``(sequences, heads, head_dim)`` bfloat16, one query per sequence.
        table: ``(sequences, length / PAGE)`` int32, page of each ``PAGE`` positions.
        lengths: ``(sequences,)`` int32, all equal.
        kv_heads: heads of K and V.
    """

    q: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    kv_heads: int

    @property
    def length(self) -> int:
        return self.table.shape[1] * PAGE


@dataclass(frozen=True)
class Peer:
    """One implementation of others.

    Attributes:
        name: in tables.
        module: what must be importable.
        package: the distribution whose version is reported.
        dtype: of its cache.
        bind: prepares whatever a step prepares once for all layers; what it returns takes K and V to
            ``(sequences, heads, head_dim)``.
        paged: how its cache lies.
        fp8_query: Q comes in E4M3, rounded outside what is timed.
    """

    name: str
    module: str
    package: str
    dtype: torch.dtype
    bind: Callable[[Decode, torch.Tensor], Attend]
    paged: bool = True
    fp8_query: bool = False

    @property
    def limit(self) -> float:
        """Largest relative error of its output."""
        return _LIMITS[self.dtype]

    def missing(self) -> str | None:
        """Why it cannot be imported, in one line."""
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a build for another torch raises whatever its loader does
            return first_line(error)
        return None

    def version(self) -> str | None:
        """Of the package, where it was installed as one."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            found = getattr(importlib.import_module(self.module), "__version__", None)
            return None if found is None else str(found)

    def query(self, decode: Decode) -> torch.Tensor:
        """Q as it reads it."""
        return decode.q.to(torch.float8_e4m3fn) if self.fp8_query else decode.q

    def cache(self, decode: Decode, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Normal K and V."""
        sequences, _, head_dim = decode.q.shape
        shape = (sequences, decode.kv_heads, decode.length, head_dim)
        if self.paged:
            shape = (decode.table.numel(), PAGE, decode.kv_heads, head_dim)
        k, v = (torch.empty(shape, dtype=self.dtype, device=decode.q.device) for _ in range(2))
        for side in (k, v):
            for part in side.tensor_split(-(-side.numel() // 2**25)):
                normal = torch.randn(
                    part.shape, generator=generator, device=part.device, dtype=torch.bfloat16
                )
                part.copy_(normal)
        return k, v

    def expected(
        self, decode: Decode, cache: tuple[torch.Tensor, torch.Tensor], sequences: list[int]
    ) -> torch.Tensor:
        """Attention of some sequences over this cache, in float64: ``(len(sequences), heads, head_dim)``."""
        q = self.query(decode)
        return torch.stack(
            [exact(q[s], *(self._tokens(decode, side, s) for side in cache)) for s in sequences]
        )

    def _tokens(self, decode: Decode, side: torch.Tensor, sequence: int) -> torch.Tensor:
        """``(kv_heads, length, head_dim)``."""
        if not self.paged:
            return side[sequence]
        # Indexing of 8-bit floats is not everywhere, that of bytes is.
        pages = side.view(torch.uint8)[decode.table[sequence].long()].view(side.dtype)
        return pages.flatten(0, 1).transpose(0, 1)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Float64 attention of one query.

    Args:
        q: ``(heads, head_dim)``.
        k: ``(kv_heads, length, head_dim)``.
        v: likewise.

    Returns:
        ``(heads, head_dim)`` float64.
    """
    grouped = q.double().reshape(k.shape[0], -1, q.shape[-1])
    logits = grouped @ k.double().transpose(1, 2) * q.shape[-1] ** -0.5
    out: torch.Tensor = logits.softmax(-1) @ v.double()
    return out.flatten(0, 1)


def first_line(error: Exception) -> str:
    """What an error says, in one line that is never empty."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _flash_attention_3(decode: Decode, q: torch.Tensor) -> Attend:
    attention = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    out = torch.empty_like(decode.q)
    starts = _starts(decode, 1)
    ones = torch.ones(q.shape[0], decode.kv_heads, device=q.device)
    names = ("q_descale", "k_descale", "v_descale") if q.dtype == torch.float8_e4m3fn else ()
    scales = dict.fromkeys(names, ones)

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        attention(
            q,
            k,
            v,
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=decode.length,
            seqused_k=decode.lengths,
            block_table=decode.table,
            causal=True,
            softmax_scale=q.shape[-1] ** -0.5,
            fa_version=3,
            out=out,
            **scales,
        )
        return out

    return attend


def _vllm_triton(decode: Decode, q: torch.Tensor) -> Attend:
    name = "vllm.v1.attention.ops.triton_unified_attention"
    attention = importlib.import_module(name).unified_attention
    sequences, heads, head_dim = q.shape
    out = torch.empty_like(q)
    starts = _starts(decode, 1)
    ones = torch.ones(1, device=q.device).expand(sequences, decode.kv_heads)
    segments = 16  # vLLM's own number
    rows = (max(sequences, 128), heads, segments)
    partial = torch.empty(*rows, head_dim, device=q.device)
    most, total = (torch.empty(rows, device=q.device) for _ in range(2))

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        attention(
            q,
            k,
            v,
            out,
            starts,
            1,
            decode.lengths,
            decode.length,
            head_dim**-0.5,
            True,
            (-1, -1),
            decode.table,
            0.0,
            None,
            ones,
            ones,
            seq_threshold_3D=sequences,  # keys are split whatever the batch
            num_par_softmax_segments=segments,
            softmax_segm_output=partial,
            softmax_segm_max=most,
            softmax_segm_expsum=total,
        )
        return out

    return attend


def _flashinfer(decode: Decode, dtype: torch.dtype, q: torch.Tensor) -> Attend:
    flashinfer = importlib.import_module("flashinfer")
    sequences, heads, head_dim = q.shape
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        _starts(decode, decode.table.shape[1]),
        decode.table.reshape(-1),
        torch.full((sequences,), PAGE, dtype=torch.int32, device=q.device),
        heads,
        decode.kv_heads,
        head_dim,
        PAGE,
        q_data_type=q.dtype,
        kv_data_type=dtype,
    )
    return lambda k, v: wrapper.run(q, (k, v))


def _flashinfer_bf16(decode: Decode, q: torch.Tensor) -> Attend:
    return _flashinfer(decode, torch.bfloat16, q)


def _flashinfer_fp8(decode: Decode, q: torch.Tensor) -> Attend:
    return _flashinfer(decode, torch.float8_e4m3fn, q)


def _sdpa(decode: Decode, q: torch.Tensor) -> Attend:
    query = q.unsqueeze(2)
    grouped = q.shape[1] != decode.kv_heads
    return lambda k, v: F.scaled_dot_product_attention(query, k, v, enable_gqa=grouped).squeeze(2)


def _starts(decode: Decode, step: int) -> torch.Tensor:
    return torch.arange(0, len(decode.q) * step + 1, step, dtype=torch.int32, device=decode.q.device)


_FA3 = ("vllm.vllm_flash_attn", "vllm")
_TRITON = ("vllm.v1.attention.ops.triton_unified_attention", "vllm")
_FLASHINFER = ("flashinfer", "flashinfer-python")
_E4M3 = torch.float8_e4m3fn

PEERS: tuple[Peer, ...] = (
    Peer("FlashAttention-3 bf16", *_FA3, torch.bfloat16, _flash_attention_3),
    Peer("FlashAttention-3 fp8", *_FA3, _E4M3, _flash_attention_3, fp8_query=True),
    Peer("FlashInfer bf16", *_FLASHINFER, torch.bfloat16, _flashinfer_bf16),
    Peer("FlashInfer fp8", *_FLASHINFER, _E4M3, _flashinfer_fp8),
    Peer("vLLM Triton bf16", *_TRITON, torch.bfloat16, _vllm_triton),
    Peer("vLLM Triton fp8", *_TRITON, _E4M3, _vllm_triton),
    Peer("torch SDPA bf16, no pages", "torch", "torch", torch.bfloat16, _sdpa, paged=False),
)
