"""The route without a model: every weight file is read by the piece, rounded, and written by the piece.

Memory holds some rows of one tensor at a time, so a 55 GB release needs no more than a small one. The result equals
Quark's round-to-nearest build bit for bit. What surprises: like Quark, it writes every floating-point tensor as
bfloat16, whatever the source has, except the `mtp.*` tensors, which are copied as they are.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from clef_core.errors import ReleaseError
from clef_core.mxfp4 import BLOCK
from clef_core.weight_encoder import PIECE_ELEMENTS, encode_weight
from clef_core.weight_files import DTYPE_BYTES, PIECE_BYTES, Entry, ShardWriter, StoredTensor, is_whole

MTP_PREFIX = "mtp."
TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")


def planned_entries(sources: Mapping[str, StoredTensor], linears: Collection[str]) -> list[Entry]:
    """What the release will hold: codes and scales of the linears named, everything else as it is.

    Raises:
        ReleaseError: a linear is missing or cannot be cut into blocks of 32.
    """
    entries = []
    weights = {f"{name}.weight" for name in linears}
    if missing := sorted(weights - set(sources)):
        raise ReleaseError(f"the source lacks {missing[0]}")
    for name, stored in sources.items():
        if name in weights:
            if len(stored.shape) != 2 or stored.shape[1] % BLOCK or stored.dtype not in FLOATS:
                raise ReleaseError(
                    f"{name}: {stored.dtype} of shape {stored.shape} cannot be cut into blocks of {BLOCK}"
                )
            n, k = stored.shape
            entries += [Entry(name, "U8", (n, k // 2)), Entry(f"{name}_scale", "U8", (n, k // BLOCK))]
        elif stored.dtype in FLOATS and not name.startswith(MTP_PREFIX):
            entries.append(Entry(name, "BF16", stored.shape))
        else:
            entries.append(Entry(name, stored.dtype, stored.shape))
    return entries


def write_shards(
    sources: Mapping[str, StoredTensor],
    plan: Mapping[str, list[Entry]],
    folder: Path,
    device: torch.device,
    progress: Callable[[int], None],
) -> None:
    """Write the weight files of `plan` that are not there yet.

    Args:
        sources: where each tensor comes from. Entries whose dtype and shape equal their source's are copied.
        device: where weights are rounded.
        progress: called with the bytes of the source that were dealt with since the last call.

    Raises:
        ReleaseError: a source cannot be read, or holds NaN or infinity in a linear.
    """
    for file, entries in plan.items():
        read = [entry for entry in entries if entry.name in sources]
        if is_whole(folder / file, entries):
            progress(sum(sources[entry.name].num_bytes for entry in read))
            continue
        with ShardWriter(folder / file, entries) as writer:
            for entry in read:
                stored = sources[entry.name]
                if (entry.dtype, entry.shape) == (stored.dtype, stored.shape):
                    written = _copy(entry, stored, writer)
                elif entry.shape == stored.shape:
                    written = _convert(entry, stored, writer)
                else:
                    written = _encode(entry, stored, writer, device)
                for num_bytes in written:
                    progress(num_bytes)


def rows(stored: StoredTensor, elements: int = PIECE_ELEMENTS) -> Iterator[Tensor]:
    """Read a tensor some rows at a time: (rows, K) each, or (elements,) of one that is no matrix."""
    width = stored.shape[-1] if len(stored.shape) == 2 else 1
    num_rows = max(1, elements // max(1, width))
    for piece in stored.pieces(num_rows * width * DTYPE_BYTES[stored.dtype]):
        flat = torch.frombuffer(piece, dtype=TORCH_DTYPES[stored.dtype])
        yield flat.view(-1, width) if len(stored.shape) == 2 else flat


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor, little-endian as torch has it."""
    return tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data


def _copy(entry: Entry, stored: StoredTensor, writer: ShardWriter) -> Iterator[int]:
    for piece in stored.pieces(PIECE_BYTES):
        writer.append(entry.name, piece)
        yield len(piece)


def _convert(entry: Entry, stored: StoredTensor, writer: ShardWriter) -> Iterator[int]:
    for piece in rows(stored):
        writer.append(entry.name, as_bytes(piece.to(TORCH_DTYPES[entry.dtype])))
        yield piece.numel() * piece.element_size()


def _encode(entry: Entry, stored: StoredTensor, writer: ShardWriter, device: torch.device) -> Iterator[int]:
    for piece in rows(stored):
        try:
            codes, scales = encode_weight(piece.to(device, torch.bfloat16))
        except ValueError as error:
            raise ReleaseError(f"{stored.file}: {entry.name}: {error}") from error
        writer.append(entry.name, as_bytes(codes))
        writer.append(f"{entry.name}_scale", as_bytes(scales))
        yield piece.numel() * piece.element_size()
