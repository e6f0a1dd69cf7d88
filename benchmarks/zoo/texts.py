"""Small models of text from the Hugging Face library: one function a family, from token ids to logits over them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

WIDTH = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 128}
LONG = {**WIDTH, "max_position_embeddings": 64}
GROUPED = {**LONG, "num_key_value_heads": 2}
SHORT = {"n_layer": 4, "n_embd": 32, "n_head": 4, "vocab_size": 128}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
LATENT = {
    **LONG, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_nope_head_dim": 8, "first_k_dense_replace": 1,
}
STATES = {"num_hidden_layers": 4, "hidden_size": 32, "vocab_size": 128, "state_size": 8}

CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("Bamba", {**LONG, "mamba_d_state": 8, "mamba_n_heads": 4}),
    "bloom": ("Bloom", {"n_layer": 4, "hidden_size": 32, "n_head": 4, "vocab_size": 128}),
    "codegen": ("CodeGen", {**SHORT, "n_positions": 64, "rotary_dim": 4}),
    "cohere": ("Cohere", GROUPED),
    "deepseek_v2": ("DeepseekV2", LATENT),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "falcon": ("Falcon", {**WIDTH, "alibi": False, "new_decoder_architecture": False}),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3Text", {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "glm4": ("Glm4", {**GROUPED, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 0}),
    "gpt2": ("GPT2", {**SHORT, "n_positions": 64}),
    "gpt_j": ("GPTJ", {**SHORT, "n_positions": 64, "rotary_dim": 4}),
    "gpt_neo": ("GPTNeo", {
        "num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 128, "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 2]],
    }),
    "gpt_neox": ("GPTNeoX", LONG),
    "gpt_oss": ("GptOss", {**EXPERTS, "num_local_experts": 4, "head_dim": 8}),
    "granite": ("Granite", GROUPED),
    "llama": ("Llama", GROUPED),
    "mamba": ("Mamba", STATES),
    "mamba2": ("Mamba2", {**STATES, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16}),
    "mistral": ("Mistral", GROUPED),
    "mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 4}),
    "mpt": ("Mpt", {"n_layers": 4, "d_model": 32, "n_heads": 4, "max_seq_len": 64, "vocab_size": 128}),
    "nemotron": ("Nemotron", {**GROUPED, "head_dim": 8}),
    "olmo2": ("Olmo2", GROUPED),
    "olmoe": ("Olmoe", {**EXPERTS, "num_experts": 4}),
    "opt": ("OPT", {
        "num_hidden_layers": 4, "hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 4, "max_position_embeddings": 64,
        "word_embed_proj_dim": 32, "vocab_size": 128,
    }),
    "persimmon": ("Persimmon", LONG),
    "phi": ("Phi", LONG),
    "phi3": ("Phi3", {**GROUPED, "pad_token_id": 0}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 8}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 8}),
    "recurrent_gemma": ("RecurrentGemma", {**LONG, "lru_width": 32}),
    "rwkv": ("Rwkv", {"num_hidden_layers": 4, "hidden_size": 32, "vocab_size": 128, "context_length": 64}),
    "smollm3": ("SmolLM3", {**GROUPED, "pad_token_id": 0}),
    "stablelm": ("StableLm", GROUPED),
    "starcoder2": ("Starcoder2", GROUPED),
    "xlnet": ("XLNet", {"n_layer": 4, "d_model": 32, "n_head": 4, "d_inner": 64, "vocab_size": 128}),
}
MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("Albert", {**LONG, "embedding_size": 16}),
    "bert": ("Bert", LONG),
    "deberta_v2": ("DebertaV2", LONG),
    "electra": ("Electra", {**LONG, "embedding_size": 32}),
    "roberta": ("Roberta", {**LONG, "max_position_embeddings": 128}),
}
PAIRED: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("Bart", {
        "vocab_size": 128, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    }),
    "t5": ("T5", {
        "vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0,
    }),
}
NAMES = (*CAUSAL, *MASKED, *PAIRED)


class Logits(nn.Module):
    """A library's model, for one input."""

    def __init__(self, model: nn.Module, paired: bool) -> None:
        super().__init__()
        self.model, self.paired = model, paired

    def forward(self, input_ids: Tensor) -> Tensor:
        extra = {"decoder_input_ids": input_ids, "use_cache": False} if self.paired else {}
        return self.model(input_ids=input_ids, **extra).logits


def make(name: str) -> nn.Module:
    """One of :data:`NAMES`, with initial weights."""
    kind, values = {**CAUSAL, **MASKED, **PAIRED}[name]
    config = getattr(transformers, f"{kind}Config")(**values)
    config.use_cache = False
    auto = transformers.AutoModelForCausalLM if name in CAUSAL else (
        transformers.AutoModelForMaskedLM if name in MASKED else transformers.AutoModelForSeq2SeqLM
    )
    return Logits(auto.from_config(config), name in PAIRED)


def example_inputs(batch: int, seq: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 128, (batch, seq)), "labels": torch.randint(0, 128, (batch, seq))}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())
