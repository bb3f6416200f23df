# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""The kernels. Everything is 64-bit words, so dtypes show in the look for numbers that are not finite alone.

Both kernels do one of three things: GATHER from the caches into staging, SCATTER back, or CHECK what is in staging.
GATHER and CHECK also look at every word, while it is in a register:

    sums    += Σ x(w) · key · key of its tile, the sum of `statestore.checksum`; a sum a unit
    states:  flags |= 1 where a recurrent state has a bit that is not zero, 2 where one of its numbers is not finite,
             4 where one of the convolution's is not; a flag a head and layer
    rows:    worst[0] = least (row · layers + layer) whose row is all zeros, worst[1] the same where a number is not
             finite; worst is as large as an int32 can be where there is none

Sums and flags are added atomically, in any order: the results are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

GATHER, SCATTER, CHECK = 0, 1, 2
"""MODE of a kernel; their code has the numbers, because it may not refer to Python's variables."""


@triton.jit
def _part(words, keys, first, near, far, at, mask):
    """What words add to their unit's sum: `at` (below 1,024) words after word `first` of a tile.

    `near` and `far` are the keys of that tile and the next.

    Masked words are zero and add nothing.

    `keys` begins with the words' keys, over and over for AHEAD words, so that what follows one another in state does so
    there too and is loaded like it; then come the tiles' keys.
    """
    w = words.to(tl.uint64, bitcast=True)
    key = tl.load(keys + first + at, mask=mask, other=0)
    tile = tl.where(first + at < 1024, near, far)
    return (w ^ (w >> 33)).to(tl.int64, bitcast=True) * (key * tile)


@triton.jit
def _bad(words, exponents, carries, signs):
    """Not zero where a number of a word is not finite; one addition looks at all of them.

    What is left of a number without its sign is zero where it is not finite; adding all ones sets the sign elsewhere.
    Numbers lie alike in both halves of a word, which are looked at together.
    """
    finite = (~words & exponents) + carries
    return ((~finite | (~finite >> 32)) & signs).to(tl.uint32)


# Nothing is specialised by sizes, or by where small tables happen to lie: kernels are compiled when a worker starts,
# never under a request.
@triton.jit(
    do_not_specialize=["first", "heads", "begin", "layers", "columns"],
    do_not_specialize_on_alignment=["flags", "sums", "pages"],
)
def states_kernel(
    cache,  # int64*: what the offsets count from
    pages,  # int64 [layers, 2]: words from `cache` to the block's convolution and recurrent state
    staging,  # int64 [heads, layers, WORDS + CONV]
    keys,  # int64: `_part` has them
    sums,  # int64 [heads]
    flags,  # int32 [heads, layers]
    first,  # head of the rank that staging begins with
    heads,  # of the rank
    begin,  # of a head's layers the one that staging begins with
    layers,  # of staging
    columns,  # of the convolution state, speculative ones included
    exponents,
    carries,
    signs,  # of the recurrent state's numbers, as `_not_finite` wants them
    conv_exponents,
    conv_carries,
    conv_signs,
    WORDS: tl.constexpr,  # of one head's recurrent state
    HISTORY: tl.constexpr,  # columns that are state
    KEY: tl.constexpr,
    VALUE: tl.constexpr,  # words of one column of one head in the q and k parts, and in v
    PER_WORD: tl.constexpr,  # the convolution's numbers in one word
    DS: tl.constexpr,
    EVEN: tl.constexpr,  # every offset is a multiple of 16 bytes
    MODE: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CONV_BLOCK: tl.constexpr,
):
    """Grid: heads of staging x layers x (blocks of recurrent state + 1 for the convolution)."""
    CONV: tl.constexpr = HISTORY * (2 * KEY + VALUE)
    BLOCKS: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    block = program % (BLOCKS + 1)
    unit = program // (BLOCKS + 1)
    layer = unit % layers
    head = unit // layers
    target = unit.to(tl.int64) * (WORDS + CONV)
    if EVEN:
        target = tl.multiple_of(target, 2)
    place = (begin + layer) * (WORDS + CONV)
    if block < BLOCKS:
        page = tl.load(pages + layer * 2 + 1) + (first + head).to(tl.int64) * WORDS
        if EVEN:
            page = tl.multiple_of(page, 2)
        at = block * BLOCK + tl.arange(0, BLOCK)
        mask = at < WORDS
        if MODE == 0:
            words = tl.load(cache + page + at, mask=mask, other=0)
            tl.store(staging + target + at, words, mask=mask)
        else:
            words = tl.load(staging + target + at, mask=mask, other=0)
            if MODE == 1:
                tl.store(cache + page + at, words, mask=mask)
        if MODE != 1:
            # Real state shows itself in its first words; only what does not is read to its end.
            found = (
                tl.load(staging + target + block * BLOCK)
                if MODE == 2
                else tl.load(cache + page + block * BLOCK)
            )
            if found == 0:
                found = tl.max((words != 0).to(tl.int32), axis=0).to(tl.int64)
            bad = tl.max(_bad(words, exponents, carries, signs), axis=0)
            tl.atomic_or(flags + unit, tl.where(found != 0, 1, 0) | tl.where(bad != 0, 2, 0), sem="relaxed")
            start = place + block * BLOCK
            word_key = start & 1023
            if EVEN:
                word_key = tl.multiple_of(word_key, 2)
            tile = keys + AHEAD + (start >> 10)
            near, far = tl.load(tile), tl.load(tile + 1)
            parts = _part(words, keys, word_key, near, far, tl.arange(0, BLOCK), mask)
            tl.atomic_add(sums + head, tl.sum(parts, axis=0), sem="relaxed")
    else:
        conv_page = tl.load(pages + layer * 2)
        conv_at = tl.arange(0, CONV_BLOCK)
        conv_mask = conv_at < CONV
        # Words of the three parts, one after the other in staging: [HISTORY, KEY], [HISTORY, KEY], [HISTORY, VALUE].
        part = tl.minimum(conv_at // (HISTORY * KEY), 2)
        inside = conv_at - part * (HISTORY * KEY)
        width = tl.where(part == 2, VALUE, KEY)
        column = inside // width
        word = part * heads * KEY + (first + head) * width + inside % width
        if DS:
            # Numbers of one column are `columns` numbers apart.
            if PER_WORD == 4:
                numbers = (cache + conv_page).to(tl.pointer_type(tl.int16), bitcast=True)
            else:
                numbers = (cache + conv_page).to(tl.pointer_type(tl.int32), bitcast=True)
            number = numbers + word * PER_WORD * columns + column
            if MODE == 0:
                conv_words = tl.zeros([CONV_BLOCK], dtype=tl.int64)
                for n in tl.static_range(PER_WORD):
                    one = tl.load(number + n * columns, mask=conv_mask, other=0).to(tl.int64)
                    low = one & (0xFFFF if PER_WORD == 4 else 0xFFFFFFFF)
                    conv_words = conv_words | (low << (n * (64 // PER_WORD)))
                tl.store(staging + target + WORDS + conv_at, conv_words, mask=conv_mask)
            else:
                conv_words = tl.load(staging + target + WORDS + conv_at, mask=conv_mask, other=0)
                if MODE == 1:
                    for n in tl.static_range(PER_WORD):
                        one = conv_words >> (n * (64 // PER_WORD))
                        tl.store(number + n * columns, one.to(numbers.dtype.element_ty), mask=conv_mask)
        else:
            total = heads * (2 * KEY + VALUE)
            source = cache + conv_page + column * total + word
            if MODE == 0:
                conv_words = tl.load(source, mask=conv_mask, other=0)
                tl.store(staging + target + WORDS + conv_at, conv_words, mask=conv_mask)
            else:
                conv_words = tl.load(staging + target + WORDS + conv_at, mask=conv_mask, other=0)
                if MODE == 1:
                    tl.store(source, conv_words, mask=conv_mask)
        if MODE != 1:
            conv_bad = tl.max(_bad(conv_words, conv_exponents, conv_carries, conv_signs), axis=0)
            if conv_bad != 0:
                tl.atomic_or(flags + unit, 4, sem="relaxed")
            after = place + WORDS
            conv_tile = keys + AHEAD + (after >> 10)
            conv_near, conv_far = tl.load(conv_tile), tl.load(conv_tile + 1)
            conv_parts = _part(conv_words, keys, after & 1023, conv_near, conv_far, conv_at, conv_mask)
            tl.atomic_add(sums + head, tl.sum(conv_parts, axis=0), sem="relaxed")


@triton.jit(
    do_not_specialize=["rows", "layers"],
    do_not_specialize_on_alignment=["tables", "units", "sums", "worst", "caches"],
)
def rows_kernel(
    cache,  # int64*: what the offsets count from
    caches,  # int64 [layers, 4]: words to the layer's first row, from block to block, from row to row; its table
    tables,  # int32 [tables, 2, rows]: block and row in it
    units,  # int32 [2, rows]: the row's unit, and its number in that unit
    staging,  # int64 [rows, layers, WORDS]
    keys,  # int64: `_part` has them
    sums,  # int64 [units]
    worst,  # int32 [2]
    rows,
    layers,
    exponents,
    carries,
    signs,
    WORDS: tl.constexpr,  # of one row of one layer
    LOW: tl.constexpr,
    HIGH: tl.constexpr,  # powers of two: columns [0, LOW) and [LOW, WORDS)
    EVEN: tl.constexpr,
    MODE: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,  # of one program
):
    """Grid: cdiv(rows, ROWS) x layers; the layers of one row are neighbours in staging, and so are their programs."""
    program = tl.program_id(0)
    layer = program % layers
    row = (program // layers) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    target = (row.to(tl.int64) * layers + layer) * WORDS
    low = tl.arange(0, LOW)
    high = LOW + tl.arange(0, HIGH)
    low_mask = here[:, None] & (low < WORDS)[None, :]
    high_mask = here[:, None] & (high < WORDS)[None, :]
    if MODE != 2:
        start = tl.load(caches + layer * 4)
        of_block = tl.load(caches + layer * 4 + 1)
        of_row = tl.load(caches + layer * 4 + 2)
        table = tables + tl.load(caches + layer * 4 + 3) * 2 * rows
        block = tl.load(table + row, mask=here, other=0).to(tl.int64)
        inside = tl.load(table + rows + row, mask=here, other=0).to(tl.int64)
        page = start + block * of_block + inside * of_row
        if EVEN:
            page = tl.multiple_of(page, 2)
    if EVEN:
        target = tl.multiple_of(target, 2)
    staged = staging + target[:, None]
    if MODE == 0:
        lows = tl.load(cache + page[:, None] + low[None, :], mask=low_mask, other=0)
        highs = tl.load(cache + page[:, None] + high[None, :], mask=high_mask, other=0)
        tl.store(staged + low[None, :], lows, mask=low_mask)
        tl.store(staged + high[None, :], highs, mask=high_mask)
    else:
        lows = tl.load(staged + low[None, :], mask=low_mask, other=0)
        highs = tl.load(staged + high[None, :], mask=high_mask, other=0)
        if MODE == 1:
            tl.store(cache + page[:, None] + low[None, :], lows, mask=low_mask)
            tl.store(cache + page[:, None] + high[None, :], highs, mask=high_mask)
    if MODE != 1:
        none: tl.constexpr = 0x7FFFFFFF
        number = row * layers + layer
        # What is rare is looked for row by row only where it is there: sums along rows cost more than the words.
        if MODE == 0:
            lead = tl.load(cache + page, mask=here, other=1)
        else:
            lead = tl.load(staging + target, mask=here, other=1)
        if tl.max((lead == 0).to(tl.int32), axis=0) != 0:
            found = tl.max((lows != 0).to(tl.int32), axis=1) | tl.max((highs != 0).to(tl.int32), axis=1)
            null = tl.min(tl.where(here & (found == 0), number, none), axis=0)
            tl.atomic_min(worst, null, mask=null != none, sem="relaxed")
        low_bad = _bad(lows, exponents, carries, signs)
        high_bad = _bad(highs, exponents, carries, signs)
        if (tl.max(low_bad) | tl.max(high_bad)) != 0:
            bad = tl.max(low_bad, axis=1) | tl.max(high_bad, axis=1)
            wrong = tl.min(tl.where(here & (bad != 0), number, none), axis=0)
            tl.atomic_min(worst + 1, wrong, mask=wrong != none, sem="relaxed")
        unit = tl.load(units + row, mask=here, other=0)
        place = (tl.load(units + rows + row, mask=here, other=0) * layers + layer) * WORDS
        first = place & 1023
        if EVEN:
            first = tl.multiple_of(first, 2)
        tile = keys + AHEAD + (place >> 10)
        near, far = tl.load(tile)[:, None], tl.load(tile + 1)[:, None]
        low_parts = _part(lows, keys, first[:, None], near, far, low[None, :], low_mask)
        high_parts = _part(highs, keys, first[:, None], near, far, high[None, :], high_mask)
        one = tl.min(tl.where(here, unit, none), axis=0)
        if one == tl.max(unit, axis=0):
            tl.atomic_add(sums + one, tl.sum(low_parts) + tl.sum(high_parts), sem="relaxed")
        else:
            parts = tl.sum(low_parts, axis=1) + tl.sum(high_parts, axis=1)
            tl.atomic_add(sums + unit, parts, mask=here, sem="relaxed")
