"""Folders of safetensors: what is read, what is refused, and when."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoint_helpers import floats, write_folder, write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.checkpoint import open_checkpoint
from mlxgen.checkpoint.folder import read_header
from mlxgen.errors import ModelError, WeightsError

ODD_MODE = {"group_size": 64, "bits": 4, "a": {"mode": "int3"}}


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards, and files beside them that are none of the model's business."""
    folder = write_folder(tmp_path / "model")
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"a.weight": floats(1, 2)})
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"b.weight": floats(3), "x": floats(9)})
    write_safetensors(folder / "consolidated.safetensors", {"a.weight": floats(7, 7), "z": floats(7)})
    write_safetensors(folder / "adapters.safetensors", {"lora": floats(7)})
    one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    write_index(folder, {"a.weight": one, "b.weight": two})
    return folder


def test_dtypes_are_listed_and_kept(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    write_safetensors(
        folder / "model.safetensors",
        {
            "bf16": ("BF16", (2,), np.array([0x3F80, 0xC000], dtype="<u2").tobytes()),
            "f16": ("F16", (1, 2), np.array([0.5, -3], dtype="<f2").tobytes()),
            "f32": floats(1.5),
            "u32": ("U32", (1,), np.array([4_000_000_000], dtype="<u4").tobytes()),
            "f8": ("F8_E4M3", (3,), bytes([0x38, 0, 0xFF])),
            "none": ("F32", (0, 4), b""),
        },
    )
    checkpoint = open_checkpoint(str(folder))
    dtypes = {name: (info.shape, info.dtype, info.nbytes) for name, info in checkpoint.tensors.items()}
    assert dtypes == {
        "bf16": ((2,), "bfloat16", 4),
        "f16": ((1, 2), "float16", 4),
        "f32": ((1,), "float32", 4),
        "u32": ((1,), "uint32", 4),
        "f8": ((3,), "float8_e4m3", 3),
        "none": ((0, 4), "float32", 0),
    }
    assert checkpoint.total_bytes == 19
    assert checkpoint.load("bf16").dtype == mx.bfloat16
    assert checkpoint.load("bf16").tolist() == [1.0, -2.0]
    assert checkpoint.load("f16").dtype == mx.float16
    assert checkpoint.load("u32").item() == 4_000_000_000
    assert checkpoint.load("f8").tolist() == [0x38, 0, 0xFF]
    assert list(checkpoint.names()) == list(checkpoint.tensors)


def test_the_index_decides_what_is_read(sharded: Path) -> None:
    checkpoint = open_checkpoint(str(sharded))
    assert list(checkpoint.tensors) == ["a.weight", "b.weight"]
    assert checkpoint.load("a.weight").tolist() == [1.0, 2.0]
    assert checkpoint.load("a.weight").tolist() == [1.0, 2.0], "a second time"
    assert [file.name for file in checkpoint.files] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert checkpoint.quantization is None
    assert checkpoint.gguf_metadata is None
    assert checkpoint.baked == frozenset()


def test_unknown_tensor_has_a_suggestion(sharded: Path) -> None:
    with pytest.raises(WeightsError, match=r"a\.wieght.*Did you mean `a\.weight`"):
        open_checkpoint(sharded).load("a.wieght")


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        WeightsError, match=r"model-00002-of-00002\.safetensors.* missing .*Incomplete download"
    ):
        open_checkpoint(sharded)


def test_dangling_link_counts_as_missing(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to(sharded / "blob-that-never-came")
    with pytest.raises(WeightsError, match="missing"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("names", [["model.safetensors"], ["part-00001-of-00002", "part-00002-of-00002"]])
def test_stale_index_beside_a_complete_set_warns(sharded: Path, names: list[str]) -> None:
    (sharded / "model-00001-of-00002.safetensors").unlink()
    for number, name in enumerate(names):
        file = sharded / name if name.endswith("s") else sharded / f"{name}.safetensors"
        write_safetensors(file, {f"w{number}": floats(number)})
    with pytest.warns(UserWarning, match="model-00001-of-00002.safetensors, which does not exist"):
        checkpoint = open_checkpoint(sharded)
    assert list(checkpoint.tensors) == [f"w{number}" for number in range(len(names))]


def test_tensor_that_only_the_index_knows(sharded: Path) -> None:
    write_index(
        sharded, {"a.weight": "model-00001-of-00002.safetensors", "c": "model-00001-of-00002.safetensors"}
    )
    with pytest.raises(WeightsError, match=r"`c` is not in model-00001-of-00002\.safetensors"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [{"a": "../secret.safetensors"}, {"a": 3}, {}, None])
def test_broken_index(sharded: Path, weight_map: object) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightsError, match="weight_map"):
        open_checkpoint(sharded)


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert sorted(open_checkpoint(sharded).tensors) == ["a.weight", "b.weight", "x"]
    (sharded / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"only some of its shards.*Incomplete download"):
        open_checkpoint(sharded)


def test_the_same_tensor_in_two_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    for number in (0, 1):
        write_safetensors(folder / f"weights.0{number}.safetensors", {"a": floats(number)})
    with pytest.raises(WeightsError, match=r"`a` is both in weights\.00.* and in weights\.01"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["pytorch_model.bin"], "pytorch_model.bin. Convert it"),
        (["adapters.safetensors"], "must hold model.safetensors"),
        ([], "must hold model.safetensors"),
    ],
)
def test_folder_without_weights(tmp_path: Path, files: list[str], message: str) -> None:
    folder = write_folder(tmp_path)
    for name in files:
        (folder / name).write_bytes(b"x")
    with pytest.raises(ModelError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "must hold config.json"),
        ("{", "must be JSON"),
        ("[1]", "must be a JSON object"),
        ("\xff", "JSON"),
    ],
)
def test_broken_config(sharded: Path, text: str | None, message: str) -> None:
    (sharded / "config.json").unlink()
    if text is not None:
        (sharded / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=message):
        open_checkpoint(sharded)


def test_truncated_file_is_refused_before_anything_is_read(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "load", lambda *_, **__: pytest.fail("read at open"))
    shard = sharded / "model-00002-of-00002.safetensors"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=rf"has {size - 1} bytes, but its tensors need {size}"):
        open_checkpoint(sharded)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cut_is_a_weights_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    file = tmp_path_factory.mktemp("cut") / "model.safetensors"
    write_safetensors(file, {"a": floats(1, 2, 3), "b": ("U8", (2,), b"xy")})
    content = file.read_bytes()
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(WeightsError):
        read_header(file)


@settings(max_examples=60, deadline=None)
@given(
    header=st.one_of(
        st.binary(max_size=40),
        st.recursive(
            st.one_of(st.none(), st.integers(-2, 99), st.sampled_from(["F32", "F64", "dtype"])),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["a", "dtype", "shape", "data_offsets"]), inner, max_size=3)
            ),
        ).map(lambda value: json.dumps(value).encode()),
        st.tuples(st.integers(-3, 9), st.integers(-3, 9), st.sampled_from(["F32", "F64"])).map(
            lambda t: json.dumps({"a": {"dtype": t[2], "shape": [1], "data_offsets": [t[0], t[1]]}}).encode()
        ),
    )
)
def test_no_header_gets_out_of_hand(tmp_path_factory: pytest.TempPathFactory, header: bytes) -> None:
    """Whatever the bytes: a listing that lies within the file, or a WeightsError."""
    file = tmp_path_factory.mktemp("header") / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    try:
        listing = read_header(file)
    except WeightsError:
        return
    assert sum(info.nbytes for info in listing.values()) <= 8 * len(listing)


def test_dtype_that_mlx_lacks(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    write_safetensors(folder / "model.safetensors", {"a": ("F64", (1,), bytes(8))})
    with pytest.raises(WeightsError, match=r"`a` .* dtype F64"):
        open_checkpoint(folder)


def test_generation_config_and_tokenizer(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert (checkpoint.generation_config, checkpoint.tokenizer_folder) == ({}, None)
    (sharded / "generation_config.json").write_text('{"temperature": 0.6}')
    (sharded / "tokenizer.json").write_text("{}")
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.generation_config == {"temperature": 0.6}
    assert checkpoint.tokenizer_folder == sharded


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_quantization_is_complete_for_every_path(sharded: Path, key: str) -> None:
    entry = {
        "group_size": 32,
        "bits": 4,
        "mode": "mxfp4",
        "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8},
        "lm_head": False,
        "model.embed_tokens": True,
        "b": {"mode": "nvfp4"},
    }
    write_folder(sharded, **{key: entry})
    assert open_checkpoint(sharded).quantization == {
        "group_size": 32,
        "bits": 4,
        "mode": "mxfp4",
        "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8, "mode": "affine"},
        "lm_head": False,
        "model.embed_tokens": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        "b": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    }


def test_quantization_of_other_tools_stays_in_the_config(sharded: Path) -> None:
    write_folder(sharded, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.quantization is None
    assert checkpoint.config["quantization_config"]["quant_method"] == "mxfp4"


@pytest.mark.parametrize(
    "entry", [{"bits": 4}, "4bit", ODD_MODE, {"group_size": 64, "bits": 4, "mode": "int3"}]
)
def test_broken_quantization(sharded: Path, entry: object) -> None:
    write_folder(sharded, quantization=entry)
    with pytest.raises(ModelError, match="quantization"):
        open_checkpoint(sharded)


def test_fingerprint(sharded: Path, tmp_path: Path) -> None:
    before = open_checkpoint(sharded).fingerprint()
    copy = tmp_path / "copy"
    shutil.copytree(sharded, copy)
    assert open_checkpoint(copy).fingerprint() == before
    write_safetensors(copy / "model-00001-of-00002.safetensors", {"a.weight": floats(1, 2.5)})
    assert open_checkpoint(copy).fingerprint() != before
    shutil.copy(sharded / "model-00001-of-00002.safetensors", copy)
    write_safetensors(copy / "consolidated.safetensors", {"a.weight": floats(0)})
    assert open_checkpoint(copy).fingerprint() == before, "what is not read does not count"


def test_nothing_keeps_a_loaded_array_alive(tmp_path: Path) -> None:
    """Four shards of four tensors: walking through takes the memory of one, holding them of all."""
    folder, tensor_bytes = write_folder(tmp_path), 1 << 20
    for shard in range(4):
        write_safetensors(
            folder / f"model-0000{shard + 1}-of-00004.safetensors",
            {f"t{shard}{i}": ("U8", (tensor_bytes,), bytes([i]) * tensor_bytes) for i in range(4)},
        )
    checkpoint = open_checkpoint(folder)
    mx.clear_cache()
    start = mx.get_active_memory()
    mx.reset_peak_memory()
    for name in checkpoint.names():
        array = checkpoint.load(name)
        mx.eval(array)
        del array
    assert mx.get_peak_memory() - start < 1.5 * tensor_bytes
    mx.reset_peak_memory()
    held = [checkpoint.load(name) for name in checkpoint.names()]
    mx.eval(held)
    assert mx.get_peak_memory() - start < 1.05 * checkpoint.total_bytes
    assert [int(array[0].item()) for array in held] == [0, 1, 2, 3] * 4


def test_file_that_vanishes_after_opening(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    for file in checkpoint.files:
        file.unlink()
    with pytest.raises(WeightsError, match="cannot be read"):
        checkpoint.load("a.weight")
