"""Safetensors by the piece: the same bytes as the library writes, nothing half-written, shards of equal size."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from clef_core.errors import ReleaseError
from clef_core.weight_files import (
    Entry,
    ShardWriter,
    StoredTensor,
    index_text,
    is_whole,
    locate,
    natural,
    plan_shards,
    write_whole,
)

NAMES = {torch.uint8: "U8", torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64", torch.float16: "F16"}


def entries_of(tensors: dict[str, torch.Tensor]) -> list[Entry]:
    return [Entry(name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b.weight": torch.randint(0, 256, (3, 5), dtype=torch.uint8, generator=generator),
        "a.é": torch.randn(7, 3, generator=generator).bfloat16(),
        "long": torch.randn(1000, generator=generator),
        "count": torch.tensor([1, 2]),
        "scalar": torch.tensor(1.5, dtype=torch.float16),
    }


def test_a_file_is_byte_for_byte_what_the_safetensors_library_writes(tmp_path, tensors):
    save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
    with ShardWriter(tmp_path / "ours", entries_of(tensors)) as writer:
        for name in reversed(tensors):  # in another order than in the file, some by the byte
            data = raw(tensors[name])
            for start in range(0, len(data), 100):
                writer.append(name, data[start : start + 100])
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()


def test_tensors_are_found_and_read_in_pieces(tmp_path, tensors):
    save_file(tensors, tmp_path / "file")
    found = locate(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, stored in found.items():
        pieces = list(stored.pieces(64))
        assert b"".join(pieces) == raw(tensors[name])
        assert all(len(piece) == 64 for piece in pieces[:-1])


def test_a_file_has_no_name_until_every_byte_is_there(tmp_path):
    path = tmp_path / "model.safetensors"

    def write(data: bytes) -> None:
        with ShardWriter(path, [Entry("b", "U8", (4,))]) as writer:
            writer.append("b", data)
            assert not path.exists()

    with pytest.raises(ValueError, match="b is not whole"):
        write(b"123")
    assert not path.exists()
    with pytest.raises(ValueError, match="more bytes"):
        write(b"12345")
    assert not path.exists()
    write(b"1234")
    assert path.exists()


def test_a_tensor_takes_no_more_bytes_than_its_shape_has(tmp_path):
    with ShardWriter(tmp_path / "f", [Entry("a", "U8", (2,)), Entry("b", "U8", (2,))]) as writer:
        with pytest.raises(ValueError, match="more bytes"):
            writer.append("a", b"123")
        writer.append("a", b"12")
        writer.append("b", b"34")
    assert load_file(tmp_path / "f")["a"].tolist() == [ord("1"), ord("2")]


def test_whole_means_these_tensors_and_every_byte(tmp_path, tensors):
    save_file(tensors, tmp_path / "f")
    entries = entries_of(tensors)
    assert is_whole(tmp_path / "f", entries)
    assert not is_whole(tmp_path / "f", entries[1:])
    assert not is_whole(tmp_path / "absent", entries)
    os.truncate(tmp_path / "f", (tmp_path / "f").stat().st_size - 1)
    assert not is_whole(tmp_path / "f", entries)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    (tmp_path / "f").write_bytes(b"12")
    with pytest.raises(ReleaseError, match="ends before"):
        list(StoredTensor(tmp_path / "f", "U8", (4,), 0, 4).pieces())


def test_an_offset_that_contradicts_the_shape_is_refused(tmp_path):
    header = json.dumps({"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(header)) + header + b"12")
    with pytest.raises(ReleaseError, match="tensor a has dtype U8 and 2 bytes"):
        locate(tmp_path / "f")


def linear(name: str, n: int) -> list[Entry]:
    return [Entry(f"{name}.weight", "U8", (n, 16)), Entry(f"{name}.weight_scale", "U8", (n, 1))]


def test_shards_are_of_about_equal_size_and_in_the_order_of_the_layers():
    entries = [entry for layer in range(20) for entry in linear(f"layers.{layer}.proj", 100)]
    plan = plan_shards(entries, 5, 1)
    assert list(plan) == [f"model-{n:05d}-of-00005.safetensors" for n in range(1, 6)]
    assert {sum(entry.num_bytes for entry in shard) for shard in plan.values()} == {4 * 1700}
    names = [entry.name for shard in plan.values() for entry in shard]
    assert names == sorted(names, key=natural)
    assert names[4:6] == ["layers.2.proj.weight", "layers.2.proj.weight_scale"]


def test_codes_and_scales_of_a_linear_share_a_file():
    plan = plan_shards([*linear("a", 10), *linear("b", 1000), *linear("c", 10)], 3, 1)
    for shard in plan.values():
        assert {entry.name.removesuffix("_scale") for entry in shard} == {
            entry.name for entry in shard if not entry.name.endswith("_scale")
        }


@pytest.mark.parametrize("sizes", [(1,) * 7, (1000, 1, 1, 1, 1), (1, 1, 1, 1, 1000), (5, 1000, 5, 5, 5, 5)])
def test_no_shard_stays_empty_however_unequal_the_tensors(sizes):
    plan = plan_shards([Entry(f"t{n}", "U8", (size,)) for n, size in enumerate(sizes)], 5, 1)
    assert len(plan) == 5
    assert all(plan.values())
    assert sum(len(shard) for shard in plan.values()) == len(sizes)


def test_a_small_release_gets_fewer_files_and_one_alone_has_no_number():
    entries = [Entry(f"t{n}", "U8", (100,)) for n in range(10)]
    assert list(plan_shards(entries, 5, 2000)) == ["model.safetensors"]
    assert len(plan_shards(entries, 5, 400)) == 2
    assert len(plan_shards(entries[:2], 5, 1)) == 2


def test_the_index_names_every_tensor_and_the_total():
    plan = plan_shards([Entry("b", "BF16", (2, 2)), Entry("a", "U8", (3,))], 2, 1)
    index = json.loads(index_text(plan))
    first, second = plan
    assert index == {"metadata": {"total_size": 11}, "weight_map": {"a": first, "b": second}}


def test_small_files_appear_whole(tmp_path):
    write_whole(tmp_path / "f", "ü")
    write_whole(tmp_path / "f", b"x")
    assert [path.name for path in Path(tmp_path).iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == b"x"
