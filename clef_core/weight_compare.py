"""An MXFP4 release's weights held against the BF16 release they were made from, some rows at a time.

Knows no law and no file layout. What surprises: AWQ multiplies the columns of a linear by scales and divides what comes
before it (`post_attention_layernorm`, the rows of `up_proj`) by the same. The norm's scales can be read off the two
norms; those of `up_proj` are stored nowhere, so each row's factor is fitted, and `down_proj` is given it back. The
error of a layer is that of the weights with the scales undone; the fit adds to it about 0.1 by the root of the row's
length, nothing to speak of but in a very small model.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from clef_core.mxfp4 import BLOCK
from clef_core.quantize_files import TORCH_DTYPES, rows
from clef_core.weight_encoder import PIECE_ELEMENTS, decode_weight, encode_weight
from clef_core.weight_files import StoredTensor

NORM = "post_attention_layernorm"
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ROW_TOLERANCE = 2.0**-7
"""Largest relative difference of a weight from its row's factor times the source: both are rounded to 2**-9, and the
factor is fitted to rounded weights."""

Tensors = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class LayerError:
    """How far one linear's weights are from the source's.

    relative: Frobenius norm of the difference by that of the source. sqnr_db: 10·log10 of signal power by error power.
    is_rounded: whether codes and scales are exactly the source's, rounded to nearest.
    """

    name: str
    relative: float
    sqnr_db: float
    is_rounded: bool


@dataclass(frozen=True)
class Scales:
    """What AWQ multiplied a linear with, and what must be divided out again: (K,) columns, (N,) rows."""

    columns: Tensor | None = None
    rows: Tensor | None = None


def norm_scales(built: StoredTensor, source: StoredTensor) -> Tensor:
    """The scales (K,) that AWQ folded into a norm, float32. Qwen3.5 multiplies by 1 + weight."""
    return (1 + _whole(source)) / (1 + _whole(built))


def row_factors(built: Tensors, source: Tensors, name: str, columns: Tensor | None) -> Tensor:
    """The factor (N,) between each row of a linear and the source's with `columns` applied, by least squares."""
    factors = []
    for ours, theirs in _paired(built, source, name):
        reference = theirs if columns is None else theirs * columns
        power = reference.square().sum(1)
        factors.append(torch.where(power > 0, (ours * reference).sum(1) / power.clamp(min=1e-38), 1.0))
    found = torch.cat(factors)
    return torch.where(found > 0, found, 1.0)


def linear_error(built: Tensors, source: Tensors, name: str, scales: Scales) -> LayerError:
    """Compare one MXFP4 linear with its source.

    Args:
        name: of the linear, without `.weight`.
        scales: to divide out of the built weight.
    """
    error = signal = 0.0
    is_rounded = True
    start = 0
    for ours, theirs, codes, code_scales in _paired_codes(built, source, name):
        wanted_codes, wanted_scales = encode_weight(theirs)
        is_rounded &= torch.equal(wanted_codes, codes) and torch.equal(wanted_scales, code_scales)
        if scales.columns is not None:
            ours = ours / scales.columns
        if scales.rows is not None:
            ours = ours / scales.rows[start : start + len(ours), None]
        start += len(ours)
        reference = theirs.float()
        error += float((ours - reference).double().square().sum())
        signal += float(reference.double().square().sum())
    relative = math.sqrt(error / signal) if signal else (math.inf if error else 0.0)
    sqnr_db = math.inf if not error else -math.inf if not signal else 10 * math.log10(signal / error)
    return LayerError(name, relative, sqnr_db, is_rounded)


def undone_scales(built: Tensors, source: Tensors, layer: str) -> dict[str, Scales]:
    """The scales of one layer's MLP linears in an AWQ build.

    Args:
        layer: prefix of the layer, `model.language_model.layers.0.`.
    """
    gate, up, down = (f"{layer}{name}" for name in MLP)
    columns = norm_scales(built[f"{layer}{NORM}.weight"], source[f"{layer}{NORM}.weight"])
    factors = row_factors(built, source, up, columns)
    return {gate: Scales(columns), up: Scales(columns, factors), down: Scales(1 / factors)}


def is_same(built: StoredTensor, source: StoredTensor) -> bool:
    """Whether a tensor is the source's bit for bit; one that is not bfloat16 in the source counts as rounded to it."""
    if built.shape != source.shape:
        return False
    if built.dtype == source.dtype:
        return all(ours == theirs for ours, theirs in zip(built.pieces(), source.pieces(), strict=True))
    if not {built.dtype, source.dtype} <= set(TORCH_DTYPES):
        return False
    dtype = TORCH_DTYPES[built.dtype]
    return all(
        torch.equal(ours.view(torch.uint8), theirs.to(dtype).view(torch.uint8))
        for ours, theirs in zip(rows(built), rows(source), strict=True)
    )


def has_scaled_rows(built: Tensors, source: Tensors, name: str) -> bool:
    """Whether each row of a bfloat16 linear is the source's times one factor, up to rounding."""
    factors = row_factors(built, source, name, None)
    start = 0
    for ours, theirs in _paired(built, source, name):
        wanted = theirs * factors[start : start + len(ours), None]
        start += len(ours)
        if ((ours - wanted).abs() > ROW_TOLERANCE * wanted.abs() + 1e-30).any():
            return False
    return True


def is_finite(stored: StoredTensor) -> bool:
    """Whether a floating-point tensor has no NaN and no infinity."""
    return all(bool(torch.isfinite(piece).all()) for piece in rows(stored))


def _whole(stored: StoredTensor) -> Tensor:
    return torch.cat(list(rows(stored))).float()


def _paired(built: Tensors, source: Tensors, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of a linear as float32, decoded where it is MXFP4, beside the source's."""
    if f"{name}.weight_scale" in built:
        for ours, theirs, _, _ in _paired_codes(built, source, name):
            yield ours, theirs.float()
    else:
        weight = f"{name}.weight"
        for ours, theirs in zip(rows(built[weight]), rows(source[weight]), strict=True):
            yield ours.float(), theirs.float()


def _paired_codes(built: Tensors, source: Tensors, name: str) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Rows of an MXFP4 linear: decoded (rows, K) float32, the source's bfloat16, packed codes, scales."""
    k = source[f"{name}.weight"].shape[1]
    num_rows = max(1, PIECE_ELEMENTS // k)
    pieces = zip(
        rows(source[f"{name}.weight"], num_rows * k),
        rows(built[f"{name}.weight"], num_rows * k // 2),
        rows(built[f"{name}.weight_scale"], num_rows * k // BLOCK),
        strict=True,
    )
    for theirs, codes, scales in pieces:
        yield decode_weight(codes, scales), theirs.to(torch.bfloat16), codes, scales
