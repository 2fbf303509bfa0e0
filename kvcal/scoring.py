"""Scores of answers, and what can be concluded from those of a few prompts over two caches."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
_RESAMPLES = 5000


def recall(answer: str, wanted: Sequence[str]) -> float:
    """Share of ``wanted`` that stands in the answer, as whole words in any case.

    >>> recall("It is 123456, I think.", ["123456", "12345"])
    0.5
    """
    found = [re.search(rf"(?<!\w){re.escape(each)}(?!\w)", answer, re.IGNORECASE) for each in wanted]
    return sum(each is not None for each in found) / len(wanted)


def ratio(answer: str, ideal: str) -> float:
    """Sequence-match ratio: twice the matching characters by all characters (difflib), as MRCR scores.

    >>> ratio("abcd", "abxd"), ratio("same", " same ")
    (0.75, 1.0)
    """
    return difflib.SequenceMatcher(None, answer.strip(), ideal.strip(), autojunk=False).ratio()


def bounds(scores: Sequence[float]) -> tuple[float, float]:
    """Confidence interval of the mean of scores between 0 and 1.

    Clopper and Pearson's for a share of right answers. Scores between 0 and 1 vary no more than right and
    wrong of the same mean, so that it is wide enough for them too.
    """
    n, total, tail = len(scores), float(sum(scores)), (1 - CONFIDENCE) / 2
    low = 0.0 if total <= 0 else float(stats.beta.ppf(tail, total, n - total + 1))
    high = 1.0 if total >= n else float(stats.beta.ppf(1 - tail, total + 1, n - total))
    return low, high


def difference_bounds(
    reference: Sequence[float], quantized: Sequence[float], seed: int
) -> tuple[float, float]:
    """Confidence interval of the mean difference of pairs, quantized less reference: paired bootstrap.

    Resampling pairs that are all alike would claim certainty. Then the interval is that of a change which may
    hit a share of prompts and has not been seen in any of these.
    """
    differences = np.asarray(quantized, dtype=float) - np.asarray(reference, dtype=float)
    if np.ptp(differences) == 0:
        unseen, same = bounds([0.0] * len(differences))[1], float(differences[0])
        room = mean(reference)  # no score is below 0 or above 1
        return max(same - unseen, -room), min(same + unseen, 1 - room)
    found = stats.bootstrap(
        (differences,),
        np.mean,
        n_resamples=_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)


def ratio_bounds(
    sums: Sequence[float], counts: Sequence[int], seed: int
) -> tuple[float, float] | tuple[None, None]:
    """Confidence interval of ``sum(sums) / sum(counts)``: bootstrap over its parts; none of a single one."""
    if len(sums) < 2:
        return None, None
    found = stats.bootstrap(
        (np.asarray(sums), np.asarray(counts, dtype=float)),
        lambda a, b, axis: a.sum(axis) / b.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)


def p_value(reference: Sequence[float], quantized: Sequence[float], seed: int) -> float:
    """Probability of a difference as large as this, or larger, if the cache made none.

    Of right and wrong: McNemar's exact test, over the prompts that changed. Of other scores: the permutation
    test of pairs, whose signs are flipped.
    """
    pairs = list(zip(reference, quantized, strict=True))
    if all(score in (0.0, 1.0) for pair in pairs for score in pair):
        lost, won = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
        return float(stats.binomtest(lost, lost + won, 0.5).pvalue) if lost + won else 1.0
    changed = np.array([b - a for a, b in pairs if a != b])
    if not len(changed):
        return 1.0
    found = stats.permutation_test(
        (changed,),
        np.mean,
        permutation_type="samples",
        n_resamples=2 * _RESAMPLES,
        rng=np.random.default_rng(seed),
    )
    return float(found.pvalue)


def area(lengths: Sequence[int], means: Sequence[float]) -> float:
    """Area under mean score over length, by trapezoids, as a share of a perfect score's.

    >>> area([1000, 2000, 4000], [1.0, 1.0, 0.0])
    0.6666666666666666
    """
    if len(lengths) == 1:
        return float(means[0])
    return float(np.trapezoid(means, lengths)) / (lengths[-1] - lengths[0])


def mean(scores: Sequence[float]) -> float:
    """Exactly rounded, whatever the order."""
    return math.fsum(scores) / len(scores)
