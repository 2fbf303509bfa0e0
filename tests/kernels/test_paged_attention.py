"""Attention over pages: the Triton kernel and its definition, and both against values never paged.

Reference values are computed in float64. Pages hold NaN wherever nobody may look: unwritten slots, memory
between rows, pages that a table does not name.
"""

import re
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import pytest
import torch

from kvcal.formats import MXFP4
from kvcal.kernels import paged, paged_reference, reference
from kvcal.kernels.paged import Pages, Segment

pytest.importorskip("triton", reason="Triton is published for Linux only")
from kvcal.kernels import paged_attention, tuning
from kvcal.kernels.tuning import Tuning
from tests.kernels.test_paged_write import SPECS, Spec, arranged, with_tokens

# Probabilities and products are rounded to 16 bits; errors are norms of a head relative to what it should be.
TOLERANCE = {torch.float16: 2e-3, torch.float32: 2e-3, torch.bfloat16: 6e-3}
NOWHERE = 10**6

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(out, expected):
    """The largest of any sequence and head."""
    out, expected = out.cpu().double(), expected.cpu().double()
    assert out.shape == expected.shape
    difference, size = (out - expected).flatten(2).norm(dim=2), expected.flatten(2).norm(dim=2)
    return float(torch.where(size == 0, difference, difference / size).nan_to_num(torch.inf).max())


def tables(lengths, page_size, spare=1, seed=0):
    """Pages of each sequence in any order, none used twice; past the end of a sequence there is none."""
    wanted = [-(-length // page_size) for length in lengths]
    width = max(wanted) + spare
    order = torch.randperm(sum(wanted) + 2, generator=torch.Generator().manual_seed(seed)).int()
    table = torch.full((len(lengths), width), NOWHERE, dtype=torch.int32)
    for row, pages, end in zip(table, wanted, np.cumsum(wanted), strict=True):
        row[:pages] = order[end - pages : end]
    return table, len(order)


def slots_of(row, positions, page_size, ring=False):
    number = positions // page_size
    number = number % len(row) if ring else number
    return row.long()[number] * page_size + positions % page_size


def dense(q, ks, vs, *, scaling, window=None, softcap=None, sinks=None):
    """Attention in float64 over ``(tokens, kv_heads, head_dim)`` of each sequence, a head at a time."""
    out = np.zeros(q.shape)
    queries = q.double().numpy()
    group = q.shape[1] // ks[0].shape[1]
    for sequence, (k, v) in enumerate(zip(ks, vs, strict=True)):
        for head in range(q.shape[1]):
            for i in range(q.shape[2]):
                last = len(k) - q.shape[2] + i
                first = 0 if window is None else max(0, last - window + 1)
                if last < 0:
                    continue
                keys, values = (x[first : last + 1, head // group].astype(np.float64) for x in (k, v))
                logits = keys @ queries[sequence, head, i] * scaling
                if softcap is not None:
                    logits = softcap * np.tanh(logits / softcap)
                extra = [] if sinks is None else [float(sinks[head])]
                p = np.exp(logits - max([*logits, *extra]))
                total = p.sum() + sum(np.exp(e - max([*logits, *extra])) for e in extra)
                out[sequence, head, i] = p @ values / total
    return torch.from_numpy(out)


@dataclass(frozen=True)
class Case:
    """One attention problem; the id names what differs from the defaults."""

    k: str = "fp8_e4m3 head"
    v: str = ""
    head_dim: int = 64
    kv_heads: int = 2
    group: int = 2
    queries: int = 1
    lengths: tuple = (70, 33, 1)
    page: int = 16
    scales_per: int | None = None
    spread: float = 0.0
    rise: float = 0.0
    order: tuple = ("phtr", "phtr", "phtr", "phtr")
    dtype: torch.dtype = torch.float16
    features: tuple = ()
    options: dict = field(default_factory=dict)

    def __str__(self):
        parts = [str(Spec.of(text)) for text in (self.k, self.v) if text]
        parts += [f"d{self.head_dim}", f"h{self.kv_heads}x{self.group}", f"q{self.queries}", f"p{self.page}"]
        parts += ["".join(f"l{length}" for length in self.lengths)] * (self.lengths != Case.lengths)
        parts += [f"g{self.scales_per}"] * bool(self.scales_per) + [f"e{self.spread:g}"] * bool(self.spread)
        parts += [f"r{self.rise:g}"] * bool(self.rise)
        parts += [f"{name}{value}" for name, value in self.options.items()] + list(self.features)
        return "-".join([*parts, str(self.dtype).removeprefix("torch.")])

    def build(self, device):
        """Arguments of ``paged_attention``."""
        table, count = tables(self.lengths, self.page)
        shape = {"head_dim": self.head_dim, "kv_heads": self.kv_heads, "page_size": self.page}
        sides = []
        for number, text in enumerate([self.k, self.v or self.k]):
            dtype = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float16
            spec = Spec.of(text)
            side = spec.pages(pages=count, group=self.scales_per, seed=number, dtype=dtype, **shape)
            for sequence, length in enumerate(self.lengths):
                seed = 10 * sequence + number
                x = normal(length, self.kv_heads, self.head_dim, seed=seed) + 0.3 * number
                x *= torch.exp(self.spread * normal(length, self.kv_heads, 1, seed=seed + 5))
                if not number:
                    x += self.rise * torch.linspace(0, 1, length).reshape(-1, 1, 1)
                if self.options.get("hadamard") and not number:
                    x = reference.hadamard(x)
                if length:
                    paged_reference.write(x, slots_of(table[sequence], torch.arange(length), self.page), side)
            order, beside = self.order[2 * number :][:2]
            sides.append(arranged(side, order, beside, device))
        heads = self.kv_heads * self.group
        # Sharp softmaxes: with flat ones every mask or scale fault would average out.
        q = normal(len(self.lengths), heads, self.queries, self.head_dim, seed=99) * 2 + bool(self.rise)
        options = {"scaling": self.head_dim**-0.5 * 0.9, **self.options}
        if "sinks" in self.features:
            options["sinks"] = normal(heads, seed=98).to(device) * 2
        if "q_scale" in self.features:
            options["q_scale"] = torch.tensor([0.013], device=device)
        if "q_scales" in self.features:
            options["q_scale"] = (torch.linspace(0.009, 0.02, heads).reshape(-1, 1, 1)).to(device)
        return {
            "q": q.to(device, self.dtype),
            "segments": [Segment(*sides, table.to(device))],
            "lengths": torch.tensor(self.lengths, dtype=torch.int32, device=device),
            **options,
        }


def assert_agrees(arguments, tolerance=None):
    out = paged_attention.paged_attention(**arguments)
    expected = paged_reference.paged_attention(**arguments, dtype=torch.float64)
    assert out.dtype == arguments["q"].dtype
    assert relative_error(out, expected) < (tolerance or TOLERANCE[out.dtype])
    return out


WINDOW, SOFTCAP = {"window": 20}, {"softcap": 2.5}
CASES = [
    *(Case(str(spec).replace("-", " ")) for spec in SPECS),
    Case("16bit"),
    Case("16bit", head_dim=80, kv_heads=1, group=16, queries=3),
    Case("fp8_e5m2 channel", head_dim=96, group=3),
    Case("fp8_e4m3 token_head", head_dim=80, group=5, kv_heads=1, queries=3),
    Case("int8 channel low", head_dim=128, group=7, kv_heads=1),
    Case("int4 group low", head_dim=192, kv_heads=1),
    Case("nvfp4 group", head_dim=256, kv_heads=1),
    Case("nvfp4 group", head_dim=80, group=1, queries=3),
    Case("int2 token_head low", head_dim=96, group=1, queries=3),
    # K and V stored differently.
    Case("int4 channel", "int2 token_head"),
    Case("int4 channel low", "int4 token_head low", queries=3),
    Case("fp8_e4m3 head", "16bit"),
    Case("16bit", "int2 group"),
    Case("int8 token_head", "fp8_e5m2 channel", head_dim=80),
    Case("nvfp4 group", "fp8_e4m3 head", group=3),
    Case("int2 group low", "nvfp4 group"),
    # Groups inside heads of other sizes.
    Case("int8 group", scales_per=16),
    Case("int4 group low", "int2 group", scales_per=16, head_dim=96),
    Case("int2 group", "int4 group", scales_per=64, head_dim=128, kv_heads=1),
    # Pages larger and smaller than what a step takes.
    Case("fp8_e4m3 token_head", page=64, lengths=(130, 63)),
    Case("int4 channel", page=256, lengths=(130, 1), kv_heads=1),
    Case("nvfp4 group", page=32, lengths=(97, 5)),
    # Many queries, some before the first token.
    Case("fp8_e4m3 head", queries=3, lengths=(150, 2, 1, 0)),
    Case("int8 token_head low", queries=40, lengths=(150, 33), kv_heads=1),
    Case("int2 channel low", queries=40, lengths=(97,), kv_heads=1, group=3),
    Case("nvfp4 group", queries=40, lengths=(41,), kv_heads=1, group=16),
    Case("16bit", queries=70, lengths=(150,), kv_heads=1, group=1),
    # What bends logits or hides keys.
    Case("fp8_e4m3 head", options={"window": 1}),
    Case("int4 channel low", options={"window": 7}, queries=3),
    Case("int8 token_head", options=WINDOW, queries=40, lengths=(150, 33), kv_heads=1),
    Case("nvfp4 group", options=WINDOW, lengths=(150, 5)),
    Case("16bit", options={"window": 1000}, queries=3),
    Case("fp8_e5m2 head", options=SOFTCAP),
    Case("int2 token_head low", options=SOFTCAP, queries=3),
    Case("int4 group", options={"softcap": 1000.0}),
    Case("int8 channel low", options=WINDOW | SOFTCAP, features=("sinks",), queries=3),
    Case("fp8_e4m3 token_head", features=("sinks",), lengths=(70, 2, 0), queries=3),
    Case("int4 head low", features=("sinks",)),
    Case("fp8_e4m3 head", features=("q_scale",)),
    Case("int4 channel low", features=("q_scales",), queries=3),
    Case("int8 token_head low", features=("q_scales", "sinks"), options=SOFTCAP),
    Case("int4 head", options={"hadamard": True}),
    Case("int2 channel low", options={"hadamard": True}, head_dim=80, queries=3),
    Case("nvfp4 group", options={"hadamard": True}, head_dim=96),
    Case("fp8_e4m3 token_head", options={"hadamard": True}, head_dim=192, kv_heads=1),
    Case("fp8_e4m3 head", options={"hadamard": True} | WINDOW, features=("q_scale", "sinks")),
    # Tokens of very different sizes, some of them 0 for whole formats.
    Case("int8 token_head low", spread=1.0),
    Case("int4 token_head", "fp8_e4m3 token_head", spread=1.0, queries=3),
    # Memory.
    Case("fp8_e4m3 head", order=("pthr", "phtr", "pthr", "phtr")),
    Case("int4 token_head low", order=("pthr", "tphr", "hptr", "pthr")),
    Case("nvfp4 group", order=("tphr", "hptr", "pthr", "phtr"), head_dim=80),
    Case("16bit", order=("hptr", "phtr", "tphr", "phtr")),
    Case("int2 group low", order=("pthr", "pthr", "pthr", "pthr"), queries=3),
    Case("fp8_e4m3 token_head", dtype=torch.float32),
]


class TestAgrees:
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_with_the_definition(self, case, device):
        assert_agrees(case.build(device))

    @pytest.mark.parametrize("rise", [0.5, 3, -3])
    @pytest.mark.parametrize("text", ["16bit", "int8 token_head low", "fp8_e4m3 token_head", "int4 group"])
    def test_with_maxima_that_move_a_little_or_far(self, text, rise, device):
        """From step to step by less than the sums wait for, by more, or never again."""
        lengths = (150, 33, 1)
        assert_agrees(Case(text, lengths=lengths, queries=3, rise=rise).build(device))

    @pytest.mark.parametrize("size", [1e-5, 1e3])
    @pytest.mark.parametrize(
        "text", ["fp8_e4m3 token_head", "int8 token_head", "int4 token_head low", "int2 token_head low"]
    )
    def test_scales_per_token_of_any_size(self, text, size, device):
        """All tokens of this size, but some of the other end. Queries keep logits near 1."""
        arguments = Case(text, dtype=torch.float32).build(device)
        (segment,) = arguments["segments"]
        for side in (segment.k, segment.v):
            for beside in with_tokens(side)[1:]:
                beside *= size
                beside[:, :, ::5] *= 1e8 if size < 1 else 1e-8
        # As the kernel rounds Q to 16 bits, which is not to count here.
        arguments["q"] = arguments["q"].half().float() / (1000 if size > 1 else 2**10)
        assert_agrees(arguments)

    @pytest.mark.parametrize("size", [1e-5, 1e3])
    @pytest.mark.parametrize("text", ["fp8_e4m3 head", "int4 channel low", "int2 head", "nvfp4 group"])
    def test_static_scales_of_any_size(self, text, size, device):
        arguments = Case(text, dtype=torch.float32).build(device)
        (segment,) = arguments["segments"]
        for side in (segment.k, segment.v):
            for each in (side.tensor_scale,) if side.fmt.block else (side.scale, side.low):
                if each is not None:
                    each *= size
        arguments["q"] = arguments["q"].half().float() / size
        assert_agrees(arguments)

    @pytest.mark.parametrize(
        "text", ["fp8_e4m3 head", "int4 channel", "int8 token_head", "int8 token_head low", "int4 group low"]
    )
    @pytest.mark.parametrize("zeros", [slice(None, None, 3), slice(None)], ids=["some", "all"])
    def test_scales_of_zero(self, text, zeros, device):
        arguments = Case(text).build(device)
        (segment,) = arguments["segments"]
        for side in (segment.k, segment.v):
            if side.sharing == "channel":
                side.scale[..., zeros] = 0
            elif side.sharing == "head":
                side.scale[zeros] = 0
            else:
                side.scale[:, :, zeros] = 0
        assert assert_agrees(arguments).isfinite().all()

    def test_zero_tokens_and_zero_queries(self, device):
        for text in ("int8 token_head", "int4 token_head low", "nvfp4 group", "fp8_e4m3 head"):
            arguments = Case(text).build(device)
            (segment,) = arguments["segments"]
            for side in (segment.k, segment.v):
                every = torch.arange(16, device=device) + 16 * int(segment.table[0, 1])
                paged_reference.write(torch.zeros(16, 2, 64, device=device), every, side)
            arguments["q"][0] = 0
            assert_agrees(arguments)

    def test_no_sequence_and_no_query(self, device):
        arguments = Case().build(device)
        none = arguments | {"q": arguments["q"][:, :, :0]}
        assert paged_attention.paged_attention(**none).shape == (3, 4, 0, 64)

    def test_q_of_any_strides(self, device):
        arguments = Case(queries=3).build(device)
        wide = torch.full((3, 3, 4, 128), torch.nan, dtype=torch.float16, device=device)
        wide[..., ::2] = arguments["q"].transpose(1, 2)
        expected = paged_attention.paged_attention(**arguments)
        arguments["q"] = wide[..., ::2].transpose(1, 2)
        assert torch.equal(paged_attention.paged_attention(**arguments), expected)

    def test_a_table_of_any_strides(self, device):
        arguments = Case().build(device)
        (segment,) = arguments["segments"]
        wide = torch.full((3, 40), NOWHERE, dtype=torch.int32, device=device)
        wide[:, : segment.table.shape[1]] = segment.table
        expected = paged_attention.paged_attention(**arguments)
        arguments["segments"] = [replace(segment, table=wide[:, : segment.table.shape[1]])]
        assert torch.equal(paged_attention.paged_attention(**arguments), expected)

    def test_scales_that_lie_behind_their_codes(self, device):
        """As an engine keeps them: a row is codes, then a float32."""
        rows = torch.full((6, 2, 16, 68), 0xFF, dtype=torch.uint8)
        spec = Spec.of("int8 token_head")
        side = spec.pages()
        inline = replace(
            side, codes=rows[..., :64].view(torch.int8), scale=rows[..., 64:].view(torch.float32)
        )
        x, at = normal(40, 2, 64, seed=1), torch.arange(40)
        for each in (side, inline):
            paged_reference.write(x, at, each)
        table = torch.arange(3, dtype=torch.int32).reshape(1, 3).to(device)
        here = [
            Pages(each.codes.to(device), 64, each.fmt, each.scale.to(device))
            if each is side
            else Pages(
                (moved := rows.to(device))[..., :64].view(torch.int8), 64, each.fmt,
                moved[..., 64:].view(torch.float32),
            )
            for each in (side, inline)
        ]  # fmt: skip
        q = normal(1, 4, 1, 64, seed=2).half().to(device)
        outs = [
            paged_attention.paged_attention(
                q, [Segment(each, each, table)], torch.tensor([40], device=device).int(), scaling=0.1
            )
            for each in here
        ]
        assert torch.equal(*outs)


@pytest.fixture
def cut(monkeypatch):
    """Cut keys into as many spans as asked for, by ``keys`` a step; returns the numbers that came of it."""

    def start(splits, keys):
        counts = []
        asked = paged_attention._Launch.splits

        def splits_of(launch, how):
            monkeypatch.setattr(tuning, "processors", lambda device: splits * launch.programs)
            counts.append(asked(launch, how))
            return counts[-1]

        monkeypatch.setattr(paged_attention._Launch, "splits", splits_of)
        monkeypatch.setattr(tuning, "choose", lambda *_: Tuning(keys, 4, 2, 1))
        return counts

    return start


def widened(arguments, width):
    """Tables with more entries, of pages that do not exist."""
    segments = []
    for segment in arguments["segments"]:
        table = torch.full((len(segment.table), width), NOWHERE, dtype=torch.int32)
        table[:, : segment.table.shape[1]] = segment.table
        segments.append(replace(segment, table=table.to(segment.table.device)))
    return arguments | {"segments": segments}


class TestSplits:
    @pytest.mark.parametrize("splits", [2, 5])
    @pytest.mark.parametrize(
        "case",
        [
            Case("fp8_e4m3 head", lengths=(200, 33, 1)),
            Case("int4 channel low", lengths=(200, 70), features=("sinks",), queries=3),
            Case("int8 token_head low", lengths=(200, 2, 0), options=SOFTCAP, queries=3),
            Case("nvfp4 group", lengths=(200, 40), options={"window": 50}),
            Case("int2 group low", "int4 token_head", lengths=(200, 5), page=64, kv_heads=1),
            Case("16bit", lengths=(130,), queries=40, kv_heads=1, group=1),
        ],
        ids=str,
    )
    def test_agree(self, case, splits, cut, device):
        counts = cut(splits, 32)
        assert_agrees(widened(case.build(device), 400 // case.page + 1))
        assert counts == [splits]

    @pytest.mark.parametrize("page", [16, 64, 128])
    @pytest.mark.parametrize("keys", [32, 64, 128])
    def test_steps_and_pages_of_other_sizes(self, keys, page, cut, device):
        cut(2, keys)
        case = Case("int4 token_head low", page=page, lengths=(150, 65, 1), kv_heads=1, queries=3)
        assert_agrees(widened(case.build(device), 640 // page))

    @pytest.mark.parametrize("text", ["fp8_e4m3 head", "int4 head low"])
    def test_empty_spans_weigh_nothing_where_scales_are_zero(self, text, cut, device):
        cut(5, 32)
        arguments = Case(text, lengths=(70, 1)).build(device)
        (segment,) = arguments["segments"]
        segment.k.scale[0] = 0
        assert_agrees(widened(arguments, 20))

    def test_a_sink_alone(self, cut, device):
        """No key is seen in any span; the sink takes all."""
        cut(3, 32)
        arguments = Case("int4 head low", lengths=(0, 0), features=("sinks",)).build(device)
        out = paged_attention.paged_attention(**widened(arguments, 20))
        assert torch.equal(out, torch.zeros_like(out))


SINKS, RECENT = 5, 21


def segmented(specs, lengths, *, queries=1, page=16, head_dim=64, device="cpu", turn=False):
    """Sinks, a middle and a ring of recent tokens, and the same tokens as one sequence each."""
    total = torch.tensor(lengths, dtype=torch.int32)
    begin = torch.minimum(total, torch.tensor(SINKS)).int()
    recent = torch.maximum(begin, total - RECENT).int()
    bounds = [(None, begin), (begin, recent), (recent, None)]
    segments, held = [], []
    for number, (spec, (first, stop)) in enumerate(zip(specs, bounds, strict=True)):
        ring = number == 2
        table, count = tables([SINKS if number == 0 else n for n in lengths], page, seed=number)
        if ring:
            width = -(-(RECENT + page - 1) // page)
            table, count = torch.arange(len(lengths) * width).flip(0).reshape(-1, width).int(), 40
        sides = []
        for side in range(2):
            pages = Spec.of(spec).pages(pages=count, page_size=page, head_dim=head_dim, seed=side)
            for sequence, length in enumerate(lengths):
                x = normal(length, 2, head_dim, seed=100 * sequence + side)
                low = 0 if first is None else int(first[sequence])
                high = length if stop is None else int(stop[sequence])
                at = torch.arange(low, high)
                slots = slots_of(table[sequence], at, page, ring)
                if len(at):
                    paged_reference.write(x[at], slots, pages)
                held.append((sequence, side, paged_reference.read(pages, slots, torch.float64).numpy()))
            sides.append(arranged(pages, device=device))
        move = [None if each is None else each.to(device) for each in (table, first, stop)]
        segments.append(Segment(*sides, *move, ring=ring))
    values = [
        [
            np.concatenate([x for s, p, x in held if (s, p) == (sequence, side)])
            for sequence in range(len(lengths))
        ]
        for side in range(2)
    ]
    q = (normal(len(lengths), 4, queries, head_dim, seed=7) * 2).half()
    return q, segments, total.to(device), values


class TestSegments:
    @pytest.mark.parametrize(
        ("queries", "options"), [(1, {}), (3, {"window": 30}), (3, {"window": 9} | SOFTCAP)], ids=str
    )
    @pytest.mark.parametrize("middle", ["int2 token_head low", "int4 channel low", "nvfp4 group"])
    def test_sinks_middle_and_ring(self, middle, queries, options, device):
        lengths = [70, 27, 4]
        q, segments, total, (k, v) = segmented(
            ["16bit", middle, "16bit"], lengths, queries=queries, device=device
        )
        assert segments[2].table.shape[1] * 16 < 70
        sinks = normal(4, seed=3) * 2
        options = {"scaling": 0.11, **options}
        expected = dense(q, k, v, sinks=sinks, **options)
        arguments = {
            "q": q.to(device), "segments": segments, "lengths": total, "sinks": sinks.to(device), **options
        }  # fmt: skip
        out = assert_agrees(arguments)
        assert relative_error(out, expected) < TOLERANCE[torch.float16]

    def test_several_splits_of_each(self, cut, device):
        counts = cut(2, 16)
        q, segments, total, (k, v) = segmented(
            ["16bit", "int4 token_head", "16bit"], [70, 26, 4], device=device
        )
        out = assert_agrees({"q": q.to(device), "segments": segments, "lengths": total, "scaling": 0.11})
        assert relative_error(out, dense(q, k, v, scaling=0.11)) < TOLERANCE[torch.float16]
        assert max(counts) == 2

    def test_order_does_not_matter(self, device):
        q, segments, total, _ = segmented(["fp8_e4m3 head", "int2 group", "16bit"], [56, 40], device=device)
        for order in ([2, 0, 1], [1, 2, 0]):
            arguments = {"segments": [segments[i] for i in order], "lengths": total, "scaling": 0.11}
            assert_agrees({"q": q.to(device), **arguments})

    def test_a_position_in_none_is_not_attended_to(self, device):
        q, segments, total, (k, v) = segmented(["16bit", "16bit", "16bit"], [60, 50], device=device)
        out = assert_agrees({"q": q.to(device), "segments": segments[1:], "lengths": total, "scaling": 0.11})
        k, v = ([x[SINKS:] for x in side] for side in (k, v))
        assert relative_error(out, dense(q, k, v, scaling=0.11)) < TOLERANCE[torch.float16]


def cache_of(side, x, lengths, device):
    """``side`` with tokens written by the definition, and its table."""
    table, count = tables(lengths, side.page_size)
    assert side.codes.shape[0] >= count
    for row, each in zip(table, x, strict=True):
        paged_reference.write(torch.from_numpy(each), slots_of(row, torch.arange(len(each)), 16), side)
    return arranged(side, device=device), table.to(device)


class TestIndependently:
    """No page, no ``paged_reference.read``: values rounded by others, attention in float64 with numpy."""

    LENGTHS = (70, 33, 1)

    def values(self, seed, head_dim=64):
        return [normal(n, 2, head_dim, seed=seed + i).numpy() for i, n in enumerate(self.LENGTHS)]

    def check(self, k_side, v_side, k, v, kept_k, kept_v, device, queries=3, **options):
        (k_pages, table), (v_pages, _) = (
            cache_of(side, x, self.LENGTHS, device) for side, x in ((k_side, k), (v_side, v))
        )
        q = (normal(3, 4, queries, k_side.head_dim, seed=50) * 2).half()
        lengths = torch.tensor(self.LENGTHS, dtype=torch.int32, device=device)
        call = (q.to(device), [Segment(k_pages, v_pages, table)], lengths)
        out = paged_attention.paged_attention(*call, scaling=0.12, **options)
        defined = paged_reference.paged_attention(*call, scaling=0.12, dtype=torch.float64, **options)
        options.pop("hadamard", None)
        expected = dense(q, kept_k, kept_v, scaling=0.12, **options)
        assert relative_error(out, expected) < TOLERANCE[torch.float16]
        # Turned keys were rounded to float16, those of ``dense`` were not.
        assert relative_error(defined, expected) < (1e-6 if k_side.fmt else TOLERANCE[torch.float16])

    def test_static(self, device):
        k_side = Spec.of("fp8_e4m3 channel").pages(pages=12)
        v_side = Spec.of("int4 channel low").pages(pages=12, seed=1)
        k, v = self.values(1), self.values(2)
        k_scale, v_scale, v_low = (
            each.squeeze(1).numpy() for each in (k_side.scale, v_side.scale, v_side.low)
        )
        kept_k = [
            torch.from_numpy((x / k_scale).clip(-448, 448)).to(torch.float8_e4m3fn).double().numpy() * k_scale
            for x in k
        ]
        kept_v = [np.rint((x - v_low) / v_scale).clip(0, 15) * v_scale.astype(float) + v_low for x in v]
        self.check(k_side, v_side, k, v, kept_k, kept_v, device, window=40, softcap=4.0)

    @pytest.mark.parametrize("head_dim", [64, 80])
    def test_nvfp4(self, head_dim, device):
        side = Spec.of("nvfp4 group").pages(pages=12, head_dim=head_dim)
        over = side.tensor_scale.reshape(1, 2, 1).numpy()

        def kept(x):
            blocks = x.reshape(len(x), 2, -1, 16)
            scale = (
                (np.abs(blocks).max(-1) / (np.float32(6) * over)).clip(0, 448).astype(ml_dtypes.float8_e4m3fn)
            )
            scale = (scale.astype(np.float32) * over)[..., None]
            elements = (blocks / scale).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
            return (elements.astype(np.float64) * scale).reshape(x.shape)

        k, v = self.values(3, head_dim), self.values(4, head_dim)
        other = replace(side, codes=side.codes.clone(), scale=side.scale.clone())
        self.check(side, other, k, v, [kept(x) for x in k], [kept(x) for x in v], device)

    def test_per_token(self, device):
        k_side = Spec.of("int8 token_head").pages(pages=12)
        v_side = Spec.of("int2 token_head low").pages(pages=12)
        k, v = self.values(5), self.values(6)

        def rounded(x):
            scale = np.abs(x).max(-1, keepdims=True).astype(np.float64) / 127
            return np.rint(x / scale) * scale

        def between(x):
            low = x.min(-1, keepdims=True).astype(np.float64)
            scale = (x.max(-1, keepdims=True) - low) / 3
            return np.rint((x - low) / scale) * scale + low

        self.check(k_side, v_side, k, v, [rounded(x) for x in k], [between(x) for x in v], device)

    @pytest.mark.parametrize("head_dim", [64, 80, 96])
    def test_turned_keys_are_those_of_no_turn(self, head_dim, device):
        sides = [Spec().pages(pages=12, head_dim=head_dim) for _ in range(2)]
        k, v = self.values(7, head_dim), self.values(8, head_dim)
        turned = [reference.hadamard(torch.from_numpy(x)).numpy() for x in k]
        self.check(*sides, turned, v, k, v, device, hadamard=True)


def pages(fmt="fp8_e4m3", **changes):
    """Arguments of ``Pages`` that are in order but for the changes."""
    spec = Spec.of(changes.pop("spec", f"{fmt} {'group' if fmt == 'nvfp4' else 'head'}"))
    good = spec.pages(pages=2)
    return {name: getattr(good, name) for name in Pages.__dataclass_fields__} | changes


def codes(*shape, dtype=torch.float8_e4m3fn):
    return torch.zeros(shape, dtype=dtype)


ONE = torch.ones(1)
BESIDE = torch.ones(2, 2, 16, 1)
GROUPS = torch.ones(2, 2, 16, 2, dtype=torch.float16)


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            pytest.param(pages(codes=codes(2, 16, 64)), "codes are (2, 16, 64) with strides", id="dims"),
            pytest.param(
                pages(codes=codes(2, 2, 64, 16).mT), "the last dimension contiguous", id="contiguous"
            ),
            pytest.param(
                pages(codes=codes(2, 2, 8, 64)), "pages of 8 tokens; a power of two", id="small page"
            ),
            pytest.param(pages(codes=codes(2, 2, 48, 64)), "pages of 48 tokens; a power of two", id="page"),
            pytest.param(
                pages("16bit", codes=codes(2, 2, 16, 64, dtype=torch.float32)),
                "codes are torch.float32",
                id="32",
            ),
            pytest.param(
                pages("16bit", codes=codes(2, 2, 16, 32, dtype=torch.float16)),
                "have rows of head_dim",
                id="row",
            ),
            pytest.param(pages("16bit", scale=ONE), "neither scale nor low", id="16 bit scale"),
            pytest.param(pages("16bit", low=ONE), "neither scale nor low", id="16 bit low"),
            pytest.param(
                pages(fmt_=None, spec="int4 head") if False else pages() | {"fmt": None},
                "without a format",
                id="fmt",
            ),
            pytest.param(
                pages(codes=codes(2, 2, 16, 64, dtype=torch.int8)), "fp8_e4m3 with heads", id="dtype"
            ),
            pytest.param(pages(codes=codes(2, 2, 16, 32)), "in rows of 32", id="codes row"),
            pytest.param(
                pages("int8", codes=codes(2, 2, 16, 64, dtype=torch.uint8)),
                "int8 with heads of 64",
                id="unsigned",
            ),
            pytest.param(pages(scale=None), "fp8_e4m3 needs a scale", id="no scale"),
            pytest.param(pages(scale=torch.ones(3, 1, 1)), "scale has shape (3, 1, 1)", id="scale"),
            pytest.param(pages(scale=torch.ones(2, 1)), "scale has shape (2, 1)", id="scale dims"),
            pytest.param(pages(scale=BESIDE[:1]), "scale has shape (1, 2, 16, 1)", id="scale pages"),
            pytest.param(pages("int4", scale=torch.ones(2, 2, 16, 8)), "scale has shape", id="groups of 8"),
            pytest.param(pages("nvfp4", scale=BESIDE), "nvfp4 takes one of [(2, 2, 16, 4)]", id="nvfp4"),
            pytest.param(pages(scale=ONE.half()), "per head it is torch.float32", id="head"),
            pytest.param(
                pages(scale=torch.ones(2, 1, 64).half()), "per channel it is torch.float32", id="channel"
            ),
            pytest.param(pages(scale=BESIDE.half()), "per token_head it is torch.float32", id="token_head"),
            pytest.param(pages("int4", scale=GROUPS.float()), "per group it is torch.float16", id="group"),
            pytest.param(
                pages("nvfp4", scale=torch.ones(2, 2, 16, 4).half()), "it is torch.float8_e4m3fn", id="block"
            ),
            pytest.param(
                pages("int4", scale=GROUPS.mT.contiguous().mT),
                "contiguous in their last dimension",
                id="strided",
            ),
            pytest.param(pages(low=torch.ones(2, 1, 1)), "fp8_e4m3 has no zero point", id="low of a float"),
            pytest.param(pages("int4", low=ONE), "low has the shape and dtype of scale", id="low shape"),
            pytest.param(
                pages("int4", low=torch.ones(2, 1, 1).half()), "low has the shape and dtype", id="low dtype"
            ),
            pytest.param(
                pages("int4", scale=GROUPS, low=GROUPS.transpose(0, 1).contiguous().transpose(0, 1)),
                "low has the strides of scale",
                id="low strides",
            ),
            pytest.param(pages("nvfp4", tensor_scale=None), "nvfp4 needs it", id="no tensor_scale"),
            pytest.param(pages(tensor_scale=ONE), "tensor_scale belongs to nvfp4", id="tensor_scale"),
        ],
    )
    def test_pages(self, arguments, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            Pages(**arguments)

    def test_formats_without_a_kernel(self):
        with pytest.raises(
            ValueError, match="no paged kernel reads mxfp4; they read fp8_e4m3, fp8_e5m2, int8"
        ):
            Pages(**pages() | {"fmt": MXFP4})

    @staticmethod
    def problem(**changes):
        """A call that is in order but for the changes."""
        shapes = {"head_dim": 64, "kv_heads": 2, "page_size": 16} | changes.pop("shapes", {})
        k = Spec.of("fp8_e4m3 head").pages(**shapes)
        v = Spec.of("fp8_e4m3 head").pages(**shapes | changes.pop("v", {}))
        table = torch.zeros(changes.pop("table", (1, 2)), dtype=torch.int32)
        return {
            "q": torch.ones(1, 4, 1, shapes["head_dim"]),
            "segments": [Segment(k, v, table)],
            "lengths": torch.ones(1, dtype=torch.int32),
            **changes,
        }

    @pytest.mark.parametrize("attend", [paged_attention.paged_attention, paged_reference.paged_attention])
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            pytest.param({"q": torch.ones(4, 1, 64)}, "q is torch.float32 (4, 1, 64)", id="dims"),
            pytest.param({"q": torch.ones(1, 4, 1, 64).double()}, "q is torch.float64", id="dtype"),
            pytest.param({"segments": []}, "no segment to attend to", id="none"),
            pytest.param({"lengths": torch.ones(2).int()}, "lengths are (2,) for 1 sequences", id="lengths"),
            pytest.param({"q": torch.ones(1, 3, 1, 64)}, "3 heads over 2 heads of K and 2 of V", id="heads"),
            pytest.param({"v": {"kv_heads": 4}}, "4 heads over 2 heads of K and 4 of V", id="kv_heads"),
            pytest.param(
                {"q": torch.ones(1, 34, 1, 64)}, "17 heads share a KV head; at most 16 do", id="group"
            ),
            pytest.param({"q": torch.ones(1, 4, 1, 80)}, "differ in head_dim", id="q head_dim"),
            pytest.param({"v": {"head_dim": 80}}, "differ in head_dim", id="v head_dim"),
            pytest.param(
                {"shapes": {"head_dim": 112}}, "heads of 112; the kernels know (64, 80", id="head_dim"
            ),
            pytest.param({"v": {"page_size": 32}}, "K and V have pages of different sizes", id="page size"),
            pytest.param({"table": (2, 2)}, "table is (2, 2) for 1 sequences", id="table"),
            pytest.param({"table": (1,)}, "table is (1,) for 1 sequences", id="table dims"),
        ],
    )
    def test_calls(self, attend, changes, message):
        arguments = self.problem(**changes)
        with pytest.raises(ValueError, match=re.escape(message)):
            attend(**arguments, scaling=0.1)


class TestPages:
    @pytest.mark.parametrize(
        ("text", "bytes_"),
        [
            ("16bit", 128),
            ("fp8_e4m3 channel", 64),
            ("int8 token_head low", 64 + 8),
            ("int4 group low", 32 + 2 * 2 * 2),
            ("int2 token_head", 16 + 4),
            ("nvfp4 group", 32 + 4),
        ],
    )
    def test_bytes_of_a_token(self, text, bytes_):
        side = Spec.of(text).pages()
        assert side.bytes_per_token_head == bytes_
        assert side.sharing == Spec.of(text).sharing
        assert (side.kv_heads, side.page_size, side.head_dim) == (2, 16, 64)


def rotated(lists, count):
    """``count`` rows; each column goes through its list at another pace, so that pairs of values meet."""
    return [[values[(i // 7**n + i) % len(values)] for n, values in enumerate(lists)] for i in range(count)]


TEXTS = ["16bit", *(str(spec).replace("-", " ") for spec in SPECS)]
FEATURES = [
    ((), {}),
    (("sinks",), WINDOW),
    (("q_scale",), SOFTCAP),
    ((), {"hadamard": True}),
    (("q_scales", "sinks"), {"hadamard": True, "window": 100}),
    ((), {"window": 1}),
]
HEAD_DIMS = paged.HEAD_DIMS
PAGES = (16, 64, 256)
LENGTHS = {1: (700, 1, 33), 3: (519, 2, 64), 40: (700, 130, 20)}


def on_gpu_case(text, head_dim, group, page, queries, feature, other, dtype):
    features, options = feature
    return Case(
        text, other, head_dim, 2, group, queries, LENGTHS[queries], page, dtype=dtype, features=features,
        options=options,
    )  # fmt: skip


def gpu_cases():
    """Each format meets each head size and each feature; each group meets each number of queries and page."""
    groups, queries = range(1, 17), (1, 3, 40)
    dtypes = (torch.bfloat16, torch.float16)
    cases, turn = {}, 0

    def add(text, head_dim=None, group=None, page=None, number=None, feature=None, other=""):
        nonlocal turn
        turn += 1
        case = on_gpu_case(
            text,
            head_dim or HEAD_DIMS[turn % 6],
            group or groups[turn * 5 % 16],
            page or PAGES[turn % 3],
            number or queries[turn // 3 % 3],
            feature or FEATURES[turn % 6],
            other,
            dtypes[turn % 2],
        )
        cases[str(case)] = case

    for number, text in enumerate(TEXTS):
        for head_dim in HEAD_DIMS:
            add(text, head_dim)
        for feature in FEATURES:
            add(text, feature=feature)
        add(text, other=TEXTS[number * 11 % len(TEXTS)])
        add(text, other=TEXTS[(number * 5 + 3) % len(TEXTS)])
    for index, group in enumerate(groups):
        for count in queries:
            for page in PAGES:
                add(TEXTS[(index * 3 + count + page) % len(TEXTS)], group=group, page=page, number=count)
    return list(cases.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    @pytest.mark.parametrize("case", gpu_cases(), ids=str)
    def test_agrees(self, case, device):
        assert_agrees(case.build(device))

    @pytest.mark.parametrize("how", [*tuning.DECODE, *tuning.PREFILL], ids=str)
    @pytest.mark.parametrize("text", ["16bit", "fp8_e4m3 head", "int4 token_head low", "nvfp4 group"])
    @pytest.mark.parametrize("queries", [1, 40])
    def test_every_candidate(self, how, text, queries, monkeypatch, device):
        monkeypatch.setattr(tuning, "choose", lambda *_: how)
        assert_agrees(Case(text, head_dim=128, queries=queries, lengths=(2000, 77), group=4).build(device))

    @pytest.mark.parametrize("text", ["fp8_e4m3 head", "int4 channel low", "nvfp4 group"])
    def test_long_sequences(self, text, device):
        assert_agrees(Case(text, head_dim=128, group=4, lengths=(40_000, 5, 17_777)).build(device))

    @pytest.mark.parametrize("text", TEXTS)
    def test_values_that_cancel(self, text, device):
        """Means of many values are small beside a code, and what tensor cores cut off must be too."""
        arguments = Case(text, head_dim=128, lengths=(70_000,), dtype=torch.float32).build(device)
        assert_agrees(arguments | {"q": torch.zeros_like(arguments["q"])})
