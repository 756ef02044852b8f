"""Builds SGLang's own model classes without a server, at any rank of any layout, and records what they load.

`python tests/kit/sglang_models.py CASE..` prints one JSON object for each case. SGLang is imported once and every case
runs in a fork: its parallel state is global. torch's fake process group stands for the other ranks. The environment
must be that of a CPU server (engine_agent/engines/sglang/cpu_server.py). Each case:

    load random tensors once, as a launch does; zero the model; record; nothing may have changed
    replay the recording from other random tensors into the zeroed model
    zero it again, give the same tensors to the real load_weights: every tensor of the model must be the same bits
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

Shapes = dict[str, tuple[int, ...]]
Config = dict[str, Any]

_COMMON: Config = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,  # not a multiple of 64: the vocabulary is padded
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE: Config = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


_DEEPSEEK: Config = dict(
    **_MOE, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1,
    first_k_dense_replace=1, routed_scaling_factor=1.0, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, topk_method="noaux_tc", scoring_func="sigmoid",
    moe_layer_freq=1, num_nextn_predict_layers=1,
    rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32,
                  "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
)  # fmt: skip


def _config(architecture: str, model_type: str, **fields: object) -> Config:
    return {**_COMMON, "architectures": [architecture], "model_type": model_type, **fields}


CONFIGS: dict[str, Config] = {
    "llama": _config("LlamaForCausalLM", "llama"),
    "llama-tied": _config("LlamaForCausalLM", "llama", tie_word_embeddings=True),
    "qwen2": _config("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _config("Qwen3ForCausalLM", "qwen3"),
    "qwen3-moe": _config(
        "Qwen3MoeForCausalLM", "qwen3_moe", **_MOE, num_experts=8, decoder_sparse_step=1, mlp_only_layers=[]
    ),
    "qwen3-moe-fp8": _config(
        "Qwen3MoeForCausalLM", "qwen3_moe", **{**_MOE, "moe_intermediate_size": 256}, hidden_size=256, head_dim=128,
        num_experts=8, decoder_sparse_step=1, mlp_only_layers=[],
        quantization_config={"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                             "weight_block_size": [128, 128]},
    ),
    "glm4-moe": _config(
        "Glm4MoeForCausalLM", "glm4_moe", **_MOE, n_routed_experts=8, n_shared_experts=1, n_group=1, topk_group=1,
        first_k_dense_replace=1, routed_scaling_factor=1.0, use_qk_norm=True, attention_bias=True,
        partial_rotary_factor=0.5,
    ),
    "gemma": _config("GemmaForCausalLM", "gemma", tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh"),
    "gpt-oss": _config(
        "GptOssForCausalLM", "gpt_oss", num_local_experts=8, num_experts_per_tok=2, intermediate_size=64,
        attention_bias=True, sliding_window=32, layer_types=["sliding_attention", "full_attention"], swiglu_limit=7.0,
        rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "beta_fast": 32.0,
                      "beta_slow": 1.0, "truncate": False},
    ),
    "qwen3-moe-moved": _config(
        "Qwen3MoeForCausalLM", "qwen3_moe", **_MOE, num_experts=8, decoder_sparse_step=1, mlp_only_layers=[]
    ),
    "deepseek-v3": _config("DeepseekV3ForCausalLM", "deepseek_v3", **_DEEPSEEK),
    "deepseek-v3-draft": _config("DeepseekV3ForCausalLMNextN", "deepseek_v3", **_DEEPSEEK),
}  # fmt: skip

PLACES: dict[str, list[list[int]]] = {
    "qwen3-moe-moved": [[0, 5, 2, 3, 4, 1, 6, 7, 5, 5], [7, 6, 5, 4, 3, 2, 1, 0, 0, 7]],
}
"""By case: which expert lies in each of SGLang's places, by layer. Some change places, some lie in several."""


def shapes(config: Config) -> Shapes:
    """Names and shapes of the checkpoint, as Hugging Face writes it."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    found: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found |= {f"{at}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        found |= _latent(config, at) if "kv_lora_rank" in config else _attention(config, at)
        found |= _feed_forward(config, layer)
    if config.get("num_nextn_predict_layers"):
        found |= _prediction(config, f"model.layers.{config['num_hidden_layers']}")
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocabulary, hidden)
    return _scaled(found) if "quantization_config" in config else found


def _feed_forward(config: Config, layer: int) -> Shapes:
    at, hidden = f"model.layers.{layer}", config["hidden_size"]
    if "num_local_experts" in config:
        return _stacked_experts(config, f"{at}.mlp")
    return _experts(config, at) if _sparse(config, layer) else _mlp(f"{at}.mlp", hidden, config["intermediate_size"])


def _stacked_experts(config: Config, at: str) -> Shapes:
    """gpt-oss keeps all experts of a layer in one tensor, each transposed, and gives everything a bias."""
    hidden, inner, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    return {
        f"{at}.router.weight": (count, hidden),
        f"{at}.router.bias": (count,),
        f"{at}.experts.gate_up_proj": (count, hidden, 2 * inner),
        f"{at}.experts.gate_up_proj_bias": (count, 2 * inner),
        f"{at}.experts.down_proj": (count, inner, hidden),
        f"{at}.experts.down_proj_bias": (count, hidden),
    }


def _prediction(config: Config, at: str) -> Shapes:
    """The layer that predicts a token more, which is the whole of a draft model."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    found: Shapes = {f"{at}.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    found |= {f"{at}.eh_proj.weight": (hidden, 2 * hidden)}
    found |= {f"{at}.{name}.weight": (vocabulary, hidden) for name in ("embed_tokens", "shared_head.head")}
    found |= {f"{at}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    return found | _latent(config, at) | _experts(config, at)


def _scaled(shapes: Shapes) -> Shapes:
    """Linear weights by blocks of 128 x 128, each with a scale."""
    found: Shapes = {}
    for name, shape in shapes.items():
        found[name] = shape
        if name.endswith("_proj.weight"):
            found[f"{name}_scale_inv"] = (-(-shape[0] // 128), -(-shape[1] // 128))
    return found


def _sparse(config: Config, layer: int) -> bool:
    return "num_experts_per_tok" in config and layer >= config.get("first_k_dense_replace", 0)


def _mlp(at: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{at}.gate_proj.weight": (inner, hidden),
        f"{at}.up_proj.weight": (inner, hidden),
        f"{at}.down_proj.weight": (hidden, inner),
    }


def _experts(config: Config, at: str) -> Shapes:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    count = config.get("num_experts", config.get("n_routed_experts"))
    found: Shapes = {f"{at}.mlp.gate.weight": (count, hidden)}
    if "n_routed_experts" in config:
        found[f"{at}.mlp.gate.e_score_correction_bias"] = (count,)
        found |= _mlp(f"{at}.mlp.shared_experts", hidden, inner * config["n_shared_experts"])
    for expert in range(count):
        found |= _mlp(f"{at}.mlp.experts.{expert}", hidden, inner)
    return found


def _attention(config: Config, at: str) -> Shapes:
    hidden, head = config["hidden_size"], config["head_dim"]
    rows = {"q": config["num_attention_heads"] * head, "k": config["num_key_value_heads"] * head}
    rows["v"] = rows["k"]
    found: Shapes = {f"{at}.self_attn.{part}_proj.weight": (size, hidden) for part, size in rows.items()}
    if config["model_type"] == "qwen2" or config.get("attention_bias"):
        found |= {f"{at}.self_attn.{part}_proj.bias": (size,) for part, size in rows.items()}
    if config["model_type"] in ("qwen3", "qwen3_moe") or config.get("use_qk_norm"):
        found |= {f"{at}.self_attn.{part}_norm.weight": (head,) for part in ("q", "k")}
    found[f"{at}.self_attn.o_proj.weight"] = (hidden, rows["q"])
    if config["model_type"] == "gpt_oss":
        found |= {f"{at}.self_attn.o_proj.bias": (hidden,), f"{at}.self_attn.sinks": (config["num_attention_heads"],)}
    return found


def _latent(config: Config, at: str) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    query, latent, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    return {
        f"{at}.self_attn.q_a_proj.weight": (query, hidden),
        f"{at}.self_attn.q_a_layernorm.weight": (query,),
        f"{at}.self_attn.q_b_proj.weight": (heads * (nope + rope), query),
        f"{at}.self_attn.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        f"{at}.self_attn.kv_a_layernorm.weight": (latent,),
        f"{at}.self_attn.kv_b_proj.weight": (heads * (nope + value), latent),
        f"{at}.self_attn.o_proj.weight": (hidden, heads * value),
    }


def dtype_of(name: str, config: Config) -> str:
    """As checkpoints store it."""
    if name.endswith(("e_score_correction_bias", "_scale_inv")):
        return "float32"
    return "float8_e4m3fn" if "quantization_config" in config and name.endswith("_proj.weight") else "bfloat16"


def build(config: Config, folder: str, *, tp: int, ep: int, rank: int, places: list[list[int]] | None = None) -> Any:
    """The model of one rank, with the weights of SGLang's ``dummy`` format."""
    import torch.distributed as dist
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.device_communicators.shm_broadcast import MessageQueue
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader import get_model
    from sglang.srt.server_args import ServerArgs
    from torch.testing._internal.distributed.fake_pg import FakeStore

    Path(folder, "config.json").write_text(json.dumps(config))
    placed: dict[str, Any] = {}
    if places:
        placed["ep_num_redundant_experts"] = len(places[0]) - config["num_experts"]
        placed["init_expert_location"] = json.dumps({"physical_to_logical_map": places})
    arguments = ServerArgs(
        model_path=folder, device="cpu", tp_size=tp, ep_size=ep, load_format="dummy",
        attention_backend="triton" if config["model_type"] == "gpt_oss" else "torch_native",
        disable_custom_all_reduce=True, skip_tokenizer_init=True, **placed,
    )  # fmt: skip
    older = _publish(arguments, rank)
    if "quantization_config" in config:
        _leave_weights_as_they_are()
    new_group = dist.new_group
    dist.new_group = lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "fake"})
    MessageQueue.create_from_process_group = staticmethod(lambda *_args, **_kwargs: None)
    parallel_state._ENABLE_CUSTOM_ALL_REDUCE = False
    dist.init_process_group(backend="fake", store=FakeStore(), rank=rank, world_size=tp)
    parallel_state.init_distributed_environment(world_size=tp, rank=rank, local_rank=rank, backend="fake")
    model_config = ModelConfig.from_server_args(arguments)
    if older:
        parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep, backend="fake")
        initialize_dp_attention(arguments, model_config)
        initialize_moe_config(arguments)
    else:
        parallel_state.initialize_model_parallel(backend="fake")
        initialize_dp_attention(arguments)
        initialize_moe_config()
    if places:
        _place_experts(arguments, model_config, rank, older=older)
    return get_model(
        model_config=model_config,
        load_config=LoadConfig(load_format="dummy"),
        device_config=DeviceConfig("cpu"),
    )


def _leave_weights_as_they_are() -> None:
    """As their loaders see them, without what kernels make of them afterwards, which is not there on a CPU.

    FP8 in blocks stays so on GPUs, too; INT4 is repacked for Marlin, and SGLang asks which GPU it would be for.
    """
    import torch
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors

    torch.cuda.get_device_capability = lambda *_arguments: (9, 0)  # type: ignore[assignment]
    methods = (compressed_tensors.CompressedTensorsLinearMethod, compressed_tensors.CompressedTensorsFusedMoEMethod)
    for method in (fp8.Fp8LinearMethod, fp8.Fp8MoEMethod, *methods):
        method.process_weights_after_loading = lambda *_arguments: None


def _place_experts(arguments: Any, model_config: Any, rank: int, *, older: bool) -> None:
    """As the model runner of each worker does it before it loads."""
    from sglang.srt.eplb import expert_location

    given = {"server_args": arguments} if older else {}
    expert_location.set_global_expert_location_metadata(
        expert_location.compute_initial_expert_location_metadata(**given, model_config=model_config, moe_ep_rank=rank)
    )


def _publish(arguments: Any, rank: int) -> bool:
    """Make the settings known in this process; whether this SGLang is one that takes the ranks separately (0.5.17)."""
    from sglang.srt import runtime_context

    if hasattr(runtime_context, "SpawnRanks"):
        runtime_context.publish(arguments, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=rank))
        return False
    runtime_context.publish(arguments, role="scheduler")
    return True


def case(name: str) -> dict[str, object]:
    """``qwen3-moe:tp2:ep2:rank1``: record, replay, compare."""
    import torch

    from weightbus.dataplane.tensors.manifest import TensorSpec
    from weightbus.engine_agent.worker.load_tracer import trace_load
    from weightbus.engine_agent.worker.model_tensors import ModelTensors

    kind, tp, ep, rank = name.split(":")
    config = CONFIGS[kind]
    with tempfile.TemporaryDirectory() as folder:
        places = PLACES.get(kind)
        model = build(config, folder, tp=int(tp[2:]), ep=int(ep[2:]), rank=int(rank[4:]), places=places)
    specs = [TensorSpec(each, dtype_of(each, config), shape) for each, shape in shapes(config).items()]

    def weights(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return {spec.name: torch.randn(spec.shape).to(getattr(torch, spec.dtype)) for spec in specs}

    model.load_weights(iter(weights(0).items()))
    live = ModelTensors(model)
    fixed = {target.name for target in live.targets if not target.parameter and "w_" not in target.name}

    def clear() -> None:
        for target, tensor in zip(live.targets, live.tensors, strict=True):
            if target.name not in fixed:
                tensor.zero_()

    def state() -> dict[str, torch.Tensor]:
        held = ModelTensors(model)
        return {target.name: tensor.clone() for target, tensor in zip(held.targets, held.tensors, strict=True)}

    clear()
    before = state()
    began = time.perf_counter()
    recording = trace_load(model, model.load_weights, specs, rank=int(rank[4:]))
    seconds = time.perf_counter() - began
    untouched = equal(before, state())
    fresh = weights(1)
    replay(recording, fresh, model)
    replayed = state()
    clear()
    model.load_weights(iter(fresh.items()))
    oracle = state()
    return {
        "case": name,
        "untouched": untouched,
        "differs": differing(replayed, oracle),
        "copies": len(recording.copies),
        "targets": sorted({recording.targets[index].name for index in recording.copies.storage.tolist()}),
        "loaded": {specs[each.tensor].name: f"{each.cause}: {each.detail}" for each in recording.loaded},
        "unread": [specs[index].name for index in recording.unread],
        "dropped": [specs[index].name for index in recording.dropped],
        "unwritten": [f"{recording.targets[patch.target].name}{patch.box.start}" for patch in recording.unwritten],
        "rewritten": [recording.targets[patch.target].name for patch in recording.rewritten],
        "constants": [recording.targets[each.target].name for each in recording.constants],
        "decoded": type(recording).decode(recording.encode(), specs).digest() == recording.digest(),
        "seconds": seconds,
    }


def replay(recording: Any, tensors: Any, model: Any) -> None:
    """The slowest correct replay: piece by piece, with torch."""
    import torch

    from weightbus.engine_agent.worker.model_tensors import ModelTensors

    live = ModelTensors(model).tensors
    for row in range(len(recording.copies)):
        piece = recording.copies.at(row)
        cut = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
        target = live[piece.view.storage]
        view = torch.as_strided(
            target, piece.box.shape, piece.view.strides, target.storage_offset() + piece.view.offset
        )
        view.copy_(tensors[piece.tensor][cut])
    for each in recording.constants:
        cut = tuple(slice(a, b) for a, b in zip(each.box.start, each.box.stop, strict=True))
        live[each.target][cut].fill_(each.value)
    names = [recording.tensors[each.tensor].name for each in recording.loaded]
    if names:
        model.load_weights(iter([(each, tensors[each].clone()) for each in names]))


def equal(one: Any, other: Any) -> bool:
    return not differing(one, other)


def differing(one: Any, other: Any) -> list[str]:
    import torch

    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())
    return [
        name
        for name in one
        if not torch.equal(one[name].contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8))
    ]


def main() -> None:
    import sglang.srt.server_args
    import torch

    torch.set_num_threads(1)
    import sglang.srt.model_loader
    import sglang.srt.models.registry  # noqa: F401

    for name in sys.argv[1:]:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            try:
                print(json.dumps(case(name)))  # noqa: T201 - what the caller reads
            except BaseException:  # noqa: BLE001 - the fork must not go on as its parent
                print(json.dumps({"case": name, "error": traceback.format_exc()}))  # noqa: T201
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
