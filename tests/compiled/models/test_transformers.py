"""Unmodified models of transformers, shard over two ranks and compiled, give what they give on one device, forward and
backward.

Experts that are looped over, and hooks, break the graph inside the loop over the layers.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise import Shard

transformers: Any = pytest.importorskip("transformers", reason="requirements.lock has it")

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "use_cache": False,
    "vocab_size": 32,
}
EXPERTS: dict[str, Any] = {**SIZES, "num_experts_per_tok": 2, "experts_implementation": "eager"}

#: By name of the parameter: the dim that is sharded.
CUTS = {
    **dict.fromkeys(["q_proj.weight", "k_proj.weight", "v_proj.weight", "q_proj.bias", "v_proj.bias"], 0),
    **dict.fromkeys(["gate_proj.weight", "up_proj.weight", "fc1.weight", "fc1.bias", "lm_head.weight", "in_proj.weight"], 0),
    **dict.fromkeys(["q_b_proj.weight", "kv_b_proj.weight", "conv1d.weight", "conv1d.bias", "A_log", "mixer.D"], 0),
    **dict.fromkeys(["dt_proj.weight", "dt_proj.bias", "embed_tokens.weight"], 0),
    **dict.fromkeys(["o_proj.weight", "out_proj.weight", "down_proj.weight", "fc2.weight", "x_proj.weight"], 1),
    "experts.gate_up_proj": 1,
    "experts.down_proj": 2,
}


def tokens(length: int = 6) -> Tensor:
    return torch.randint(0, 32, (2, length))


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**EXPERTS, num_local_experts=4)), {"input_ids": tokens()}


def qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(**EXPERTS, num_experts=4, moe_intermediate_size=8, head_dim=4)
    return transformers.Qwen3MoeForCausalLM(config), {"input_ids": tokens()}


def deepseek_v3() -> Any:
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    config = transformers.DeepseekV3Config(**EXPERTS, **ranks, **experts)
    return transformers.DeepseekV3ForCausalLM(config), {"input_ids": tokens()}


def whisper() -> Any:
    parts = {"layers": 2, "attention_heads": 4, "ffn_dim": 32}
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in parts.items()}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "begin_suppress_tokens": None}
    lengths = {"max_source_positions": 6, "max_target_positions": 16, "num_mel_bins": 8}
    config = transformers.WhisperConfig(d_model=16, vocab_size=32, use_cache=False, **sides, **ids, **lengths)
    model = transformers.WhisperForConditionalGeneration(config)
    return model, {"input_features": torch.randn(2, 8, 12), "decoder_input_ids": tokens(5)}


def mamba() -> Any:
    config = transformers.MambaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        vocab_size=32,
        state_size=4,
        intermediate_size=32,
        time_step_rank=4,
        use_cache=False,
    )
    return transformers.MambaForCausalLM(config), {"input_ids": tokens(4)}


def cut(model: nn.Module, mesh: sw.Mesh) -> None:
    """Put a model's parameters on a mesh of one axis, those of them sharded that CUTS names."""
    names = {p: name for name, p in model.named_parameters()}
    done: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for last, p in [(last, p) for last, p in module._parameters.items() if p is not None]:
            if p not in done:
                dims = [dim for ending, dim in CUTS.items() if names[p].endswith(ending)]
                placements = {"tp": Shard(dims[0])} if dims else {}
                done[p] = nn.Parameter(sw.distribute_tensor(p.detach(), mesh, placements), p.requires_grad)
            module._parameters[last] = done[p]


def break_graphs(model: nn.Module) -> None:
    """Break the graph behind every layer."""
    layers = [layer for several in model.modules() if isinstance(several, nn.ModuleList) for layer in several]
    for layer in layers:
        layer.register_forward_hook(lambda *_: torch._dynamo.graph_break())


def check(make: Callable[[], Any], backend: str, breaks: bool) -> None:
    importlib.import_module("torch._dynamo").reset()
    torch.manual_seed(0)
    dense, given = make()
    for p in dense.parameters():
        nn.init.normal_(p, std=0.3)
    model = copy.deepcopy(dense)
    want = dense(**given).logits
    want.square().mean().backward()
    cut(model, sw.init_mesh(tp=2))
    if breaks:
        break_graphs(model)
    got = torch.compile(model, backend=backend)(**given).logits
    got.square().mean().backward()
    torch.testing.assert_close(got.full_tensor(), want, atol=1e-4, rtol=1e-4)
    for (name, p), dense_p in zip(model.named_parameters(), dense.named_parameters(), strict=True):
        wanted = dense_p[1].grad
        found = None if p.grad is None else p.grad.full_tensor()
        assert (found is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}")


pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, and of Dynamo on its code


@pytest.mark.parametrize("make", [mixtral], ids=lambda make: make.__name__)
def test_models_compiled_with_graph_breaks(make: Callable[[], Any]) -> None:
    check(make, "aot_eager", breaks=True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("breaks", [True, False], ids=["breaks", "whole"])
@pytest.mark.parametrize("make", [mixtral, qwen3_moe, deepseek_v3, whisper, mamba], ids=lambda make: make.__name__)
def test_more_models(make: Callable[[], Any], breaks: bool, backend: str) -> None:
    check(make, backend, breaks)
