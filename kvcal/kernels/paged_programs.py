"""The Triton programs of paged attention: spans of keys for rows of queries, and the merge of spans.

Decode is bound by bytes, so the loop over keys moves codes and little else. Rows of a program are the query
heads that share a KV head, times its queries. Each program takes a span of keys (split-KV; Flash-Decoding,
Dao et al. 2023) and leaves an output with its log-sum-exp. Static scales live outside the loop: those of K in
Q and in the softmax scale, those of V in the result. Scales per token multiply logits and probabilities; only
those of a group inside a head cost an operation per element.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcal.kernels import words
from kvcal.kernels.quantize import decode_e4m3, encode_e4m3
from kvcal.kernels.words import decode, parted, spread, united

_LOG2_E = tl.constexpr(1.4426950408889634)

# Below every logit, and finite: differences of two are 0, not NaN.
_LOWEST = tl.constexpr(-1.0e30)

# A row's probabilities may pass 1 by this power of two before its sums are scaled anew.
_HIGHEST = tl.constexpr(6.0)

# Lifts block scales of NVFP4 so that a float16 holds their products with elements exactly.
_NVFP4_LIFT = tl.constexpr(2.0**7)

# A kernel serves every batch, length and number of splits.
_RUN_TIME = ["table_width", "heads", "queries", "splits", "begin", "total", "window"]


@triton.jit(do_not_specialize=_RUN_TIME)  # type: ignore[untyped-decorator]
def spans(
    q_ptr: tl.tensor,
    q_scale_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_static_ptr: tl.tensor,
    k_static_low_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    k_low_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_static_ptr: tl.tensor,
    v_static_low_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    v_low_ptr: tl.tensor,
    table_ptr: tl.tensor,
    length_ptr: tl.tensor,
    first_ptr: tl.tensor,
    stop_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    k_page: tl.tensor,
    k_head: tl.tensor,
    k_scale_page: tl.tensor,
    k_scale_head: tl.tensor,
    v_page: tl.tensor,
    v_head: tl.tensor,
    v_scale_page: tl.tensor,
    v_scale_head: tl.tensor,
    table_stride: tl.tensor,
    table_width: tl.tensor,
    heads: tl.tensor,
    queries: tl.tensor,
    splits: tl.tensor,
    begin: tl.tensor,
    total: tl.tensor,
    scaling: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    Q_ROWS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    QUANTIZED_Q: tl.constexpr,
    TURNED: tl.constexpr,
    RING: tl.constexpr,
    FIRST_GIVEN: tl.constexpr,
    SINKS: tl.constexpr,
    ALONE: tl.constexpr,
    SAME_PLACES: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_SCALE_TOKEN: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_SCALE_TOKEN: tl.constexpr,
    K_KIND: tl.constexpr,
    K_WORDS: tl.constexpr,
    K_SHARING: tl.constexpr,
    K_LOW: tl.constexpr,
    K_WORDS_PER_SCALE: tl.constexpr,
    V_KIND: tl.constexpr,
    V_WORDS: tl.constexpr,
    V_SHARING: tl.constexpr,
    V_LOW: tl.constexpr,
    V_WORDS_PER_SCALE: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    V_PER_WORD: tl.constexpr = words.per_word(V_KIND)
    P_TYPE: tl.constexpr = tl.bfloat16 if V_KIND == "bfloat16" else tl.float16
    # Logits in the loop are proportional to those of the softmax; where each key has a scale, or a cap
    # bends them, they are those of the softmax, in base 2.
    IN_BASE_2: tl.constexpr = SOFTCAPPED or K_SHARING == "token_head"

    sequence = tl.program_id(2)
    kv_head = tl.program_id(1)
    split = tl.program_id(0) % splits
    first_query = tl.program_id(0) // splits * BLOCK_Q
    length = tl.load(length_ptr + sequence)
    stop = tl.load(stop_ptr + sequence)
    first = tl.load(first_ptr + sequence) if FIRST_GIVEN else 0

    row = tl.arange(0, ROWS)
    query = first_query + row // GROUP
    inside = (query < queries) & (row < BLOCK_Q * GROUP)
    query = tl.minimum(query, queries - 1)
    head = kv_head * GROUP + row % GROUP
    position = length - queries + query
    lowest = length - queries + first_query
    highest = tl.minimum(lowest + BLOCK_Q, length) - 1

    q_row = tl.arange(0, Q_ROWS)
    q_head = kv_head * GROUP + q_row % GROUP
    q_query = tl.minimum(first_query + q_row // GROUP, queries - 1)
    qs, unit, shift, q_sum = _queries(
        q_ptr + ((sequence.to(tl.int64) * heads + q_head) * queries + q_query) * HEAD_DIM,
        q_scale_ptr + q_head,
        k_static_ptr + kv_head * (HEAD_DIM if K_SHARING == "channel" else 1),
        k_static_low_ptr + kv_head * (HEAD_DIM if K_SHARING == "channel" else 1),
        scaling,
        HEAD_DIM,
        ROWS,
        Q_ROWS,
        QUANTIZED_Q,
        TURNED,
        K_KIND,
        K_WORDS,
        K_SHARING,
        K_LOW,
    )

    # Tiles of this split: whole ones first, then those that a boundary crosses.
    low_end = tl.maximum(first, lowest - window + 1) if WINDOWED else first
    low_end = tl.maximum(low_end, 0) // KEYS * KEYS
    high_end = tl.minimum(stop, highest + 1)
    tiles = tl.cdiv(tl.maximum(high_end - low_end, 0), KEYS)
    per_split = tl.cdiv(tiles, splits)
    tile = tl.minimum(split * per_split, tiles)
    last_tile = tl.minimum(tile + per_split, tiles)
    all_see_from = tl.maximum(first, highest - window + 1) if WINDOWED else first
    whole = tl.cdiv(tl.maximum(all_see_from - low_end, 0), KEYS)
    whole = tl.minimum(tl.maximum(whole, tile), last_tile)
    whole_stop = tl.maximum(tl.minimum(stop, lowest + 1) - low_end, 0) // KEYS
    whole_stop = tl.minimum(tl.maximum(whole_stop, whole), last_tile)

    k_ptr += kv_head.to(tl.int64) * k_head
    v_ptr += kv_head.to(tl.int64) * v_head
    k_scale_ptr += kv_head.to(tl.int64) * k_scale_head
    k_low_ptr += kv_head.to(tl.int64) * k_scale_head
    v_scale_ptr += kv_head.to(tl.int64) * v_scale_head
    v_low_ptr += kv_head.to(tl.int64) * v_scale_head
    table_ptr += sequence.to(tl.int64) * table_stride

    top = tl.full((ROWS,), _LOWEST, tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)  # Σ p, as the values are divided by it
    rounded = tl.zeros((ROWS,), tl.float32)  # Σ of what multiplies codes of V
    lows = tl.zeros((ROWS,), tl.float32)  # Σ p low, of offsets per token
    v_unit = tl.full((1,), 2.0**-100, tl.float32)
    sums = ()
    for _ in tl.static_range(V_PER_WORD):
        sums += (tl.zeros((ROWS, V_WORDS), tl.float32),)  # type: ignore[assignment]

    for edges in tl.static_range(2):
        steps = whole - tile + last_tile - whole_stop if edges else whole_stop - whole
        # The pages of a tile are looked up a step before they are needed.
        key = _first_key(0, low_end, tile, whole, whole_stop, KEYS, edges)
        page = _pages(table_ptr, table_width, key, PAGE, KEYS, RING, PTX)
        for step in tl.range(0, steps, num_stages=1 if edges else STAGES):
            key = _first_key(step, low_end, tile, whole, whole_stop, KEYS, edges)
            next_key = _first_key(step + 1, low_end, tile, whole, whole_stop, KEYS, edges)
            next_page = _pages(table_ptr, table_width, next_key, PAGE, KEYS, RING, PTX)
            top, weight, rounded, lows, v_unit, sums = _tile(
                page, key, qs, unit, shift, q_sum, top, weight, rounded, lows, v_unit, sums,
                k_ptr, v_ptr, k_scale_ptr, k_low_ptr, v_scale_ptr, v_low_ptr,
                k_page, v_page, k_scale_page, v_scale_page,
                first, stop, position, window, softcap,
                edges, HEAD_DIM, ROWS, PAGE, KEYS, WINDOWED, SOFTCAPPED, SAME_PLACES, IN_BASE_2,
                K_TOKEN, K_SCALE_TOKEN, V_TOKEN, V_SCALE_TOKEN,
                K_KIND, K_WORDS, K_SHARING, K_LOW, K_WORDS_PER_SCALE,
                V_KIND, V_WORDS, V_SHARING, V_LOW, V_WORDS_PER_SCALE, P_TYPE, PTX,
            )  # fmt: skip
            page = next_page

    if V_SHARING != "token_head":
        weight = rounded
    empty = weight == 0
    inverse = 1.0 / tl.where(empty, 1.0, weight)
    lse = (top if IN_BASE_2 else top * unit + shift) + tl.log2(tl.where(empty, 1.0, weight))
    lse = tl.where(empty, float("-inf"), lse)
    if ALONE and SINKS:
        # The sink takes its part of the softmax and adds nothing.
        kept = 1.0 / (1.0 + tl.exp2(tl.load(sink_ptr + head) * _LOG2_E - lse))
        inverse *= kept
    else:
        kept = tl.full((ROWS,), 1.0, tl.float32)
    out_row = ((sequence.to(tl.int64) * heads + head) * queries + query) * (1 if ALONE else total)
    if not ALONE:
        out_row += begin + split
        tl.store(lse_ptr + out_row, lse, mask=inside)
    channel = tl.arange(0, V_WORDS * V_PER_WORD)
    v_static_ptr += kv_head * (HEAD_DIM if V_SHARING == "channel" else 1)
    v_static_low_ptr += kv_head * (HEAD_DIM if V_SHARING == "channel" else 1)
    V_NORMAL: tl.constexpr = V_SHARING == "group"
    values = ()
    for j in tl.static_range(V_PER_WORD):
        values += (sums[j] * words.factor(V_KIND, j, V_NORMAL),)  # type: ignore[assignment]
    value = united(values, ROWS, V_WORDS * V_PER_WORD, V_PER_WORD)
    if V_SHARING == "token_head":
        value = (value - words.offset(V_KIND) * rounded[:, None]) * v_unit[None, :]
        value = (value + lows[:, None]) * inverse[:, None]
    elif V_SHARING == "group":
        value *= inverse[:, None]
        if V_KIND == "nvfp4":
            value *= tl.load(v_static_ptr) * (1.0 / _NVFP4_LIFT)
    else:
        value = value * inverse[:, None] - (words.offset(V_KIND) * kept)[:, None]
        value *= _of_channels(v_static_ptr, channel, HEAD_DIM, V_SHARING)[None, :]
        if V_LOW:
            value += _of_channels(v_static_low_ptr, channel, HEAD_DIM, V_SHARING)[None, :] * kept[:, None]
        value = tl.where(empty[:, None], 0.0, value)
    store = inside[:, None] & (channel < HEAD_DIM)[None, :]
    tl.store(out_ptr + out_row[:, None] * HEAD_DIM + channel[None, :], value, mask=store)


@triton.jit  # type: ignore[untyped-decorator]
def _first_key(
    step: tl.tensor,
    low_end: tl.tensor,
    tile: tl.tensor,
    whole: tl.tensor,
    whole_stop: tl.tensor,
    KEYS: tl.constexpr,
    EDGES: tl.constexpr,
) -> tl.tensor:
    """Where a step begins: whole tiles in a row, or those before and after them."""
    if EDGES:
        index = tl.where(step < whole - tile, tile + step, whole_stop + step - (whole - tile))
    else:
        index = whole + step
    return low_end + index * KEYS


@triton.jit  # type: ignore[untyped-decorator]
def _of_channels(
    pointer: tl.tensor, channel: tl.tensor, HEAD_DIM: tl.constexpr, SHARING: tl.constexpr
) -> tl.tensor:
    """A static scale for each channel; that of the head for all; 1 where there is none."""
    if SHARING == "none":
        return tl.full(channel.shape, 1.0, tl.float32)
    elif SHARING == "channel":
        return tl.load(pointer + channel, mask=channel < HEAD_DIM, other=0.0)
    else:
        return tl.load(pointer + channel * 0)


@triton.jit  # type: ignore[untyped-decorator]
def _queries(
    q_ptrs: tl.tensor,
    q_scale_ptrs: tl.tensor,
    static_ptr: tl.tensor,
    static_low_ptr: tl.tensor,
    scaling: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    Q_ROWS: tl.constexpr,
    QUANTIZED_Q: tl.constexpr,
    TURNED: tl.constexpr,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    SHARING: tl.constexpr,
    LOW: tl.constexpr,
) -> tl.tensor:
    """Q for the split dots, with what leaves the loop.

    Returns:
        Tiles ``(ROWS, WORDS)``, one per code of a word, each scaled by powers of two; ``unit`` and
        ``shift``, with which a dot becomes a logit in base 2; the sum of each row, as a logit.
    """
    PER_WORD: tl.constexpr = words.per_word(KIND)
    TYPE: tl.constexpr = tl.bfloat16 if KIND == "bfloat16" else tl.float16
    CHANNELS: tl.constexpr = WORDS * PER_WORD
    channel = tl.arange(0, CHANNELS)
    real = (channel < HEAD_DIM)[None, :]
    if TURNED:
        q = _turned(q_ptrs, channel, HEAD_DIM, Q_ROWS, TURNED)
    else:
        q = tl.load(q_ptrs[:, None] + channel[None, :], mask=real, other=0.0).to(tl.float32)
    q_scale = tl.full((Q_ROWS,), 1.0, tl.float32)
    if QUANTIZED_Q:
        q_scale = tl.load(q_scale_ptrs).to(tl.float32)
        q = decode_e4m3(encode_e4m3(tl.div_rn(q, tl.broadcast_to(q_scale[:, None], (Q_ROWS, CHANNELS)))))
    low_dot = tl.zeros((Q_ROWS,), tl.float32)
    if LOW and SHARING != "token_head" and SHARING != "group":
        low = _of_channels(static_low_ptr, channel, HEAD_DIM, SHARING)
        low_dot += tl.sum(tl.where(real, q * low[None, :], 0.0), 1) * q_scale * (scaling * _LOG2_E)
    if SHARING == "channel":
        q *= _of_channels(static_ptr, channel, HEAD_DIM, SHARING)[None, :]
    # A power of two, so that dividing rounds nothing; float16 then holds 16-bit queries of any size.
    power = (tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(power == 0, 1.0, power)
    q = (q * (1.0 / power)[:, None]).to(TYPE)
    q_sum = tl.sum(q.to(tl.float32), 1)

    # The channels of a word whose codes come out smaller take larger queries, so that all dots have one unit.
    NORMAL: tl.constexpr = SHARING == "group"
    LEAST: tl.constexpr = words.least_factor(KIND, NORMAL)
    parts = parted(q, Q_ROWS, WORDS, PER_WORD)
    qs = ()
    for j in tl.static_range(PER_WORD):
        part = (parts[j] * (words.factor(KIND, j, NORMAL) / LEAST)).to(TYPE)
        qs += (_repeated(part, ROWS // Q_ROWS),)  # type: ignore[assignment]
    unit = q_scale * power * (scaling * _LOG2_E)
    shift = tl.zeros((Q_ROWS,), tl.float32)
    if SHARING == "group":
        if KIND == "nvfp4":
            unit *= tl.load(static_ptr) * (1.0 / _NVFP4_LIFT)
    elif SHARING == "token_head":
        # Leaves each dot before the key's scale meets it.
        shift = q_sum * (words.offset(KIND) / LEAST)
    else:
        if SHARING == "head":
            unit *= tl.load(static_ptr)
        shift = low_dot - q_sum * unit * words.offset(KIND)
    return (
        qs,
        _repeated(unit * LEAST, ROWS // Q_ROWS),
        _repeated(shift, ROWS // Q_ROWS),
        _repeated(q_sum * unit, ROWS // Q_ROWS),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _repeated(x: tl.tensor, TIMES: tl.constexpr) -> tl.tensor:
    """The rows ``TIMES`` times: a dot has more of them than a few queries fill."""
    if TIMES == 1:
        return x
    elif len(x.shape) == 1:
        return tl.reshape(tl.broadcast_to(x[None, :], (TIMES, x.shape[0])), (TIMES * x.shape[0],))
    else:
        repeated = tl.broadcast_to(x[None, :, :], (TIMES, x.shape[0], x.shape[1]))
        return tl.reshape(repeated, (TIMES * x.shape[0], x.shape[1]))


@triton.jit  # type: ignore[untyped-decorator]
def _turned(
    q_ptrs: tl.tensor, channel: tl.tensor, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, ORDER: tl.constexpr
) -> tl.tensor:
    """Channels of Q after the block-diagonal Hadamard transform, ``(ROWS, channels)``."""
    turned = tl.zeros((ROWS, channel.shape[0]), tl.float32)
    # 64 channels at a time: the signs of all would not fit into registers.
    for start in tl.static_range(0, HEAD_DIM, 64):
        source = start + tl.arange(0, 64)
        q = tl.load(q_ptrs[:, None] + source[None, :], mask=(source < HEAD_DIM)[None, :], other=0.0)
        q = q.to(tl.float32)
        common = source[:, None] & channel[None, :] & (ORDER - 1)
        common ^= common >> 4
        common ^= common >> 2
        common ^= common >> 1
        sign = 1.0 - 2.0 * (common & 1).to(tl.float32)
        sign = tl.where(source[:, None] // ORDER == channel[None, :] // ORDER, sign, 0.0)
        turned = tl.dot(q, sign, turned, input_precision="tf32x3")
    return tl.where((channel < HEAD_DIM)[None, :], turned * ORDER**-0.5, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _pages(
    table_ptr: tl.tensor,
    table_width: tl.tensor,
    first_key: tl.tensor,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    RING: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """Pages of ``KEYS`` keys, int64. Past the table's end its last one, which nobody reads.

    A tile starts at a multiple of its length, so that within it only constants are added.
    """
    lane = tl.arange(0, KEYS)
    number = first_key // PAGE + (lane * 0 if PAGE >= KEYS else lane // PAGE)
    number = number % table_width if RING else tl.minimum(number, table_width - 1)
    if PTX:
        # Hidden from Triton's pipeliner, which would halve the codes in flight for loads that wait for loads.
        page = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];",
            "=r,l",
            [(table_ptr + number).to(tl.int64)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        page = tl.load(table_ptr + number)
    return page.to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    page, first_key, qs, unit, shift, q_sum, top, weight, rounded, lows, v_unit, sums,
    k_ptr, v_ptr, k_scale_ptr, k_low_ptr, v_scale_ptr, v_low_ptr,
    k_page, v_page, k_scale_page, v_scale_page,
    first, stop, position, window, softcap,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAPPED: tl.constexpr, SAME_PLACES: tl.constexpr,
    IN_BASE_2: tl.constexpr, K_TOKEN: tl.constexpr, K_SCALE_TOKEN: tl.constexpr,
    V_TOKEN: tl.constexpr, V_SCALE_TOKEN: tl.constexpr,
    K_KIND: tl.constexpr, K_WORDS: tl.constexpr, K_SHARING: tl.constexpr, K_LOW: tl.constexpr,
    K_WORDS_PER_SCALE: tl.constexpr,
    V_KIND: tl.constexpr, V_WORDS: tl.constexpr, V_SHARING: tl.constexpr, V_LOW: tl.constexpr,
    V_WORDS_PER_SCALE: tl.constexpr, P_TYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over ``KEYS`` keys; ``MASKED`` where a row does not see all of them."""
    K_PER_WORD: tl.constexpr = words.per_word(K_KIND)
    V_PER_WORD: tl.constexpr = words.per_word(V_KIND)
    lane = tl.arange(0, KEYS)
    key = first_key + lane
    stored = (key >= first) & (key < stop)

    slot = (first_key % PAGE if PAGE >= KEYS else 0) + lane % PAGE
    k_word = tl.arange(0, K_WORDS)
    v_word = tl.arange(0, V_WORDS)
    k_place = (page * k_page)[:, None] + (slot * K_TOKEN)[:, None] + k_word[None, :]
    if SAME_PLACES and K_WORDS == V_WORDS:
        v_place = k_place
    else:
        v_place = (page * v_page)[:, None] + (slot * V_TOKEN)[:, None] + v_word[None, :]
    k_words = _load(k_ptr, k_place, stored, k_word, HEAD_DIM // K_PER_WORD, K_WORDS, MASKED)
    v_words = _load(v_ptr, v_place, stored, v_word, HEAD_DIM // V_PER_WORD, V_WORDS, MASKED)
    k_beside, k_low = _beside(
        k_scale_ptr, k_low_ptr, page * k_scale_page + slot * K_SCALE_TOKEN, stored, HEAD_DIM, KEYS,
        K_KIND, K_WORDS, K_SHARING, K_LOW, K_WORDS_PER_SCALE, MASKED,
    )  # fmt: skip
    v_beside, v_low = _beside(
        v_scale_ptr, v_low_ptr, page * v_scale_page + slot * V_SCALE_TOKEN, stored, HEAD_DIM, KEYS,
        V_KIND, V_WORDS, V_SHARING, V_LOW, V_WORDS_PER_SCALE, MASKED,
    )  # fmt: skip

    logits = tl.zeros((ROWS, KEYS), tl.float32)
    for j in tl.static_range(K_PER_WORD):
        k = _operand(k_words, k_beside, k_low, j, K_KIND, K_SHARING, K_LOW, PTX)
        logits = tl.dot(qs[j], tl.trans(k), logits)
    if K_SHARING == "token_head":
        logits = (logits - shift[:, None]) * (k_beside[None, :] * unit[:, None])
        if K_LOW:
            logits += k_low[None, :] * q_sum[:, None]
    elif IN_BASE_2:
        logits = logits * unit[:, None] + shift[:, None]
    if SOFTCAPPED:
        bound = softcap * _LOG2_E
        logits = bound * _tanh(logits / bound)
    if MASKED:
        seen = stored[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            seen &= key[None, :] > position[:, None] - window
        logits = tl.where(seen, logits, _LOWEST)

    # Sums are scaled anew only when a maximum has moved far: float16 holds probabilities of some hundreds.
    above = tl.maximum(top, tl.max(logits, 1))
    rise = above - top if IN_BASE_2 else (above - top) * unit
    far = tl.max(rise, 0) > _HIGHEST
    unit_above = v_unit
    if V_SHARING == "token_head":
        # In units of the largest scale so far, float16 holds probabilities times scales of any size.
        unit_above = tl.maximum(v_unit, _power_above(tl.max(v_beside, 0)))
        far |= tl.max(unit_above - v_unit, 0) > 0
    if far:
        fade = tl.exp2(-rise)
        weight *= fade
        lows *= fade
        fade *= tl.broadcast_to(v_unit / unit_above, (ROWS,))
        rounded *= fade
        faded = ()
        for j in tl.static_range(V_PER_WORD):
            faded += (sums[j] * fade[:, None],)  # type: ignore[assignment]
        sums = faded
        top = above
        v_unit = unit_above

    if IN_BASE_2:
        p = tl.exp2(logits - top[:, None])
    else:
        p = tl.exp2(logits * unit[:, None] - (top * unit)[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    if V_SHARING == "token_head":
        weight += tl.sum(p, 1)
        if V_LOW:
            lows += tl.sum(p * v_low[None, :], 1)
        p *= (v_beside / v_unit)[None, :]
    p = p.to(P_TYPE)
    # What multiplies V is what is summed: offsets of codes then cancel exactly.
    rounded += tl.sum(p.to(tl.float32), 1)
    new_sums = ()
    for j in tl.static_range(V_PER_WORD):
        v = _operand(v_words, v_beside, v_low, j, V_KIND, V_SHARING, V_LOW, PTX)
        new_sums += (tl.dot(p, v, sums[j]),)  # type: ignore[assignment]
    return top, weight, rounded, lows, v_unit, new_sums


@triton.jit  # type: ignore[untyped-decorator]
def _load(
    pointer: tl.tensor,
    place: tl.tensor,
    stored: tl.tensor,
    word: tl.tensor,
    ROW: tl.constexpr,
    WORDS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Words of a tile, ``(KEYS, WORDS)``; 0 past a row's end and, if ``MASKED``, where nothing is stored."""
    if MASKED:
        return tl.load(pointer + place, mask=stored[:, None] & (word < ROW)[None, :], other=0)
    elif ROW == WORDS:
        return tl.load(pointer + place)
    else:
        return tl.load(pointer + place, mask=(word < ROW)[None, :], other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _beside(
    scale_ptr: tl.tensor,
    low_ptr: tl.tensor,
    place: tl.tensor,
    stored: tl.tensor,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    SHARING: tl.constexpr,
    LOW: tl.constexpr,
    WORDS_PER_SCALE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Scale and offset that lie with the tokens: ``(KEYS,)``, or ``(KEYS, WORDS)`` of groups in float16."""
    scale = 0.0
    low = 0.0
    if SHARING == "token_head":
        scale = tl.load(scale_ptr + place, mask=stored, other=0.0) if MASKED else tl.load(scale_ptr + place)
        if LOW:
            low = tl.load(low_ptr + place, mask=stored, other=0.0) if MASKED else tl.load(low_ptr + place)
    elif SHARING == "group":
        GROUPS: tl.constexpr = WORDS // WORDS_PER_SCALE
        REAL: tl.constexpr = HEAD_DIM // (words.per_word(KIND) * WORDS_PER_SCALE)
        group = tl.arange(0, GROUPS)
        mask = (group < REAL)[None, :]
        if MASKED:
            mask &= stored[:, None]
        scale = tl.load(scale_ptr + place[:, None] + group[None, :], mask=mask, other=0)
        if KIND == "nvfp4":
            bits = scale.to(tl.uint16) << 7  # E4M3 without a sign is a float16 of 2 ** -8 of its value
            scale = bits.to(tl.float16, bitcast=True) * (256.0 * _NVFP4_LIFT)
            scale = scale.to(tl.float16)
        scale = spread(scale, KEYS, GROUPS, WORDS_PER_SCALE)
        if LOW:
            low = tl.load(low_ptr + place[:, None] + group[None, :], mask=mask, other=0)
            low = spread(low, KEYS, GROUPS, WORDS_PER_SCALE)
    return scale, low


@triton.jit  # type: ignore[untyped-decorator]
def _operand(
    word: tl.tensor,
    scale: tl.tensor,
    low: tl.tensor,
    J: tl.constexpr,
    KIND: tl.constexpr,
    SHARING: tl.constexpr,
    LOW: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """The ``J``-th codes as the dot takes them: values where groups have scales, else with their offset."""
    if SHARING == "group":
        x = decode(word, J, KIND, True, PTX)
        if words.offset(KIND, J, True) != 0.0:
            x = (x - words.offset(KIND, J, True)).to(tl.float16)
        x = x * scale
        if LOW:
            x += low
        return x
    else:
        return decode(word, J, KIND, False, PTX)


@triton.jit  # type: ignore[untyped-decorator]
def _power_above(x: tl.tensor) -> tl.tensor:
    """The power of two above ``x``."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 2.0


@triton.jit  # type: ignore[untyped-decorator]
def _tanh(x: tl.tensor) -> tl.tensor:
    """With a series where ``1 - decay`` would cancel: float64, as validation has it, would be slow here."""
    size = tl.abs(x)
    decay = tl.exp2(-2.8853900817779268 * size)
    square = x * x
    series = x * (1.0 - square * (0.3333333333 - square * (0.1333333333 - square * 0.0539682540)))
    bent = (1.0 - decay) / (1.0 + decay)
    return tl.where(size < 0.125, series, tl.where(x < 0, -bent, bent))


@triton.jit(do_not_specialize=["total", "heads", "queries"])  # type: ignore[untyped-decorator]
def merge(
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    out_ptr: tl.tensor,
    total: tl.tensor,
    heads: tl.tensor,
    queries: tl.tensor,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """``Σ 2^lse out / Σ 2^lse`` over the splits of a row, a sink among the summands below."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    split = tl.arange(0, SPLITS)
    top = tl.full((1,), _LOWEST, tl.float32)
    weight = tl.zeros((1,), tl.float32)
    if SINKS:
        top = tl.load(sink_ptr + row // queries % heads + tl.arange(0, 1)) * _LOG2_E
        weight += 1.0
    value = tl.zeros((CHANNELS,), tl.float32)
    for start in tl.range(0, total, SPLITS):
        inside = start + split < total
        lse = tl.load(lse_ptr + row * total + start + split, mask=inside, other=float("-inf"))
        above = tl.maximum(top, tl.max(lse, 0))
        part = tl.exp2(lse - above)
        fade = tl.exp2(top - above)
        place = (row * total + start + split)[:, None] * HEAD_DIM + channel[None, :]
        outs = tl.load(partial_ptr + place, mask=inside[:, None] & (channel < HEAD_DIM)[None, :], other=0.0)
        value = value * fade + tl.sum(outs * part[:, None], 0)
        weight = weight * fade + tl.sum(part, 0)
        top = above
    value /= tl.where(weight == 0, 1.0, weight)
    tl.store(out_ptr + row * HEAD_DIM + channel, value, mask=channel < HEAD_DIM)
