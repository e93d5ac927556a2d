"""Safetensors files: dtypes, and files that are broken."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.checkpoints import NAMES, write_raw, write_safetensors
from support.published_layers import COMPRESSED

from jax_dsa import nn
from jax_dsa.nn.hf_names import hf_tensors


def test_every_dtype_and_an_empty_tensor(rng, tmp_path):
    file = tmp_path / "a.safetensors"
    tensors = {name: rng.integers(0, 2, (3, 5)).astype(jnp.dtype(name)) for name in NAMES} | {
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float32(2.5),
    }
    write_safetensors(file, tensors)
    got = nn.SafeTensors(file)
    assert len(got) == len(tensors) and got.file("bool") == file
    for name, x in tensors.items():
        assert got[name].dtype == x.dtype and got[name].shape == x.shape
        np.testing.assert_array_equal(got[name].astype(np.float32), x.astype(np.float32))
    with pytest.raises(KeyError):
        got["other"]


def entry(dtype="F32", shape=(2, 3), offsets=(0, 24)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes, expected at least 8; it is cut off or no safetensors file"),
        (b"abc", "has 3 bytes, expected at least 8"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3",
            "is a Git LFS pointer",
        ),
        ((100).to_bytes(8, "little") + b"{}", "has 10 bytes, expected at least 108"),
        (b"PK\3\4" + bytes(60), "expected at least [0-9]*; it is cut off or no safetensors file"),
        ((2).to_bytes(8, "little") + b"{]", "the header of 2 bytes in .* is not JSON"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "the header of 2 bytes in .* is not JSON"),
        (bytes(8), "the header of 0 bytes in .* is not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "the header in .* is a JSON list, expected an object"),
    ],
)
def test_broken_files_are_named(content, message, tmp_path):
    file = tmp_path / "model-00001-of-00002.safetensors"
    file.write_bytes(content)
    for path in (file, tmp_path, str(file)):
        with pytest.raises(ValueError, match=message) as error:
            nn.SafeTensors(path)
        assert error.match(str(file))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"x": 1}, "describes tensor 'x' as 1, expected 'dtype', 'shape' and 'data_offsets'"),
        ({"x": {"dtype": "F32", "shape": [2, 3]}}, "describes tensor 'x' as .*, expected 'dtype'"),
        ({"x": entry(offsets=(0,))}, "describes tensor 'x' as"),
        ({"x": entry(shape=("a",))}, "describes tensor 'x' as"),
        ({"x": entry(offsets=(24, 0))}, "gives tensor 'x' shape .* and offsets 24 to 0"),
        ({"x": entry(offsets=(-24, 0))}, "gives tensor 'x' shape .* and offsets -24 to 0"),
        ({"x": entry(shape=(-2, -3))}, r"gives tensor 'x' shape \(-2, -3\)"),
        ({"x": entry(offsets=(4, 28))}, "expected at least [0-9]* for tensor 'x'; the file is cut"),
    ],
)
def test_broken_headers_are_named(header, message, tmp_path):
    file = tmp_path / "a.safetensors"
    write_raw(file, header, bytes(24))
    with pytest.raises(ValueError, match=message) as error:
        nn.SafeTensors(file)
    assert error.match(str(file))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"x": entry(dtype="F4")}, "tensor 'x' in {} has dtype 'F4', expected one of"),
        ({"x": entry(shape=(2, 2))}, r"tensor 'x' in {} has 24 bytes, expected 16 for shape"),
        ({"x": entry(dtype="F64")}, r"tensor 'x' in {} has 24 bytes, expected 48 for shape"),
        ({"x": entry(offsets=(0, 0))}, r"tensor 'x' in {} has 0 bytes, expected 24 for shape"),
    ],
)
def test_broken_tensors_are_named(header, message, tmp_path):
    file = tmp_path / "a.safetensors"
    write_raw(file, header, bytes(24))
    tensors = nn.SafeTensors(file)
    with pytest.raises(ValueError, match=message.format(file)):
        tensors["x"]


def test_absent_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no file"):
        nn.SafeTensors(tmp_path)
    absent = tmp_path / "absent"
    with pytest.raises(FileNotFoundError, match=f"SafeTensors: .*'{absent}'.* expected a safeten"):
        nn.SafeTensors(absent)
    with pytest.raises(OSError, match=f"SafeTensors: .*'{tmp_path}x*'.* expected a safetensors f"):
        nn.SafeTensors(f"{tmp_path}{'x' * 500}")


def test_two_files_with_the_same_tensor(tmp_path):
    for name in ("a", "b"):
        write_safetensors(tmp_path / f"{name}.safetensors", {"x": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"a.safetensors and .*b.safetensors both have .* 'x'"):
        nn.SafeTensors(tmp_path)


def test_a_replaced_file_keeps_its_tensors(tmp_path):
    """Reads are of the file that was opened, before and after another one takes its path."""
    file, other = tmp_path / "a.safetensors", tmp_path / "b"
    old = {"w": np.full(3, 1, np.float32), "z": np.full(3, 2, np.float32)}
    write_safetensors(file, old)
    files = nn.SafeTensors(tmp_path)
    np.testing.assert_array_equal(files["w"], old["w"])
    write_safetensors(other, {name: np.full(3, 7, np.float32) for name in ("a", "w", "z")})
    other.replace(file)
    for name, x in old.items():
        np.testing.assert_array_equal(files[name], x)
    file.unlink()
    np.testing.assert_array_equal(files["z"], old["z"])


@pytest.mark.parametrize("change", ["longer", "shorter", "same size"])
def test_a_file_that_is_written_to_is_an_error(change, tmp_path):
    file = tmp_path / "a.safetensors"
    tensors = {"w": np.full(3, 1, np.float32), "z": np.full(3, 2, np.float32)}
    write_safetensors(file, tensors)
    files, size = nn.SafeTensors(file), file.stat().st_size
    assert files["w"][0] == 1
    if change == "shorter":
        os.truncate(file, size - 1)
    else:
        more = {"a": tensors["w"]} if change == "longer" else {}
        write_safetensors(file, {**more, **tensors, "z": np.full(3, 5, np.float32)})
        os.utime(file, (0, 0))
    with pytest.raises(ValueError, match=f"{file} was written to .*had {size} bytes"):
        files["w"]


def test_files_that_are_cut_off_leave_a_module_unchanged(tmp_path):
    """Wherever the file ends, and whatever dtype the header says, the error names the file."""
    module = nnx.eval_shape(lambda: nn.CompressedAttention(COMPRESSED, rngs=nnx.Rngs(0)))
    weights = {x.name: np.ones(x.shape, np.float32) for x in hf_tensors(module)}
    nn.load_hf(module, weights)
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {name: 2 * x for name, x in weights.items()})
    whole = file.read_bytes()
    before = jax.tree.map(np.array, nnx.state(module))
    broken = [whole[:length] for length in (0, 5, 8, 100, len(whole) // 2, len(whole) - 1)]
    for dtype in (b"I32", b"U16", b"F9_"):
        start = whole.rfind(b"F32", 0, whole.find(b"}}"))
        broken.append(whole[:start] + dtype + whole[start + 3 :])
    for content in broken:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=str(file)):
            nn.load_hf(module, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(module), before)
