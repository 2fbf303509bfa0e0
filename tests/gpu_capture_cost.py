"""What collection costs on a GPU, for a random model in the shape of Llama 3 8B made on the card.

    python -m tests.gpu_capture_cost

``kvcal bench capture`` on 128 samples of 2048 tokens, in batches of 4, and then llm-compressor's ``oneshot``
with its defaults and the same scheme, if it can be imported. Of each: seconds over those of the plain
forward pass of the decoder on the same tokens, and peak memory over that of the plain pass. Prints one JSON
document.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from dataclasses import asdict
from typing import Any

import torch
import transformers
from rich.console import Console
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from kvcal import arch, bench, plan, recipe
from kvcal.data import TokenSet
from kvcal.progress import Narrator
from tests import tiny

SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def build(layers: int) -> Any:
    """Random weights, small enough that nothing overflows in 32 layers."""
    config = LlamaConfig(**SHAPE | {"num_hidden_layers": layers}, architectures=["LlamaForCausalLM"])
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def their_seconds(model: Any, tokens: TokenSet) -> float | str:
    """One run of llm-compressor with its default pipeline and observer, everything but loading."""
    if importlib.util.find_spec("llmcompressor") is None:
        return "llmcompressor is not installed"
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
    rows = [
        {"input_ids": torch.tensor([s]), "attention_mask": torch.ones(1, len(s), dtype=torch.long)}
        for s in tokens.samples
    ]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        model.config._name_or_path = folder
        torch.cuda.synchronize()
        start = time.perf_counter()
        oneshot(
            model=model,
            processor=tiny.build_tokenizer(),
            recipe=QuantizationModifier(kv_cache_scheme=scheme),
            dataset=DataLoader(rows, batch_size=None),
        )
        torch.cuda.synchronize()
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()

    model = build(options.layers)
    drawn = torch.randint(0, SHAPE["vocab_size"], (options.samples, options.seq_len)).tolist()
    tokens = TokenSet(tuple(tuple(row) for row in drawn))
    settings = {"samples": options.samples, "seq_len": options.seq_len, "batch_size": options.batch_size}
    resolved = plan.resolve(
        recipe.Recipe().override({"calibration": settings}), arch.read(model.config.to_dict())
    )
    narrator = Narrator(Console(stderr=True))
    with narrator.stage("bench capture", tokens.tokens * options.pairs * 6) as on_tokens:
        rows = bench.capture_overhead(model, resolved, tokens, options.pairs, on_tokens)
    document = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seed": 0,
        "settings": vars(options),
        "kvcal": [asdict(row) for row in rows],
    }
    print(json.dumps(document, indent=1), flush=True)
    seconds = their_seconds(model, tokens)
    plain = rows[0].plain_seconds
    theirs = {"seconds": seconds} | ({} if isinstance(seconds, str) else {"ratio": seconds / plain})
    print(json.dumps({"llm-compressor": theirs}, indent=1))


if __name__ == "__main__":
    main()
