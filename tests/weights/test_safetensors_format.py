from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llmkit.errors import ModelError
from llmkit_weights.safetensors_format import SafetensorsFormat

SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def read(path: Path) -> dict[str, torch.Tensor]:
    reader = SafetensorsFormat()
    assert reader.recognises(path)
    return dict(reader.tensors(path, reader.config(path)))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    content = json.loads((folder / INDEX).read_text())
    change(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


def test_single_file_in_every_type(model_folder: Path) -> None:
    values = torch.arange(6).reshape(2, 3)
    types = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
    expected = {name: values.to(getattr(torch, name)) for name in types}
    expected |= {"bool": values > 2, "scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}
    save_file(expected, model_folder / "model.safetensors")
    assert_equal(read(model_folder), expected)
    assert SafetensorsFormat().size_bytes(model_folder) == sum(t.numel() * t.element_size() for t in expected.values())
    assert_equal(read(model_folder / "model.safetensors"), expected)


def test_tensors_own_their_memory(model_folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, model_folder / "model.safetensors")
    found = read(model_folder)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == len(tensors)
    for tensor in found.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_shards(sharded_folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    assert_equal(read(sharded_folder), tensors)
    (sharded_folder / INDEX).unlink()
    assert_equal(read(sharded_folder), tensors)


def test_a_file_of_another_layout_beside_the_shards_is_left_alone(
    sharded_folder: Path, tensors: dict[str, torch.Tensor]
) -> None:
    save_file({"layers.0.wq": torch.zeros(1)}, sharded_folder / "consolidated.safetensors")
    assert_equal(read(sharded_folder), tensors)


@pytest.mark.parametrize("keep_index", [True, False])
def test_missing_shard(sharded_folder: Path, keep_index: bool) -> None:
    (sharded_folder / SHARD_2).unlink()
    if not keep_index:
        (sharded_folder / INDEX).unlink()
    with pytest.raises(ModelError, match=f"lacks the shard {SHARD_2}"):
        SafetensorsFormat().config(sharded_folder)


def test_missing_shard_names_a_tensor(sharded_folder: Path) -> None:
    (sharded_folder / SHARD_1).unlink()
    with pytest.raises(ModelError, match=r"should hold model\.embed_tokens\.weight"):
        read(sharded_folder)


def test_stray_shard(sharded_folder: Path) -> None:
    save_file({"x": torch.zeros(1)}, sharded_folder / "model-00003-of-00003.safetensors")
    with pytest.raises(ModelError, match=r"model-00003-of-00003\.safetensors does not belong"):
        read(sharded_folder)


def test_cut_shard_names_file_and_tensor(sharded_folder: Path) -> None:
    shard = sharded_folder / SHARD_2
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ModelError, match=rf"{SHARD_2} is cut short: tensor model\.\S+ ends at byte \d+"):
        read(sharded_folder)


@pytest.mark.parametrize("size", [0, 5, 8, 40])
def test_truncated_header(sharded_folder: Path, size: int) -> None:
    shard = sharded_folder / SHARD_1
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(ModelError, match=f"{SHARD_1} is cut short or not a safetensors file"):
        read(sharded_folder)


def test_damage_is_found_before_anything_is_yielded(sharded_folder: Path) -> None:
    shard = sharded_folder / SHARD_2
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ModelError):
        next(iter(SafetensorsFormat().tensors(sharded_folder, {})))


def write_header(file: Path, header: str, data: bytes = b"") -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data)


ENTRY = '"dtype":"F32","shape":[1],"data_offsets":[0,4]'


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (f'{{"a":{{{ENTRY}}},"a":{{{ENTRY}}}}}', "lists a twice"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', r"tensor a of shape \[2\] and type F32 cannot lie"),
        ('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}', "tensor a"),
        ('{"a":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}}', "Tensor a .* type F8_E4M3"),
        ('{"a":{"shape":[1],"data_offsets":[0,4]}}', "damaged at tensor a"),
        ('{"a":7}', "damaged at tensor a"),
        ("[]", "not an object"),
        ("{", "is damaged"),
    ],
)
def test_damaged_header(model_folder: Path, header: str, message: str) -> None:
    write_header(model_folder / "model.safetensors", header, bytes(4))
    with pytest.raises(ModelError, match=message):
        read(model_folder)


def test_tensor_in_two_shards(sharded_folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (sharded_folder / INDEX).unlink()
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, sharded_folder / SHARD_1)
    with pytest.raises(ModelError, match=rf"model\.norm\.weight is in both .*{SHARD_1} and {SHARD_2}"):
        read(sharded_folder)


def test_index_and_shards_disagree(sharded_folder: Path) -> None:
    edit_index(sharded_folder, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(ModelError, match=rf"Tensor model\.norm\.weight is in .*{SHARD_2}, but {INDEX} does not say so"):
        read(sharded_folder)
    edit_index(sharded_folder, lambda weights: weights.update({"model.norm.weight": SHARD_2, "more": SHARD_1}))
    with pytest.raises(ModelError, match=rf"says that tensor more is in .*{SHARD_1}, but it is not"):
        read(sharded_folder)


@pytest.mark.parametrize("target", ["../secret.safetensors", "/etc/passwd", 7])
def test_index_cannot_point_elsewhere(sharded_folder: Path, target: Any) -> None:
    edit_index(sharded_folder, lambda weights: weights.update({"model.norm.weight": target}))
    with pytest.raises(ModelError, match="no file name in its folder"):
        read(sharded_folder)


def test_index_lists_a_tensor_twice(sharded_folder: Path) -> None:
    (sharded_folder / INDEX).write_text(f'{{"weight_map": {{"a": "{SHARD_1}", "a": "{SHARD_2}"}}}}')
    with pytest.raises(ModelError, match="lists a twice"):
        read(sharded_folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_a_hint(model_folder: Path, name: str) -> None:
    (model_folder / name).write_bytes(b"\x80\x04N.")
    with pytest.raises(ModelError, match=f"only in pickle files .*{name}.*never opened.*safetensors"):
        SafetensorsFormat().config(model_folder)


def test_no_weights_at_all(model_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        SafetensorsFormat().config(model_folder)


def test_quantised_checkpoints_are_refused(model_folder: Path, config: dict[str, Any]) -> None:
    save_file({"a": torch.zeros(1)}, model_folder / "model.safetensors")
    (model_folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelError, match="stored quantised \\(gptq\\)"):
        SafetensorsFormat().config(model_folder)


@pytest.mark.parametrize(("content", "message"), [("{", "not valid JSON"), ("[]", "not an object")])
def test_bad_config(model_folder: Path, content: str, message: str) -> None:
    (model_folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        SafetensorsFormat().config(model_folder)


def test_generation_config_is_optional(model_folder: Path) -> None:
    assert SafetensorsFormat().generation_config(model_folder) == {}
    (model_folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert SafetensorsFormat().generation_config(model_folder) == {"eos_token_id": [1, 2]}


def test_a_folder_without_tokenizer(model_folder: Path) -> None:
    assert SafetensorsFormat().tokenizer(model_folder) is None
