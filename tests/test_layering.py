"""A module imports only modules of a lower rank. The table is that of the design; a new module gets a row."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "kvcal"

RANKS: dict[str, float] = {
    "": 0,  # the version alone
    "errors": 0,
    "folders": 0,
    "launch": 1,
    "peaks": 1,
    "log_lines": 1,
    "formats": 1,
    "granularity": 1,
    "latent": 1,
    "model_config": 1.2,
    "families": 1.5,
    "arch": 2,
    "planner": 0,
    "planner.known_shapes": 1,
    "planner.gpus": 1.5,
    "planner.layer_cache": 2.2,
    "planner.layer_state": 2.2,
    "planner.parameters": 2.3,
    "planner.served_model": 2.4,
    "planner.measured": 3,
    "planner.capacity": 3.6,
    "planner.recommendation": 3.7,
    "planner.report": 4,
    "planner.local_gpu": 4.5,
    "allocate": 2,
    "exactness": 2.5,
    "engine_spec": 2.4,
    "engines": 2.5,
    "recipe": 3,
    "plan": 4,
    "scheme": 3.5,
    "trial": 4.2,
    "kernels": 0,
    "kernels.reference": 5,
    "kernels.codes": 5,
    "kernels.groups": 5.2,
    "kernels.quantize": 5,
    "kernels.attention": 5.2,
    "kernels.paged": 5,
    "kernels.words": 5,
    "kernels.paged_reference": 5.2,
    "kernels.tuning": 5.2,
    "kernels.paged_write": 5.3,
    "kernels.paged_programs": 5.25,
    "kernels.paged_attention": 5.3,
    "kernels.observe_reference": 5,
    "kernels.observe": 5.6,
    "kernels.dispatch": 5.8,
    "histogram": 5.5,
    "windows": 5,
    "codebooks": 5,
    "online": 5.6,
    "statistics": 6,
    "expansion": 5.9,
    "encoder_decoder": 5.9,
    "halves": 6.5,
    "capture": 6,
    "rotary": 6,
    "data": 6,
    "documents": 5.95,
    "images": 5.9,
    "sources": 6,
    "models": 6.5,
    "layerwise": 6.7,
    "forward": 6.8,
    "placement": 6.8,
    "memory": 6.8,
    "resume": 6.8,
    "distributed": 6.9,
    "probe": 6.2,
    "calibrate": 7,
    "weights": 7.5,
    "objectives": 7.8,
    "scales": 8,
    "transforms": 0,
    "transforms.record": 8,
    "transforms.weights": 8.2,
    "transforms.proof": 8.4,
    "transforms.key_scale": 8.4,
    "transforms.key_offset": 8.4,
    "transforms.key_turn": 8.4,
    "transforms.key_hadamard": 8.4,
    "transforms.value_map": 8.4,
    "transforms.latent_scale": 8.4,
    "basis": 8,
    "second_pass": 7,
    "storage": 8.6,
    "cache": 8.6,
    "evaluate": 9,
    "scoring": 5,
    "retrieval": 5.2,
    "prompts": 6.2,
    "generation": 9.2,
    "continuations": 9.3,
    "suite": 9.5,
    "suite_report": 10.7,
    "run_suite": 11,
    "harness": 11,
    "observers": 9,
    "sensitivity": 9.4,
    "folding": 9.5,
    "paged_cache": 8.8,
    "validate": 9,
    "phase": 9,
    "phase_report": 10.5,
    "export": 0,
    "export.bundle": 9,
    "export.naming": 9,
    "export.compressed_tensors": 9.5,
    "export.modelopt": 9.5,
    "export.plain": 9.5,
    "export.kernel": 9.5,
    "export.targets": 9.7,
    "export.folded": 9.5,
    "bench": 10,
    "attention_bench": 0,
    "attention_bench.peers": 9,
    "attention_bench.timing": 9,
    "attention_bench.decode": 10,
    "attention_bench.report": 10.5,
    "run_compare": 11,
    "run_export": 11,
    "run_merge": 11,
    "scaling": 11,
    "engine_report": 4.5,
    "tensor_parallel": 10.2,
    "comparison_report": 10.5,
    "comparison": 10.3,
    "chart": 10.5,
    "opening": 10.5,
    "check": 10,
    "live_engine": 9,
    "check_live": 10,
    "gates": 10,
    "progress": 10,
    "preflight": 10.5,
    "manifest": 10,
    "unfold": 10,
    "mixed": 10.1,
    "measure": 10.2,
    "report": 10.5,
    "stage_report": 10.5,
    "markdown": 10.6,
    "run_ranks": 10.8,
    "records": 1,
    "page": 0,
    "page.svg": 1,
    "page.tables": 1,
    "page.channels": 9,
    "page.source": 10,
    "page.serving": 10.2,
    "page.figures": 10.6,
    "page.channel_figures": 10.65,
    "page.heading": 10.6,
    "page.sections": 10.7,
    "page.render": 10.8,
    "export_report": 10.9,
    "run_report": 11,
    "run": 11,
    "options": 11.2,
    "terminal": 11,
    "cli_bench": 11.5,
    "cli_recipes": 11.5,
    "cli_plan": 11.5,
    "cli_diff": 11.5,
    "cli_report": 11.5,
    "regression": 10.2,
    "regression_report": 10.5,
    "ci_report": 10,
    "cli": 12,
    "__main__": 13,
    "vllm_probe": 0,  # runs in the engine's environment, which has no kvcal
}
NO_TORCH_UP_TO = 4


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
every_module = pytest.mark.parametrize("module", MODULES, ids=lambda m: m or "kvcal")


def imports(module: str) -> set[str]:
    """Dotted names that a module imports anywhere, for type checking too; a member counts as its module."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {m if m.removeprefix("kvcal.") in MODULES else str(node.module) for m in members}
    return found


def own_imports(module: str) -> set[str]:
    """The same, of kvcal only and without its name."""
    return {
        name.removeprefix("kvcal").removeprefix(".")
        for name in imports(module)
        if name.split(".")[0] == "kvcal"
    }


def test_every_module_has_a_rank_and_every_rank_a_module() -> None:
    assert RANKS.keys() == MODULES.keys()


@every_module
def test_only_lower_ranks_are_imported(module: str) -> None:
    too_high = {name for name in own_imports(module) if name and RANKS[name] >= RANKS[module]}
    assert not too_high, f"{module} (rank {RANKS[module]}) imports {too_high}"


def test_low_ranks_import_no_torch_not_even_through_others() -> None:
    low = [m for m, rank in RANKS.items() if rank <= NO_TORCH_UP_TO]
    code = f"""
import importlib, sys
for module in {low!r}:
    importlib.import_module(f"kvcal.{{module}}".rstrip("."))
print(*({{"torch", "transformers", "triton", "numpy", "safetensors", "datasets"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*/**/__init__.py")), ids=lambda p: p.parent.name)
def test_inner_package_files_are_empty(path: Path) -> None:
    assert path.read_bytes() == b""


DEFINITIONS = (
    "kernels.reference",
    "kernels.codes",
    "kernels.groups",
    "kernels.observe_reference",
    "kernels.paged",
    "kernels.paged_reference",
)  # in torch alone


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("kernels.")])
def test_only_dispatch_knows_both_kernels_and_reference(module: str) -> None:
    if module not in ("kernels.dispatch", *DEFINITIONS):
        assert "kernels.reference" not in own_imports(module)
        assert "triton" in imports(module)


def test_only_dispatch_imports_kernels() -> None:
    kernels = {m for m in MODULES if m.startswith("kernels.")}
    triton = kernels - {"kernels.dispatch", *DEFINITIONS}
    assert {m for m in MODULES.keys() - kernels if own_imports(m) & triton} == set()


SHARED_BY_EXPORTS = {"export.bundle", "export.naming"}


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("export.") and m != "export.targets"])
def test_export_targets_never_import_each_other(module: str) -> None:
    targets = {m for m in MODULES if m.startswith("export.")} - SHARED_BY_EXPORTS
    assert not own_imports(module) & targets


def test_the_probe_needs_nothing_of_kvcal_and_nothing_needs_the_probe() -> None:
    assert own_imports("vllm_probe") == set()
    assert not [m for m in MODULES if "vllm_probe" in own_imports(m)]


def test_no_module_is_called_after_nothing() -> None:
    assert not {m.split(".")[-1] for m in MODULES} & {"utils", "util", "common", "helpers", "misc", "base"}
