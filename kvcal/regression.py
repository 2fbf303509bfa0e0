"""Whether a new calibration is worse than the last, from the records of both. Loads no tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcal import records as recorded
from kvcal.errors import UsageError
from kvcal.gates import GateResult
from kvcal.records import Records

_FIDELITIES = {"fidelity": "K and V", "fidelity_fp8_attention": "K, V and Q"}
_SIDES = ("k", "v", "q")


@dataclass(frozen=True)
class Margin:
    """How much worse a value may get: an amount, or a share of the old value."""

    amount: float
    relative: bool

    def beyond(self, old: float, *, at_least: bool) -> float:
        """The worst value that is allowed."""
        allowed = self.amount * abs(old) if self.relative else self.amount
        return old - allowed if at_least else old + allowed


def margin(text: str, option: str) -> Margin:
    """Read one.

    >>> margin("10%", "--max-kl-increase").beyond(0.02, at_least=False)
    0.022
    >>> margin("0.001", "--max-kl-increase").beyond(0.02, at_least=False)
    0.021

    Raises:
        UsageError: it is neither a number nor a percentage.
    """
    stripped = text.strip()
    try:
        number = float(stripped.removesuffix("%"))
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(f"{option} must be an amount like 0.001 or a share like 10%, found {text!r}")
    relative = stripped.endswith("%")
    return Margin(number / 100 if relative else number, relative)


@dataclass(frozen=True)
class Margins:
    """One per measure; perplexity is taken relative to that over the 16-bit cache."""

    kl: Margin
    perplexity: Margin
    top1: Margin


@dataclass(frozen=True)
class Change:
    """Something that is not as it was."""

    what: str
    old: str
    new: str


@dataclass(frozen=True)
class ScaleChange:
    """The scales of one side of one layer, or its absolute maximum where no scales were written.

    ``factor`` is new over old, of the head that changed most.
    """

    layer: int
    side: str
    old: float
    new: float
    factor: float


@dataclass(frozen=True)
class Comparison:
    """Two calibrations side by side.

    Attributes:
        incomparable: why they should not be compared.
        gates: what the new one may not exceed, with the old one's values.
        changes: settings, versions, text and outcomes that differ.
        scales: every side of every layer, what changed most first.
    """

    old: Records
    new: Records
    incomparable: tuple[str, ...]
    gates: tuple[tuple[float, GateResult], ...]
    newly_failed: bool
    changes: tuple[Change, ...]
    scales: tuple[ScaleChange, ...]

    @property
    def passed(self) -> bool:
        return not self.newly_failed and all(gate.passed for _, gate in self.gates)


def read(folder: Path) -> Records:
    """The records of a checkpoint, or of a run that failed.

    Raises:
        UsageError: there is no such folder.
        ModelError: it holds no records, or broken ones.
    """
    found = recorded.read(folder)
    try:
        _touch(found)
    except recorded.BROKEN as error:
        raise recorded.not_whole(folder, error) from None
    return found


def _touch(records: Records) -> None:
    """Every field that a comparison reads, so that a broken record is found where its folder is known."""
    dict(_settings(records))
    _refusals(records, records)
    _scale_changes(records, records)
    list(_gates(records, records, Margins(*[Margin(0, relative=False)] * 3)))


def compare(old: Records, new: Records, margins: Margins) -> Comparison:
    """Compare them, whether they are comparable or not; ``incomparable`` says why they are not."""
    return Comparison(
        old=old,
        new=new,
        incomparable=tuple(_refusals(old, new)),
        gates=tuple(_gates(old, new, margins)),
        newly_failed=old.report["verdict"] == "pass" and new.report["verdict"] != "pass",
        changes=tuple(_changes(old, new)),
        scales=tuple(_scale_changes(old, new)),
    )


def _refusals(old: Records, new: Records) -> list[str]:
    reasons = []
    if old.model != new.model:
        reasons.append(f"{old.folder} is about {old.model}, {new.folder} about {new.model}")
    before, after = old.manifest["architecture"], new.manifest["architecture"]
    geometry = sorted(key for key in before.keys() & after.keys() - {"quant_method"})
    reasons += [
        f"the model's {key} was {before[key]!r} and is {after[key]!r}"
        for key in geometry
        if before[key] != after[key]
    ]
    texts = [records.manifest["evaluation"] for records in (old, new)]
    if texts[0]["sha256"] != texts[1]["sha256"]:
        reasons.append(
            f"the held-out text differs: {texts[0]['tokens']:,} tokens of {texts[0]['dataset']}, then"
            f" {texts[1]['tokens']:,} of {texts[1]['dataset']}"
        )
    return reasons


# Name -> how it is read from a fidelity, and whether more is better.
_MEASURES: dict[str, tuple[Callable[[Mapping[str, float]], float], bool]] = {
    "kl": (lambda fidelity: fidelity["kl_mean"], False),
    "perplexity": (lambda fidelity: fidelity["perplexity"] / fidelity["perplexity_reference"], False),
    "top1": (lambda fidelity: fidelity["top1_agreement"], True),
}
_TITLES = {"kl": "KL mean", "perplexity": "perplexity over 16-bit", "top1": "top-1 agreement"}


def _gates(old: Records, new: Records, margins: Margins) -> Iterator[tuple[float, GateResult]]:
    """Old value and gate of each measure that both have."""
    for key, label in _FIDELITIES.items():
        before, after = old.report[key], new.report[key]
        if before is None or after is None:
            continue
        for name, (measure, at_least) in _MEASURES.items():
            was, allowed = measure(before), getattr(margins, name)
            limit = allowed.beyond(was, at_least=at_least)
            yield was, GateResult(f"{_TITLES[name]}, {label}", limit, measure(after), at_least)


def _changes(old: Records, new: Records) -> Iterator[Change]:
    before, after = dict(_settings(old)), dict(_settings(new))
    for what in [*before, *(key for key in after if key not in before)]:
        values = [_text(settings.get(what)) for settings in (before, after)]
        if values[0] != values[1]:
            yield Change(what, *values)


def _settings(records: Records) -> Iterator[tuple[str, Any]]:
    """Everything that may explain a difference, by name."""
    manifest, report = records.manifest, records.report
    yield "verdict", report["verdict"]
    yield "model revision", manifest["model"]["revision"]
    yield from _flat(records.recipe, "")
    yield "scales", records.plan["scaling"]
    yield "bits per element", report["bits_per_element"]
    yield "layers in 16 bits", report["skipped_layers"]
    yield "folds", report["folds"] and report["folds"]["kept"]
    yield "attention error, worst layer", f"{report['attention_error']['worst']:.4f}"
    yield "engine", f"{report['engine']['name']} {report['engine']['version']}"
    yield "calibration text", manifest["calibration"]["sha256"][:12]
    yield "computed in", f"{manifest['compute']['dtype']} on {manifest['compute']['device']}"
    yield "kvcal", manifest["kvcal"]
    yield from manifest["versions"].items()
    yield "machine", manifest["machine"]["gpu"] or manifest["machine"]["cpu"]


def _flat(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" != "description":
            yield f"{prefix}{key}", value


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _scale_changes(old: Records, new: Records) -> list[ScaleChange]:
    """Sides of layers whose scales differ, the largest change first."""
    found = []
    after = {layer["index"]: layer for layer in new.report["layers"]}
    for layer in old.report["layers"]:
        for side in _SIDES:
            if layer["index"] in after:
                was, now = _aligned(layer[side], after[layer["index"]][side])
                pairs = [(a, b) for a, b in zip(was, now, strict=True) if a > 0 and b > 0 and a != b]
                if pairs:
                    a, b = max(pairs, key=lambda pair: abs(math.log2(pair[1] / pair[0])))
                    found.append(ScaleChange(layer["index"], side, a, b, b / a))
    return sorted(found, key=lambda change: -abs(math.log2(change.factor)))


def _aligned(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Scale by scale; the largest of each where their number differs, maxima where there are none."""
    was, now = old["scale"], new["scale"]
    if not was or not now:
        return [old["amax"]], [new["amax"]]
    if len(was) != len(now):
        return [max(was)], [max(now)]
    return was, now
