from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from llmkit.errors import ModelError
from llmkit_weights.gguf_config import _llama3_divisors
from llmkit_weights.gguf_format import GgufFormat

Tensors = dict[str, torch.Tensor]
WriteGguf = Callable[..., Path]

# Largest error relative to the largest value of a block, by the steps that the type has.
TOLERANCES = {
    "F32": 0.0,
    "F16": 1e-3,
    "BF16": 1e-2,
    "Q8_0": 1e-2,
    "Q4_0": 0.13,
    "Q4_1": 0.08,
    "Q5_0": 0.07,
    "Q5_1": 0.04,
}
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def read(path: Path) -> Tensors:
    reader = GgufFormat()
    assert reader.recognises(path)
    return dict(reader.tensors(path, reader.config(path)))


@pytest.mark.parametrize("kind", TOLERANCES)
def test_types_and_row_order(write_gguf: WriteGguf, tensors: Tensors, kind: str) -> None:
    """B86: q and k rows come back in checkpoint order, each with its own number of heads."""
    path = write_gguf(tensors, quantise=kind)
    found = read(path)
    assert found.keys() == tensors.keys()
    for name, expected in tensors.items():
        matrix_type = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
        assert found[name].dtype == (matrix_type if expected.dim() > 1 else torch.float32)
        torch.testing.assert_close(
            found[name].float(), expected, rtol=0, atol=TOLERANCES[kind] * expected.abs().max().item()
        )
    assert GgufFormat().size_bytes(path) == sum(t.numel() * t.element_size() for t in found.values())


def test_stored_types(write_gguf: WriteGguf, make_tensors: Callable[..., Tensors]) -> None:
    path = write_gguf(make_tensors(head=True), quantise="Q4_0")
    stored = {role: frozenset({"Q4_0"}) for role in ("linear", "lm_head", "embedding")}
    assert GgufFormat().stored_types(path) == stored


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants(write_gguf: WriteGguf, tensors: Tensors, kind: str) -> None:
    """The gguf package cannot write these, so blocks are made up; the sizes leave a last chunk that is not whole."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows, columns = 9, 1030 * block_size
    raw = np.random.default_rng(3).integers(0, 256, (rows, columns // block_size * block_bytes), dtype=np.uint8)
    # Scales are float16 somewhere in each block: without the top exponent bit they are never infinite or NaN.
    raw &= 0xBF
    del tensors["model.layers.0.mlp.up_proj.weight"]

    def metadata(writer: Any) -> None:
        writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])

    found = read(write_gguf(tensors, metadata=metadata))["model.layers.0.mlp.up_proj.weight"]
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert found.shape == (rows, columns)
    assert np.array_equal(found.numpy(), expected)


def test_q8_0_by_hand(write_gguf: WriteGguf, tensors: Tensors) -> None:
    values = torch.arange(-32, 32).repeat(96, 1).float() * 0.5
    values[:, 0] = values[:, 63] = 63.5  # 127 steps of 0.5 in each block of 32, so every value is exact
    tensors["model.layers.0.mlp.gate_proj.weight"] = values
    assert torch.equal(
        read(write_gguf(tensors, quantise="Q8_0"))["model.layers.0.mlp.gate_proj.weight"][:, 0], values[:, 0]
    )


def test_q_and_k_biases_are_reordered_too(write_gguf: WriteGguf, make_tensors: Callable[..., Tensors]) -> None:
    tensors = make_tensors(qkv_bias=True)
    path = write_gguf(tensors)
    found = read(path)
    for name in ("q", "k", "v"):
        key = f"model.layers.0.self_attn.{name}_proj.bias"
        assert torch.equal(found[key], tensors[key])
    assert GgufFormat().config(path)["attention_bias"] is True


@pytest.mark.parametrize(
    ("architecture", "options"), [("qwen2", {"qkv_bias": True}), ("qwen3", {"qk_norm": True, "head": True})]
)
def test_qwen_rows_are_left_alone(
    write_gguf: WriteGguf, make_tensors: Callable[..., Tensors], architecture: str, options: dict[str, bool]
) -> None:
    tensors = make_tensors(**options)
    path = write_gguf(tensors, architecture=architecture)
    found = read(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    config = GgufFormat().config(path)
    assert config["architectures"] == [f"{architecture.capitalize()}ForCausalLM"]
    assert config["attention_bias"] is False


def test_config_keys(write_gguf: WriteGguf, tensors: Tensors, config: dict[str, Any]) -> None:
    found = GgufFormat().config(write_gguf(tensors))
    expected = {key: value for key, value in config.items() if key != "rms_norm_eps"}
    assert {key: found[key] for key in expected} == expected
    assert found["rms_norm_eps"] == pytest.approx(1e-5)
    assert found["dtype"] == "float32"
    assert found["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}


def test_a_head_of_its_own(write_gguf: WriteGguf, make_tensors: Callable[..., Tensors]) -> None:
    """B84: without output.weight the embedding is the head, with it it is not."""
    tensors = make_tensors(head=True)
    path = write_gguf(tensors)
    assert GgufFormat().config(path)["tie_word_embeddings"] is False
    assert torch.equal(read(path)["lm_head.weight"], tensors["lm_head.weight"])


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q4_1", None)])
def test_dtype_is_that_of_the_matrices(write_gguf: WriteGguf, tensors: Tensors, kind: str, dtype: str | None) -> None:
    assert GgufFormat().config(write_gguf(tensors, quantise=kind)).get("dtype") == dtype


def test_mistral_is_filed_under_llama(write_gguf: WriteGguf, tensors: Tensors) -> None:
    path = write_gguf(tensors, metadata=lambda writer: writer.add_sliding_window(32))
    config = GgufFormat().config(path)
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 32)


def test_rope_keys(write_gguf: WriteGguf, tensors: Tensors) -> None:
    def metadata(writer: Any) -> None:
        writer.add_rope_freq_base(5e5)
        writer.add_rope_dimension_count(8)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    assert GgufFormat().config(write_gguf(tensors, metadata=metadata))["rope_parameters"] == {
        "rope_theta": 5e5,
        "rope_type": "yarn",
        "factor": 4.0,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 32,
    }


def test_llama3_scaling_is_recovered_from_its_table(write_gguf: WriteGguf, tensors: Tensors) -> None:
    table = np.array(_llama3_divisors(5e5, 128, 8.0, 8192), dtype=np.float32)
    assert (table[0], table[-1]) == (1.0, 8.0)  # the fastest frequency stays, the slowest is divided by the factor

    def metadata(writer: Any) -> None:
        writer.add_rope_freq_base(5e5)
        writer.add_key_length(128)
        writer.add_value_length(128)

    path = write_gguf(tensors, metadata=metadata, raw={"rope_freqs.weight": table})
    assert GgufFormat().config(path)["rope_parameters"] == {
        "rope_theta": 5e5,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    bad = write_gguf(tensors, metadata=metadata, raw={"rope_freqs.weight": table * 1.1}, name="bad.gguf")
    with pytest.raises(ModelError, match="no known rope scaling"):
        GgufFormat().config(bad)


def test_end_tokens_and_sampling_defaults(write_gguf: WriteGguf, tensors: Tensors) -> None:
    def metadata(writer: Any) -> None:
        writer.add_token_list(["a", "<|im_end|>", "<|eot_id|>", "b"])
        writer.add_token_types([1, 3, 1, 1])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(3)
        writer.add_eot_token_id(2)
        writer.add_float32("general.sampling.temp", 0.5)

    found = GgufFormat().generation_config(write_gguf(tensors, metadata=metadata))
    assert found == {"bos_token_id": 0, "eos_token_id": [3, 2, 1], "temperature": 0.5}


def test_unknown_architecture_and_experts(write_gguf: WriteGguf, tensors: Tensors) -> None:
    with pytest.raises(ModelError, match=r"architecture 'mamba'.*known: gemma3, llama, phi3, qwen2, qwen3, qwen3moe"):
        GgufFormat().config(write_gguf(tensors, architecture="mamba"))
    path = write_gguf(tensors, architecture="qwen2", metadata=lambda writer: writer.add_expert_count(8))
    with pytest.raises(ModelError, match="qwen2 with experts"):
        GgufFormat().config(path)


def test_unknown_tensor(write_gguf: WriteGguf, tensors: Tensors) -> None:
    path = write_gguf(tensors, raw={"blk.0.ssm_a.weight": np.zeros((4, 4), dtype=np.float32)})
    with pytest.raises(ModelError, match=r"blk\.0\.ssm_a\.weight, which no known architecture has"):
        read(path)


def test_types_that_cannot_be_dequantised(write_gguf: WriteGguf, tensors: Tensors) -> None:
    path = write_gguf(tensors, raw={"output.weight": np.zeros((4, 64), dtype=np.int32)})
    with pytest.raises(ModelError, match=r"output\.weight .* type I32, which cannot be dequantised"):
        read(path)


def test_a_cut_file_names_the_tensor(write_gguf: WriteGguf, tensors: Tensors) -> None:
    path = write_gguf(tensors)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4096])
    with pytest.raises(ModelError, match=r"is cut short: tensor \S+ ends at byte \d+, the file has \d+"):
        GgufFormat().config(path)
    for size in (8, 30, 100, 400):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=f"is cut short: it ends at byte {size}, inside its header"):
            GgufFormat().config(path)


def test_other_byte_order_version_and_magic(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for content, message in (
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1; supported are 2 and 3"),
        (b"ggml" + bytes(20), "is not a GGUF file"),
        (b"", "cannot be read as a GGUF file"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            GgufFormat().config(path)


def test_split_files(write_gguf: WriteGguf, tensors: Tensors) -> None:
    def metadata(writer: Any) -> None:
        writer.add_uint16("split.count", 3)
        writer.add_uint16("split.no", 1)

    with pytest.raises(ModelError, match=r"part 2 of 3 of a split model.*llama-gguf-split --merge"):
        GgufFormat().config(write_gguf(tensors, metadata=metadata))


def test_a_folder_with_one_file(write_gguf: WriteGguf, tensors: Tensors, tmp_path: Path) -> None:
    write_gguf(tensors)
    assert read(tmp_path).keys() == tensors.keys()
    write_gguf(tensors, name="second.gguf")
    with pytest.raises(ModelError, match=r"should hold one GGUF file, it has second\.gguf, tiny\.gguf"):
        GgufFormat().config(tmp_path)


def test_a_replaced_file_is_read_anew(write_gguf: WriteGguf, make_tensors: Callable[..., Tensors]) -> None:
    reader = GgufFormat()
    assert reader.config(write_gguf(make_tensors()))["tie_word_embeddings"] is True
    assert reader.config(write_gguf(make_tensors(head=True)))["tie_word_embeddings"] is False


@pytest.mark.parametrize("seed", range(4))
def test_any_damage_is_explained(write_gguf: WriteGguf, tensors: Tensors, seed: int) -> None:
    """Bytes of the header changed at random, or the file cut: a ModelError, or a file that is as good as before."""

    def metadata(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(["a", "b", "ab"])
        writer.add_token_types([1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(2)

    path = write_gguf(tensors, metadata=metadata)
    whole = path.read_bytes()
    header = min(tensor.start for tensor in GgufFormat()._file(path).tensors.values())
    random = Random(seed)
    explained = 0
    for _ in range(150):
        damaged = bytearray(whole[: random.randrange(1, header)] if random.random() < 0.2 else whole)
        for _ in range(random.choice([1, 1, 4])):
            damaged[random.randrange(min(header, len(damaged)))] = random.choice(
                [0, 1, 4, 8, 127, 255, random.randrange(256)]
            )
        path.write_bytes(damaged)
        reader = GgufFormat()
        try:
            config = reader.config(path)
            reader.generation_config(path)
            reader.tokenizer(path)
            for _ in reader.tensors(path, config):
                pass
        except ModelError:
            explained += 1
    assert 0 < explained < 150


@pytest.mark.parametrize(("key", "value"), [("llama.attention.head_count", 0), ("llama.embedding_length", "x")])
def test_metadata_of_other_types(write_gguf: WriteGguf, tensors: Tensors, key: str, value: Any) -> None:
    reader = GgufFormat()
    path = write_gguf(tensors)
    reader._file(path)._values[key] = value
    with pytest.raises(ModelError, match="damaged"):
        reader.config(path)


@pytest.mark.model
def test_smollm2_rows_agree_with_an_independent_reader(smollm2_gguf: Path) -> None:
    """B86 on the real file: the row order is undone as transformers undoes it, in every layer."""
    reader = GgufFormat()
    config = reader.config(smollm2_gguf)
    found = dict(reader.tensors(smollm2_gguf, config))
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf).tensors}
    for layer in range(30):
        for short, heads in (("q", 9), ("k", 3)):
            tensor = raw[f"blk.{layer}.attn_{short}.weight"]
            stored = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            expected = stored.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(-1, 576)
            assert np.array_equal(found[f"model.layers.{layer}.self_attn.{short}_proj.weight"].numpy(), expected)
    assert len(found) == 272
    assert config["rope_parameters"]["rope_theta"] == 100_000
    assert reader.generation_config(smollm2_gguf)["eos_token_id"] == 2
