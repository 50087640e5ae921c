"""What 4-bit arithmetic in one part of the model does to the answers, part by part, for one's own requests.

Every part (a layer, a kind of linear, one linear) is rounded to MXFP4 alone, weights and activations, as a release by
`--algorithm none` would be; the rest stays BF16; the answers are held against those of the untouched model. Two more
runs give the scale: everything rounded at once, and nothing rounded but the batches padded (the noise floor: how much
the answers move when only the shape of a batch changes). What surprises: the effects of parts do not add up to the
effect of all.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from clef_core import stats
from clef_core.encoding import Record
from clef_core.engine import Batching, Decision, Engine
from clef_core.errors import ReleaseError, RequestError
from clef_core.linears import read_backbone
from clef_core.model import Release
from clef_core.mxfp4_linear import MXFP4Linear
from clef_core.progress import Count, Listener, silent
from clef_core.weight_encoder import encode_weight

Parts = Literal["layer", "kind", "linear"]
EVERYTHING = "everything"
NOISE_FLOOR = "noise floor"


@dataclass(frozen=True)
class Effect:
    """What one part does to the answers; the left of each pair is the untouched model.

    agreement: answers with the same top option. kl: KL(BF16‖part) in nats. max_abs_dp: largest change of a probability.
    """

    part: str
    num_linears: int
    num_weights: int
    agreement: stats.Interval
    kl: stats.Mean
    max_abs_dp: float

    def to_json(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "num_linears": self.num_linears,
            "num_weights": self.num_weights,
            "num_answers": self.agreement.n,
            "num_agreeing": self.agreement.successes,
            "agreement": [self.agreement.share, self.agreement.low, self.agreement.high],
            "kl": self.kl.value,
            "kl_standard_error": None if math.isnan(self.kl.standard_error) else self.kl.standard_error,
            "max_abs_dp": self.max_abs_dp,
        }


@dataclass(frozen=True)
class Sensitivity:
    """A finished run. `effects` are in the order of the model."""

    parts: Parts
    num_requests: int
    num_refused: int
    noise_floor: Effect
    everything: Effect
    effects: tuple[Effect, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "num_requests": self.num_requests,
            "num_refused": self.num_refused,
            "noise_floor": self.noise_floor.to_json(),
            "everything": self.everything.to_json(),
            "effects": [effect.to_json() for effect in self.effects],
        }


def measure_sensitivity(
    release: Release,
    records: Sequence[Record],
    parts: Parts = "layer",
    *,
    max_batch_tokens: int | None = None,
    listener: Listener = silent,
) -> Sensitivity:
    """Answer the records once per part and compare.

    Args:
        release: a loaded BF16 release; it is as before when this returns.
        records: requests with their pictures.

    Raises:
        ReleaseError: the release is not BF16.
        RequestError: no record can be answered.
    """
    if release.linear_mode is not None:
        raise ReleaseError(f"{release.files.path} is MXFP4 already; sensitivity needs the BF16 release")
    linears = read_backbone(release.files.config, release.files.path).linears
    groups = group_linears(linears, parts)
    engine = Engine(release, max_batch_tokens=max_batch_tokens)
    count = Count(listener, "sensitivity", (len(groups) + 3) * len(records), "rows")

    reference = _answers(engine, records, count, "fast")
    answered = sorted(reference)
    if not answered:
        raise RequestError.at((), "none of the requests can be answered")
    good = [records[index] for index in answered]
    wanted = [reference[index] for index in answered]

    def effect(part: str, names: Sequence[str], batching: Batching = "fast") -> Effect:
        weights = sum(release.backbone.get_submodule(name).weight.numel() for name in names)
        with quantised(release.backbone, names):
            found = _answers(engine, good, count, batching)
        return _compare(part, len(names), weights, wanted, [found[index] for index in range(len(good))])

    count.add((len(groups) + 2) * (len(records) - len(good)))
    noise_floor = effect(NOISE_FLOOR, (), "padded")
    everything = effect(EVERYTHING, linears)
    effects = tuple(effect(part, names) for part, names in groups.items())
    return Sensitivity(parts, len(good), len(records) - len(good), noise_floor, everything, effects)


def group_linears(linears: Sequence[str], parts: Parts) -> dict[str, list[str]]:
    """Part → its linears, both in the order of the model.

    A layer is called `3`, a kind `mlp.up_proj`, a linear `3.mlp.up_proj`.
    """
    groups: dict[str, list[str]] = {}
    for name in linears:
        layer, _, kind = name.rpartition(".layers.")[2].partition(".")
        part = {"layer": layer, "kind": kind, "linear": f"{layer}.{kind}"}[parts]
        groups.setdefault(part, []).append(name)
    return groups


@contextmanager
def quantised(backbone: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Inside, the linears named are MXFP4; afterwards they are what they were."""
    before = {name: backbone.get_submodule(name) for name in names}
    try:
        for name, linear in before.items():
            _replace(backbone, name, _rounded(linear))
        yield
    finally:
        for name, linear in before.items():
            _replace(backbone, name, linear)


def _rounded(linear: nn.Module) -> MXFP4Linear:
    weight: torch.Tensor = linear.weight  # type: ignore[assignment]  # a parameter
    rounded = MXFP4Linear(weight.shape[1], weight.shape[0], device=weight.device)
    rounded.weight, rounded.weight_scale = encode_weight(weight.detach().to(torch.bfloat16))
    rounded.expand(weight.dtype)
    return rounded


def _replace(backbone: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(backbone.get_submodule(parent), leaf, module)


def _answers(engine: Engine, records: Sequence[Record], count: Count, batching: Batching) -> dict[int, Decision]:
    """The decisions by index of record; records that the engine refuses are left out."""
    found = {}
    for finished in engine.run(records, batching):
        found.update({index: outcome for index, outcome in finished if isinstance(outcome, Decision)})
        count.add(len(finished))
    return found


def _compare(
    part: str, num_linears: int, num_weights: int, left: Sequence[Decision], right: Sequence[Decision]
) -> Effect:
    pairs = [
        (list(options.values()), [theirs.log_probs[question][option] for option in options])
        for ours, theirs in zip(left, right, strict=True)
        for question, options in ours.log_probs.items()
    ]
    agreeing = sum(stats.top(ours) == stats.top(theirs) for ours, theirs in pairs)
    return Effect(
        part=part,
        num_linears=num_linears,
        num_weights=num_weights,
        agreement=stats.wilson(agreeing, len(pairs)),
        kl=stats.mean([stats.kl_divergence(ours, theirs) for ours, theirs in pairs]),
        max_abs_dp=max(stats.max_abs_difference(ours, theirs) for ours, theirs in pairs),
    )
