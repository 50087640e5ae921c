"""The dry run: what a table would cost, before anything is stored.

Counts rows, tokens, bad rows and rows that are too long, with the tokenizer alone. Knows no queue; how fast the workers
are must be told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from clef_core.errors import RequestError, TooLongError
from clef_core.schema import Submission
from clef_core.tokens import MAX_TOKENS, PromptTokenizer
from worker.submit import BatchRow
from worker.table_rows import RowNote

MAX_NOTES = 20  # of each kind that are kept; the counts are of all


@dataclass(frozen=True)
class Plan:
    """What a run would do. Tokens are those of rows that can be answered; a time of None is unknown."""

    num_rows: int
    num_bad: int
    bad: tuple[RowNote, ...]
    num_too_long: int
    too_long: tuple[RowNote, ...]
    num_distinct: int
    distinct_tokens: int
    total_tokens: int
    longest_tokens: int
    longest_row: int | None
    max_tokens: int
    estimated_s: float | None

    @property
    def num_answerable(self) -> int:
        return self.num_rows - self.num_bad - self.num_too_long


@dataclass
class _Notes:
    number: int = 0
    kept: list[RowNote] = field(default_factory=list)

    def add(self, row: int, message: str) -> None:
        self.number += 1
        if len(self.kept) < MAX_NOTES:
            self.kept.append(RowNote(row, message))


def plan(
    rows: Iterable[BatchRow],
    tokenizer: PromptTokenizer,
    *,
    max_tokens: int = MAX_TOKENS,
    tokens_per_s: float | None = None,
) -> Plan:
    """Go through all rows and add up.

    Args:
        max_tokens: the limit of a request.
        tokens_per_s: how fast the slowest variant was lately (`worker.progress.tokens_per_s`); None if unknown.

    Returns:
        The plan. Its time counts identical rows once, as the workers do.
    """
    bad, too_long = _Notes(), _Notes()
    num_rows = total = distinct_tokens = longest = 0
    longest_row: int | None = None
    distinct: set[bytes] = set()
    for row in rows:
        num_rows += 1
        if row.submission is None:
            bad.add(row.number, "; ".join(map(str, row.problems)))
            continue
        request = row.submission.request
        sizes = [(image.width, image.height) for image in row.submission.images]
        try:
            tokens = tokenizer.check_length(request, sizes, max_tokens).total
        except TooLongError as error:
            too_long.add(row.number, f"{error.num_tokens:,} tokens")
            continue
        except RequestError as error:
            bad.add(row.number, str(error))
            continue
        total += tokens
        if tokens > longest:
            longest, longest_row = tokens, row.number
        digest = _digest(row.submission)
        if digest not in distinct:
            distinct.add(digest)
            distinct_tokens += tokens
    return Plan(
        num_rows=num_rows,
        num_bad=bad.number,
        bad=tuple(bad.kept),
        num_too_long=too_long.number,
        too_long=tuple(too_long.kept),
        num_distinct=len(distinct),
        distinct_tokens=distinct_tokens,
        total_tokens=total,
        longest_tokens=longest,
        longest_row=longest_row,
        max_tokens=max_tokens,
        estimated_s=distinct_tokens / tokens_per_s if tokens_per_s else None,
    )


def _digest(submission: Submission) -> bytes:
    body = submission.request.to_json()
    images = [image.sha256 for image in submission.images]
    text = json.dumps([body["state"], body["questions"], images], ensure_ascii=False)
    return hashlib.sha256(text.encode()).digest()[:12]
