"""`perplexity`: how well a release's backbone predicts a text, through our engine or through a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from worker.commands.releases import describe_engine, loaded
from worker.commands.terminal import errors_on_one_line, fail, stderr

if TYPE_CHECKING:
    from clef_core.windows import Perplexity

STDOUT = Path("-")
TEXT = Path("wikitext2") / "test.txt"
TEXT_SOURCE = "WikiText-2 (Merity et al. 2016), CC BY-SA"


@dataclass(frozen=True)
class _Measured:
    found: Perplexity
    seconds: float
    how: str


@errors_on_one_line
def perplexity(
    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--variant", "--release", "-v", help="Variant or release directory; repeat. Default: bf16 and mxfp4."
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", help="Text file. Default: wikitext2/test.txt among the tasks' data.")
    ] = None,
    windows: Annotated[int, typer.Option("--windows", min=2, help="Windows from the start of the text.")] = 64,
    window_tokens: Annotated[int, typer.Option("--window-tokens", min=2, help="Tokens of a window.")] = 1024,
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", metavar="URL", help="Measure the model of this OpenAI-compatible server instead."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Its name on the server. Default: the only one there.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="CLEF_ENDPOINT_KEY", help="Key of the server.", show_envvar=True),
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write everything as JSON; - for stdout.")
    ] = None,
) -> None:
    """Print the perplexity of each variant's backbone on a text, with standard errors and the ratio to the first.

    The windows do not overlap, and every token but a window's first is predicted. With --endpoint the server scores the
    same windows; they are cut by the tokenizer of the (one) --variant, which must be the server's too. Values compare
    on the same text only.

    Exit codes: 0 measured, 1 the server does not answer, 2 bad input, 130 stopped by Ctrl-C.
    """
    import json

    from worker.commands.export import open_output

    names = variant or (["bf16"] if endpoint else ["bf16", "mxfp4"])
    if endpoint is not None and len(names) != 1:
        fail("--endpoint measures one model: give one --variant, whose tokenizer the server has")
    content, source = _read_text(text)
    if endpoint is not None:
        measured = _through_endpoint(endpoint, model, api_key, names[0], content, (windows, window_tokens))
    else:
        measured = _through_engine(names, content, (windows, window_tokens))
    if json_out is not None:
        body = _to_json(measured, source)
        with open_output(None if json_out == STDOUT else json_out) as out:
            out.write(json.dumps(body, ensure_ascii=False, indent=2) + "\n")
    if json_out != STDOUT:
        typer.echo(_to_markdown(measured, source))


def _read_text(text: Path | None) -> tuple[str, str]:
    from worker.task_rows import DATA_FOLDERS

    path = text or next((folder / TEXT for folder in DATA_FOLDERS if (folder / TEXT).is_file()), None)
    if path is None:
        fail(f"{DATA_FOLDERS[0] / TEXT} is missing ({TEXT_SOURCE}); say where a text is with --text FILE")
    try:
        return path.read_text(encoding="utf-8"), path.name
    except UnicodeDecodeError:
        fail(f"{path} is no UTF-8 text")


def _through_engine(names: list[str], content: str, size: tuple[int, int]) -> dict[str, _Measured]:
    measured = {}
    for variant, engine in loaded(names):
        from clef_core.perplexity import perplexity as measure
        from clef_core.windows import windows_of

        started = time.perf_counter()
        cut = windows_of(engine.release.tokenizer, content, *size)
        with _progress(variant, len(cut)) as told:
            found = measure(engine.release, cut, told)
        measured[variant] = _Measured(found, time.perf_counter() - started, describe_engine(engine))
    return measured


def _through_endpoint(
    url: str, model: str | None, api_key: str | None, name: str, content: str, size: tuple[int, int]
) -> dict[str, _Measured]:
    from clef_core.release import resolve_release
    from clef_core.tokens import PromptTokenizer
    from clef_core.windows import windows_of
    from worker.endpoint import Endpoint, endpoint_perplexity, served_model
    from worker.settings import load_settings
    from worker.sides import with_variant

    settings, variant = with_variant(load_settings(), name)
    tokenizer = PromptTokenizer.from_release(resolve_release(settings.variants[variant]))
    cut = windows_of(tokenizer, content, *size)
    endpoint = Endpoint(url, model or served_model(url, api_key), api_key)
    started = time.perf_counter()
    with _progress(endpoint.model, len(cut)) as told:
        found = endpoint_perplexity(endpoint, cut, told)
    return {endpoint.model: _Measured(found, time.perf_counter() - started, f"through {url}")}


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("windows"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr()) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done: bar.update(task, completed=done)


def _to_json(measured: Mapping[str, _Measured], source: str) -> dict[str, Any]:
    from dataclasses import asdict

    from clef_core.windows import perplexity_ratio

    first = next(iter(measured.values())).found
    body: dict[str, Any] = {"text": source}
    for name, one in measured.items():
        ratio = perplexity_ratio(first, one.found)
        body[name] = asdict(one.found) | {
            "seconds": one.seconds,
            "how": one.how,
            "ratio_to_first": ratio.value,
            "ratio_standard_error": ratio.standard_error,
        }
    return body


def _to_markdown(measured: Mapping[str, _Measured], source: str) -> str:
    from clef_core.windows import perplexity_ratio
    from worker.comparison_tables import escape, markdown_table

    first_name, first = next(iter(measured.items()))
    header = ["model", f"perplexity on {escape(source)}", f"ratio to {escape(first_name)}", "windows", "seconds", "how"]
    rows = []
    for name, one in measured.items():
        found = one.found
        ratio = perplexity_ratio(first.found, found)
        shown = "1" if name == first_name else f"{ratio.value:.4f} ± {ratio.standard_error:.4f}"
        rows.append(
            [
                escape(name),
                f"{found.value:.3f} ± {found.standard_error:.3f}",
                shown,
                f"{found.num_windows} × {found.window_tokens:,}",
                f"{one.seconds:.1f}",
                escape(one.how),
            ]
        )
    return markdown_table(header, rows)
