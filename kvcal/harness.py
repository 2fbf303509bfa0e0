"""A checkpoint over its quantized cache as a model of lm-evaluation-harness.

``python -m kvcal.harness`` is the harness's own command line with one model more: it looks for models in its
registry alone, which this module enters when it is imported. For example::

    python -m kvcal.harness --model kvcal --model_args pretrained=out/demo --tasks lambada_openai

Both ways in which the harness uses a model go through :class:`kvcal.generation.WrittenCache`: one pass for
likelihoods, prefill and decode for text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from kvcal import generation, opening
from kvcal.errors import PlanRefused
from kvcal.generation import Served
from kvcal.models import Trust
from kvcal.opening import Request
from kvcal.progress import Narrator


@register_model("kvcal")
class QuantizedCacheLM(HFLM):  # type: ignore[misc]
    """A folder that ``kvcal calibrate`` wrote, read by kvcal and run by the harness."""

    def __init__(
        self,
        pretrained: str,
        round_query: bool = False,
        quantized: bool = True,
        device: str = "auto",
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        trust_remote_code: bool = False,
    ):
        """Open the folder.

        Args:
            pretrained: it.
            round_query: Q is rounded too, as kernels that compute attention in FP8 do.
            quantized: False is the same model over an unquantized cache, to compare with.
            device: auto, cpu, cuda or cuda:N.
            batch_size: of the harness.
            max_batch_size: of the harness.
            max_length: of the harness.
            add_bos_token: of the harness.
            trust_remote_code: run code that the folder brings.

        Raises:
            PlanRefused: no kernel rounds Q with this format, or the model has an encoder.
        """
        folder = Path(pretrained)
        request = Request(pretrained, device=device, trust=Trust(remote_code=trust_remote_code))
        plan = opening.recorded_plan(folder)
        if plan.model.encoder_decoder:
            raise PlanRefused(
                [
                    f"{plan.model.model_type} is an encoder-decoder, and the harness is given decoders alone;"
                    " kvcal evaluate measures KL on its decoder's tokens"
                ]
            )
        if round_query and not plan.format.rounds_query:
            raise PlanRefused([f"round_query: no kernel computes attention in {plan.format.name}"])
        model, cache, tokenizer = opening.reopen(folder, plan, request, Narrator())
        self._served = Served(cache if quantized else None, round_query)
        super().__init__(
            pretrained=model,
            backend="causal",
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            max_length=max_length,
            add_bos_token=add_bos_token,
        )

    def _model_call(self, inps: torch.Tensor, **_: Any) -> torch.Tensor:
        """Logits ``(batch, tokens, vocab)``; rows are padded on the right, where nothing looks."""
        cache = generation.empty_cache(self.model, self._served)
        with torch.no_grad(), generation.rounding_query(self.model, self._served):
            logits: torch.Tensor = self.model(inps, past_key_values=cache, use_cache=True).logits
        return logits

    def _model_generate(self, context: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        cache = generation.empty_cache(self.model, self._served)
        with generation.rounding_query(self.model, self._served):
            found: torch.Tensor = super()._model_generate(context, *args, past_key_values=cache, **kwargs)
        return found


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
