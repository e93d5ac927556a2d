"""Configurations of attention layers from those of `transformers` and from published files."""

from __future__ import annotations

import json
import math
import types

import numpy as np
import pytest
from support.published_configs import COMPRESSED, CONFIGS, GROUPED, ROPE, SIZES

from jax_dsa import nn

REQUIRED = {
    "deepseek_v32": set(SIZES) - {"rms_norm_eps"},
    "glm_moe_dsa": set(SIZES) - {"rms_norm_eps"},
    "glm5_next": {*SIZES, "index_kpool"},
    "hy_v4": set(SIZES),
    "mistral_large4": set(SIZES) - {"q_lora_rank"},
    "deepseek_v4": set(COMPRESSED),
    "minimax_m3_vl": set(GROUPED) | {"index_n_heads", "index_topk_blocks"},
    "qwen4_exp": set(GROUPED),
}
FULL, SHARED = "full", "shared"


@pytest.mark.parametrize(
    "kind", ["deepseek_v32", "glm5_next", "deepseek_v4", "minimax_m3_vl", "qwen4_exp"]
)
def test_published_configurations_equal_those_of_transformers(kind):
    want, got = nn.from_hf(CONFIGS[kind]), nn.from_hf(CONFIGS[f"{kind} as published"])
    assert got == want
    assert nn.from_hf(types.SimpleNamespace(to_dict=lambda: CONFIGS[kind])) == want


def test_yarn_as_published():
    config = nn.from_hf(CONFIGS["deepseek_v32 as published"])[7].config
    assert config.rope_factor == 1
    np.testing.assert_allclose(config.scale, 20**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    want = nn.yarn_frequencies(8, base=1e4, factor=40, original_length=4096)
    np.testing.assert_allclose(config.rope_frequencies, want)
    window, compressed = (x.config for x in nn.from_hf(CONFIGS["deepseek_v4 as published"])[:2])
    np.testing.assert_allclose(window.rope_frequencies, 1e4 ** -(np.arange(4) / 4))
    want = nn.yarn_frequencies(8, base=1.6e5, factor=16, original_length=65536)
    np.testing.assert_allclose(compressed.rope_frequencies, want)
    assert compressed.rope_factor == 1


@pytest.mark.parametrize("kind", CONFIGS)
def test_configurations_from_files(kind, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS[kind]))
    for path in (tmp_path, file, str(tmp_path)):
        assert nn.from_hf(path) == nn.from_hf(CONFIGS[kind])


def without(config, field):
    """Returns a configuration, or its `text_config`, without a field."""
    if "text_config" in config:
        return {**config, "text_config": without(config["text_config"], field)}
    return {name: value for name, value in config.items() if name != field}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_missing_field_is_named(kind, tmp_path):
    config = CONFIGS[kind].get("text_config", CONFIGS[kind])
    names = {"model_type", *(REQUIRED[kind.removesuffix(" as published")])} & set(config)
    if "text_config" in CONFIGS[kind]:
        names.discard("model_type")  # The outer one tells it.
    names |= {"rope_theta"} & set(config)
    for field in names:
        config = without(CONFIGS[kind], field)
        where = "'text_config' in argument 'config'" if "text_config" in config else "argument"
        with pytest.raises(KeyError, match=rf"from_hf: .*{where}.* lacks the field '{field}'"):
            nn.from_hf(config)
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(KeyError, match=rf"{tmp_path / 'config.json'} lacks the field"):
            nn.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("kind", "parts", "field"),
    [
        ("deepseek_v32", ["rope_parameters"], "factor"),
        ("deepseek_v32 as published", ["rope_scaling"], "original_max_position_embeddings"),
        ("deepseek_v4", ["rope_parameters", "main"], "rope_theta"),
        ("deepseek_v4 as published", [], "compress_rope_theta"),
        ("deepseek_v4 as published", [], "qk_rope_head_dim"),
        ("deepseek_v4 as published", [], "compress_ratios"),
        ("glm_moe_dsa", [], "rope_parameters"),
    ],
)
def test_a_missing_field_of_the_rotary_embedding_is_named(kind, parts, field):
    config = json.loads(json.dumps(CONFIGS[kind]))
    inner = config
    for part in parts:
        inner = inner[part]
    del inner[field]
    name = "rope_theta" if field == "rope_parameters" else field
    with pytest.raises(KeyError, match=f"lacks the field '{name}'"):
        nn.from_hf(config)


def test_broken_files_of_configurations(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        nn.from_hf(tmp_path)
    file = tmp_path / "config.json"
    for text, message in (
        ("", r"the file of 0 bytes in {} is not JSON"),
        ('{"model_type"', r"the file of 13 bytes in {} is not JSON"),
        ("[1]", r"the file in {} is a JSON list, expected an object"),
        ("version https://git-lfs.github.com/spec/v1\noid", r"{} is a Git LFS pointer, expected"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message.format(file)):
            nn.from_hf(tmp_path)


def derived(frequency, offset):
    return [SHARED if max(i - offset + 1, 0) % frequency else FULL for i in range(8)]


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({}, [FULL] * 8),
        ({"index_topk_freq": 1}, [FULL] * 8),
        ({"index_topk_freq": 0}, [FULL] * 8),
        ({"index_topk_freq": 4}, derived(4, 2)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, derived(4, 3)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, None),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, derived(3, 1)),
        ({"index_topk_pattern": "FFSSFSSS"}, [*[FULL] * 2, SHARED, SHARED, FULL, *[SHARED] * 3]),
        ({"index_topk_pattern": "FSSSFSSSF"}, [FULL, *[SHARED] * 3] * 2),
        ({"index_topk_pattern": [FULL] * 7 + [SHARED]}, [FULL] * 7 + [SHARED]),
        ({"index_topk_pattern": "FSFSFSFS", "index_topk_freq": 4}, [FULL, SHARED] * 4),
        ({"indexer_types": derived(4, 3), "index_topk_pattern": "F" * 8}, derived(4, 3)),
        ({"indexer_types": None, "index_topk_pattern": None, "index_topk_freq": 2}, derived(2, 2)),
    ],
)
@pytest.mark.parametrize("kind", ["glm_moe_dsa", "deepseek_v32"])
def test_indexer_types(kind, fields, want):
    config = {**CONFIGS[kind], **fields}
    if want is None:  # The first layer would have no selection.
        with pytest.raises(ValueError, match=r"index_topk_freq\[0\] in .* is 'shared', expected"):
            nn.from_hf(config)
        return
    assert [x.indexer_type for x in nn.from_hf(config)] == want


def test_every_fourth_layer_of_hy4_has_an_indexer_by_default():
    types = [FULL, *[FULL, SHARED, SHARED, SHARED] * 2][:8]
    assert [x.indexer_type for x in nn.from_hf(CONFIGS["hy_v4"])] == types


def test_layers_of_minimax():
    """0 in `sparse_attention_freq` marks a dense layer. Without it, all layers are dense."""
    config = CONFIGS["minimax_m3_vl as published"]
    assert [x.config.indexer for x in nn.from_hf(config)] == [None, "max", "max", "max"]
    sparse = config["text_config"]["sparse_attention_config"]
    for change in ({"use_sparse_attention": False}, {"sparse_attention_freq": None}):
        text = config["text_config"] | {"sparse_attention_config": sparse | change}
        assert {x.config.indexer for x in nn.from_hf({**config, "text_config": text})} == {None}
    forced = sparse | {"sparse_init_block": 1, "sparse_local_block": 0}
    text = config["text_config"] | {"sparse_attention_config": forced}
    layer = nn.from_hf({**config, "text_config": text})[1].config
    assert (layer.sink_blocks, layer.local_blocks, layer.rope_dim) == (1, 0, 8)


def test_layers_of_qwen():
    """Its layers of linear attention have no configuration."""
    config = CONFIGS["qwen4_exp"]
    layers = nn.from_hf(config)
    assert [x.config is None for x in layers] == [True, True, True, False]
    assert (layers[3].config.top_k, layers[3].config.block_size, layers[3].config.gate) == (
        8,
        4,
        True,
    )
    names = ["full_attention", "qwen_sparse_attention", "indexed_attention", "linear_attention"]
    layers = nn.from_hf({**config, "layer_types": names})
    assert [x.config for x in layers] == [layers[0].config] * 3 + [None]
    dense = {name: x for name, x in config.items() if not name.startswith("indexer_")}
    assert nn.from_hf(dense)[3].config.indexer is None
    with pytest.raises(KeyError, match=r"lacks the fields \['indexer_budget'\] beside"):
        nn.from_hf(without(config, "indexer_budget"))


def test_every_fourth_layer_of_mistral_has_no_position_by_default():
    config = without(without(CONFIGS["mistral_large4"], "no_rope_layers"), "kv_source_layers")
    config["text_config"] |= {"num_hidden_layers": 8, "indexer_types": None}
    assert [x.config.rope_dim for x in nn.from_hf(config)] == [8, 8, 8, 0] * 2
    assert [x.kv_source for x in nn.from_hf(config)] == list(range(8))
    config["text_config"]["no_rope_layer_interval"] = 2
    assert [x.config.rope_dim for x in nn.from_hf(config)] == [8, 0] * 4


def test_only_the_sparse_layers_of_glm5_next_have_a_configuration():
    layers = nn.from_hf(CONFIGS["glm5_next"])
    assert [i for i, layer in enumerate(layers) if layer.config is not None] == [3, 7]
    config = layers[7].config
    assert (config.rope_dim, config.index_pool, config.index_tail) == (0, 4, True)
    assert config.scale == SIZES["qk_nope_head_dim"] ** -0.5
    plain = without(without(CONFIGS["glm5_next"], "layer_types"), "indexer_types")
    assert nn.from_hf(plain) == layers


def test_a_selection_is_shared_by_adjacent_layers_of_glm5_next():
    plain = CONFIGS["glm5_next as published"]
    kinds = ["indexed_attention", "full_attention", "linear_attention", *["indexed_attention"] * 5]
    types = [FULL, SHARED, SHARED, FULL, SHARED, SHARED, FULL, SHARED]
    layers = nn.from_hf({**plain, "layer_types": kinds, "indexer_types": types})
    assert [x.indexer_type for x in layers if x.config] == [
        t for i, t in enumerate(types) if i != 2
    ]
    message = "indexer_types in .* makes layer 3 'shared', expected 'full' after layer 2, which"
    with pytest.raises(ValueError, match=message):
        nn.from_hf({**plain, "layer_types": kinds, "indexer_types": [FULL, *[SHARED] * 7]})
    with pytest.raises(ValueError, match=r"index_topk_freq in .* makes layer 3 'shared'"):
        nn.from_hf({**plain, "index_topk_freq": 8})


def test_fields_of_glm5_next_with_a_wrong_value():
    plain = CONFIGS["glm5_next as published"]
    for fields, message in (
        ({"layer_types": ["x"] * 8}, r"layer_types\[0\] in .* is 'x', expected one of"),
        ({"qk_rope_head_dim": 8}, r"qk_rope_head_dim in .* is 8, expected one of \(0,\)"),
        ({"index_kpool": 3}, "AttentionConfig: index_pool is 3, expected a divisor of top_k = 8"),
    ):
        with pytest.raises(ValueError, match=f"from_hf: .*{message}"):
            nn.from_hf({**plain, **fields})
    with pytest.raises(TypeError, match=r"from_hf: .* argument 'index_tail' is 1 \(int\), want a"):
        nn.from_hf({**plain, "index_kpool_always_select_tail": 1})
    with pytest.raises(ValueError, match=r"'rope_alpha' has shape \(2,\), expected None, because"):
        nn.from_hf(plain, rope_alpha=(0.1, 0.2))


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("glm_moe_dsa", {"indexer_types": [FULL]}, r"indexer_types in .* is \['full'\], expected"),
        ("glm_moe_dsa", {"indexer_types": [SHARED] * 8}, r"indexer_types\[0\] in .* is 'shared'"),
        ("glm_moe_dsa", {"index_topk_pattern": "FFFXFFFF"}, r"index_topk_pattern\[3\] .* is 'X'"),
        ("glm_moe_dsa", {"index_topk_freq": "4"}, "'index_topk_freq' in .* is '4', expected an"),
        ("glm_moe_dsa", {"num_hidden_layers": 2**70}, "expected an int from 1 to 2147483647"),
        ("glm_moe_dsa", {"qk_rope_head_dim": 2**70}, "'qk_rope_head_dim' in .*, expected an int"),
        ("glm_moe_dsa", {"rope_parameters": {**ROPE, "rope_theta": 10**400}}, "'rope_theta' in "),
        (
            "deepseek_v4 as published",
            {"partial_rotary_factor": 2**70},
            "'partial_rotary_factor' in .*, expected a number above 0 and up to 1",
        ),
        ("glm_moe_dsa", {"num_hidden_layers": 8.5}, "'num_hidden_layers' in .* is 8.5, expected"),
        ("glm_moe_dsa", {"rope_parameters": {"rope_type": "linear"}, "rope_theta": 1e4}, "linear"),
        ("glm_moe_dsa", {"rope_parameters": {**ROPE, "rope_theta": "a"}}, "'rope_theta' in .* 'a'"),
        (
            "glm_moe_dsa",
            {"rope_parameters": {**ROPE, "rope_theta": 1}},
            "is 1, expected .* above 1",
        ),
        ("deepseek_v32", {"kv_source_layers": [1] * 8}, r"kv_source_layers\[0\] in .* is 1, expec"),
        (
            "deepseek_v32",
            {"no_rope_layers": [1]},
            r"no_rope_layers in .* is \[1\], expected a list",
        ),
        ("deepseek_v4", {"layer_types": ["x"] * 4}, r"layer_types\[0\] in .* is 'x', expected one"),
        (
            "deepseek_v4 as published",
            {"compress_ratios": [0, 2, 1, 1]},
            r"compress_ratios\[1\] in .* is 2, expected one of \(0, 4, 128\)",
        ),
        (
            "minimax_m3_vl",
            {"rotary_dim": 16},
            "rotary_dim for 16, rope_parameters.partial_rotary_factor for 8 of 32 elements",
        ),
        (
            "minimax_m3_vl",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor for 16, rope_parameters.partial_rotary_factor for 8 of 32",
        ),
        ("minimax_m3_vl", {"use_gemma_norm": False}, "use_gemma_norm in .* is False, expected one"),
        ("minimax_m3_vl", {"attention_bias": True}, "attention_bias in .* is True, expected one"),
        (
            "minimax_m3_vl",
            {"layer_types": None, "sparse_attention_config": {"use_sparse_attention": "no"}},
            "use_sparse_attention in .* is 'no', expected one of",
        ),
        (
            "minimax_m3_vl",
            {
                "layer_types": None,
                "sparse_attention_config": {"sparse_attention_freq": [0, 2, 1, 1]},
            },
            r"sparse_attention_freq\[1\] in .* is 2, expected one of",
        ),
        (
            "minimax_m3_vl",
            {"layer_types": ["x"] * 4},
            r"layer_types\[0\] in .* is 'x', expected one",
        ),
        (
            "minimax_m3_vl",
            {"sparse_attention_config": {"sparse_score_type": "lse"}},
            "sparse_score_type in .* is 'lse', expected one of",
        ),
        ("qwen4_exp", {"indexer_kv_heads": 2}, "indexer_kv_heads in .* is 2, expected one of"),
        (
            "qwen4_exp",
            {"indexer_budget": 30},
            "'indexer_budget' in .* is 30, .* multiple of .* = 4",
        ),
        ("qwen4_exp", {"attn_output_gate": False}, "attn_output_gate in .* is False, expected one"),
        (
            "qwen4_exp",
            {
                "rope_parameters": CONFIGS["qwen4_exp"]["rope_parameters"]
                | {"mrope_section": [3, 1]}
            },
            "'mrope_sections' is",
        ),
        (
            "qwen4_exp",
            {
                "rope_parameters": {
                    **ROPE,
                    "partial_rotary_factor": 0.25,
                    "mrope_interleaved": False,
                }
            },
            "mrope_interleaved in .* is False, expected one of",
        ),
    ],
)
def test_fields_with_a_wrong_value(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        nn.from_hf({**CONFIGS[kind], **fields})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("deepseek_v32", "index_topk"),
        ("glm_moe_dsa", "q_lora_rank"),
        ("hy_v4", "rms_norm_eps"),
        ("deepseek_v4", "index_topk"),
        ("deepseek_v4", "o_groups"),
        ("deepseek_v4", "rms_norm_eps"),
    ],
)
@pytest.mark.parametrize("value", [0, -1, "8", True])
def test_sizes_are_called_as_in_the_file(kind, name, value, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIGS[kind], name: value}))
    with pytest.raises(ValueError, match=f"from_hf: '{name}' in {file} is {value!r}, expected"):
        nn.from_hf(file)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("glm_moe_dsa", {"index_head_dim": 2}, "AttentionConfig: index_rope_dim is 8, expected at"),
        ("deepseek_v4", {"o_groups": 3}, "CompressedConfig: num_heads is .*, expected a multiple"),
        ("minimax_m3_vl", {"index_n_heads": 1}, "GroupedConfig: argument 'index_heads' is 1, want"),
    ],
)
def test_sizes_that_do_not_fit_name_the_file(kind, fields, message, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIGS[kind], **fields}))
    with pytest.raises(ValueError, match=f"from_hf: no layer has the sizes in {file}: {message}"):
        nn.from_hf(tmp_path)
    with pytest.raises(ValueError, match=r"^from_hf: argument 'dtype' is 'int32', want"):
        nn.from_hf(CONFIGS[kind], dtype="int32")


def test_paths_that_cannot_be_read(tmp_path):
    """The error names the function, the path and what it should be."""
    expected = "expected a dictionary, or the path of a config.json or of its directory"
    for path in (tmp_path, tmp_path / "absent", str(tmp_path / "absent")):
        with pytest.raises(FileNotFoundError, match=f"from_hf: cannot read '{path}.*{expected}"):
            nn.from_hf(path)
    text = json.dumps(CONFIGS["glm_moe_dsa"] | {"note": "x" * 5000})
    with pytest.raises(OSError, match=f"from_hf: cannot .*(?i:name too long).*{expected}") as error:
        nn.from_hf(text)
    assert len(str(error.value)) < 300


def test_unknown_model_type_raises():
    with pytest.raises(ValueError, match="model_type is 'llama', expected one of"):
        nn.from_hf({"model_type": "llama"})


@pytest.mark.parametrize("config", [None, 3, [CONFIGS["hy_v4"]], {"text_config": "x"}])
def test_what_is_no_configuration(config):
    with pytest.raises(TypeError, match=r"from_hf: .* is .*, expected a"):
        nn.from_hf(config)


def test_learnt_frequencies_of_another_length():
    alpha = (0.1, -0.2, 0.0, 0.3)
    plain, learnt = (nn.from_hf(CONFIGS["hy_v4"], rope_alpha=a)[0].config for a in (None, alpha))
    want = np.exp(alpha) * plain.rope_frequencies
    np.testing.assert_allclose(learnt.rope_frequencies, want)
    for wrong in ((0.1,), alpha * 2, (alpha,)):
        with pytest.raises(
            ValueError, match=r"argument 'rope_alpha' has shape .*, expected \(4,\)"
        ):
            nn.from_hf(CONFIGS["hy_v4"], rope_alpha=wrong)
