"""What must hold of an MXFP4 release, law by law, each with its result.

Reads everything and changes nothing; memory stays small whatever the release. A broken release is no error here: each
law says what it found. What surprises: with a source, a build by plain rounding must be the source's weights rounded by
our encoder, bit for bit; AWQ moves weights on purpose, so there only the error with its scales undone is bounded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clef_core import laws, source_laws
from clef_core.errors import ReleaseError
from clef_core.inspected import Inspected, Unchecked
from clef_core.laws import Case, Finding
from clef_core.progress import Listener, silent
from clef_core.weight_compare import LayerError

LAWS: tuple[Callable[[Case], Finding], ...] = (
    laws.files,
    laws.checksums,
    laws.index,
    laws.config,
    laws.linears,
    laws.tensors,
    laws.numbers,
    laws.sizes,
    source_laws.copies,
    source_laws.unchanged,
    source_laws.errors,
)

Status = Literal["holds", "broken", "unchecked"]


@dataclass(frozen=True)
class Law:
    """One law and its result. `detail` is what was measured, or why the law was not looked at."""

    name: str
    statement: str
    status: Status
    detail: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """All laws, and with a source the error of every MXFP4 linear, the largest first."""

    path: Path
    source: Path | None
    laws: tuple[Law, ...]
    errors: tuple[LayerError, ...]

    @property
    def holds(self) -> bool:
        return all(law.status != "broken" for law in self.laws)


def verify(path: str | Path, source: str | Path | None = None, listener: Listener = silent) -> Report:
    """Look at every law.

    Args:
        path: the MXFP4 release.
        source: the BF16 release it was made from; without it the laws about the source are not looked at.
        listener: is told how far the laws are that read a lot.

    Raises:
        ReleaseError: one of the directories is not there.
    """
    path, source = Path(path), None if source is None else Path(source)
    for directory in filter(None, (path, source)):
        if not directory.is_dir():
            raise ReleaseError(f"{directory}: no such release directory")
    case = Case(Inspected(path), None if source is None else Inspected(source), listener)
    results = tuple(_look_at(law, case) for law in LAWS)
    return Report(path, source, results, tuple(sorted(case.errors, key=lambda error: -error.relative)))


def _look_at(law: Callable[[Case], Finding], case: Case) -> Law:
    statement = (law.__doc__ or "").strip()
    try:
        finding = law(case)
    except Unchecked as reason:
        return Law(law.__name__, statement, "unchecked", str(reason))
    status: Status = "broken" if finding.problems else "holds"
    return Law(law.__name__, statement, status, finding.detail, tuple(finding.problems))
