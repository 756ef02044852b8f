"""Replicas give as many bytes: of published sizes, by the forecast, which has the planner's bytes (test_traffic.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weightbus.trainer_agent.forecast.fleet import EngineLocation, Engines, FleetSpec, ForecastTransport, TrainerSpec
from weightbus.trainer_agent.forecast.forecast import Forecast
from weightbus.trainer_agent.forecast.traffic import Tensors

MOST = 1.1
"""Of the busiest source to the mean."""
_ATTENTION = {"num_attention_heads": 32, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"}
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, **_ATTENTION,
}  # fmt: skip
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, **_ATTENTION,
}  # fmt: skip
QWEN3_30B: dict[str, Any] = {
    **QWEN3_8B, "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 12, "num_key_value_heads": 4, "num_experts": 128, "moe_intermediate_size": 768,
}  # fmt: skip
FORECASTS = {
    name: Forecast(Tensors.parse(config))
    for name, config in {"llama-8b": LLAMA_8B, "qwen3-8b": QWEN3_8B, "qwen3-30b": QWEN3_30B}.items()
}


def busiest(name: str, trainer: TrainerSpec, engines: Engines) -> float:
    """Of the bytes that each source gives, the most to the mean; or to what one tensor's part has, if that is more."""
    forecast = FORECASTS[name]
    found = forecast.traffic(FleetSpec(trainer, (engines,)))
    given = np.bincount(found.source, weights=found.nbytes, minlength=trainer.gpus)
    largest = int(forecast.tensors.nbytes.max()) // trainer.tp * engines.count
    return float(given.max() / max(given.mean(), largest))


@pytest.mark.parametrize("name", FORECASTS)
@pytest.mark.parametrize("dp", [2, 4, 8, 16])
@pytest.mark.parametrize("tp", [1, 2])
def test_no_replica_gives_much_more_than_the_others(name: str, dp: int, tp: int) -> None:
    """Engines that are alike have one plan, so it is even in itself."""
    engines = Engines(4, tp, location=EngineLocation.OTHER, transport=ForecastTransport.SENDS)
    assert busiest(name, TrainerSpec(dp, 16), engines) <= MOST
    assert busiest(name, TrainerSpec(2 * dp, 16, tp=2), engines) <= MOST


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_experts_and_what_is_with_all_ranks_even_each_other_out(ep: int) -> None:
    """Sets of holders that lie in one another. Each worker's part is even, as far as experts of its own let it be."""
    for tp in (1, 2, 4):
        engines = Engines(2, tp, ep=min(tp, 2), location=EngineLocation.OTHER, transport=ForecastTransport.SENDS)
        assert busiest("qwen3-30b", TrainerSpec(8, 8, ep=ep, etp=1), engines) <= (MOST if tp == 1 else 1.15)
