"""Plain data of comparisons: what the stores take and give. The same rules as in `db.views`.

A comparison is decided (all its decisions are there) before it is finished (its answers are compared and summarised);
between the two lies a moment that a person who watches should not take for a stop.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from db.views import DecisionView, Json, RunView, Side

Effect = Literal["broke", "fixed", "other"]
AnswerOrder = Literal["margin", "row", "divergence"]
ComparisonStatus = Literal["running", "summarising", "done", "cancelled"]


@dataclass(frozen=True)
class NewComparison:
    """A comparison to store. `parameters` says how it was asked for; nothing in the database reads it."""

    batch_id: int
    name: str
    left_variant: str
    right_variant: str
    floor_variant: str | None
    parameters: dict[str, Json]

    @property
    def variants(self) -> dict[Side, str]:
        """The variant of each side that is run."""
        sides: dict[Side, str] = {"left": self.left_variant, "right": self.right_variant}
        return sides if self.floor_variant is None else sides | {"floor": self.floor_variant}


@dataclass(frozen=True)
class ComparisonView:
    """`statistics` is `clef_core.comparison_report.Report` as JSON; None while it runs, or when nothing came out."""

    id: int
    batch_id: int
    name: str
    left_variant: str
    right_variant: str
    floor_variant: str | None
    left_run: RunView | None
    right_run: RunView | None
    floor_run: RunView | None
    parameters: dict[str, Json]
    statistics: dict[str, Json] | None
    num_rows: int
    created_at: datetime
    stored_at: datetime | None
    cancel_requested_at: datetime | None
    finished_at: datetime | None

    @property
    def variants(self) -> dict[Side, str]:
        """The variant of each side that is run."""
        sides: dict[Side, str] = {"left": self.left_variant, "right": self.right_variant}
        return sides if self.floor_variant is None else sides | {"floor": self.floor_variant}


@dataclass(frozen=True)
class ComparisonItem:
    """One line of the list of comparisons. `agreement` is None until it is known."""

    id: int
    name: str
    left_variant: str
    right_variant: str
    num_rows: int
    created_at: datetime
    status: ComparisonStatus
    agreement: float | None


@dataclass(frozen=True)
class ComparisonProgress:
    """Counts are decisions, all sides together. `eta_s` is None while none finished lately."""

    comparison_id: int
    num_rows: int
    num_decisions: int
    queued: int
    running: int
    done: int
    failed: int
    cancelled: int
    decisions_per_s: float
    eta_s: float | None
    is_decided: bool
    is_finished: bool
    is_cancelled: bool

    @property
    def status(self) -> ComparisonStatus:
        if not self.is_decided:
            return "running"
        if not self.is_finished:
            return "summarising"
        return "cancelled" if self.is_cancelled else "done"


@dataclass(frozen=True)
class PairedRow:
    """One request with what each side decided, to be compared. A side that has no answer is absent."""

    request_id: int
    labels: dict[str, str]
    log_probs: dict[Side, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class ComparedAnswer:
    """One row of table `comparison_answers`; the fields are those of `clef_core.comparison.Compared`."""

    request_id: int
    question_id: str
    left_option: str
    right_option: str
    left_confidence: float
    right_confidence: float
    margin: float
    kl: float
    total_variation: float
    max_abs_dp: float
    label: str | None
    left_brier: float | None
    right_brier: float | None
    floor_option: str | None
    floor_kl: float | None
    floor_total_variation: float | None
    floor_max_abs_dp: float | None
    is_flip: bool
    effect: Effect | None


@dataclass(frozen=True)
class AnswerFilter:
    """Which answers to list. `max_margin` keeps near ties: the left run's two best options are closer than this."""

    question_id: str | None = None
    is_flip: bool | None = None
    effect: Effect | None = None
    max_margin: float | None = None


@dataclass(frozen=True)
class ListedAnswer:
    """An answer with what a list shows of its request: the row's number and id, and the start of its state."""

    answer: ComparedAnswer
    row_number: int | None
    external_id: str | None
    title: str


@dataclass(frozen=True)
class AnswerPage:
    """Some of the answers that pass a filter; `total` is how many pass it."""

    total: int
    rows: tuple[ListedAnswer, ...]


@dataclass(frozen=True)
class SideDecisions:
    """What each side decided for one request, unrounded log-probabilities included."""

    request_id: int
    decisions: dict[Side, DecisionView]
