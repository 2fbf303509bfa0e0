"""The Triton kernels against the reference, on a GPU or in Triton's CPU interpreter.

Codes agree bit for bit. Attention is held to a float64 evaluation of the same definition, and so is the
reference, at one tolerance: neither may hide behind the other's rounding.
"""

from dataclasses import dataclass, field

import pytest
import torch

from kvcal.formats import FP8_E4M3
from kvcal.kernels import reference

pytest.importorskip("triton", reason="Triton is published for Linux only")
from kvcal.kernels import attention, quantize
from tests.kernels.conftest import E4M3_NAN

TOLERANCE = 2e-6  # relative Frobenius norm; float32 sums reach 4e-7 here
# A probability that float32 puts on the other side of a rounding tie moves by 1/16 of itself.
TOLERANCE_ROUNDED_PROBABILITIES = 2e-3

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def scales_of(heads, first):
    """Different for every head and no power of two: 1.7 apart, restarting every 8 heads."""
    return torch.tensor([first * 1.7 ** (h % 8) * (1 + h // 8 / 10) for h in range(heads)]).reshape(-1, 1, 1)


def amid_nan(x, layout):
    """``x`` as a view into memory that is NaN all around it; ``layout`` permutes its dims ``bhtd``."""
    order = ["bhtd".index(dim) for dim in layout]
    before, after = (1, 1, 3, 5), (1, 1, 64, 64)
    bytes_ = x.dtype.itemsize == 1
    sizes = [before[d] + x.shape[d] + after[d] for d in order]
    memory = torch.full(sizes, E4M3_NAN, dtype=torch.uint8) if bytes_ else torch.full(sizes, torch.nan)
    memory = memory.to(x.device, None if bytes_ else x.dtype).view(x.dtype)
    view = memory.permute([order.index(d) for d in range(4)])
    view = view[tuple(slice(before[d], before[d] + x.shape[d]) for d in range(4))]
    view.copy_(x)
    return view


class TestQuantize:
    @staticmethod
    def assert_equal_codes(x, scale):
        codes = quantize.quantize(x, scale, FP8_E4M3)
        expected = reference.quantize(x, scale, FP8_E4M3)
        assert codes.dtype == expected.dtype
        assert codes.shape == expected.shape
        nan = expected.float().isnan()  # a NaN's sign bit means nothing
        assert torch.equal(codes.float().isnan(), nan)
        assert torch.equal(codes.view(torch.uint8)[~nan], expected.view(torch.uint8)[~nan])

    @pytest.mark.filterwarnings("ignore:.* encountered in divide:RuntimeWarning")  # numpy, interpreting
    @pytest.mark.parametrize("scale", ["one", "per_tensor", "per_head"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_every_16_bit_pattern(self, dtype, scale, device):
        x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).reshape(1, 8, 64, 128).to(device)
        scale = {"one": torch.ones(1), "per_tensor": torch.tensor([0.0371]), "per_head": scales_of(8, 0.01)}[
            scale
        ]
        self.assert_equal_codes(x, scale.to(device))

    def test_float32_ties_and_their_neighbours(self, device):
        values = torch.arange(E4M3_NAN, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        ties = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([464.0, 480.0, torch.inf])])
        around = torch.cat([ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9))])
        x = torch.cat([around, -around]).reshape(1, 1, -1).to(device)
        self.assert_equal_codes(x, torch.ones(1, device=device))

    def test_quotients_near_ties(self, device):
        """``tie * scale`` divided by ``scale``: an approximate division lands on the wrong side."""
        values = torch.arange(E4M3_NAN, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        ties = (values[1:] + values[:-1]) / 2
        scale = scales_of(8, 0.0123)
        self.assert_equal_codes((ties.reshape(1, 1, -1, 1) * scale).to(device), scale.to(device))

    @pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 33, 80), (3, 17, 5), (1, 2, 0, 64)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    def test_shapes(self, dtype, shape, device):
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 5).to(device, dtype)
        self.assert_equal_codes(x, scales_of(shape[-3], 0.013).to(device))

    @pytest.mark.parametrize("layout", ["bhtd", "bthd", "dhbt"])
    def test_strided_views_amid_nan(self, layout, device):
        x = torch.randn(2, 3, 17, 24, generator=torch.Generator().manual_seed(3)).to(device)
        self.assert_equal_codes(amid_nan(x, layout), scales_of(3, 0.013).to(device))

    def test_block_end_amid_nan(self, device):
        memory = torch.full((3, 1, 2, 700), torch.nan, device=device)
        memory[1] = torch.linspace(-9, 9, 1400, device=device).reshape(1, 2, 700)
        assert memory[1:2].is_contiguous()  # so that the kernel reads in place, and masks its last block
        self.assert_equal_codes(memory[1:2], torch.tensor([0.021], device=device))

    @pytest.mark.parametrize(
        ("x", "scale", "message"),
        [
            pytest.param(torch.ones(1, 3, 2, 4), torch.ones(2), "2 values for 3 heads", id="scales"),
            pytest.param(torch.ones(2, 4), torch.ones(1), "heads, tokens, head_dim", id="dims"),
            pytest.param(torch.ones(1, 3, 2, 4).int(), torch.ones(1), "int32", id="dtype"),
        ],
    )
    def test_refuses(self, x, scale, message):
        with pytest.raises(ValueError, match=message):
            quantize.quantize(x, scale, FP8_E4M3)


@dataclass(frozen=True)
class Case:
    """One attention problem; the id names what differs from the defaults."""

    head_dim: int = 64
    queries: int = 17
    keys: int = 17
    kv_heads: int = 1
    group: int = 1
    batch: int = 1
    scales: str = "per_head"
    quantized_q: bool = False
    probabilities: bool = False
    dtype: torch.dtype = torch.float32
    options: dict = field(default_factory=dict)

    def __str__(self):
        parts = [f"d{self.head_dim}", f"q{self.queries}k{self.keys}", f"h{self.kv_heads}x{self.group}"]
        parts += [self.scales, "q8" if self.quantized_q else "q16", "p8" if self.probabilities else "p16"]
        parts += [f"{name}{value:g}" for name, value in self.options.items()]
        return "-".join(parts)

    def inputs(self, device):
        """Q, and the codes and scales of K and V, as keyword arguments of ``quantized_attention``."""
        generator = torch.Generator().manual_seed(self.head_dim * self.keys + self.queries)
        heads = self.kv_heads * self.group

        def normal(heads, tokens, spread):
            x = torch.randn(self.batch, heads, tokens, self.head_dim, generator=generator) * spread
            return x.to(device, self.dtype)

        def scale(heads, first):
            scale = torch.tensor([first]) if self.scales == "per_tensor" else scales_of(heads, first)
            return scale.to(device)

        k_scale, v_scale = scale(self.kv_heads, 0.011), scale(self.kv_heads, 0.043)
        # Sharp softmaxes: with flat ones every mask or scale fault would average out.
        q = normal(heads, self.queries, 3.0)
        return {
            "q": q,
            "k": reference.quantize(normal(self.kv_heads, self.keys, 1.0), k_scale, FP8_E4M3),
            "v": reference.quantize(normal(self.kv_heads, self.keys, 1.0), v_scale, FP8_E4M3),
            "k_scale": k_scale,
            "v_scale": v_scale,
            "q_scale": scale(heads, 0.019) if self.quantized_q else None,
            "fmt": FP8_E4M3,
            "scaling": self.head_dim**-0.5 * 0.9,
            "quantize_probabilities": self.probabilities,
            **self.options,
        }


def in_float64(
    q, k, v, k_scale, v_scale, fmt, scaling, quantize_probabilities, q_scale, window=0, softcap=0, sinks=None
):
    """The definition in float64, one query head at a time."""
    k, v = (codes.double() * scale.double() for codes, scale in ((k, k_scale), (v, v_scale)))
    if q_scale is not None:
        q = reference.quantize(q, q_scale, fmt).double() * q_scale.double()
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    group = heads // k.shape[1]
    age = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None, :]
    hidden = ((age < 0) | (age >= (window or keys))).to(q.device)
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for head in range(heads):
        logits = q[:, head].double() @ k[:, head // group].mT * scaling
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits[:, hidden] = -torch.inf
        sink = torch.tensor(-torch.inf) if sinks is None else sinks[head].double()
        largest = torch.maximum(logits.amax(-1, keepdim=True), sink)
        p = torch.exp(logits - largest)
        total = p.sum(-1, keepdim=True) + torch.exp(sink - largest)
        if quantize_probabilities:
            p = (p * 256).float().to(torch.float8_e4m3fn).double() / 256
        out[:, head] = p @ v[:, head // group] / total
    return out


def relative_error(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


def assert_parity(inputs):
    expected = in_float64(**inputs)
    out = attention.quantized_attention(**inputs)
    assert out.dtype == torch.float32
    assert out.shape == expected.shape
    rounded = inputs["quantize_probabilities"]
    tolerance = TOLERANCE_ROUNDED_PROBABILITIES if rounded else TOLERANCE
    errors = {
        "triton": relative_error(out, expected),
        "reference": relative_error(reference.quantized_attention(**inputs), expected),
    }
    assert max(errors.values()) < tolerance, errors


WINDOW, SOFTCAP = {"window": 7}, {"softcap": 4.0}
# A covering subset: each value of each axis, alone and with the others it shares code with.
CASES = [
    Case(),
    Case(head_dim=80, queries=65, keys=65),
    Case(head_dim=96, queries=33, keys=63, quantized_q=True),
    Case(head_dim=128, queries=17, keys=33, probabilities=True),
    Case(head_dim=256, kv_heads=2, quantized_q=True, probabilities=True),
    Case(queries=1, keys=1, kv_heads=2, quantized_q=True),
    Case(queries=1, keys=63, kv_heads=3, probabilities=True),
    Case(queries=33, keys=33, kv_heads=2, group=3),
    Case(kv_heads=2, group=4, quantized_q=True, batch=2, dtype=torch.bfloat16),
    Case(group=8, quantized_q=True, probabilities=True),
    Case(kv_heads=2, group=3, scales="per_tensor", quantized_q=True),
    Case(kv_heads=3, scales="per_tensor", batch=2, dtype=torch.float16),
    Case(head_dim=80, queries=65, keys=97, options=WINDOW),
    Case(queries=97, keys=97, options={"window": 1}),
    Case(queries=1, keys=63, options={"window": 32}, quantized_q=True),
    Case(queries=17, keys=63, options={"window": 1000}),
    Case(head_dim=96, kv_heads=2, options=SOFTCAP),
    # Far above the logits, where a tanh that cancels near 0 loses digits.
    Case(queries=33, keys=63, options={"softcap": 1000.0}),
    Case(
        queries=33,
        keys=63,
        kv_heads=2,
        group=4,
        options=WINDOW | SOFTCAP,
        quantized_q=True,
        probabilities=True,
    ),
]


class TestAttention:
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_agrees(self, case, device):
        assert_parity(case.inputs(device))

    @pytest.mark.parametrize("head_dim", [64, 80])
    @pytest.mark.parametrize(
        "layouts",
        [
            pytest.param(("bhtd", "bhtd", "bhtd"), id="dense rows"),
            pytest.param(("bthd", "bthd", "bhtd"), id="tokens before heads"),
            pytest.param(("bhdt", "dthb", "bthd"), id="each its own"),
        ],
    )
    def test_strided_views_amid_nan(self, layouts, head_dim, device):
        inputs = Case(head_dim=head_dim, queries=9, keys=35, kv_heads=2, batch=2).inputs(device)
        for name, layout in zip("qkv", layouts, strict=True):
            inputs[name] = amid_nan(inputs[name], layout)
            assert not inputs[name].is_contiguous()
        assert_parity(inputs)

    @pytest.mark.parametrize("probabilities", [False, True])
    def test_sinks(self, probabilities, device):
        """Far below the logits, among them and far above."""
        case = Case(kv_heads=2, group=3, queries=33, keys=63, options=WINDOW, probabilities=probabilities)
        sinks = torch.tensor([-90.0, -1.0, 0.0, 2.5, 9.0, 40.0], device=device)
        inputs = case.inputs(device)
        assert_parity(inputs | {"sinks": sinks})
        with pytest.raises(ValueError, match="each of 6 query heads has one"):
            attention.quantized_attention(**inputs, sinks=sinks[:2])

    def test_scales_amid_nan(self, device):
        inputs = Case(kv_heads=2, group=2, quantized_q=True).inputs(device)
        for name in ("k_scale", "v_scale", "q_scale"):
            spread = torch.full((3 * len(inputs[name]), 1, 1), torch.nan, device=device)
            spread[1::3] = inputs[name]
            inputs[name] = spread[1::3]
        assert_parity(inputs)

    def test_batches_share_an_expanded_cache(self, device):
        inputs = Case(batch=2).inputs(device)
        for name in ("k", "v"):
            inputs[name] = inputs[name][:1].expand(2, -1, -1, -1)
        assert_parity(inputs)

    def test_no_query_gives_an_empty_output(self, device):
        inputs = Case().inputs(device)
        inputs["q"] = inputs["q"][:, :, :0]
        assert attention.quantized_attention(**inputs).shape == (1, 1, 0, 64)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            pytest.param({"q": torch.ones(1, 3, 4, 64)}, "no multiple of KV heads", id="heads"),
            pytest.param({"q": torch.ones(1, 2, 5, 64)}, "more queries than keys", id="queries"),
            pytest.param({"q": torch.ones(1, 2, 4, 80)}, "batch or head_dim", id="head_dim"),
            pytest.param({"q": torch.ones(2, 2, 4, 64)}, "batch or head_dim", id="batch"),
            pytest.param({"q": torch.ones(2, 4, 64)}, "batch, heads, tokens, head_dim", id="dims"),
            pytest.param({"v": torch.ones(1, 2, 3, 64)}, "K and V differ", id="k and v"),
            pytest.param({"k": torch.ones(1, 2, 4, 64)}, "must be codes", id="dtype"),
            pytest.param({"k_scale": torch.ones(3)}, "k_scale has 3 values for 2 heads", id="k_scale"),
            pytest.param({"v_scale": torch.ones(4)}, "v_scale has 4 values for 2 heads", id="v_scale"),
            pytest.param({"q_scale": torch.ones(2)}, "q_scale has 2 values for 4 heads", id="q_scale"),
            pytest.param({"window": 0}, "window is 0", id="window"),
            pytest.param({"softcap": 0.0}, "softcap is 0", id="softcap"),
        ],
    )
    def test_refuses(self, changes, message):
        inputs = Case(queries=4, keys=4, kv_heads=2, group=2).inputs("cpu")
        with pytest.raises(ValueError, match=message):
            attention.quantized_attention(**inputs | changes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    @pytest.mark.parametrize(
        "options", [{}, {"window": 333}, SOFTCAP, {"window": 64, "softcap": 30.0}], ids=str
    )
    @pytest.mark.parametrize("precision", ["q16p16", "q8p16", "q16p8", "q8p8"])
    @pytest.mark.parametrize(("kv_heads", "group"), [(8, 1), (2, 3), (2, 4), (1, 8)])
    @pytest.mark.parametrize(("queries", "keys"), [(2048, 2048), (1023, 1023), (1, 2047), (513, 1999)])
    @pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
    def test_attention_agrees(self, head_dim, queries, keys, kv_heads, group, precision, options, device):
        case = Case(
            head_dim=head_dim,
            queries=queries,
            keys=keys,
            kv_heads=kv_heads,
            group=group,
            scales="per_tensor" if queries == 513 else "per_head",
            quantized_q="q8" in precision,
            probabilities="p8" in precision,
            dtype=torch.bfloat16 if queries == 1 else torch.float32,
            options=options,
        )
        assert_parity(case.inputs(device))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    def test_quantize_agrees(self, dtype, device):
        x = torch.randn(4, 32, 2047, 128, device=device) * 4
        TestQuantize.assert_equal_codes(x.to(dtype), scales_of(32, 0.004).to(device))
