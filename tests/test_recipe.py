from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcal import engines, exactness, formats, granularity, recipe, weights
from kvcal.errors import RecipeError, UsageError
from kvcal.recipe import Recipe

quick = settings(deadline=None, max_examples=40)


def faults(text: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        recipe.parse_text(text, "x.yaml")
    assert str(caught.value).startswith("x.yaml: ")
    return caught.value.faults


def test_all_faults_are_listed_at_once_with_path_value_and_fix() -> None:
    found = faults(
        """
        format: fp9
        granularity: per_heads
        engine: sglong
        deliver: folded
        scale: {rule: amaxx, headroom: 0.5, objective: mae, percentile: 20}
        folds: {transforms: [key_scale, key_scala], scales: any, samples: 0, seed: -1, sede: 1}
        weights: {scheme: W4A4, schema: 1}
        calibration: {samples: 0, sampels: 3, seq_len: 4}
        evaluation: 3
        gates: {top1_agreement: 1.5}
        """
    )
    assert sorted(found) == sorted(
        [
            "format: found 'fp9'; unknown format 'fp9'; known: fp8_e4m3, int8_per_token_head,"
            " fp8_per_token_head, int4_per_token_head, fp8_e5m2, int8, int6, int5, int4, int3, int2, nvfp4,"
            " mxfp4, fp8_latent_bf16_rope, fp8",
            "granularity: found 'per_heads'; unknown granularity 'per_heads'; known: per_tensor, per_head,"
            " per_channel, per_token, per_token_head",
            "engine: found 'sglong'; unknown engine 'sglong'; known: " + ", ".join(engines.names()),
            "deliver: found 'folded'; should be 'metadata', 'fold' or 'both'",
            "folds.transforms.1: found 'key_scala'; should be 'key_scale', 'key_turn', 'key_offset',"
            " 'key_hadamard', 'value_scale', 'value_hadamard', 'value_random_hadamard', 'value_balanced' or"
            " 'latent_scale'",
            "folds.scales: found 'any'; should be 'power_of_two' or 'free'",
            "folds.samples: found 0; should be greater than or equal to 1",
            "folds.seed: found -1; should be greater than or equal to 0",
            "folds.sede: unknown field; did you mean 'seed'?",
            "weights.scheme: found 'W4A4'; should be 'FP8_DYNAMIC' or 'W4A16'",
            "weights.schema: unknown field; did you mean 'scheme'?",
            "scale.rule: found 'amaxx'; should be 'amax' or 'power_of_two'",
            "scale.headroom: found 0.5; should be greater than or equal to 1",
            "scale.objective: found 'mae'; should be 'amax', 'percentile', 'mse' or 'attention'",
            "scale.percentile: found 20; should be greater than 50",
            "calibration.samples: found 0; should be greater than or equal to 1",
            "calibration.sampels: unknown field; did you mean 'samples'?",
            "calibration.seq_len: found 4; should be greater than or equal to 8",
            "evaluation: found 3; should be a mapping of fields",
            "gates.top1_agreement: found 1.5; should be less than or equal to 1",
        ]
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("granularty: per_head", "granularty: unknown field; did you mean 'granularity'?"),
        ("gates: {kl_men: 1}", "gates.kl_men: unknown field; did you mean 'kl_mean'?"),
        (
            "evaluation: {zzz: 1}",
            "evaluation.zzz: unknown field; known here: batch_size, chunk, column, dataset, samples,",
        ),
        ("evaluation: {seed: 1}", "evaluation.seed: unknown field; known here: batch_size,"),
        ("folds: {transform: [key_scale]}", "folds.transform: unknown field; did you mean 'transforms'?"),
        ("folds: {zzz: 1}", "folds.zzz: unknown field; known here: samples, scales, seed, transforms"),
        # a section that may be left out
        (
            "weights: {scheme: W4A16, zzz: 1}",
            "weights.zzz: unknown field; known here: scheme",
        ),
        (
            "weights: {scheme: W4A16, schemes: 1}",
            "weights.schemes: unknown field; did you mean 'scheme'?",
        ),
        ("delivery: fold", "delivery: unknown field; did you mean 'deliver'?"),
    ],
)
def test_unknown_field_is_met_with_a_close_or_the_known_ones(text: str, fault: str) -> None:
    (found,) = faults(text)
    assert found.startswith(fault)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("calibration: {samples: '64'}", "calibration.samples: found '64'; should be a valid integer"),
        ("calibration: {samples: 64.0}", "calibration.samples: found 64.0; should be a valid integer"),
        ("calibration: {samples: true}", "calibration.samples: found True; should be a valid integer"),
        ("calibration: {samples: null}", "calibration.samples: found None; should be a valid integer"),
        ("calibration: {seed: -1}", "calibration.seed: found -1; should be greater than or equal to 0"),
        ("scale: {headroom: true}", "scale.headroom: found True; should be a valid number"),
        (
            "scale: {objective: percentile, percentile: 100.5}",
            "scale.percentile: found 100.5; should be less",
        ),
        (
            "scale: {objective: mse, percentile: 99}",
            "scale: found {'objective': 'mse', 'percentile': 99}; percentile 99 has no effect with objective"
            " mse; leave it out",
        ),
        ("gates: {kl_mean: '0.1'}", "gates.kl_mean: found '0.1'; should be a valid number; no quotes"),
        (
            "gates: {kl_mean: 1e-3}",
            "gates.kl_mean: found '1e-3'; should be a valid number; no quotes, and YAML",
        ),
        ("description: 7", "description: found 7; should be a valid string"),
        ("format: null", "format: found None; should be a valid string"),
        ("deliver: true", "deliver: found True; should be 'metadata', 'fold' or 'both'"),
        ("folds: null", "folds: found None; should be a mapping of fields"),
        ("folds: {transforms: key_scale}", "folds.transforms: found 'key_scale'; should be a valid list"),
        ("folds: {transforms: null}", "folds.transforms: found None; should be a valid list"),
        ("folds: {transforms: [true]}", "folds.transforms.0: found True; should be 'key_scale', 'key_turn'"),
        ("folds: {samples: '8'}", "folds.samples: found '8'; should be a valid integer"),
        ("folds: {seed: 9223372036854775808}", "folds.seed: found 9223372036854775808; should be less than"),
        ("weights: W4A16", "weights: found 'W4A16'; should be a mapping of fields"),
        ("weights: {}", "weights.scheme: found {}; Field required"),
        ("weights: {scheme: null}", "weights.scheme: found None; should be 'FP8_DYNAMIC' or 'W4A16'"),
        ("calibration: {dataset: ''}", "calibration.dataset: found ''; String should have at least 1 char"),
    ],
)
def test_nothing_is_coerced(text: str, fault: str) -> None:
    (found,) = faults(text)
    assert found.startswith(fault)


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "-0.1"])
@pytest.mark.parametrize("gate", recipe.Gates.model_fields)
def test_a_gate_that_cannot_be_kept_or_broken_is_refused(gate: str, value: str) -> None:
    (found,) = faults(f"gates: {{{gate}: {value}}}")
    assert found.startswith(
        f"gates.{gate}: found {float(value.replace('.n', 'n').replace('.i', 'i'))}; should be"
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "a recipe is a mapping of fields, found NoneType"),
        ("[fp8]", "a recipe is a mapping of fields, found list"),
        ("format: fp8: x", "not YAML: mapping values are not allowed here"),
        ("format: fp8\nformat: fp8", "not YAML: field 'format' is given twice in"),
        ("scale: {headroom: 1, headroom: 2}", "not YAML: field 'headroom' is given twice in"),
        ("format: !!python/name:os.system", "not YAML: could not determine a constructor"),
        ("format: \0", "not YAML: unacceptable character"),
        ("[" * 1000, "not YAML:"),
    ],
)
def test_text_that_is_no_mapping_is_one_fault(text: str, fault: str) -> None:
    (found,) = faults(text)
    assert found.startswith(fault)
    assert "\n" not in found


def test_a_value_that_expands_without_end_is_shown_short() -> None:
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 30)]
    found = faults("\n".join(["l0: &l0 [x]", *levels, "description: *l29"]))
    assert max(map(len, found)) < 300


def test_override_replaces_dotted_fields_and_leaves_the_rest() -> None:
    base = recipe.parse_text("calibration: {samples: 3, seed: 9}\ngates: {kl_p99: 1.0}", "x")
    changed = base.override({"calibration.samples": 16, "granularity": "per_head"})
    assert changed == base.model_copy(
        update={
            "granularity": "per_head",
            "calibration": base.calibration.model_copy(update={"samples": 16}),
        }
    )
    assert base.calibration.samples == 3


def test_one_limit_of_mixed_formats_is_given() -> None:
    assert faults("mixed: {}") == ["mixed: found {}; needs one of bits_budget and max_kl"]
    assert len(faults("mixed: {bits_budget: 9.0, max_kl: 0.1}")) == 1
    assert faults("mixed: {max_kl: 0, passes: 1, samples: 0, bits: 4}") == [
        "mixed.max_kl: found 0; should be greater than 0",
        "mixed.passes: found 1; should be greater than or equal to 2",
        "mixed.samples: found 0; should be greater than or equal to 1",
        "mixed.bits: unknown field; known here: bits_budget, max_kl, passes, samples",
    ]
    assert recipe.parse_text("mixed: {bits_budget: 9.5}", "x").mixed == recipe.Mixed(bits_budget=9.5)


def test_a_field_of_a_section_that_is_left_out_opens_it() -> None:
    changed = Recipe().override({"mixed.max_kl": 0.01, "mixed.passes": 8})
    assert changed.mixed == recipe.Mixed(max_kl=0.01, passes=8)
    with pytest.raises(RecipeError, match="command line: mixed: "):
        changed.override({"mixed.bits_budget": 9.0})


def test_override_reaches_sections_that_are_left_out() -> None:
    changed = Recipe().override({"weights": {"scheme": "W4A16"}, "folds.samples": 3, "deliver": "both"})
    assert changed.weights == recipe.Weights(scheme="W4A16")
    assert changed.folds == recipe.Folds(samples=3)
    assert changed.deliver == "both"
    assert changed.override({"weights": None}).weights is None


def test_every_scheme_of_weights_is_one_that_can_be_carried_out() -> None:
    assert set(get_args(recipe.Weights.model_fields["scheme"].annotation)) == weights.SCHEMES.keys()


def test_every_transform_is_one_whose_fold_is_known() -> None:
    assert set(get_args(recipe.Transform)) == exactness.WHY_NOT_FOLDED.keys()


def test_override_is_validated_and_blames_the_command_line() -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe().override({"calibration.samples": 0, "format": "int7"})
    assert str(caught.value).startswith("command line: ")
    assert len(caught.value.faults) == 2


def test_aliases_of_a_format_become_its_name() -> None:
    assert recipe.parse_text("format: fp8", "x").format == "fp8_e4m3"


def test_defaults_alone_are_a_recipe() -> None:
    assert recipe.parse_text("{}", "x") == Recipe()


def test_recipes_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Recipe().format = "fp8"  # type: ignore[misc]


texts = st.builds(
    dict,
    dataset=st.text(min_size=1, max_size=9),
    split=st.text(max_size=9),
    column=st.none() | st.text(max_size=9),
    samples=st.integers(1, 2**70),
    seq_len=st.integers(8, 2**70),
    batch_size=st.integers(1, 2**70),
)
limits = st.none() | st.floats(0, allow_infinity=False)
recipes = st.builds(
    dict,
    description=st.text(max_size=30),
    format=st.sampled_from(formats.names()),
    granularity=st.sampled_from([None, *granularity.names()]),
    deliver=st.sampled_from([None, "metadata", "fold", "both"]),
    folds=st.builds(
        dict,
        transforms=st.lists(st.sampled_from(get_args(recipe.Transform)), max_size=4),
        scales=st.sampled_from(["power_of_two", "free"]),
        samples=st.integers(1, 2**70),
        seed=st.integers(0, 2**63 - 1),
    ),
    weights=st.none() | st.builds(dict, scheme=st.sampled_from(["FP8_DYNAMIC", "W4A16"])),
    scale=st.builds(
        dict,
        rule=st.sampled_from(["amax", "power_of_two"]),
        headroom=st.floats(1, 16),
        objective=st.sampled_from(get_args(recipe.Objective)),
    )
    | st.builds(dict, objective=st.just("percentile"), percentile=st.floats(50, 100, exclude_min=True)),
    calibration=texts.flatmap(
        lambda t: st.builds(lambda seed: t | {"seed": seed}, st.integers(0, 2**63 - 1))
    ),
    evaluation=texts,
    gates=st.builds(dict, kl_mean=limits, kl_p99=limits, top1_agreement=st.none() | st.floats(0, 1)),
)


@quick
@given(recipes)
def test_yaml_brings_back_the_same_recipe(tree: dict[str, Any]) -> None:
    written = recipe.parse(tree, "x")
    encoded = written.to_yaml().encode("utf-8")
    assert recipe.parse_text(encoded.decode("utf-8"), "y") == written


yaml_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.dates()
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
SECTIONS = (Recipe, recipe.Calibration, recipe.Gates, recipe.Folds, recipe.Weights, recipe.ScaleRule)
FIELDS = [name for section in SECTIONS for name in section.model_fields]


@quick
@given(
    st.dictionaries(
        st.sampled_from(FIELDS), yaml_values | st.dictionaries(st.sampled_from(FIELDS), yaml_values)
    )
)
def test_any_tree_gives_a_recipe_or_its_faults(tree: dict[str, Any]) -> None:
    with contextlib.suppress(RecipeError):
        recipe.parse(tree, "x")


@quick
@given(st.text(alphabet="{}[]:,-&*!|>'\"#%@`? \n\tab0.~<", max_size=40))
def test_any_text_gives_a_recipe_or_its_faults(text: str) -> None:
    with contextlib.suppress(RecipeError):
        recipe.parse_text(text, "x")


def test_load_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("granularity: per_head")
    assert recipe.load(str(path)) == Recipe(granularity="per_head")


def test_load_names_the_file_in_its_faults(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("zzz: 1")
    with pytest.raises(RecipeError, match=r"mine\.yaml: zzz: unknown field"):
        recipe.load(str(path))


@pytest.mark.parametrize("name", ["fp9", "a" * 300, "a\0b"])
def test_load_of_an_unknown_name_lists_the_shipped_ones(name: str) -> None:
    with pytest.raises(UsageError, match=r"no recipe named .*; kvcal ships .*fp8"):
        recipe.load(name)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "not UTF-8"])
def test_load_of_an_unreadable_file_says_so(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=r"mine\.yaml: cannot be read"):
        recipe.load(str(path))


def test_load_of_a_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        recipe.load(str(tmp_path))
