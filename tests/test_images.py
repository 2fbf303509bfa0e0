"""Rows with images: what the model sees of them is what its own processor and class make of them."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from kvcal import capture, data, distributed, forward, images, opening, recipe, run, second_pass
from kvcal.data import TokenSet
from kvcal.errors import DataError, PlanRefused, UsageError
from kvcal.images import ImageInputs
from kvcal.launch import Place
from kvcal.opening import Request
from kvcal.progress import Narrator
from kvcal.recipe import Text
from kvcal.statistics import Statistics
from tests import pictures, ranks, tiny
from tests.test_evaluate import RoundedCache, through_e4m3

Kvcal = Callable[..., Any]
SEEING = ["llava", "qwen2_5_vl"]
every_family = pytest.mark.parametrize("family", SEEING)
SMALL = ("--samples", "6", "--evaluation-samples", "2", "--seq-len", "64", "--batch-size", "4")


@pytest.fixture(autouse=True)
def dataset_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets-cache"))


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA with its processor. Nothing changes its files."""
    return pictures.save(tmp_path_factory.mktemp("seeing") / "tiny-llava")


def load(
    path: Path, role: data.Role = "calibration", family: str = "llava", seq_len: int = 64, **fields: Any
) -> TokenSet:
    processor = pictures.build_processor(family)
    text = Text(dataset=str(path), **({"samples": 1000} | fields))
    return data.load(text, processor.tokenizer, role, seq_len, 0, lambda: processor)


def by_transformers(folder: Path, dataset: Path, role: data.Role) -> list[Any]:
    """What transformers alone makes of the rows of one part, images from their paths included."""
    processor = AutoProcessor.from_pretrained(folder)
    found = []
    for line in dataset.read_text().splitlines():
        chat = json.loads(line)["messages"]
        if data.belongs_to(images.row("test", chat, None, dataset.parent)) != role:
            continue
        for part in (part for part in chat[0]["content"] if part["type"] == "image"):
            part["path"] = str(dataset.parent / part["path"])
        found.append(
            processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
        )
    return found


def extremes(model: Any, inputs: list[Any]) -> dict[tuple[int, str], torch.Tensor]:
    """``(kv_heads, head_dim)`` amax of what the model's own cache is given, and of nothing else."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    for each in inputs:
        with torch.no_grad():
            cache = model(**each, use_cache=True).past_key_values
        for index, layer in enumerate(cache.layers):
            for side, x in (("k", layer.keys), ("v", layer.values)):
                amax = x.abs().amax((0, 2))
                found[index, side] = torch.maximum(found.get((index, side), amax), amax)
    return found


@every_family
def test_plan_to_check(family: str, tmp_path: Path, kvcal: Kvcal) -> None:
    folder = pictures.save(tmp_path / "model", family)
    dataset, output = pictures.chats(tmp_path / "chats.jsonl"), tmp_path / "out"
    (tmp_path / "r.yaml").write_text("granularity: per_head\ngates: {kl_mean: null}\n")
    options = ("--recipe", tmp_path / "r.yaml", "--dataset", dataset, *SMALL, "--samples", "50")
    options += ("--evaluation-samples", "50", "--json")
    assert kvcal("plan", "--model", folder, "--recipe", tmp_path / "r.yaml").code == 0
    done = kvcal("calibrate", "--model", folder, "--output", output, *options)
    assert done.code == 0, done.stderr

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = by_transformers(folder, dataset, "calibration")
    expected = extremes(model, inputs)
    found = Statistics.load(output / "kvcal" / "statistics.safetensors")
    for (index, side), amax in expected.items():
        torch.testing.assert_close(found.layers[index][side].amax, amax, rtol=1e-5, atol=1e-6)  # type: ignore[index]
    blind = [{k: v for k, v in each.items() if k in ("input_ids", "attention_mask")} for each in inputs]
    for key, amax in extremes(model, blind).items():  # so that a model without its images would be seen
        assert float((amax / expected[key] - 1).abs().max()) > 1e-2
    manifest = json.loads((output / "kvcal" / "manifest.json").read_text())
    tokens = sum(each["input_ids"].shape[1] for each in inputs)
    assert manifest["calibration"]["tokens"] == tokens
    assert manifest["calibration"]["with_images"] == manifest["calibration"]["samples"] == len(inputs)

    kl = decoded_kl(model, by_transformers(folder, dataset, "evaluation"), output)
    assert done.document["fidelity"]["kl_mean"] == pytest.approx(kl, rel=1e-3)
    assert kvcal("check", output).code == 0
    for command in ("evaluate", "validate"):
        again = kvcal(command, output, "--json")
        assert again.code == 0, again.stderr
    base, scales = load_file(folder / "model.safetensors"), load_file(output / "kvcal-scales.safetensors")
    files = [f for f in output.glob("*.safetensors") if f.name != "kvcal-scales.safetensors"]
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert written.keys() == base.keys()
    assert all(torch.equal(base[name], written[name]) for name in base)
    modules = {
        name.rpartition(".q_proj")[0] for name in base if "language_model" in name and ".q_proj" in name
    }
    modules = modules or {n.rpartition(".q_proj")[0] for n in base if ".q_proj" in n and "visual" not in n}
    assert sorted(scales) == sorted(f"{module}.{side}_scale" for module in modules for side in "kvq")


def decoded_kl(model: Any, inputs: list[Any], output: Path) -> float:
    """Mean KL over a cache that hands back E4M3, of the predictions that some text follows."""
    scales = load_file(output / "kvcal-scales.safetensors")

    def rounding(index: int, side: str, x: torch.Tensor) -> torch.Tensor:
        (scale,) = (
            s for name, s in scales.items() if f".{index}." in name and name.endswith(f"{side}_scale")
        )
        return through_e4m3(x, scale.float())

    values = []
    for each in inputs:
        with torch.no_grad():
            p = model(**each, use_cache=False).logits[0].double().log_softmax(-1)
            given = model(**each, past_key_values=RoundedCache(rounding), use_cache=True)
        q = given.logits[0].double().log_softmax(-1)
        followed = torch.cat([each["input_ids"][0, 1:] != pictures.PLACEHOLDER, torch.tensor([True])])
        values.append((p.exp() * (p - q)).sum(-1)[followed])
    return float(torch.cat(values).mean())


def rows_of(kind: str, folder: Path, count: int = 20) -> Path:
    """The same questions about the same images, told in another form."""
    import datasets

    names = pictures.files(folder, count)
    ask = [f"What is in {n}?" for n in names]
    stored = [{"bytes": pictures.png(seed), "path": None} for seed in range(count)]
    image, sequence = datasets.Image(), datasets.List(datasets.Image())
    path = folder / f"{kind.replace(' ', '-')}.jsonl"
    chats = [pictures.chat(a, {}) for a in ask]
    if kind in ("path", "url", "image"):
        rows = [{"messages": pictures.chat(a, {kind: n})} for a, n in zip(ask, names, strict=True)]
    elif kind == "data":
        uris = [base64.b64encode(pictures.png(seed)).decode() for seed in range(count)]
        rows = [{"messages": pictures.chat(a, {})} for a in ask]
        for row, uri in zip(rows, uris, strict=True):
            given = {"url": f"data:image/png;base64,{uri}"}
            row["messages"][0]["content"][0] = {"type": "image_url", "image_url": given}
    elif kind == "base64":
        encoded = [base64.b64encode(pictures.png(seed)).decode() for seed in range(count)]
        rows = [{"messages": pictures.chat(a, {kind: e})} for a, e in zip(ask, encoded, strict=True)]
    elif kind == "column":
        rows = [{"messages": c, "image": n} for c, n in zip(chats, names, strict=True)]
    elif kind == "columns without parts":
        plain = [[{"role": t["role"], "content": t["content"][-1]["text"]} for t in c] for c in chats]
        rows = [{"messages": c, "images": [n]} for c, n in zip(plain, names, strict=True)]
    elif kind == "parquet column":
        table = datasets.Dataset.from_dict({"messages": chats, "image": stored})
        table.cast_column("image", image).to_parquet(path.with_suffix(".parquet"))
        return path.with_suffix(".parquet")
    elif kind == "parquet columns":
        table = datasets.Dataset.from_dict({"messages": chats, "images": [[s] for s in stored]})
        table.cast_column("images", sequence).to_parquet(path.with_suffix(".parquet"))
        return path.with_suffix(".parquet")
    else:
        assert kind == "parquet part"
        for chat, image_stored in zip(chats, stored, strict=True):
            chat[0]["content"][0]["image"] = image_stored
        datasets.Dataset.from_dict({"messages": chats}).to_parquet(path.with_suffix(".parquet"))
        return path.with_suffix(".parquet")
    return pictures.jsonl(path, rows)


@pytest.mark.parametrize(
    "kind",
    [
        "url",
        "image",
        "data",
        "base64",
        "column",
        "columns without parts",
        "parquet column",
        "parquet columns",
        "parquet part",
    ],
)
def test_however_images_are_told_the_samples_are_the_same(kind: str, tmp_path: Path) -> None:
    first, second = (rows_of(each, tmp_path) for each in ("path", kind))
    assert load(first).with_images == len(load(first).samples) > 10
    if kind == "columns without parts":  # another document, so perhaps in the other part
        first_hashes, second_hashes = (
            {*load(d).hashes, *load(d, "evaluation").hashes} for d in (first, second)
        )
        assert first_hashes == second_hashes
    else:
        assert (load(second).samples, load(second).images) == (load(first).samples, load(first).images)


def test_text_has_its_placeholders_or_stands_behind_its_images(tmp_path: Path) -> None:
    names = pictures.files(tmp_path, 20)
    told = [{"text": f"See {n} <image> here.", "image": n} for n in names]
    found = load(pictures.jsonl(tmp_path / "told.jsonl", told))
    ids = found.samples[0]
    assert ids[0] == 256
    assert ids.count(pictures.PLACEHOLDER) == 4
    behind = load(pictures.jsonl(tmp_path / "b.jsonl", [{"text": f"See {n}.", "image": n} for n in names]))
    chats = [
        [{"role": "user", "content": pictures.chat(f"See {n}.", {"path": n})[0]["content"]}] for n in names
    ]
    as_chats = load(pictures.jsonl(tmp_path / "c.jsonl", [{"messages": c} for c in chats]))
    assert {*behind.samples} & {*as_chats.samples}


def test_the_bytes_of_images_decide_parts_and_hashes(tmp_path: Path) -> None:
    """One question about many images: what tells the rows apart is the images."""
    names = pictures.files(tmp_path, 40)
    dataset = pictures.jsonl(
        tmp_path / "a.jsonl", [{"messages": pictures.chat("?", {"path": n})} for n in names]
    )
    calibration, evaluation = load(dataset), load(dataset, "evaluation")
    assert len({*calibration.samples, *evaluation.samples}) == 1
    assert len(calibration.samples) + len(evaluation.samples) == 40
    assert len({*calibration.hashes, *evaluation.hashes}) == 40
    (tmp_path / "0.png").write_bytes(pictures.png(1000))
    before = {*calibration.hashes, *evaluation.hashes}
    after = {*load(dataset).hashes, *load(dataset, "evaluation").hashes}
    assert len(before - after) == len(after - before) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": pictures.chat("?", {"url": "https://x.org/a.png"})}, "kvcal fetches none, download it"),
        ({"messages": pictures.chat("?", {"path": "no.png"})}, "no.png: cannot be read as an image"),
        ({"messages": pictures.chat("?", {"path": "rows.jsonl"})}, "rows.jsonl: cannot be read as an image"),
        ({"messages": pictures.chat("?", {"url": "data:image/png;base64,$"})}, "is not base64"),
        ({"messages": pictures.chat("?", {"image": 3})}, "an image is int, neither a path nor bytes"),
        ({"messages": pictures.chat("?", {})}, "more parts of type image than images"),
        ({"messages": pictures.chat("?", {}), "images": ["0.png", "1.png"]}, "fewer parts of type image"),
        ({"messages": pictures.chat("?"), "image": "0.png", "images": ["1.png"]}, "columns image and images"),
        ({"text": "a <image> and <image>", "image": "0.png"}, "has 1 images and 2 placeholders '<image>'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "path": "a.mp4"}]}]},
            "a chat has a part of type 'video'; kvcal calibrates on text and images",
        ),
    ],
)
def test_what_cannot_be_read_is_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    pictures.files(tmp_path, 2)
    dataset = pictures.jsonl(tmp_path / "rows.jsonl", [row | {"number": i} for i in range(9)])
    with pytest.raises(DataError) as caught:
        load(dataset), load(dataset, "evaluation")
    assert message in str(caught.value)


def test_relative_paths_need_a_folder() -> None:
    with pytest.raises(DataError, match="relative ones start from the folder of a dataset file"):
        images.row("owner/name", pictures.chat("?", {"path": "a.png"}), None, None)


def test_without_a_template_text_must_say_where_images_belong(tmp_path: Path) -> None:
    pictures.files(tmp_path, 20)
    rows = [{"text": f"See {n}.", "image": f"{n}.png"} for n in range(20)]
    dataset = pictures.jsonl(tmp_path / "rows.jsonl", rows)
    processor = pictures.build_processor(template=False)
    with pytest.raises(
        DataError, match="no chat template; give text with '<image>' where each image belongs"
    ):
        data.load(Text(dataset=str(dataset)), processor.tokenizer, "calibration", 64, 0, lambda: processor)


def test_rows_that_are_too_long_are_left_out_whole(tmp_path: Path) -> None:
    names = pictures.files(tmp_path, 40)
    rows = [{"messages": pictures.chat("?" * (40 if i % 2 else 1), {"path": n})} for i, n in enumerate(names)]
    dataset = pictures.jsonl(tmp_path / "rows.jsonl", rows)
    short = load(dataset, seq_len=64)
    assert {sample.count(pictures.PLACEHOLDER) for sample in short.samples} == {4}
    left_out = len(load(dataset, seq_len=500).samples) - len(short.samples)
    assert left_out > 5
    assert short.notices[0].startswith(f"calibration: left out {left_out} rows whose images would not fit")
    with pytest.raises(DataError, match=r"no calibration sample .* left out .* the shortest has 39"):
        load(dataset, seq_len=30)


def test_a_chunk_never_cuts_a_row_with_images(tmp_path: Path) -> None:
    dataset = pictures.chats(tmp_path / "chats.jsonl")
    with pytest.raises(UsageError, match=r"a row with images has \d+ tokens, which --chunk 32 would cut"):
        load(dataset, chunk=32)


def made(lengths: list[int], with_images: list[bool]) -> TokenSet:
    seen = tuple(
        ImageInputs(str(i), {"pixel_values": torch.full((1, 1), float(i))}, torch.arange(n) == 0)
        if has
        else None
        for i, (n, has) in enumerate(zip(lengths, with_images, strict=True))
    )
    samples = tuple((i,) * n for i, n in enumerate(lengths))
    return TokenSet(samples, images=seen if any(with_images) else ())


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12), st.integers(1, 5))
def test_rows_with_images_are_batches_of_their_own(rows: list[tuple[int, bool]], batch_size: int) -> None:
    tokens = made([n for n, _ in rows], [has for _, has in rows])
    batches = list(tokens.batches(batch_size))
    found = []
    for batch in batches:
        found += batch.input_ids[:, 0].tolist()
        assert len(batch.input_ids) <= (1 if batch.images else batch_size)
        if batch.images is not None:  # those of this very row
            assert batch.images.tensors["pixel_values"].item() == batch.input_ids[0, 0]
            assert batch.keep is None
    assert sorted(found) == list(range(len(rows)))
    widths = [batch.input_ids.shape[1] for batch in batches]
    assert widths == sorted(widths, reverse=True)
    text = tokens.part(slice(2, None))
    assert [b.images for b in text.singly()] == list(tokens._images()[2:])


def test_ranks_share_the_batches_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = made([9, 3, 8, 5, 4, 7], [False, True, True, False, False, False])
    whole = [(b.input_ids.tolist(), b.images) for b in tokens.batches(2)]
    for rank in range(2):
        monkeypatch.setattr(distributed, "place", lambda rank=rank: Place(rank, 2, rank))
        batches, share = distributed.dealt(tokens, 2)
        mine = list(batches)
        assert [(b.input_ids.tolist(), b.images) for b in mine] == whole[rank::2]
        assert share * sum(b.tokens for b in mine) == pytest.approx(tokens.tokens)


def test_samples_and_images_cannot_come_apart() -> None:
    tokens = made([3, 4], [True, False])
    with pytest.raises(ValueError, match="1 samples with images of 2"):
        dataclasses.replace(tokens, samples=tokens.samples[:1])


def test_validation_cuts_text_and_no_images() -> None:
    text = made([9, 5], [False, False])
    assert [len(s) for s in text.first(2, 6).samples] == [6, 5]
    mixed = made([9, 5, 4, 3], [True, False, True, True])
    assert [len(s) for s in mixed.first(2, 6).samples] == [5, 4]
    assert mixed.first(2, 6).with_images == 1
    assert [len(s) for s in mixed.first(2, 2).samples] == [3]


def test_floating_inputs_take_the_dtype_of_the_model() -> None:
    tensors = {"pixel_values": torch.ones(1, 3), "image_grid_thw": torch.ones(1, 3, dtype=torch.long)}
    seen = ImageInputs("", tensors, torch.tensor([True]))
    (batch,) = TokenSet(((1,),), images=(seen,)).batches(1)
    found = batch.inputs(torch.device("cpu"), dtype=torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "input_ids": torch.long,
        "pixel_values": torch.bfloat16,
        "image_grid_thw": torch.long,
    }


def test_positions_before_a_placeholder_are_not_scored() -> None:
    seen = ImageInputs("", {}, torch.tensor([False, True, True, False, True]))
    (batch,) = TokenSet(((1, 2, 3, 4, 5),), images=(seen,)).batches(1)
    assert batch.scored.tolist() == [[False, False, True, False, True]]


def test_a_chunk_of_text_forgets_the_positions_of_an_image_before_it(tmp_path: Path) -> None:
    """Models with positions of several axes remember how far the last images moved them."""
    model = tiny.build_model("qwen2_5_vl")
    seen = load(pictures.chats(tmp_path / "chats.jsonl"), family="qwen2_5_vl")
    (image, *_) = seen.batches(1)
    text = TokenSet((tuple(range(60)),), chunk=16)
    (chunked,), (whole,) = text.batches(1), dataclasses.replace(text, chunk=None).batches(1)
    found: dict[int, list[torch.Tensor]] = {}

    def keys(batches: list[data.Batch]) -> dict[int, torch.Tensor]:
        found.clear()
        for step in (step for batch in batches for step in forward.steps(model, [batch])):
            step.run()
        return {index: torch.cat(parts, 2)[:, :, -60:] for index, parts in found.items()}

    def see(call: capture.AttentionCall) -> None:
        found.setdefault(call.layer, []).append(call.key[:, :, -call.query.shape[2] :])

    with capture.intercept(model, see), torch.no_grad():
        expected = keys([whole])
        for index, key in keys([image, chunked]).items():
            torch.testing.assert_close(key, expected[index], rtol=1e-4, atol=1e-5)


def failed(done: Any, code: int, message: str) -> None:
    assert done.code == code, done.stderr
    assert message in " ".join(done.stderr.split())


def test_a_model_of_text_alone_is_refused(kvcal: Kvcal, llama_folder: Path, tmp_path: Path) -> None:
    dataset = pictures.chats(tmp_path / "chats.jsonl")
    done = kvcal("calibrate", "--model", llama_folder, "--dataset", dataset, "--output", "no", *SMALL)
    failed(done, 4, "is run as a model of text alone, and the dataset has rows with images; leave them out")


def test_a_folder_without_a_processor_is_refused(kvcal: Kvcal, tmp_path: Path) -> None:
    folder, dataset = tiny.save(tmp_path / "model", "llava"), pictures.chats(tmp_path / "chats.jsonl")
    done = kvcal("calibrate", "--model", folder, "--dataset", dataset, "--output", "no", *SMALL)
    failed(done, 4, "has no processor that can be loaded, which rows with images need")


def test_a_processor_of_another_model_is_named(kvcal: Kvcal, tmp_path: Path) -> None:
    folder, dataset = tiny.save(tmp_path / "model", "llava"), pictures.chats(tmp_path / "chats.jsonl")
    other = pictures.build_processor()
    other.patch_size = 7
    other.save_pretrained(folder)
    wanted = ("--dataset", dataset, "--output", "no", *SMALL, "--seq-len", "128")
    done = kvcal("calibrate", "--model", folder, *wanted)
    failed(done, 4, "the model refuses what its processor made of a row with images")


def test_layers_from_the_disk_are_refused(kvcal: Kvcal, seeing: Path, tmp_path: Path) -> None:
    dataset = pictures.chats(tmp_path / "chats.jsonl")
    wanted = ("--device-map", "layerwise", "--dataset", dataset, "--output", "no", *SMALL)
    done = kvcal("calibrate", "--model", seeing, *wanted)
    failed(done, 3, "--device-map layerwise: what images become is made outside the decoder layers")


def test_a_chunk_is_refused_on_the_command_line(kvcal: Kvcal, seeing: Path, tmp_path: Path) -> None:
    dataset = pictures.chats(tmp_path / "chats.jsonl")
    wanted = ("--dataset", dataset, "--output", "no", "--chunk", "16", *SMALL)
    failed(kvcal("calibrate", "--model", seeing, *wanted), 2, "use --chunk 64 or --seq-len 16")


def test_quantizing_weights_on_images_is_refused(seeing: Path, tmp_path: Path) -> None:
    wanted = recipe.parse(
        {"weights": {"scheme": "W4A16"}, "calibration": {"dataset": str(tmp_path / "chats.jsonl")}}, "t"
    )
    pictures.chats(tmp_path / "chats.jsonl")
    resolved = SimpleNamespace(recipe=wanted, seq_len=64, model=SimpleNamespace(decoder_start=None))
    processor = opening.processor_of(seeing, Request(str(seeing)))
    with pytest.raises(PlanRefused, match="llm-compressor is given text alone"):
        opening.calibration_text(resolved, pictures.build_processor().tokenizer, processor, Narrator.silent())  # type: ignore[arg-type]


def test_attention_in_both_directions_is_refused(kvcal: Kvcal, tmp_path: Path) -> None:
    """Gemma 3's tokens of one image see each other, here far behind the start; text alone works."""
    folder, names = pictures.save(tmp_path / "model", "gemma3"), pictures.files(tmp_path, 24)
    rows = [{"messages": pictures.chat("?", {"path": n})} for n in names]
    for row in rows:
        row["messages"][0]["content"].insert(0, {"type": "text", "text": 80 * "."})
    dataset = pictures.jsonl(tmp_path / "rows.jsonl", rows)
    long = ("--dataset", dataset, *SMALL, "--seq-len", "150")
    done = kvcal("calibrate", "--model", folder, "--output", "no", *long)
    failed(done, 4, "from causal softmax attention over its Q, K and V")
    (tmp_path / "r.yaml").write_text("gates: {kl_mean: null}\n")
    options = ("--recipe", tmp_path / "r.yaml", *SMALL)
    assert kvcal("calibrate", "--model", folder, "--output", "out", *options).code == 0
    done = kvcal("validate", "out", "--dataset", dataset, "--seq-len", "150")
    failed(done, 4, "from causal softmax attention over its Q, K and V")


@pytest.fixture(scope="module")
def calibrated(seeing: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """The dataset of chats and text, what was written, and the report of a run in one process."""
    folder = tmp_path_factory.mktemp("calibrated")
    dataset = pictures.chats(folder / "chats.jsonl")
    with dataset.open("a") as file:
        for index in range(24):
            file.write(json.dumps({"messages": pictures.chat(f"What is {index}?" * (1 + index % 3))}) + "\n")
    fields = {"dataset": str(dataset), "samples": 20, "seq_len": 64}
    wanted = recipe.parse(
        {"calibration": fields, "evaluation": fields | {"samples": 6}, "gates": {"kl_mean": None}}, "tests"
    )
    done = run.run_calibrate(Request(str(seeing), output=folder / "out"), wanted, Narrator.silent())
    assert done is not None
    manifest = json.loads((folder / "out" / "kvcal" / "manifest.json").read_text())
    assert 0 < manifest["calibration"]["with_images"] < manifest["calibration"]["samples"]
    return dataset, folder / "out", dict(done[0])


MIXED = ("--samples", "20", "--evaluation-samples", "6", "--seq-len", "64", "--json", "--recipe", "r.yaml")


@pytest.mark.parametrize("how", [pytest.param("two ranks", marks=pytest.mark.slow), "auto"])
def test_however_it_is_run_the_checkpoint_is_the_same(
    how: str,
    calibrated: tuple[Path, Path, dict[str, Any]],
    seeing: Path,
    kvcal: Kvcal,
    tmp_path: Path,
) -> None:
    dataset, expected, report = calibrated
    (tmp_path / "r.yaml").write_text("gates: {kl_mean: null}\n")
    arguments = ("calibrate", "--model", str(seeing), "--dataset", str(dataset), "--output", "out", *MIXED)
    if how == "auto":
        size = (seeing / "model.safetensors").stat().st_size
        done = kvcal(*arguments, "--device-map", "auto", "--max-memory", f"cpu={size * 3 // 2000}KB")
        found = done
    else:
        found, other = ranks.run(ranks.command, 2, tmp_path, *arguments)
        assert other.code == 0, other.stderr
    assert found.code == 0, found.stderr
    assert json.loads(found.stdout)["fidelity"] == report["fidelity"]
    first, second = (load_file(each / "kvcal-scales.safetensors") for each in (tmp_path / "out", expected))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    samples = [
        json.loads((each / "kvcal" / "samples.json").read_text()) for each in (tmp_path / "out", expected)
    ]
    assert samples[0] == samples[1]


def test_suites_are_of_text(calibrated: tuple[Path, Path, dict[str, Any]], kvcal: Kvcal) -> None:
    dataset, folder, _ = calibrated
    done = kvcal("evaluate", folder, "--suite", "quick", "--dataset", dataset)
    failed(done, 2, "--suite continues text alone, and the held-out rows have images")


def test_schemes_are_compared_on_images(seeing: Path, kvcal: Kvcal, tmp_path: Path) -> None:
    """Moving averages take a second pass over the rows, one after the other; the first counts in full."""
    dataset = pictures.chats(tmp_path / "chats.jsonl")
    model = AutoModelForImageTextToText.from_pretrained(seeing, dtype=torch.float32).eval()
    rows, spec = by_transformers(seeing, dataset, "calibration"), tiny.spec_of(model)
    first = load(dataset).part(slice(1))
    (same,) = (row for row in rows if tuple(row["input_ids"][0].tolist()) == first.samples[0])
    layers = {layer.index: layer for layer in spec.layers}
    ends = second_pass.moving_extremes(model, layers, first)
    for (index, side), amax in extremes(model, [same]).items():
        torch.testing.assert_close(ends[index][side], amax.amax().reshape(1), rtol=1e-5, atol=1e-6)  # type: ignore[index]
    wanted = ("--schemes", "fp8,llm-compressor-fp8", "--dataset", dataset, *SMALL, "--json")
    done = kvcal("compare", "--model", seeing, *wanted)
    assert done.code == 0, done.stderr
