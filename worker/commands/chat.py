"""`chat`: the same four prompts to each variant's backbone, greedy, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from worker.commands.terminal import errors_on_one_line, stderr

if TYPE_CHECKING:
    from clef_core.chat import Reply

STDOUT = Path("-")


@errors_on_one_line
def chat(
    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--variant", "--release", "-v", help="Variant or release directory; repeat. Default: bf16 and mxfp4."
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Ask this instead of the four prompts; repeat.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest reply, in tokens.")] = 64,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the replies as JSON; - for stdout.")
    ] = None,
) -> None:
    """Let each variant's backbone answer four prompts greedily and print the replies side by side.

    A check by eye that a quantised build still speaks. The joint head takes no part, and nothing is stored.

    Exit codes: 0 answered, 2 bad input, 130 stopped by Ctrl-C.
    """
    import json
    from dataclasses import asdict

    from worker.commands.export import open_output
    from worker.commands.releases import loaded

    replies: dict[str, list[Reply]] = {}
    for name, engine in loaded(variant or ["bf16", "mxfp4"]):
        from clef_core.chat import PROMPTS
        from clef_core.chat import chat as talk

        with stderr().status(f"{name} is writing", spinner="dots"):
            replies[name] = talk(engine.release, prompt or PROMPTS, max_new_tokens)
    if json_out is not None:
        body = {name: [asdict(reply) for reply in of_name] for name, of_name in replies.items()}
        with open_output(None if json_out == STDOUT else json_out) as out:
            out.write(json.dumps(body, ensure_ascii=False, indent=2) + "\n")
    if json_out != STDOUT:
        typer.echo(_to_markdown(replies))


def _to_markdown(replies: Mapping[str, Sequence[Reply]]) -> str:
    from worker.comparison_tables import escape, markdown_table

    header = ["prompt", *map(escape, replies)]
    rows = [
        [escape(row[0].prompt), *(escape(reply.text) + (" …" if reply.is_cut else "") for reply in row)]
        for row in zip(*replies.values(), strict=True)
    ]
    return markdown_table(header, rows)
