"""Whatever a file holds, nothing but a KvcalError ever comes out of reading it."""

from __future__ import annotations

import copy
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcal import arch, check, families, models, plan, recipe, sources, unfold
from kvcal.errors import KvcalError
from tests.conftest import Outcome

# The same examples every time, so that a red test is red for everybody.
fuzz = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

TEXTS = st.text(st.characters(exclude_categories=()), max_size=12)
NUMBERS = st.one_of(st.integers(-3, 3), st.sampled_from([1000, -(2**63)]), st.floats())
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)
BYTES = st.binary(max_size=200)


@contextmanager
def only_kvcal_errors() -> Iterator[None]:
    """Let a KvcalError pass if it is one line that can be printed; anything else fails the test."""
    try:
        yield
    except KvcalError as error:
        message = str(error)
        assert message.strip()
        assert len(message) < 5000
        message.encode("utf-8", "backslashreplace")


def paths_of(tree: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a tree of dicts and lists."""
    found = [here]
    if isinstance(tree, dict):
        children = list(tree.items())
    else:
        children = list(enumerate(tree)) if isinstance(tree, list) else []
    for key, child in children:
        found += paths_of(child, (*here, key))
    return found


@st.composite
def mutated(draw: st.DrawFn, tree: Any) -> Any:
    """A copy with one to three places replaced, removed or renamed."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths_of(tree)))
        if not path:
            return draw(TREES)
        parent = tree
        for key in path[:-1]:
            parent = parent[key]
        action = draw(st.sampled_from(["replace", "remove", "rename"]))
        if action == "replace":
            parent[path[-1]] = draw(TREES)
        elif action == "remove":
            del parent[path[-1]]
        elif isinstance(parent, dict):
            parent[draw(TEXTS)] = parent.pop(path[-1])
    return tree


# --- recipes

VALID_RECIPE = recipe.Recipe(weights=recipe.Weights(scheme="W4A16"), deliver="fold").model_dump()


@fuzz
@given(TREES)
def test_recipe_of_any_tree(tree: Any):
    with only_kvcal_errors():
        recipe.parse(tree, "fuzz")


@fuzz
@given(mutated(VALID_RECIPE))
def test_recipe_with_mutated_fields(tree: Any):
    with only_kvcal_errors():
        parsed = recipe.parse(tree, "fuzz")
        assert recipe.parse_text(parsed.to_yaml(), "fuzz") == parsed


@fuzz
@given(st.one_of(st.text(max_size=80), st.text("{}[]:&*!|>-?#'\"%@` \n\tab1", max_size=80)))
def test_recipe_of_any_text(text: str):
    with only_kvcal_errors():
        recipe.parse_text(text, "fuzz")


@fuzz
@given(mutated(VALID_RECIPE), st.integers(0, 400), st.text(max_size=4))
def test_recipe_with_text_put_into_its_yaml(tree: Any, where: int, garbage: str):
    text = yaml.safe_dump(VALID_RECIPE)
    with only_kvcal_errors():
        recipe.parse_text(text[:where] + garbage + text[where:], "fuzz")
    with suppress(yaml.YAMLError), only_kvcal_errors():
        recipe.parse_text(yaml.safe_dump(tree), "fuzz")


@fuzz
@given(BYTES)
def test_recipe_file_of_any_bytes(tmp_path: Path, content: bytes):
    (tmp_path / "r.yaml").write_bytes(content)
    with only_kvcal_errors():
        recipe.load(str(tmp_path / "r.yaml"))


@fuzz
@given(st.text(max_size=300))
def test_recipe_of_any_name(name: str):
    with only_kvcal_errors():
        recipe.load(name)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1000,
        "{a: " * 1000,
        "a: &a [*a]",
        "a: " + "9" * 5000,
        "? [1]\n: 2",
        "? {1: 2}\n: 3",
        "!!python/object:x {}",
        "a: 2020-13-45",
        "a: 0b",
        "a: 1__2:99",
        "<<: 3",
        "<<: [1]",
        "\0",
        "a: \ud800",
        "- - -",
        "%YAML 9.9\n---\na",
        "calibration: {seed: .nan}",
        "gates: {kl_mean: .inf}",
        "scale: {headroom: -.inf}",
        "!!binary 'x'",
        "!!set {a, b}",
        "a: 1\na: 2",
        "1: 2",
        "calibration: {1: 2}",
        "calibration: {null: 2}",
        "calibration: {!!binary aaaa: 2}",
        "!!timestamp x",
        "a: !!int x",
        "a: !!float x",
        "a: !!int ''",
        "a: !!bool x",
    ],
)
def test_recipe_of_yaml_that_bites(text: str):
    with only_kvcal_errors():
        recipe.parse_text(text, "fuzz")


# --- config.json

VALID_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 263,
    "max_position_embeddings": 256,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 24,
    "use_sliding_window": True,
    "sliding_window_pattern": 2,
    "max_window_layers": 1,
    "attn_logit_softcapping": 5.0,
    "quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {}},
}


RECIPES = (
    recipe.Recipe(),
    recipe.Recipe(format="int4_per_token_head"),
    recipe.Recipe(deliver="both", granularity="per_head"),
)


def resolve(config: Any) -> None:
    for wanted in RECIPES:
        with only_kvcal_errors():
            plan.resolve(wanted, arch.read(config))


@fuzz
@given(mutated(VALID_RECIPE), st.sampled_from([16, 32, 33]))
def test_plan_of_a_recipe_with_mutated_fields(tree: Any, head_dim: int):
    with only_kvcal_errors():
        found = plan.resolve(recipe.parse(tree, "fuzz"), arch.read(VALID_CONFIG | {"head_dim": head_dim}))
        assert 0 < found.bits_per_element < 16


@fuzz
@given(mutated(VALID_CONFIG).filter(lambda config: isinstance(config, dict)))
def test_config_with_mutated_fields(config: dict[str, Any]):
    resolve(config)


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
@settings(fuzz, max_examples=10)
@given(st.sampled_from(sorted(VALID_CONFIG)), TREES)
def test_config_of_each_family_with_any_value_in_a_field(family: str, field: str, value: Any):
    config = VALID_CONFIG | {"model_type": family, field: value}
    resolve(config)
    del config[field]
    resolve(config)


@pytest.mark.parametrize(
    "field",
    [
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "head_dim",
        "max_position_embeddings",
    ],
)
def test_config_with_a_size_beyond_reason(field: str):
    config = {key: value for key, value in VALID_CONFIG.items() if key != "layer_types"}
    resolve(config | {field: 2**40})


@fuzz
@given(st.one_of(BYTES, TREES.map(lambda tree: json.dumps(tree).encode())))
def test_config_file_of_any_bytes(tmp_path: Path, content: bytes):
    (tmp_path / "config.json").write_bytes(content)
    with only_kvcal_errors():
        plan.resolve(recipe.Recipe(), arch.read(sources.read_config(tmp_path)))


@fuzz
@given(st.text(max_size=300))
def test_model_of_any_name(name: str):
    if name != "demo":
        with only_kvcal_errors():
            sources.locate(name, None, weights=False, say=lambda _: None)


# --- weight files


def safetensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


VALID_HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "model.layers.0.self_attn.k_scale": {"dtype": "F32", "shape": [1], "data_offsets": [24, 28]},
}
WEIGHT_FILES = st.one_of(
    BYTES,
    st.builds(safetensors, BYTES, BYTES),
    st.builds(safetensors, BYTES, BYTES, st.integers(0, 2**64 - 1)),
    mutated(VALID_HEADER).map(lambda header: safetensors(json.dumps(header).encode(), bytes(28))),
    st.builds(
        lambda keep, length: safetensors(json.dumps(VALID_HEADER).encode(), bytes(28), length)[:keep],
        st.integers(0, 300),
        st.one_of(st.none(), st.integers(0, 400)),
    ),
)


@fuzz
@given(WEIGHT_FILES)
def test_weight_file_of_any_bytes(tmp_path: Path, content: bytes):
    (tmp_path / "model.safetensors").write_bytes(content)
    with only_kvcal_errors():
        models.weight_map(tmp_path)


@fuzz
@given(st.one_of(BYTES, TREES.map(lambda tree: json.dumps(tree).encode())))
def test_index_of_any_bytes(tmp_path: Path, content: bytes):
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with only_kvcal_errors():
        models.weight_map(tmp_path)


@fuzz
@given(
    st.dictionaries(TEXTS, st.one_of(TEXTS, st.sampled_from(["", ".", "..", "x" * 300, "a\0b", "s", "/s"])))
)
def test_index_that_names_any_file(tmp_path: Path, weight_map: dict[str, str]):
    (tmp_path / "s").write_bytes(safetensors(json.dumps(VALID_HEADER).encode(), bytes(28)))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with only_kvcal_errors():
        models.weight_map(tmp_path)


# --- a checkpoint: check reports what it finds and raises nothing


@pytest.fixture(scope="module")
def scratch(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose files the tests of this module write and put back."""
    return Path(shutil.copytree(exported, tmp_path_factory.mktemp("fuzz") / "checkpoint"))


@contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def names_a_fault(folder: Path) -> bool:
    findings = check.check(folder, "vllm")
    assert findings
    return any(not finding.ok and finding.message for finding in findings)


def test_check_is_content_with_the_checkpoint_that_is_mutated(scratch: Path):
    assert not names_a_fault(scratch)


@fuzz
@given(WEIGHT_FILES)
def test_check_of_any_scale_shard(scratch: Path, content: bytes):
    with replaced(scratch / "kvcal-scales.safetensors", content):
        assert names_a_fault(scratch)


@fuzz
@given(st.data())
def test_check_of_a_mutated_scale_header(scratch: Path, data: st.DataObject):
    path = scratch / "kvcal-scales.safetensors"
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    changed = json.dumps(data.draw(mutated(header))).encode()
    with replaced(path, safetensors(changed, content[8 + length :])):
        check.check(scratch, "vllm")


@fuzz
@given(st.data())
def test_check_of_a_mutated_config(scratch: Path, data: st.DataObject):
    config = json.loads((scratch / "config.json").read_text())
    changed = data.draw(mutated(config))
    with replaced(scratch / "config.json", json.dumps(changed).encode()):
        check.check(scratch, "vllm")


@fuzz
@given(st.data())
def test_check_of_a_mutated_kv_scheme(scratch: Path, data: st.DataObject):
    config = json.loads((scratch / "config.json").read_text())
    config["quantization_config"] = data.draw(mutated(config["quantization_config"]))
    with replaced(scratch / "config.json", json.dumps(config).encode()):
        check.check(scratch, "vllm")


@fuzz
@given(st.data())
def test_check_of_a_mutated_index(scratch: Path, data: st.DataObject):
    path = scratch / "model.safetensors.index.json"
    changed = data.draw(mutated(json.loads(path.read_text())))
    with replaced(path, json.dumps(changed).encode()):
        check.check(scratch, "vllm")


# --- a folded checkpoint: check and unfold


@pytest.fixture(scope="module")
def folded_scratch(folded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folded checkpoint whose files the tests of this module write and put back."""
    return Path(shutil.copytree(folded, tmp_path_factory.mktemp("fuzz") / "folded"))


def unfold_into(folder: Path, target: Path, rounded: bool) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    with only_kvcal_errors():
        unfold.unfold(folder, target, rounded=rounded)


def test_check_is_content_with_the_folded_checkpoint_that_is_mutated(folded_scratch: Path):
    assert not names_a_fault(folded_scratch)


@fuzz
@given(st.data(), st.booleans())
def test_a_mutated_record_of_folds(folded_scratch: Path, tmp_path: Path, data: st.DataObject, rounded: bool):
    path = folded_scratch / "kvcal" / "folds.json"
    changed = data.draw(mutated(json.loads(path.read_text())))
    with replaced(path, json.dumps(changed).encode()):
        check.check(folded_scratch, "vllm")
        unfold_into(folded_scratch, tmp_path / "target", rounded)


@fuzz
@given(st.data(), st.booleans())
def test_mutated_headers_of_transforms(
    folded_scratch: Path, tmp_path: Path, data: st.DataObject, rounded: bool
):
    path = folded_scratch / "kvcal" / "folds.safetensors"
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    changed = json.dumps(data.draw(mutated(json.loads(content[8 : 8 + length])))).encode()
    with replaced(path, safetensors(changed, content[8 + length :])):
        check.check(folded_scratch, "vllm")
        unfold_into(folded_scratch, tmp_path / "target", rounded)


@fuzz
@given(BYTES, st.sampled_from(["folds.json", "folds.safetensors", "originals.safetensors", "recipe.yaml"]))
def test_records_of_folds_of_any_bytes(folded_scratch: Path, tmp_path: Path, content: bytes, name: str):
    path = folded_scratch / "kvcal" / name
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(content)
    try:
        assert names_a_fault(folded_scratch)
        unfold_into(folded_scratch, tmp_path / "target", rounded=True)
    finally:
        path.unlink()
        if before is not None:
            path.write_bytes(before)


@fuzz
@given(st.data())
def test_a_mutated_config_of_a_folded_checkpoint(folded_scratch: Path, tmp_path: Path, data: st.DataObject):
    config = json.loads((folded_scratch / "config.json").read_text())
    changed = data.draw(mutated(config))
    with replaced(folded_scratch / "config.json", json.dumps(changed).encode()):
        check.check(folded_scratch, "vllm")
        unfold_into(folded_scratch, tmp_path / "target", rounded=True)


# --- the same through the command line

BROKEN: dict[str, dict[str, bytes]] = {
    "config of nothing": {"config.json": b""},
    "config of null": {"config.json": b"null"},
    "config nested deeply": {"config.json": b"[" * 10_000},
    "config of lone surrogates": {"config.json": b'{"model_type": "\\ud800"}'},
    "config of infinities": {"config.json": b'{"model_type": "llama", "hidden_size": Infinity}'},
    "header of nothing": {"model.safetensors": b""},
    "header of null": {"model.safetensors": safetensors(b"null")},
    "header too long": {"model.safetensors": safetensors(b"{}", length=2**63)},
    "header without data": {"model.safetensors": safetensors(json.dumps(VALID_HEADER).encode())},
    "header of one scale": {"model.safetensors": safetensors(json.dumps(VALID_HEADER).encode(), bytes(28))},
    "index of null": {"model.safetensors.index.json": b"null"},
    "index of surrogates": {"model.safetensors.index.json": b'{"weight_map": {"a": "\\ud800"}}'},
    "tokenizer of null": {"tokenizer.json": b"null"},
    "tokenizer settings of null": {"tokenizer_config.json": b"null"},
    "recipe of null": {"r.yaml": b""},
    "recipe of bytes": {"r.yaml": b"\xff\xfe\x00"},
    "recipe of surrogates": {"r.yaml": b'description: "\\ud800"'},
    "recipe nested deeply": {"r.yaml": b"[" * 1000},
}


@pytest.mark.parametrize("case", BROKEN)
def test_no_traceback_reaches_the_user(
    case: str, copied: Path, kvcal: Callable[..., Outcome], small: tuple[str, ...]
):
    (copied / "r.yaml").write_text("description: none\n")
    for name, content in BROKEN[case].items():
        (copied / name).write_bytes(content)
    for command in (
        ("plan", "--model", copied, "--recipe", copied / "r.yaml"),
        ("calibrate", "--model", copied, "--recipe", copied / "r.yaml", "--output", "out", *small),
        ("check", copied),
        ("recipes", "validate", copied / "r.yaml"),
    ):
        outcome = kvcal(*command)
        assert outcome.code != 1, outcome.stderr
        assert "Traceback" not in outcome.stderr
        errors = [line for line in outcome.stderr.splitlines() if line.startswith("error:")]
        assert len(errors) == (outcome.code != 0)
