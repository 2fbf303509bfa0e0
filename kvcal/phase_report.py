"""What ``kvcal bench phase`` found, as a document and in the terminal. Nothing is computed here."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from kvcal.phase import BandError, Phase, PhaseErrors


def document(found: Phase, name: str) -> dict[str, Any]:
    """The document behind ``kvcal bench phase --json``; ``name`` is the format's."""
    return {
        "format": name,
        "tokens": found.tokens,
        "distances": [list(edges) for edges in found.distances],
        "pooled": [_group(each) | {"statement": statement(each)} for each in found.pooled],
        "layers": [_group(each) for each in found.layers],
    }


def show(console: Console, found: Phase, name: str) -> None:
    """A table for each group of layers with the same bands, and what follows from it."""
    for errors in found.pooled:
        named = f"layer{'s' if len(errors.layers) > 1 else ''} {_runs(errors.layers)}"
        console.print(f"{name}, {named}, {found.tokens:,} tokens", highlight=False)
        shares = Table(title="share of the logit error's variance", title_justify="left")
        for heading in ("pairs", "tokens a turn", "share", "left", "bits", "left by even bits"):
            shares.add_column(heading, justify="right")
        for band in errors.bands:
            cells = (f"{100 * band.share:.1f} %", f"{100 * band.left:.1f} %", f"{band.bits:.2f}")
            shares.add_row(_name(band), _waves(band), *cells, f"{100 * band.left_evenly:.1f} %")
        console.print(shares)
        console.print(_by_distance(errors, found.distances))
        console.print(statement(errors), highlight=False)


def statement(errors: PhaseErrors) -> str:
    """When keeping a band in 16 bits pays, in a sentence."""
    paying, band = sum(band.pays for band in errors.bands), errors.best
    turn = f", one turn in {_waves(band)} tokens" if band.wavelengths else ""
    what = f"pairs {_name(band)}" if band.pairs else "the channels without rotation"
    return (
        "A band is worth 16 bits if it leaves less of the variance than the same bits would, spread over all"
        f" channels: {paying} of {len(errors.bands)} here. The nearest to it is {what}{turn}: with"
        f" {band.bits:.2f} bits per element of K {100 * band.left:.0f} % are left, spread evenly"
        f" {100 * band.left_evenly:.0f} %."
    )


def _by_distance(errors: PhaseErrors, distances: list[tuple[int, int]]) -> Table:
    # Narrow, so that eight bands fit 80 columns.
    table = Table(
        title="rms logit error by distance of query and key, a column per band",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("distance", justify="right")
    for band in errors.bands:
        table.add_column(_name(band), justify="right")
    for index, (low, high) in enumerate(distances):
        cells = [band.rms[index] for band in errors.bands]
        if any(cell is not None for cell in cells):
            row = ("" if cell is None else f"{cell:.2g}" for cell in cells)
            table.add_row(f"{low}" if low == high else f"{low}-{high}", *row)
    return table


def _group(errors: PhaseErrors) -> dict[str, Any]:
    bands = [asdict(band) | {"pays": band.pays} for band in errors.bands]
    return {"layers": list(errors.layers), "bands": bands}


def _name(band: BandError) -> str:
    if band.pairs is None:
        return "none"
    first, last = band.pairs
    return f"{first}" if first == last else f"{first}-{last}"


def _waves(band: BandError) -> str:
    waves = [f"{wave:,.0f}" for wave in band.wavelengths or ()]
    return " to ".join(dict.fromkeys(waves))


def _runs(layers: tuple[int, ...]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
