"""Observers for llm-compressor: ranges of kvcal in its recipes. Needs the extra ``llm-compressor``.

Importing this module registers them by name; after that a recipe can ask for one::

    import kvcal.observers
    QuantizationModifier(kv_cache_scheme={..., "observer": "kvcal_mse"})

Each keeps a histogram of all that it is shown (:mod:`kvcal.histogram`), so that neither the order of the
samples nor the size of a batch matters, and leaves the range to :mod:`kvcal.objectives`. They are for K, V
and Q. llm-compressor shows padding to its observers as if it were tokens: give it samples without.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_range
from llmcompressor.observers import Observer
from torch.distributed import ReduceOp

from kvcal import formats, histogram, objectives
from kvcal.errors import StatisticsError, UsageError
from kvcal.formats import KVFormat
from kvcal.granularity import PerHead
from kvcal.recipe import Objective
from kvcal.statistics import SideStatistics


class _HistogramObserver(Observer):  # type: ignore[misc]  # Observer is Any to mypy
    """A range from all values seen; ``objective`` says which, as in :func:`kvcal.objectives.ranges`.

    Attributes:
        counts: ``(scales, 1, bins)`` int64.
        lowest: exact minimum, ``scale_shape`` float32.
        highest: exact maximum, likewise.
    """

    objective: ClassVar[Objective]
    options: ClassVar[frozenset[str]] = frozenset()

    counts: torch.Tensor
    lowest: torch.Tensor
    highest: torch.Tensor

    # What is gathered, and how that of several processes becomes that of all.
    _stats_attrs = ["counts", "lowest", "highest"]  # noqa: RUF012  (llm-compressor's interface)
    _act_sync_dict = {"counts": ReduceOp.SUM, "lowest": ReduceOp.MIN, "highest": ReduceOp.MAX}  # noqa: RUF012

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any):
        super().__init__(base_name, args, **observer_kwargs)
        if base_name not in ("q", "k", "v"):
            raise UsageError(f"kvcal's observers are for K, V and Q in attention, not for {base_name!r}")
        unknown = self.args.observer_kwargs.keys() - self.options
        if unknown:
            raise UsageError(f"observer kvcal_{self.objective} has no option {', '.join(sorted(unknown))}")
        self.format = _format(args)
        self.percentile = float(self.args.observer_kwargs.get("percentile", 99.99))
        if not 50 < self.percentile <= 100:
            raise UsageError(f"percentile is {self.percentile:g}; it must be above 50 and at most 100")

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        """Take in ``(observations, *scale_shape, group)``."""
        low, high = observed.amin((0, -1)).float(), observed.amax((0, -1)).float()
        if self.has_statistics:
            self.lowest, self.highest = torch.minimum(self.lowest, low), torch.maximum(self.highest, high)
        else:
            self.lowest, self.highest = low, high
            self.counts = torch.zeros(
                low.numel(), 1, histogram.BINS, dtype=torch.int64, device=observed.device
            )
        rows = observed.reshape(len(observed), low.numel(), -1).transpose(0, 1)
        histogram.count(rows.unsqueeze(0), None, self.counts)

    def get_qparams(self) -> Any:
        """The scale of the range, as compressed-tensors makes one from a minimum and a maximum.

        Raises:
            StatisticsError: NaN or infinity was seen.
        """
        low, high = self._range()
        if self.args.symmetric:
            # compressed-tensors divides by half of all steps, 127.5 of INT8, and kvcal by the largest code.
            lowest, highest = calculate_range(self.args, high.device)
            high = high * float(highest - lowest) / (2 * self.format.max)
            low = -high
        self.min_vals, self.max_vals = low, high
        return super().get_qparams()

    def _range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lower and upper end, ``scale_shape`` float32."""
        if not bool((self.lowest.isfinite() & self.highest.isfinite()).all()):
            raise StatisticsError(f"{self.base_name.upper()} holds NaN or infinity; look for such a weight")
        shape, device = self.lowest.shape, self.lowest.device
        # One channel for every scale: objectives pools channels, and here that is done already.
        low, high = (end.reshape(-1, 1).cpu() for end in (self.lowest, self.highest))
        unused = torch.zeros(len(low), dtype=torch.int64)
        seen = SideStatistics(
            tokens=self.counts[0].sum().cpu(),
            minimum=low,
            maximum=high,
            total=torch.zeros_like(low, dtype=torch.float64),
            squares=torch.zeros_like(low, dtype=torch.float64),
            saturated=unused,
            zeroed=unused,
            histogram=self.counts.cpu(),
        )
        ends = objectives.ranges(
            seen,
            PerHead(),
            self.format,
            self.objective,
            symmetric=self.args.symmetric,
            percentile=self.percentile,
        )
        low, high = (end.reshape(shape).to(device) for end in ends)
        return low, high


@Observer.register("kvcal_percentile")
class PercentileObserver(_HistogramObserver):
    """All but the largest magnitudes; ``observer_kwargs: {percentile: 99.99}`` says how many."""

    objective = "percentile"
    options = frozenset({"percentile"})


@Observer.register("kvcal_mse")
class SquaredErrorObserver(_HistogramObserver):
    """The range whose squared rounding error is smallest."""

    objective = "mse"


def _format(args: QuantizationArgs) -> KVFormat:
    """What compressed-tensors rounds elements to."""
    if args.type == "int":
        return formats.get(f"int{args.num_bits}")
    return {8: formats.FP8_E4M3, 4: formats.NVFP4}[args.num_bits]
