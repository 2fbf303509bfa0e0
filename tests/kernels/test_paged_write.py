"""Writing to pages: the Triton kernel bit for bit as the definition, and the definition against others."""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcal import formats
from kvcal.kernels import paged, paged_reference
from tests.kernels.conftest import E4M3_NAN

pytest.importorskip("triton", reason="Triton is published for Linux only")
from kvcal.kernels import paged_write

INTEGERS = ("int8", "int4", "int2")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ORDERS = ["phtr", "pthr", "hptr", "tphr"]


@dataclass(frozen=True)
class Spec:
    """How a side of the cache is stored: ``Spec.of("int4 group low")``; no format is 16 bits."""

    fmt: str | None = None
    sharing: str = "head"
    low: bool = False

    @classmethod
    def of(cls, text):
        """From ``"16bit"``, ``"int4 group low"`` and the like."""
        name, *rest = text.split()
        return cls(None if name == "16bit" else name, *rest[:1], low="low" in rest)

    def __str__(self):
        return "-".join([self.fmt or "16bit", self.sharing] + ["low"] * self.low)

    @property
    def format(self):
        return formats.get(self.fmt) if self.fmt else None

    def pages(self, *, head_dim=64, kv_heads=2, page_size=16, pages=6, group=None, reach=3.0, seed=0, **rest):
        """Pages full of NaN, or of 0x7F where codes know none. Static scales suit values up to ``reach``."""
        fmt, scale, low = self.format, None, None
        generator = torch.Generator().manual_seed(seed)
        if fmt and not fmt.block and self.sharing in ("head", "channel"):
            shape = (kv_heads, 1, head_dim if self.sharing == "channel" else 1)
            wide = torch.rand(shape, generator=generator) + 0.6
            scale = wide * reach / fmt.max
            if self.low:
                scale, low = wide * 2 * reach / (2**fmt.bits - 1), -wide * reach * 0.9
        tensor_scale = None
        if fmt and fmt.block:
            tensor_scale = reach * (torch.rand(kv_heads, 1, 1, generator=generator) + 0.6) / 2688
        rest = {"dtype": torch.float16} | rest
        held = paged.allocate(
            fmt,
            pages=pages,
            kv_heads=kv_heads,
            page_size=page_size,
            head_dim=head_dim,
            sharing=self.sharing,
            scale=scale,
            low=low,
            group=group or (32 if head_dim % 32 == 0 else 16),
            asymmetric=self.low,
            tensor_scale=tensor_scale,
            **rest,
        )
        for tensor in with_tokens(held):
            poison = E4M3_NAN if tensor.itemsize == 1 else 0xFF
            tensor.view(torch.uint8).fill_(poison)
        return held


SPECS = [
    *(
        Spec(fmt, sharing)
        for fmt in ("fp8_e4m3", "fp8_e5m2")
        for sharing in ("head", "channel", "token_head")
    ),
    *(
        Spec(fmt, sharing, low)
        for fmt in INTEGERS
        for sharing in ("head", "channel", "token_head", "group")
        for low in (False, True)
    ),
    Spec("nvfp4", "group"),
]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=str)


def with_tokens(pages):
    """Codes, and the scales and lows that lie beside them."""
    beside = [each for each in (pages.scale, pages.low) if each is not None and each.dim() == 4]
    return [pages.codes, *beside]


def amid(x, order):
    """``x`` as a view into bytes of 0xFF all around it; ``order`` permutes its dims ``phtr``."""
    permuted = x.permute(["phtr".index(dim) for dim in order])
    sizes = [n + 2 for n in permuted.shape[:-1]] + [(permuted.shape[-1] + 4) * x.itemsize]
    memory = torch.full(sizes, 0xFF, dtype=torch.uint8, device=x.device).view(x.dtype)
    inner = memory[1:-1, 1:-1, 1:-1, 2:-2]
    inner.view(torch.uint8).copy_(permuted.contiguous().view(torch.uint8))
    return inner.permute([order.index(dim) for dim in "phtr"])


def arranged(pages, order="phtr", beside="phtr", device="cpu"):
    """The same pages in other memory, with bytes of 0xFF between them."""

    def moved(tensor):
        if tensor is None:
            return None
        tensor = tensor.to(device)
        return amid(tensor, beside) if tensor.dim() == 4 else tensor

    return replace(
        pages,
        codes=amid(pages.codes.to(device), order),
        scale=moved(pages.scale),
        low=moved(pages.low),
        tensor_scale=moved(pages.tensor_scale),
    )


def memory(tensor):
    """All bytes of a tensor's storage."""
    return torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).clone()


def tokens(n, kv_heads=2, head_dim=64, seed=0, spread=0.0):
    """Gaussian tokens that differ in size by ``e ** spread`` or so; the fourth is 0, the fifth constant."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(spread * torch.randn(n, kv_heads, 1, generator=generator))
    x = torch.randn(n, kv_heads, head_dim, generator=generator) * size
    x[3:4] = 0
    x[4:5] = 1.25
    return x


def some_slots(n, total, seed=0):
    """Distinct slots in any order, the second and sixth skipped."""
    slots = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:n]
    slots[1:6:4] = torch.tensor([-1, -7])[: len(slots[1:6:4])]
    return slots


def assert_same_bytes(x, slots, pages):
    """The kernel and the definition leave the same bytes in all of the memory, written or not."""
    mine, theirs = pages(), pages()
    before = memory(mine.codes)
    paged_write.write(x, slots, mine)
    paged_reference.write(x, slots, theirs)
    for ours, defined in zip(with_tokens(mine), with_tokens(theirs), strict=True):
        assert torch.equal(memory(ours), memory(defined))
    return before, memory(mine.codes)


class TestKernel:
    @every_spec
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    def test_agrees_bit_for_bit(self, spec, dtype, device):
        x = tokens(21, spread=1.0).to(device, dtype)
        before, after = assert_same_bytes(
            x, some_slots(21, 96).to(device), lambda: arranged(spec.pages(), device=device)
        )
        assert not torch.equal(before, after)

    @every_spec
    @pytest.mark.parametrize("head_dim", [80, 96])
    def test_rows_that_are_no_power_of_two(self, spec, head_dim, device):
        x = tokens(9, 3, head_dim, seed=1).to(device)
        assert_same_bytes(
            x,
            some_slots(9, 96).to(device),
            lambda: arranged(spec.pages(kv_heads=3, head_dim=head_dim), device=device),
        )

    @pytest.mark.parametrize("group", [16, 32, 64])
    @pytest.mark.parametrize(
        "spec", [s for s in SPECS if s.sharing == "group" and s.fmt in INTEGERS], ids=str
    )
    def test_groups_of_other_sizes(self, spec, group, device):
        x = tokens(5, 2, 128).to(device)
        x[0, :, :group] *= 100
        assert_same_bytes(
            x,
            some_slots(5, 96).to(device),
            lambda: arranged(spec.pages(head_dim=128, group=group), device=device),
        )

    @pytest.mark.parametrize(
        ("dtype", "stored"),
        [
            (torch.float16, torch.float16),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float16),
            # The interpreter cuts bits off where it should round.
            pytest.param(torch.float16, torch.bfloat16, marks=on_gpu),
            pytest.param(torch.float32, torch.bfloat16, marks=on_gpu),
        ],
        ids=str,
    )
    def test_16_bit_pages(self, dtype, stored, device):
        x = (tokens(21) * 3).to(device, dtype)
        assert_same_bytes(
            x, some_slots(21, 96).to(device), lambda: arranged(Spec().pages(dtype=stored), device=device)
        )

    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("beside", ["phtr", "tphr"])
    @pytest.mark.parametrize("text", ["16bit", "fp8_e4m3 head", "int4 token_head low", "nvfp4 group"])
    def test_layouts(self, text, beside, order, device):
        spec = Spec.of(text)
        assert_same_bytes(
            tokens(9).to(device),
            some_slots(9, 96).to(device),
            lambda: arranged(spec.pages(), order, beside, device),
        )

    @pytest.mark.parametrize("text", ["16bit", "fp8_e5m2 channel", "int2 group low", "nvfp4 group"])
    def test_strides_of_x(self, text, device):
        spec = Spec.of(text)
        wide = torch.full((64, 2, 40), torch.nan, device=device)
        wide[:, :, 1::3] = tokens(13).permute(2, 1, 0).to(device)
        x = wide[:, :, 1::3].permute(2, 1, 0)
        assert_same_bytes(x, some_slots(13, 96).to(device), lambda: arranged(spec.pages(), device=device))

    @every_spec
    def test_extremes(self, spec, device):
        x = torch.tensor([0.0, -0.0, 6e-8, -1e-5, 65504.0, -65504.0, 1e-3, 448.0]).repeat(6, 2, 8)
        x[0] = 65504.0
        x[1] = 6e-8
        x[2] = -1e-4
        assert_same_bytes(
            x.to(device), torch.arange(6, device=device), lambda: arranged(spec.pages(), device=device)
        )

    @every_spec
    def test_static_scales_of_zero(self, spec, device):
        def pages():
            held = arranged(spec.pages(), device=device)
            scale = held.tensor_scale if spec.fmt == "nvfp4" else held.scale
            if scale.dim() < 4:
                scale[0] = 0
            return held

        assert_same_bytes(tokens(5).to(device), torch.arange(5, device=device), pages)

    @pytest.mark.parametrize("shape", [(1,), (2, 1, 1)], ids=str)
    @pytest.mark.parametrize("fmt", ["fp8_e4m3", "int4", "nvfp4"])
    def test_scales_of_the_tensor_and_of_heads(self, fmt, shape, device):
        spec = Spec(fmt, "group" if fmt == "nvfp4" else "head")
        scale = torch.linspace(0.011, 0.017, shape[0]).reshape(shape)

        def pages():
            held = spec.pages()
            name = "tensor_scale" if fmt == "nvfp4" else "scale"
            return arranged(replace(held, **{name: scale}), device=device)

        assert_same_bytes(tokens(5).to(device), torch.arange(5, device=device), pages)

    @pytest.mark.parametrize(
        "write", [paged_write.write, paged_reference.write], ids=["kernel", "definition"]
    )
    @pytest.mark.parametrize("skipped", [0, 3])
    @pytest.mark.parametrize("text", ["16bit", "fp8_e4m3 token_head", "int4 group low", "nvfp4 group"])
    def test_nothing_to_write(self, text, skipped, write, device):
        held = arranged(Spec.of(text).pages(), device=device)
        before = [memory(each) for each in with_tokens(held)]
        write(tokens(skipped).to(device), torch.full((skipped,), -1, device=device), held)
        for was, each in zip(before, with_tokens(held), strict=True):
            assert torch.equal(was, memory(each))

    @pytest.mark.parametrize("shape", [(3, 1, 64), (3, 2, 80)], ids=str)
    def test_refuses_other_shapes(self, shape, device):
        with pytest.raises(ValueError, match="for pages of 2 heads of 64"):
            paged_write.write(torch.zeros(shape), torch.arange(3), Spec().pages())


def codes_of(pages, n):
    """Bytes of the first ``n`` slots, ``(n, kv_heads, row)``."""
    return pages.codes.view(torch.uint8).transpose(1, 2).flatten(0, 1)[:n].numpy()


def scales_of(pages, n):
    return [each.transpose(1, 2).flatten(0, 1)[:n] for each in with_tokens(pages)[1:]]


class TestDefinition:
    """``paged_reference.write`` against torch's and ml_dtypes' casts, numpy and compressed-tensors."""

    @pytest.mark.parametrize("sharing", ["head", "channel", "token_head"])
    @pytest.mark.parametrize(
        ("fmt", "dtype", "most"),
        [("fp8_e4m3", torch.float8_e4m3fn, 448.0), ("fp8_e5m2", torch.float8_e5m2, 57344.0)],
    )
    def test_floats(self, fmt, dtype, most, sharing):
        pages, x = Spec(fmt, sharing).pages(), tokens(20, spread=1.0)
        paged_reference.write(x, torch.arange(20), pages)
        if sharing == "token_head":
            scale = x.numpy().__abs__().max(-1, keepdims=True) / np.float32(most)
            assert np.array_equal(scales_of(pages, 20)[0].numpy(), scale)
            scale = torch.from_numpy(scale)
        else:
            scale = pages.scale.squeeze(1)
        quotient = torch.where(scale == 0, 0.0, x / scale).clamp(-most, most)
        assert np.array_equal(codes_of(pages, 20), quotient.to(dtype).view(torch.uint8).numpy())

    @pytest.mark.parametrize("sharing", ["head", "channel", "token_head", "group"])
    @pytest.mark.parametrize("fmt", INTEGERS)
    def test_signed_integers(self, fmt, sharing):
        pages, x = Spec(fmt, sharing).pages(), tokens(20)
        paged_reference.write(x, torch.arange(20), pages)
        bits = pages.fmt.bits
        half = 2 ** (bits - 1)
        if sharing in ("token_head", "group"):
            groups = x.numpy().reshape(20, 2, -1, 64 if sharing == "token_head" else 32)
            kind = np.float32 if sharing == "token_head" else np.float16
            stored = (np.abs(groups).max(-1) / np.float32(half - 1)).astype(kind)
            assert np.array_equal(scales_of(pages, 20)[0].numpy(), stored)
            scale = stored.astype(np.float32).repeat(groups.shape[-1], -1)
        else:
            scale = pages.scale.squeeze(1).numpy()
        steps = x.numpy() / np.where(scale == 0, np.float32(np.inf), scale)
        signed = np.rint(steps).clip(-half, half - 1).astype(np.int8)
        if fmt == "int8":
            assert np.array_equal(codes_of(pages, 20).view(np.int8), signed)
        else:
            theirs = pack_to_int32(torch.from_numpy(signed).reshape(40, 64), bits).numpy().astype("<i4")
            assert np.array_equal(codes_of(pages, 20), theirs.view(np.uint8).reshape(20, 2, -1))

    @pytest.mark.parametrize("sharing", ["head", "channel", "token_head", "group"])
    @pytest.mark.parametrize("fmt", INTEGERS)
    def test_unsigned_integers(self, fmt, sharing):
        pages, x = Spec(fmt, sharing, low=True).pages(), tokens(20)
        paged_reference.write(x, torch.arange(20), pages)
        bits, most = pages.fmt.bits, np.float32(2**pages.fmt.bits - 1)
        if sharing in ("token_head", "group"):
            groups = x.numpy().reshape(20, 2, -1, 64 if sharing == "token_head" else 32)
            kind = np.float32 if sharing == "token_head" else np.float16
            stored_low = groups.min(-1).astype(kind)
            stored = ((groups.max(-1) - groups.min(-1)) / most).astype(kind)
            for found, wanted in zip(scales_of(pages, 20), (stored, stored_low), strict=True):
                assert np.array_equal(found.numpy(), wanted)
            scale, low = (
                each.astype(np.float32).repeat(groups.shape[-1], -1) for each in (stored, stored_low)
            )
        else:
            scale, low = pages.scale.squeeze(1).numpy(), pages.low.squeeze(1).numpy()
        steps = (x.numpy() - low) / np.where(scale == 0, np.float32(np.inf), scale)
        code = np.rint(steps).clip(0, most).astype(np.uint32)
        assert set(np.unique(code)) <= set(range(2**bits))
        each = code.reshape(20, 2, -1, 8 // bits) << (bits * np.arange(8 // bits, dtype=np.uint32))
        assert np.array_equal(codes_of(pages, 20), each.sum(-1))

    def test_nvfp4(self):
        pages, x = Spec("nvfp4", "group").pages(), tokens(20, spread=1.0)
        paged_reference.write(x, torch.arange(20), pages)
        over = pages.tensor_scale.reshape(1, 2, 1).numpy()
        blocks = x.numpy().reshape(20, 2, 4, 16)
        wanted = (np.abs(blocks).max(-1) / (np.float32(6) * over)).clip(0, 448)
        block_scale = np.maximum(wanted.astype(ml_dtypes.float8_e4m3fn).astype(np.float32), 2.0**-9)
        (stored,) = scales_of(pages, 20)
        assert np.array_equal(stored.float().numpy(), block_scale)
        elements = (blocks / (block_scale * over)[..., None]).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
        values = torch.from_numpy(elements.astype(np.float32).reshape(40, 64))
        theirs = pack_fp4_to_uint8(values).numpy().reshape(20, 2, 32)
        assert np.array_equal(codes_of(pages, 20), theirs)

    @every_spec
    def test_reads_what_it_wrote_wherever_it_lies(self, spec):
        pages, x, slots = spec.pages(), tokens(20), some_slots(20, 96)
        paged_reference.write(x, slots, pages)
        kept = slots >= 0
        found = paged_reference.read(pages, slots[kept])
        assert found.isfinite().all()
        # The noise of rounding to 2 bits, with a scale for a whole head, is about as large as a Gaussian.
        allowed = {"int2": 0.9, "int4": 0.3, "nvfp4": 0.2}.get(spec.fmt, 0.15)
        assert (found - x[kept]).norm() / x[kept].norm() < allowed
        for order in ORDERS:
            moved = arranged(pages, order, order)
            assert torch.equal(paged_reference.read(moved, slots[kept]), found)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.fmt in INTEGERS and s.sharing != "group"], ids=str)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(0, 4), away=st.floats(-100, 100))
def test_integers_come_back_within_half_a_step(spec, seed, spread, away, device):
    pages = arranged(spec.pages(), device=device)
    x = tokens(7, seed=seed, spread=spread) + (away if spec.low else 0.0)
    if spec.sharing != "token_head":
        least = -pages.scale * pages.fmt.max if pages.low is None else pages.low
        most = pages.scale * pages.fmt.max if pages.low is None else pages.low + pages.scale * 3
        x = torch.minimum(torch.maximum(x, least.cpu().squeeze(1)), most.cpu().squeeze(1))
    slots = torch.arange(7, device=device) * 5
    paged_write.write(x.to(device), slots, pages)
    found = paged_reference.read(pages, slots, torch.float64).cpu()
    step = pages.scale.cpu().squeeze(1) if pages.scale.dim() < 4 else scales_at(pages, slots)
    largest = x.abs().amax(-1, keepdim=True)
    assert ((found - x).abs() <= step * 0.5 + 2e-6 * largest).all()


def scales_at(pages, slots):
    size = pages.page_size
    return pages.scale[slots // size, :, slots % size].cpu()
