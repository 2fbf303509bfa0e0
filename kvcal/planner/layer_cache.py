"""What each layer keeps of every token, in terms that memory and bandwidth are counted in.

Layers with K and V, with or without a window, come from :mod:`kvcal.arch`; a latent (MLA, DeepSeek-V2,
arXiv 2405.04434) is one vector per token that all heads share. What layers without attention keep is in
:mod:`kvcal.planner.layer_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcal.arch import LayerSpec, ModelSpec
from kvcal.errors import ModelError, UsageError
from kvcal.formats import KVFormat
from kvcal.model_config import positive_int


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer.

    Attributes:
        query_heads: heads that read it.
        kv_heads: heads that ranks deal out among them; a latent has one, which every rank holds.
        vectors: elements of each vector that a KV head keeps of a token: K and V, or a latent and the rotary
            key behind it.
        contracted: channels that a query head multiplies with one token's cache, for the logits and for the
            output: twice ``head_dim``; of a latent its width and again what of it is value.
        window: how many of the latest tokens the layer keeps; None for all.
        latent: K and V are one vector.
        shared: the tokens are those of another layer, read here and held there.
    """

    query_heads: int
    kv_heads: int
    vectors: tuple[int, ...]
    contracted: int
    window: int | None = None
    latent: bool = False
    shared: bool = False

    @property
    def elements(self) -> int:
        """That one token adds."""
        return 0 if self.shared else self.kv_heads * sum(self.vectors)

    def bytes_per_token(self, fmt: KVFormat | None, ranks: int = 1) -> int:
        """Bytes of one token on one of ``ranks`` GPUs, scales that come with it included.

        ``fmt`` None is the 16-bit cache. What the layer shares is counted where it is held,
        :meth:`bytes_added`.

        >>> from kvcal.formats import get
        >>> deepseek_v3 = LayerCache(128, 1, (512, 64), contracted=1088, latent=True)
        >>> [deepseek_v3.bytes_per_token(fmt) for fmt in (None, get("fp8"), get("fp8_latent_bf16_rope"))]
        [1152, 576, 640]
        """
        widths = self.vectors
        if fmt is not None and fmt.latent_only:
            latent, rotary = widths
            return self.heads_on(ranks) * (bytes_per_vector(fmt, latent) + bytes_per_vector(None, rotary))
        return self.heads_on(ranks) * sum(bytes_per_vector(fmt, width) for width in widths)

    def bytes_added(self, fmt: KVFormat | None, ranks: int = 1) -> int:
        """Bytes that one token adds to what the layer holds."""
        return 0 if self.shared else self.bytes_per_token(fmt, ranks)

    def heads_on(self, ranks: int) -> int:
        """KV heads that each rank holds: dealt out, or copied where there are more ranks than heads.

        Raises:
            UsageError: neither is possible.
        """
        if self.query_heads % ranks:
            raise UsageError(
                f"{self.query_heads} attention heads cannot be dealt out to {ranks} GPUs; --tensor-parallel"
                f" takes divisors of {self.query_heads}"
            )
        if self.kv_heads % ranks and ranks % self.kv_heads:
            raise UsageError(
                f"{self.kv_heads} KV heads cannot be dealt out to {ranks} GPUs; --tensor-parallel takes"
                f" divisors and multiples of {self.kv_heads}"
            )
        return max(1, self.kv_heads // ranks)

    def tokens_read(self, context: int) -> int:
        """Tokens that a query attends to after ``context`` of them."""
        return context if self.window is None else min(context, self.window)

    def tokens_held(self, context: int, page: int) -> int:
        """Tokens that its pages have room for; a window may begin and end inside a page.

        None are held of another layer's cache.

        >>> LayerCache(1, 1, (64, 64), 128).tokens_held(17, page=16)
        32
        >>> LayerCache(1, 1, (64, 64), 128, window=32).tokens_held(1000, page=16)
        48
        """
        if self.shared:
            return 0
        pages = -(-context // page)
        if self.window is not None:
            pages = min(pages, -(-(self.window - 1) // page) + 1)
        return pages * page


def bytes_per_vector(fmt: KVFormat | None, width: int) -> int:
    """Bytes of ``width`` elements: codes, block scales, and the scale of a dynamic format.

    >>> from kvcal.formats import get
    >>> bytes_per_vector(None, 128), bytes_per_vector(get("fp8"), 128), bytes_per_vector(get("nvfp4"), 128)
    (256, 128, 72)
    >>> bytes_per_vector(get("int4_per_token_head"), 128)
    68
    """
    if fmt is None:
        return 2 * width
    blocks = -(-width // fmt.block) if fmt.block else 0
    return -(-width * fmt.bits // 8) + blocks + fmt.scale_bits // 8


def caches_latents(config: Mapping[str, Any]) -> bool:
    """Whether the model is one that :func:`latents` reads. Others may have a ``kv_lora_rank`` too."""
    return config.get("model_type") in ("deepseek_v2", "deepseek_v3", "kimi_k2")


def latents(config: Mapping[str, Any]) -> tuple[LayerCache, ...]:
    """The caches of a model with multi-head latent attention, layer by layer, from its ``config.json``.

    Queries are taken into the latent's space, so each head reads the latent itself, twice its value part.
    The rotary key beside it is read once.

    Raises:
        ModelError: a field is missing or cannot be meant.
    """
    names = ("num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim")
    layers, heads, rank, rotary = (positive_int(config, name) for name in names)
    layer = LayerCache(heads, 1, (rank, rotary), contracted=2 * rank + rotary, latent=True)
    return (layer,) * layers


def in_shared_blocks(config: Mapping[str, Any]) -> tuple[LayerCache, ...]:
    """The caches of Zamba2, from its ``config.json``.

    A few attention blocks serve at many depths: weights are shared, caches are not. transformers gives none
    of them a layer of its own, so there is nothing that could be read off its code.

    Raises:
        ModelError: a field is missing or cannot be meant.
    """
    names = ("num_attention_heads", "num_key_value_heads", "attention_head_dim")
    heads, kv_heads, head_dim = (positive_int(config, name) for name in names)
    kinds = config.get("layers_block_type")
    if not isinstance(kinds, list) or "hybrid" not in kinds:
        raise ModelError(f"config.json: layers_block_type must list hybrid layers, found {kinds!r}")
    layer = LayerCache(heads, kv_heads, (head_dim, head_dim), contracted=2 * head_dim)
    return (layer,) * kinds.count("hybrid")


def of_model(model: ModelSpec) -> tuple[LayerCache, ...]:
    """The caches of the layers that attend with K and V, in their order."""
    return tuple(_of_layer(layer) for layer in model.layers)


def _of_layer(layer: LayerSpec) -> LayerCache:
    return LayerCache(
        query_heads=layer.heads,
        kv_heads=layer.kv_heads,
        vectors=(layer.head_dim, layer.head_dim),
        contracted=2 * layer.head_dim,
        window=layer.window,
        shared=layer.shares is not None,
    )
