"""The header of a safetensors file is read as it was written, or not at all."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from zinf.core.interchange.header import DTYPES, ordered, read_header, write_header
from zinf.core.program import ArraySpec

FLOATS = ArraySpec((2, 3), "float32", 4)
SPECS = {
    "a": ArraySpec((3,), "uint8", 1),
    "b": FLOATS,
    "c": ArraySpec((), "bfloat16", 2),
    "d": ArraySpec((0, 7), "float64", 8),
}


def file_of(text: bytes, data: bytes, length: int | None = None) -> bytes:
    length = len(text) if length is None else length
    return length.to_bytes(8, "little") + text + data


def with_header(content: object, data: bytes = bytes(24)) -> bytes:
    return file_of(json.dumps(content).encode(), data)


def tensor(dtype="F32", shape=(2, 3), offsets=(0, 24)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def read(path: Path, content: bytes):
    path.write_bytes(content)
    with open(path, "rb", buffering=0) as file:
        return read_header(file, path)


def test_what_is_read_is_what_was_written(tmp_path):
    names = ordered(SPECS)
    data = bytes(sum(spec.nbytes for spec in SPECS.values()))
    header = write_header(SPECS, names, {"format": "flax"})
    assert len(header) % 4096 == 0
    found = read(tmp_path / "file", header + data)
    assert {name: stored.spec for name, stored in found.items()} == SPECS
    for name, stored in found.items():
        assert stored.start % SPECS[name].itemsize == 0
    with safetensors.safe_open(tmp_path / "file", "np") as file:
        assert set(file.keys()) == set(SPECS)
        assert file.metadata() == {"format": "flax"}


def test_the_library_knows_every_dtype_by_our_code_and_size(tmp_path):
    path = tmp_path / "file"
    for code, (dtype, itemsize) in DTYPES.items():
        specs = {"x": ArraySpec((4,), dtype, itemsize)}
        path.write_bytes(write_header(specs, specs, {}) + bytes(4 * itemsize))
        with safetensors.safe_open(path, "np") as file:
            assert file.get_slice("x").get_dtype() == code
            assert file.get_slice("x").get_shape() == [4]


def test_a_file_of_the_library_is_read(tmp_path):
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.array(True)}
    safetensors.numpy.save_file(arrays, tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    for name, stored in read(tmp_path / "file", content).items():
        there = content[stored.start : stored.start + stored.spec.nbytes]
        assert there == arrays[name].tobytes()


NO_FILE = {
    "empty": b"",
    "shorter than its length": b"\x08\0\0",
    "a header beyond its end": file_of(b"{}", b"", 3),
    "a header of exabytes": file_of(b"{}", b"", 2**63),
    "no JSON": file_of(b"{'a': 1}", b""),
    "no text": file_of(b'{"\xff": 1}', b""),
    "a list": with_header([]),
    "deeper than the stack": file_of(b"[" * 100_000, b""),
    "a name twice": file_of(b'{"__metadata__": {}, "__metadata__": {}}', b""),
    "metadata that is a list": with_header({"__metadata__": [1]}),
    "an entry that is a number": with_header({"a": 3}),
    "no offsets": with_header({"a": {"dtype": "F32", "shape": [2, 3]}}),
    "an unknown dtype": with_header({"a": tensor("F33")}),
    "a dtype that is a list": with_header({"a": tensor(["F32"])}),
    "an object": with_header({"a": tensor("O")}),
    "a shape that is a number": with_header({"a": {**tensor(), "shape": 6}}),
    "a negative size": with_header({"a": tensor(shape=(-2, -3))}),
    "a size that is a float": with_header({"a": tensor(shape=(2.0, 3))}),
    "a size that is a bool": with_header({"a": tensor(shape=(True, 6))}),
    "an absurd shape": with_header({"a": tensor(shape=(2**40, 2**40))}),
    "too many dims": with_header({"a": tensor(shape=[1] * 100, offsets=(0, 4))}),
    "a size of 10,000 digits": file_of(
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 10_000 + b"]}}", b""
    ),
    "offsets that are too few": with_header({"a": tensor(offsets=(0,))}),
    "offsets of other bytes": with_header({"a": tensor(offsets=(0, 20))}),
    "offsets before the file": with_header({"a": tensor(offsets=(-24, 0))}),
    "offsets in reverse": with_header({"a": tensor(offsets=(24, 0))}),
    "offsets beyond the file": with_header({"a": tensor(offsets=(8, 32))}),
    "an overlap": with_header({"a": tensor(), "b": tensor()}),
    "a gap": with_header(
        {"a": tensor(), "b": tensor(offsets=(32, 56))}, data=bytes(56)
    ),
    "bytes of no tensor": with_header({"a": tensor()}, data=bytes(25)),
    "a tensor that is cut off": with_header({"a": tensor()}, data=bytes(23)),
}


def test_a_hostile_header_is_refused_with_the_file(tmp_path):
    for name, content in NO_FILE.items():
        with pytest.raises(ValueError, match="is no safetensors file") as refused:
            read(tmp_path / "file", content)
        assert str(tmp_path / "file") in str(refused.value), name
        # The library refuses the same, if with less to go by.
        with pytest.raises(Exception):  # noqa: B017
            safetensors.safe_open(tmp_path / "file", "np")


def test_no_damage_to_a_header_is_a_crash_or_a_tensor_outside_its_file(tmp_path):
    random = np.random.default_rng(0)
    names = ordered(SPECS)
    header = write_header(SPECS, names, {"format": "flax"})
    used = len(header.rstrip())  # What is behind it is white space.
    data = bytes(sum(spec.nbytes for spec in SPECS.values()))
    outcomes = set()
    for _ in range(300):
        damaged = bytearray(header)
        for _ in range(random.integers(1, 4)):
            # Mostly digits and signs, which leave JSON what it is.
            value = random.choice(list(b'0123456789-"[]{},:.eFIB\0\xff'))
            damaged[random.integers(0, used)] = value
        content = bytes(damaged) + data
        try:
            found = read(tmp_path / "file", content)
        except ValueError as error:
            assert "is no safetensors file" in str(error)
            outcomes.add("refused")
            continue
        outcomes.add("read")
        for stored in found.values():
            assert 0 <= stored.start <= stored.start + stored.spec.nbytes
            assert stored.start + stored.spec.nbytes <= len(content)
    assert outcomes == {"refused", "read"}


def test_a_dtype_or_a_name_that_the_format_lacks_is_refused():
    wide = {"a": ArraySpec((1,), "complex128", 16)}
    with pytest.raises(ValueError, match="'a' is complex128"):
        write_header(wide, wide, {})
    taken = {"__metadata__": FLOATS}
    with pytest.raises(ValueError, match="No tensor can be called"):
        write_header(taken, taken, {})
