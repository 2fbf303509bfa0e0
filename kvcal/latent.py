"""Multi-head latent attention: what a layer caches in place of K and V.

A token's K and V of all heads come out of one latent by the up-projection, but for a rotary key that all
heads share: ``k_h = [U_k,h c, r]``, ``v_h = U_v,h c`` (DeepSeek-V2, arXiv 2405.04434, section 2.1). The cache
holds ``c`` behind its RMS norm and ``r`` behind RoPE; kernels that decode read them as the K and V of a
single head, with the up-projection of K absorbed into Q.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcal.errors import ModelError


@dataclass(frozen=True)
class LatentSpec:
    """Sizes, in channels, and module paths relative to the attention module.

    Attributes:
        rank: of the latent.
        rotary: of the rotary key.
        key: of what the up-projection makes of the latent for one head's K.
        value: of one head's V.
        query: the projection whose rows are Q's, head by head, ``key`` channels and then ``rotary``.
        down: the projection to the latent, before its norm, and then to the rotary key.
        norm: the norm of the latent.
        up: the up-projection, without a bias; rows go head by head through K and V.
    """

    rank: int
    rotary: int
    key: int
    value: int
    query: str
    down: str = "kv_a_proj_with_mqa"
    norm: str = "kv_a_layernorm"
    up: str = "kv_b_proj"

    @property
    def width(self) -> int:
        """Elements that a token adds to the cache."""
        return self.rank + self.rotary

    def size_of(self, side: str) -> int:
        """Channels of the latent (k), the rotary key (v), or Q with the up-projection absorbed (q)."""
        return {"k": self.rank, "v": self.rotary, "q": self.width}[side]


def read(config: Mapping[str, Any]) -> LatentSpec:
    """The sizes that a DeepSeek config gives.

    Raises:
        ModelError: one is missing or cannot be meant.
    """
    rotary = _size(config, "qk_rope_head_dim")
    if rotary % 2:
        raise ModelError(f"config.json: qk_rope_head_dim {rotary} is odd; its channels do not pair up")
    return LatentSpec(
        rank=_size(config, "kv_lora_rank"),
        rotary=rotary,
        key=_size(config, "qk_nope_head_dim"),
        value=_size(config, "v_head_dim"),
        # Q has a down-projection of its own in all but the small models.
        query="q_proj" if config.get("q_lora_rank") is None else "q_b_proj",
    )


def _size(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 65_536:
        raise ModelError(f"config.json: {field} must be a positive integer, found {value!r}")
    return value
