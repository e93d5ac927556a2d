"""Small configurations of published models, for `nn.from_hf`."""

from __future__ import annotations

SIZES = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "attention_bias": False,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "q_lora_rank": 24,
    "rms_norm_eps": 1e-6,
}
YARN = {
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
ROPE = {"rope_type": "default", "rope_theta": 8e6}
COMPRESSED = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 10,
    "sliding_window": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "rms_norm_eps": 1e-6,
}
GROUPED = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
}
# Every model type, in the form of `transformers` and, where it differs, as published.
CONFIGS = {
    "deepseek_v32": {
        **SIZES,
        "model_type": "deepseek_v32",
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000, **YARN},
    },
    "deepseek_v32 as published": {
        **SIZES,
        "model_type": "deepseek_v32",
        "rope_theta": 10000,
        "rope_scaling": {"type": "yarn", **YARN},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "glm_moe_dsa": {**SIZES, "model_type": "glm_moe_dsa", "rope_parameters": ROPE},
    "glm5_next": {
        "model_type": "glm5_next",
        "text_config": {
            **SIZES,
            "model_type": "glm5_next_text",
            "qk_rope_head_dim": 0,
            "index_kpool": 4,
            "index_kpool_always_select_tail": True,
            "layer_types": [*["linear_attention"] * 3, "indexed_attention"] * 2,
            "indexer_types": ["full"] * 8,
        },
    },
    # Text models have no inner configuration, and older ones another name for sparse layers.
    "glm5_next as published": {
        **SIZES,
        "model_type": "glm5_next",
        "qk_rope_head_dim": 0,
        "index_kpool": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    },
    "hy_v4": {**SIZES, "model_type": "hy_v4", "rope_parameters": ROPE},
    "mistral_large4": {
        "model_type": "mistral_large4",
        "text_config": {
            **SIZES,
            "model_type": "mistral_large4_text",
            "num_hidden_layers": 4,
            "indexer_types": ["full", "full", "full", "shared"],
            "no_rope_layers": [1, 0, 1, 0],
            "kv_source_layers": [0, 1, 0, 1],
            "rope_parameters": {**ROPE, "rope_type": "yarn", **YARN, "attention_factor": 1.0},
        },
    },
    "deepseek_v4": {
        **COMPRESSED,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 128,
        },
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
            "compress": {
                "rope_type": "yarn",
                "rope_theta": 1.6e5,
                "partial_rotary_factor": 0.25,
                "attention_factor": 1.0,
                "factor": 16,
                "original_max_position_embeddings": 65536,
            },
        },
    },
    # A last entry belongs to the prediction of a second token.
    "deepseek_v4 as published": {
        **COMPRESSED,
        "compress_ratios": [0, 4, 128, 4, 0],
        "qk_rope_head_dim": 8,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    },
    "minimax_m3_vl": {
        **GROUPED,
        "model_type": "minimax_m3_vl_text",
        "head_dim": 32,
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 16,
        "index_topk_blocks": 4,
        "index_local_blocks": 1,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
    },
    "minimax_m3_vl as published": {
        "model_type": "minimax_m3_vl",
        "quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        "text_config": {
            **GROUPED,
            "head_dim": 32,
            "rope_theta": 8e6,
            "rotary_dim": 8,
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 16,
                "sparse_block_size": 16,
                "sparse_topk_blocks": 4,
                "sparse_init_block": 0,
                "sparse_local_block": 1,
                "sparse_score_type": "max",
                "sparse_attention_freq": [0, 1, 1, 1],
            },
        },
    },
    "qwen4_exp": {
        **GROUPED,
        "model_type": "qwen4_exp_text",
        "head_dim": 32,
        "layer_types": [*["linear_attention"] * 3, "indexed_attention"],
        "attention_bias": False,
        "indexer_n_heads": 3,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
        "rope_parameters": {
            **ROPE,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    "qwen4_exp as published": {
        "model_type": "qwen4_exp",
        "text_config": {
            **GROUPED,
            "head_dim": 32,
            "full_attention_interval": 4,
            "indexer_n_heads": 3,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 32,
            "indexer_compress_ratio": 4,
            "partial_rotary_factor": 0.25,
            "rope_theta": 8e6,
            "rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]},
        },
    },
}
