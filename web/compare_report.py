"""What came out of a comparison as HTML: headline, tables, plots, confusions, and acting only above a confidence.

Takes a view and its report; knows no Gradio and no database. Every option and question of a user is escaped here; the
plots come from `web.plots`. The right run is drawn in the accent colour and the left one in ink, as on every screen.
"""

import re
from collections.abc import Sequence
from html import escape

from clef_core.comparison_report import CoverageCurve, DivergenceNumbers, Report, SummaryNumbers
from clef_core.errors import count
from db.comparison_views import ComparisonView
from db.views import RunView
from web.bars import variant_label
from web.compare_view import run_names
from web.frame import Fact, facts_html
from web.plots import Names, coverage_svg, histogram_svg, reliability_svg, scatter_svg
from worker.comparison_tables import accuracy, interval, percent, plus_minus, verdict

MAX_QUESTIONS = 50
MAX_CONFUSIONS = 10


# ---- report --------------------------------------------------------------------------------------------------------


def report_html(view: ComparisonView, report: Report) -> str:
    """Everything that does not change while one looks at it: headline, figures, tables, plots, how it was made."""
    names = run_names(view)
    random = view.parameters.get("random_releases") or ()
    note = ""
    if random:
        of = " and ".join(escape(variant_label(name)) for name in random)
        words = "the figures show that the machinery works, and nothing about Clef"
        note = f'<p class="hint">Random weights ({of}): {words}.</p>'
    return (
        f'<div class="report"><section class="panel headline"><p class="verdict-line">{_headline(view, report)}</p>'
        f"{_floor_line(report.overall)}{note}{_overall_facts(report.overall)}</section>"
        f"{_divergence_table(report)}{_label_table(report, names)}"
        f'<div class="plots">{_plots(report, names)}</div>{_confusions(report, names)}{_made(view, report)}</div>'
    )


def _headline(view: ComparisonView, report: Report) -> str:
    """The stored sentence, with the variants written as on the rest of the page."""
    sentence = report.headline
    for variant in {view.left_variant, view.right_variant}:
        label = variant_label(variant)
        sentence = re.sub(rf"(?<![\w-]){re.escape(variant)}(?![\w-])", lambda _, label=label: label, sentence)  # type: ignore[misc]  # the default binds the loop's value
    return escape(sentence)


def _floor_line(overall: SummaryNumbers) -> str:
    if overall.floor is None:
        return '<p class="summary">Without a noise floor nobody can say how much of the difference is rounding.</p>'
    style = "" if overall.is_within_floor else " summary-differs"
    floor = overall.floor
    return (
        f'<p class="summary{style}">{"Within" if overall.is_within_floor else "Outside"} the noise floor: mean KL '
        f"{plus_minus(overall.kl_mean, overall.kl_se)} nats against {plus_minus(floor.kl_mean, floor.kl_se)} of the "
        "left run against itself.</p>"
    )


def _overall_facts(overall: SummaryNumbers) -> str:
    low, high = overall.agreement_low, overall.agreement_high
    facts = [
        Fact("Agreement", percent(overall.agreement), f"95 % CI {interval(low, high)}, n = {overall.n:,}"),
        Fact("Mean KL", plus_minus(overall.kl_mean, None), "nats"),
        Fact("Largest |Δp|", f"{overall.max_abs_dp:.3g}", "of any option"),
        Fact("Flips", f"{overall.num_flips:,}", f"{overall.num_near_ties:,} of them near ties"),
    ]
    if (labelled := overall.labelled) is not None:
        facts.append(
            Fact("Broke / fixed", f"{labelled.broke:,} / {labelled.fixed:,}", f"McNemar p {labelled.mcnemar_p:.3g}")
        )
    return facts_html(facts)


def _divergence_table(report: Report) -> str:
    heads = ["n", "Agreement", "KL, nats", "Total variation", "Largest |Δp|", "Flips (near ties)"]
    floor_heads = ["Agreement", "KL, nats", "Largest |Δp|", "Verdict"]
    has_floor = report.overall.floor is not None
    rows = []
    for name, found in _summaries(report):
        cells = [
            f"{found.n:,}",
            f"{percent(found.agreement)} <small>{interval(found.agreement_low, found.agreement_high)}</small>",
            _plus_minus(found.kl_mean, found.kl_se),
            _plus_minus(found.tv_mean, found.tv_se),
            f"{found.max_abs_dp:.3g}",
            f"{found.num_flips:,} ({found.num_near_ties:,})",
        ]
        rows.append((name, cells, _floor_cells(found, found.floor) if has_floor else []))
    groups = [("", 1), ("The two runs", len(heads)), *([("Noise floor", len(floor_heads))] if has_floor else [])]
    return _table("How far apart", groups, [*heads, *(floor_heads if has_floor else [])], rows, len(report.questions))


def _floor_cells(found: SummaryNumbers, floor: DivergenceNumbers | None) -> list[str]:
    if floor is None:
        return ["–", "–", "–", verdict(found)]
    style = "" if found.is_within_floor else ' class="outside"'
    return [
        percent(floor.agreement),
        _plus_minus(floor.kl_mean, floor.kl_se),
        f"{floor.max_abs_dp:.3g}",
        f"<span{style}>{verdict(found)}</span>",
    ]


def _label_table(report: Report, names: Names) -> str:
    if report.overall.labelled is None:
        words = "No right answers are known for these rows, so there is no accuracy"
        return f'<p class="hint">{words}. Columns named label or label:&lt;question&gt; bring them.</p>'
    left, right = escape(names.left), escape(names.right)
    heads = ["n", left, right, "broke", "fixed", "p", left, right, left, right]
    groups = [("", 2), ("Accuracy (95 % CI)", 2), ("McNemar, exact", 3), ("ECE", 2), ("Brier", 2)]
    rows = []
    for name, found in _summaries(report):
        if (labelled := found.labelled) is None:
            continue
        a, b = labelled.left, labelled.right
        cells = [
            f"{a.n:,}",
            accuracy(a),
            accuracy(b),
            f"{labelled.broke:,}",
            f"{labelled.fixed:,}",
            f"{labelled.mcnemar_p:.3g}",
        ]
        cells += [f"{value:.3f}" for value in (a.ece, b.ece, a.brier, b.brier)]
        rows.append((name, cells, list[str]()))
    return _table("Against the right answers", groups, heads, rows, len(rows))


def _summaries(report: Report) -> list[tuple[str, SummaryNumbers]]:
    """All questions together first, unless there is one alone."""
    questions = list(report.questions.items())
    return questions if len(questions) == 1 else [("", report.overall), *questions[:MAX_QUESTIONS]]


def _table(
    title: str,
    groups: Sequence[tuple[str, int]],
    heads: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str], Sequence[str]]],
    num_questions: int,
) -> str:
    """A table of figures; heads and cells are markup, the rows' names plain text (empty: all questions)."""
    over = "".join(f'<th scope="colgroup" colspan="{width}">{escape(name)}</th>' for name, width in groups)
    under = "".join(f'<th scope="col">{head}</th>' for head in heads)
    body = "".join(
        f'<tr{"" if name else " class=all"}><th scope="row">{escape(name) or "all questions"}</th>'
        f"{''.join(f'<td>{cell}</td>' for cell in cells)}"
        f"{''.join(f'<td class=floor>{cell}</td>' for cell in floor)}</tr>"
        for name, cells, floor in rows
    )
    more = (
        f'<p class="hint">The first {MAX_QUESTIONS} of {num_questions:,} questions; the JSON has all.</p>'
        if num_questions > MAX_QUESTIONS
        else ""
    )
    return (
        f'<section class="panel"><h3 class="panel-title">{escape(title)}</h3><div class="table-scroll" tabindex="0">'
        f'<table class="plain figures"><thead><tr class="groups">{over}</tr><tr><th scope="col">Question</th>'
        f"{under}</tr></thead><tbody>{body}</tbody></table></div>{more}</section>"
    )


def _plus_minus(value: float, error: float | None) -> str:
    figure, _, spread = plus_minus(value, error).partition(" ± ")
    return f"{figure} <small>± {spread}</small>" if spread else figure


def _plots(report: Report, names: Names) -> str:
    scatter = report.scatter
    drawn, of = len(scatter.left), scatter.num_answers
    sample = f"n = {of:,}" if drawn == of else f"a random {drawn:,} of n = {of:,}"
    figures = [
        _figure(
            "Top probability", scatter_svg(scatter, names), f"{sample} answers. On the diagonal both are equally sure.",
            _key("dot", "the same option") + _key("diamond", "another option"),
        ),
        _figure(
            "How far the probabilities move", histogram_svg(report.histogram, names),
            f"n = {report.overall.n:,} answers.",
            _key("bar", f"{names.right} against {names.left}")
            + (_key("floor", f"noise floor: {names.left} against itself") if report.histogram.floor else ""),
        ),
    ]  # fmt: skip
    if (labelled := report.overall.labelled) is not None:
        figures.append(
            _figure(
                "Is it as right as it is sure?", reliability_svg(labelled, names),
                f"n = {labelled.left.n:,} labelled answers in 15 bins; a larger dot has more.",
                _key("left", names.left) + _key("right", names.right),
            )
        )  # fmt: skip
    return "".join(figures)


def _figure(title: str, svg: str, note: str, keys: str) -> str:
    return (
        f'<figure class="panel plot"><h3 class="panel-title">{escape(title)}</h3><div class="keys">{keys}</div>{svg}'
        f'<figcaption class="hint">{escape(note)}</figcaption></figure>'
    )


def _key(style: str, words: str) -> str:
    return f'<span class="plot-key"><i class="k-{style}"></i>{escape(words)}</span>'


def _confusions(report: Report, names: Names) -> str:
    if not report.confusions:
        return ""
    shown = report.confusions[:MAX_CONFUSIONS]
    most = shown[0].count
    rows = "".join(
        f'<tr><th scope="row">{escape(one.question_id)}</th><td>{escape(one.left_option)}</td>'
        f"<td>{escape(one.right_option)}</td>"
        f'<td class="c-count"><span>{one.count:,}</span><i style="width:{100 * one.count / most:.1f}%"></i></td></tr>'
        for one in shown
    )
    rest = report.num_other_flips + sum(one.count for one in report.confusions[MAX_CONFUSIONS:])
    more = f'<p class="hint">{count(rest, "flip")} in other ways; the list below has them all.</p>' if rest else ""
    return (
        '<section class="panel"><h3 class="panel-title">What became what</h3><div class="table-scroll" tabindex="0">'
        f'<table class="plain confusions"><thead><tr><th scope="col">Question</th>'
        f'<th scope="col">{escape(names.left)}</th><th scope="col">{escape(names.right)}</th>'
        f'<th scope="col">Flips</th></tr></thead><tbody>{rows}</tbody></table></div>{more}</section>'
    )


def _made(view: ComparisonView, report: Report) -> str:
    runs = [("left", view.left_run), ("right", view.right_run), ("floor", view.floor_run)]
    items = "".join(f"<li><b>{side}</b> {escape(_run_words(run))}</li>" for side, run in runs if run is not None)
    meanings = "".join(f"<li><b>{escape(name)}</b> {escape(words)}</li>" for name, words in report.definitions.items())
    skipped = (
        f"<li>{count(report.num_skipped, 'record')} left out: a run has no answer</li>" if report.num_skipped else ""
    )
    return (
        '<details class="more made"><summary>How it was made, and what the figures mean</summary>'
        f'<ul class="notes">{items}{skipped}</ul><ul class="notes">{meanings}</ul></details>'
    )


def _run_words(run: RunView) -> str:
    threads = f", {count(run.threads, 'thread')}" if run.threads else ""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return (
        f"{variant_label(run.variant)}, release {run.release_checksum[:12]}, linears {run.linear_mode}, {run.dtype}, "
        f"{run.device}{threads}, batching {run.batching.get('mode')}, {versions}"
    )


# ---- acting above a confidence -------------------------------------------------------------------------------------


def threshold_html(curve: CoverageCurve, names: Names, threshold: float) -> str:
    """Coverage and accuracy of both runs at a threshold, with the curve."""
    place = min(range(len(curve.thresholds)), key=lambda index: abs(curve.thresholds[index] - threshold))
    sides = (
        (names.left, "left", curve.left_coverage[place], curve.left_accuracy[place]),
        (names.right, "right", curve.right_coverage[place], curve.right_accuracy[place]),
    )
    rows = "".join(
        f'<tr><th scope="row"><span class="plot-key"><i class="k-{style}"></i>{escape(name)}</span></th>'
        f"<td>{percent(coverage)} <small>{round(coverage * curve.n):,} of {curve.n:,}</small></td>"
        f"{f'<td>{_accuracy_cell(right)}</td>' if curve.is_labelled else ''}</tr>"
        for name, style, coverage, right in sides
    )
    head = '<th scope="col">of them right</th>' if curve.is_labelled else ""
    lines = _key("thin", "acted on") + (_key("thick", "right among these") if curve.is_labelled else "")
    what = "labelled answers" if curve.is_labelled else "answers; without labels nobody knows which are right"
    return (
        f'<div class="threshold"><div><table class="plain"><thead><tr>'
        f'<th scope="col">At {curve.thresholds[place]:.2f} and above</th><th scope="col">acted on</th>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table>"
        f'<p class="hint">n = {curve.n:,} {what}.</p></div>'
        f'<figure class="plot"><div class="keys">{lines}</div>{coverage_svg(curve, names, threshold)}</figure></div>'
    )


def _accuracy_cell(accuracy_above: float | None) -> str:
    return "–" if accuracy_above is None else percent(accuracy_above)
