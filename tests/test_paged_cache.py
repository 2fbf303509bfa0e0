"""A layer's cache in pages: the same attention as over the K and V that the cache gives back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcal import formats, paged_cache, validate
from kvcal.cache import QuantizedCache
from kvcal.capture import AttentionCall
from kvcal.formats import FP8_E4M3, FP8_E5M2, KVFormat
from kvcal.kernels import dispatch, reference
from kvcal.scales import Scales
from kvcal.transforms.record import LayerTransform, Transforms
from tests.test_calibrate import token_set
from tests.test_evaluate import DYNAMIC
from tests.test_validate import prepared

STATIC = [FP8_E4M3, FP8_E5M2, formats.NVFP4]


def call(
    batch: int = 2, heads: int = 6, kv_heads: int = 2, tokens: int = 70, head_dim: int = 64, **geometry: Any
) -> AttentionCall:
    generator = torch.Generator().manual_seed(heads + tokens + head_dim)
    q, k, v = (
        torch.randn(batch, n, tokens, head_dim, generator=generator) for n in (heads, kv_heads, kv_heads)
    )
    k[..., 3] *= 20  # an outlier channel, which every scale has to carry
    options = {"scaling": 0.11, "window": None, "softcap": None} | geometry
    return AttentionCall(0, q * 2, k, v + 0.4, **options)


def cache_of(fmt: KVFormat, kv_heads: int = 2) -> QuantizedCache:
    if fmt.dynamic:
        return QuantizedCache(fmt)
    shape = (1,) if fmt.block else (kv_heads, 1, 1)
    of = {side: (torch.rand(shape) * 0.5 + 0.7) * 9 / fmt.reach for side in ("k", "v")}
    return QuantizedCache(fmt, Scales({0: of | {"q": torch.ones(1)}}))


def expected(of: AttentionCall, cache: QuantizedCache) -> torch.Tensor:
    """Over what the cache gives back, which was never in a page."""
    q, k, v = cache.give_back(0, of.query, of.key, of.value)
    return reference.attention(
        q.double(), k.double(), v.double(), scaling=of.scaling, window=of.window, softcap=of.softcap
    )


CPU = dispatch.choose(torch.device("cpu"))


class TestAttend:
    @pytest.mark.parametrize("fmt", [*STATIC, *DYNAMIC], ids=lambda fmt: fmt.name)
    @pytest.mark.parametrize("tokens", [1, 63, 64, 70])
    def test_every_format(self, fmt: KVFormat, tokens: int) -> None:
        of, cache = call(tokens=tokens), cache_of(fmt)
        assert paged_cache.reads(of, cache)
        torch.testing.assert_close(
            paged_cache.attend(of, cache, CPU).double(), expected(of, cache), atol=1e-4, rtol=1e-4
        )

    @pytest.mark.parametrize("geometry", [{"window": 9}, {"softcap": 3.0}, {"window": 65, "softcap": 20.0}])
    @pytest.mark.parametrize("head_dim", [80, 128])
    def test_geometry(self, geometry: dict[str, Any], head_dim: int) -> None:
        for fmt in (FP8_E4M3, *DYNAMIC):
            of, cache = call(head_dim=head_dim, **geometry), cache_of(fmt)
            torch.testing.assert_close(
                paged_cache.attend(of, cache, CPU).double(), expected(of, cache), atol=1e-4, rtol=1e-4
            )


class TestReads:
    @pytest.mark.parametrize(
        ("changes", "fmt"),
        [
            ({"head_dim": 32}, FP8_E4M3),
            ({"heads": 34}, FP8_E4M3),
            ({}, formats.INT3),
            ({"head_dim": 32}, formats.INT8_PER_TOKEN_HEAD),
        ],
        ids=["head size", "group", "format", "head size of a dynamic format"],
    )
    def test_not_what_no_kernel_knows(self, changes: dict[str, Any], fmt: KVFormat) -> None:
        assert not paged_cache.reads(call(**changes), cache_of(fmt))

    def test_not_a_layer_in_16_bits_nor_one_that_is_transformed(self) -> None:
        plain = QuantizedCache(formats.INT8_PER_TOKEN_HEAD)
        skipped = QuantizedCache(plain.format, skipped=(0,))
        transformed = QuantizedCache(plain.format, None, Transforms({0: LayerTransform()}))
        elsewhere = QuantizedCache(plain.format, None, Transforms({1: LayerTransform()}), (2,))
        assert [paged_cache.reads(call(), each) for each in (plain, skipped, transformed, elsewhere)] == [
            True,
            False,
            False,
            True,
        ]


class TestValidate:
    @pytest.mark.parametrize("fmt", [FP8_E4M3, *DYNAMIC], ids=lambda fmt: fmt.name)
    def test_pages_change_nothing(self, fmt: KVFormat, monkeypatch: pytest.MonkeyPatch) -> None:
        tokens = token_set([29, 70])
        model, cache, _ = prepared("llama", tokens, fmt, head_dim=64)
        over_pages = validate.validate(model, cache, tokens)
        monkeypatch.setattr(paged_cache, "reads", lambda *_: False)
        without = validate.validate(model, cache, tokens)
        for index, layer in without.layers.items():
            assert over_pages.layers[index].cache == pytest.approx(layer.cache, rel=1e-4)

    def test_a_cache_without_quantized_layers_needs_no_kernel(self) -> None:
        tokens = token_set([29])
        model, cache, _ = prepared("llama", tokens, formats.INT8_PER_TOKEN_HEAD)
        skipped = QuantizedCache(cache.format, skipped=(0, 1, 2))
        measured = validate.validate(model, skipped, tokens)
        assert measured.implementation == "none: every layer is kept in 16 bits"
        assert measured.mean == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    @pytest.mark.parametrize("fmt", [FP8_E4M3, *DYNAMIC], ids=lambda fmt: fmt.name)
    def test_validation_agrees_with_the_definition(
        self, fmt: KVFormat, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokens = token_set([29, 300])
        model, cache, _ = prepared("llama", tokens, fmt, head_dim=64)
        model.to("cuda")
        by_kernel = validate.validate(model, cache, tokens)
        monkeypatch.setenv("KVCAL_EAGER", "1")
        by_torch = validate.validate(model, cache, tokens)
        assert (by_kernel.implementation, by_torch.implementation) == ("triton", "torch reference")
        for index, layer in by_torch.layers.items():
            assert by_kernel.layers[index].cache == pytest.approx(layer.cache, rel=0.02)

    def test_a_head_size_without_a_kernel_is_named(self) -> None:
        tokens = token_set([29])
        model, cache, _ = prepared("llama", tokens, formats.INT8_PER_TOKEN_HEAD, head_dim=32)
        assert validate.validate(model.to("cuda"), cache, tokens).implementation == "torch reference"
