"""What each layer keeps of every token, in terms that memory and bandwidth are counted in.

Layers with K and V, with or without a window, come from :mod:`kvcal.arch`; a latent (MLA, DeepSeek-V2,
arXiv 2405.04434) is one vector per token that all heads share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcal import arch
from kvcal.arch import LayerSpec, ModelSpec
from kvcal.errors import PlanRefused, UsageError
from kvcal.formats import KVFormat
from kvcal.model_config import positive_int


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer.

    Attributes:
        query_heads: heads that read it.
        kv_heads: heads that ranks deal out among them; a latent has one, which every rank holds.
        vectors: elements of each vector that a KV head keeps of a token: K and V, or one latent.
        contracted: channels that a query head multiplies with one token's cache, for the logits and for the
            output: twice ``head_dim``; of a latent its width and again what of it is value.
        window: how many of the latest tokens the layer keeps; None for all.
        latent: K and V are one vector.
    """

    query_heads: int
    kv_heads: int
    vectors: tuple[int, ...]
    contracted: int
    window: int | None = None
    latent: bool = False

    @property
    def elements(self) -> int:
        """Of one token."""
        return self.kv_heads * sum(self.vectors)

    def bytes_per_token(self, fmt: KVFormat | None, ranks: int = 1) -> int:
        """Bytes that one token adds on one of ``ranks`` GPUs, scales that come with it included.

        ``fmt`` None is the 16-bit cache.
        """
        return self.heads_on(ranks) * sum(bytes_per_vector(fmt, width) for width in self.vectors)

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

        >>> LayerCache(1, 1, (64, 64), 128).tokens_held(17, page=16)
        32
        >>> LayerCache(1, 1, (64, 64), 128, window=32).tokens_held(1000, page=16)
        48
        """
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


def read(config: Mapping[str, Any]) -> tuple[LayerCache, ...]:
    """The caches of a model, layer by layer, from its ``config.json``.

    Raises:
        ModelError: a field is missing or cannot be meant.
        PlanRefused: the model keeps something else.
    """
    if config.get("kv_lora_rank") is not None:
        return _latents(config)
    return of_model(arch.read(config))


def of_model(model: ModelSpec) -> tuple[LayerCache, ...]:
    """The caches of a model whose layers all have K and V of their own.

    Raises:
        PlanRefused: they have not.
    """
    if model.layers_without_attention:
        count = model.layers_without_attention
        raise PlanRefused([f"the state that {count} layers without attention keep is not counted yet"])
    return tuple(_of_layer(layer) for layer in model.layers)


def _of_layer(layer: LayerSpec) -> LayerCache:
    if layer.kind not in ("full", "sliding"):
        raise PlanRefused([f"layer {layer.index} is of kind {layer.kind}, whose cache is not counted yet"])
    if layer.shares is not None:
        raise PlanRefused(
            [f"layer {layer.index} reads the cache of layer {layer.shares}, which is not counted yet"]
        )
    return LayerCache(
        query_heads=layer.heads,
        kv_heads=layer.kv_heads,
        vectors=(layer.head_dim, layer.head_dim),
        contracted=2 * layer.head_dim,
        window=layer.window,
    )


def _latents(config: Mapping[str, Any]) -> tuple[LayerCache, ...]:
    """Queries are taken into the latent's space, so each head reads the latent itself, twice its value part.

    The rotary key beside it is read once.
    """
    names = ("num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim")
    layers, heads, rank, rotary = (positive_int(config, name) for name in names)
    layer = LayerCache(heads, 1, (rank + rotary,), contracted=2 * rank + rotary, latent=True)
    return (layer,) * layers
