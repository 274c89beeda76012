"""Tiny random checkpoints of many architectures, for the map sweep. No tokenizer, no download."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_BASE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 517,  # not divisible: the embedding is padded
    "max_position_embeddings": 512,
}
_NO_GQA = {key: value for key, value in _BASE.items() if key != "num_key_value_heads"}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_MOE = _EXPERTS | {"moe_intermediate_size": 64}
_HEAD = {"head_dim": 32}
_GPT2 = {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 517, "n_positions": 512}
_OPT = {
    "hidden_size": 128,
    "ffn_dim": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 517,
    "max_position_embeddings": 512,
    "word_embed_proj_dim": 128,
}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
}
_NEXT = {
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
_GPTOSS = {
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_tied": ("Llama", _BASE | {"tie_word_embeddings": True}),
    "llama_mqa": (
        "Llama",
        _BASE | {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("Qwen2", _BASE),
    "qwen3": ("Qwen3", _BASE | _HEAD),
    "qwen3moe": ("Qwen3Moe", _BASE | _HEAD | _MOE),
    "qwen3moe_padded": ("Qwen3Moe", _BASE | _HEAD | _MOE | {"moe_intermediate_size": 96}),
    "mixtral": ("Mixtral", _BASE | {"num_local_experts": 4}),
    "olmoe": ("Olmoe", _BASE | _EXPERTS | {"intermediate_size": 64}),
    "gemma2": ("Gemma2", _BASE | _HEAD),
    "gemma3": ("Gemma3", _BASE | _HEAD),
    "phi3": ("Phi3", _BASE | {"pad_token_id": 0}),
    "phi": ("Phi", _BASE),
    "glm4": ("Glm4", _BASE | _HEAD | {"pad_token_id": 0}),
    "granite": ("Granite", _BASE),
    "olmo2": ("Olmo2", _BASE),
    "stablelm": ("StableLm", _BASE),
    "smollm3": ("SmolLM3", _BASE | {"pad_token_id": 0}),
    "gptneox": ("GPTNeoX", _NO_GQA),
    "gpt2": ("GPT2", _GPT2),
    "opt": ("OPT", _OPT),
    "gptoss": ("GptOss", _BASE | _HEAD | _GPTOSS),
    "deepseek_v2": ("DeepseekV2", _BASE | _DEEPSEEK),
    "mamba": (
        "Mamba",
        {"hidden_size": 128, "state_size": 16, "num_hidden_layers": 2, "vocab_size": 517},
    ),
    "qwen3_next": ("Qwen3Next", _BASE | _HEAD | _MOE | _NEXT),
    "starcoder2": ("Starcoder2", _BASE),
    "cohere": ("Cohere", _BASE),
}
"""Name -> (transformers class stem, configuration)."""

_CONFIG_CLASSES = {"Gemma3": "Gemma3TextConfig"}
_MODEL_CLASSES = {"GPT2": "GPT2LMHeadModel"}

OPAQUE: dict[str, str] = {
    "phi": r"lm_head\.bias",
    "deepseek_v2": r".*\.kv_b_proj\.weight",
    "mamba": r".*\.A_log",
}
"""Architecture -> the only names that may be refused (on a CPU)."""


def make_checkpoint(name: str, folder: Path) -> Path:
    """Write one architecture's random bf16 checkpoint."""
    import transformers

    stem, config = ARCHITECTURES[name]
    config_class = getattr(transformers, _CONFIG_CLASSES.get(stem, f"{stem}Config"))
    model_class = getattr(transformers, _MODEL_CLASSES.get(stem, f"{stem}ForCausalLM"))
    torch.manual_seed(0)
    model = model_class(config_class(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    path = folder / name
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def random_change(
    tensors: Iterator[tuple[str, torch.Tensor]], *, share: float, seed: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(name, indices, values, merged tensor): a delta that touches `share` of every tensor."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors:
        merged = tensor.reshape(-1).clone()
        count = max(1, int(merged.numel() * share))
        indices = torch.randperm(merged.numel(), generator=generator)[:count].sort().values
        noise = 1 + torch.randn(count, generator=generator)
        merged[indices] = (merged[indices].float() * noise).to(merged.dtype)
        yield name, indices, merged[indices], merged.view(tensor.shape)
