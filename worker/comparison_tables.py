"""A comparison's report as Markdown: a headline, a table of differences, a table against the labels, how it was made.

Pure: takes the report and gives text. Texts of users (question ids, variants) are escaped, so that they cannot make
cells or markup. The formats of single figures are shared with the table of `evaluate`.
"""

from clef_core.comparison_report import DivergenceNumbers, QualityNumbers, Report, SummaryNumbers
from db.comparison_views import ComparisonView
from db.views import RunView

OVERALL = "all questions"


def comparison_markdown(view: ComparisonView, report: Report) -> str:
    """The report as a headline, a table per kind of figure, and how each run was made."""
    left, right = view.left_variant, view.right_variant
    parts = [f"**{escape(report.headline)}**", _divergence_table(report, left, right)]
    if report.overall.labelled is not None:
        parts.append(_label_table(report, left, right))
    notes = [f"- {side}: {_run_text(run)}" for side, run in _runs(view) if run is not None]
    notes.append(f"- agreement: {report.definitions['agreement']}; KL: {report.definitions['kl']}")
    notes.append(f"- floor: {report.definitions['floor']}")
    if report.overall.labelled is not None:
        notes.append(f"- ECE: {report.definitions['ece']}; Brier: {report.definitions['brier']}")
    if report.num_skipped:
        notes.append(f"- {report.num_skipped:,} records are left out: a run has no answer to them")
    if view.cancel_requested_at is not None:
        notes.append("- the comparison was cancelled: it covers what was done by then")
    if random := view.parameters.get("random_releases"):
        notes.append(f"- random weights, the figures say nothing about Clef: {', '.join(random)}")
    return "\n\n".join([*parts, "\n".join(notes)]) + "\n"


def _runs(view: ComparisonView) -> list[tuple[str, RunView | None]]:
    return [
        (f"left, {view.left_variant}", view.left_run),
        (f"right, {view.right_variant}", view.right_run),
        (f"floor, {view.floor_variant}", view.floor_run),
    ]


def _run_text(run: RunView) -> str:
    threads = f", {run.threads} threads" if run.threads else ""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return (
        f"release {run.release_checksum[:12]}, linears {run.linear_mode}, {run.dtype}, {run.device}{threads}, "
        f"batching {run.batching.get('mode')}, {versions}"
    )


def _divergence_table(report: Report, left: str, right: str) -> str:
    header = [
        "question", "n", "agreement", "95 % CI", f"KL({left}‖{right})", "total variation", "max \\|Δp\\|",
        "flips (near ties)", "floor: agreement", "floor: KL", "floor: max \\|Δp\\|", "difference",
    ]  # fmt: skip
    rows = []
    for name, found in _summaries(report):
        rows.append(
            [
                escape(name),
                f"{found.n:,}",
                percent(found.agreement),
                interval(found.agreement_low, found.agreement_high),
                plus_minus(found.kl_mean, found.kl_se),
                plus_minus(found.tv_mean, found.tv_se),
                f"{found.max_abs_dp:.3g}",
                f"{found.num_flips:,} ({found.num_near_ties:,})",
                *_floor_cells(found.floor),
                verdict(found),
            ]
        )
    return markdown_table(header, rows)


def _floor_cells(floor: DivergenceNumbers | None) -> list[str]:
    if floor is None:
        return ["–", "–", "–"]
    return [percent(floor.agreement), plus_minus(floor.kl_mean, floor.kl_se), f"{floor.max_abs_dp:.3g}"]


def _label_table(report: Report, left: str, right: str) -> str:
    header = [
        "question", "labelled", f"{left} accuracy", f"{right} accuracy", "fixed", "broke", "McNemar p",
        f"{left} ECE", f"{right} ECE", f"{left} Brier", f"{right} Brier",
    ]  # fmt: skip
    rows = []
    for name, found in _summaries(report):
        if (labelled := found.labelled) is not None:
            a, b = labelled.left, labelled.right
            rows.append(
                [
                    escape(name),
                    f"{a.n:,}",
                    accuracy(a),
                    accuracy(b),
                    f"{labelled.fixed:,}",
                    f"{labelled.broke:,}",
                    f"{labelled.mcnemar_p:.3g}",
                    f"{a.ece:.3f}",
                    f"{b.ece:.3f}",
                    f"{a.brier:.3f}",
                    f"{b.brier:.3f}",
                ]
            )
    return markdown_table(header, rows)


def _summaries(report: Report) -> list[tuple[str, SummaryNumbers]]:
    if len(report.questions) == 1:
        return list(report.questions.items())
    return [(OVERALL, report.overall), *report.questions.items()]


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table whose cells are Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def percent(share: float) -> str:
    """`98.0 %`."""
    return f"{100 * share:.1f} %"


def interval(low: float, high: float) -> str:
    """`95.7–99.1`, in per cent."""
    return f"{100 * low:.1f}–{100 * high:.1f}"


def accuracy(quality: QualityNumbers) -> str:
    """`94.0 % (90.7–96.2)`."""
    return f"{percent(quality.accuracy)} ({interval(quality.accuracy_low, quality.accuracy_high)})"


def plus_minus(value: float, error: float | None) -> str:
    """`0.0220 ± 0.0031` (a standard error); small values in scientific notation, zero as zero."""
    if value == 0:
        return "0"
    spec = ".4f" if value >= 0.001 else ".1e"
    return f"{value:{spec}}" if error is None else f"{value:{spec}} ± {error:{spec}}"


def verdict(found: SummaryNumbers) -> str:
    """What the difference is against the floor."""
    if found.is_within_floor is None:
        return "no floor measured"
    return "within the floor" if found.is_within_floor else "outside the floor"


def escape(text: str) -> str:
    """A text of users in a Markdown table: on one line, no cell or markup of its own."""
    escaped = "".join(f"\\{character}" if character in "\\|*_`<>[]#" else character for character in text)
    return " ".join(escaped.split())
