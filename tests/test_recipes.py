"""The recipes that kvcal ships: each valid, and readable alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvcal import formats, recipe

FOLDER = Path(__file__).parent.parent / "recipes"
every_recipe = pytest.mark.parametrize(
    "path",
    sorted(p for p in FOLDER.rglob("*.y*ml") if not p.is_relative_to(FOLDER / "schemes")),
    ids=lambda p: str(p.relative_to(FOLDER)),
)


def test_the_promised_recipes_are_shipped() -> None:
    assert {"fp8", "fp8-per-head", "fp8-ci"} <= set(recipe.shipped())


@every_recipe
def test_it_is_valid_and_found_by_its_name(path: Path) -> None:
    assert path.parent == FOLDER
    assert recipe.load(path.stem) == recipe.load(str(path))
    assert path.stem in recipe.shipped()


@every_recipe
def test_its_header_says_what_it_is_for_and_what_it_cost(path: Path) -> None:
    header = [line for line in path.read_text().split("\n\n")[0].splitlines() if line.startswith("#")]
    assert path.read_text().startswith("#")
    for promise in ("# For: ", "Engine: ", "# Cost when measured: "):
        assert any(promise in line for line in header), promise


@every_recipe
def test_it_sets_every_section_itself_but_those_without_effect(path: Path) -> None:
    loaded = recipe.load(str(path))
    writes_scales = loaded.deliver != "fold" and not formats.get(loaded.format).dynamic
    folds = loaded.deliver != "metadata"
    has_effect = {
        "granularity": writes_scales,
        "scale": writes_scales or (folds and "value_scale" in loaded.folds.transforms),
        "folds": folds,
        "weights": loaded.weights is not None,
        "mixed": loaded.mixed is not None,
        "schemes": bool(loaded.schemes),
    }
    if loaded.schemes:  # compared, not calibrated
        has_effect |= dict.fromkeys(("format", "engine", "deliver", "granularity", "scale", "folds"), False)
    wanted = {name for name in recipe.Recipe.model_fields if has_effect.get(name, True)}
    assert yaml.safe_load(path.read_text()).keys() == wanted


@every_recipe
def test_its_description_is_one_short_line(path: Path) -> None:
    description = recipe.load(str(path)).description
    assert 20 < len(description) <= 72
    assert "\n" not in description


@every_recipe
def test_it_fails_a_build_whose_model_got_worse(path: Path) -> None:
    assert recipe.load(str(path)).gates.kl_mean is not None


def test_the_ci_recipe_is_smaller_and_stricter_than_the_default() -> None:
    ci, default = recipe.load("fp8-ci"), recipe.load("fp8")
    assert (
        ci.calibration.samples * ci.calibration.seq_len
        < default.calibration.samples * default.calibration.seq_len
    )
    assert ci.gates.kl_mean is not None
    assert default.gates.kl_mean is not None
    assert ci.gates.kl_mean < default.gates.kl_mean
