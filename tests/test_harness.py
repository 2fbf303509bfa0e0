"""The harness's own evaluation over a quantized cache, on a task whose rows are a local file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from kvcal import evaluate, opening
from kvcal.errors import PlanRefused
from kvcal.harness import QuantizedCacheLM
from kvcal.opening import Request
from kvcal.progress import Narrator

CONTEXTS = ["the cache holds a", "one head and one", "a token of the page and of a"]
CHOICES = [" scale", " window", " sink"]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with two tasks: one of likelihoods, one of generated text."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": c, "choices": CHOICES, "label": i} for i, c in enumerate(CONTEXTS)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
num_fewshot: 0
"""
    (folder / "choose.yaml").write_text(f"""task: local_choose
output_type: multiple_choice
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}]{common}""")
    (folder / "write.yaml").write_text(f"""task: local_write
output_type: generate_until
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs: {{until: ["never"], max_gen_toks: 9}}
metric_list: [{{metric: exact_match}}]{common}""")
    return folder


def evaluated(model: Any, tasks: Path) -> dict[str, list[Any]]:
    """What the model answered to each row of each task."""
    found = simple_evaluate(
        model=model,
        tasks=["local_choose", "local_write"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found is not None
    return {
        name: [sample["filtered_resps"] for sample in sorted(samples, key=lambda s: s["doc_id"])]
        for name, samples in found["samples"].items()
    }


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("round_query", [False, True])
def test_both_kinds_of_request_go_through_the_quantized_cache(
    exported: Path, tasks: Path, round_query: bool, batch_size: int
) -> None:
    """Against one masked pass of the emulation, text by text."""
    lm = QuantizedCacheLM(str(exported), round_query=round_query, device="cpu", batch_size=batch_size)
    found = evaluated(lm, tasks)
    request = Request(str(exported), device="cpu")
    model, cache, tokenizer = opening.reopen(exported, opening.recorded_plan(exported), request, Narrator())
    plain = 0.0
    with torch.inference_mode():
        for row, context in enumerate(CONTEXTS):
            start = tokenizer(context)["input_ids"]
            for place, choice in enumerate(CHOICES):
                rest = tokenizer(choice, add_special_tokens=False)["input_ids"]
                ids = torch.tensor([[*start, *rest]])
                with evaluate.through(model, cache, with_query=round_query):
                    expected = _log_likelihood(model, ids, len(rest))
                plain = max(plain, abs(expected - _log_likelihood(model, ids, len(rest))))
                assert found["local_choose"][row][place][0] == pytest.approx(expected, abs=1e-4)
            text = list(start)
            with evaluate.through(model, cache, with_query=round_query):
                for _ in range(9):
                    text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
            assert found["local_write"][row] == [tokenizer.decode(text[len(start) :])]
    assert plain > 1e-3  # an unquantized cache would not have passed


def _log_likelihood(model: Any, ids: torch.Tensor, last: int) -> float:
    logs = model(ids, use_cache=False).logits[0].log_softmax(-1)
    return float(sum(logs[i - 1, ids[0, i]] for i in range(ids.shape[1] - last, ids.shape[1])))


def test_the_unquantized_cache_is_the_plain_model(exported: Path, tasks: Path) -> None:
    lm = QuantizedCacheLM(str(exported), quantized=False, device="cpu")
    found = evaluated(lm, tasks)
    ids = lm.tokenizer(CONTEXTS[0] + CHOICES[0], return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        expected = _log_likelihood(lm.model, ids, len(CHOICES[0]))
    assert found["local_choose"][0][0][0] == pytest.approx(expected, abs=1e-4)


def test_q_is_rounded_only_where_kernels_do(folded: Path) -> None:
    with pytest.raises(PlanRefused, match="round_query: no kernel computes attention in int8_per_token_head"):
        QuantizedCacheLM(str(folded), round_query=True, device="cpu")


def test_the_registry_knows_it() -> None:
    assert get_model("kvcal") is QuantizedCacheLM


@pytest.mark.slow
def test_the_command_line_of_the_harness(exported: Path, tasks: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvcal.harness", "--model", "kvcal", "--tasks", "local_choose"]
    options = ["--model_args", f"pretrained={exported}", "--device", "cpu", "--include_path", str(tasks)]
    done = subprocess.run(
        [*command, *options, "--output_path", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "out").rglob("results_*.json")
    assert "local_choose" in json.loads(written.read_text())["results"]
