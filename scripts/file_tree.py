"""Write the README's file tree from the first line of each module's docstring.

Run: .venv/bin/python scripts/file_tree.py (rewrites what stands between the two markers in README.md)
"""

import ast
from pathlib import Path

PROJECT = Path(__file__).parent.parent
PACKAGES = ("clef_core", "db", "worker", "worker/commands", "web", "training")
BEGIN, END = "<!-- file tree: scripts/file_tree.py -->", "<!-- end of the file tree -->"
TOP = (
    ("app.py", "starts Redis, the workers and the page, and ends them again"),
    ("checkpoints/", "clef-nano, written by `training/`, and random releases, by `scripts/make_small_release.py`"),
    ("examples/", "messages, questions and drawn receipts: what page and README show"),
    (
        "tests/",
        "one `test_<module>.py` per module; `data/golden` holds the reference's answers; `browser/` drives Chromium",
    ),
    ("benchmarks/", "run by hand"),
)


def file_tree(project: Path = PROJECT) -> str:
    """The tree as Markdown: a list per package, a line per module."""
    lines = [f"- `{name}` – {what}" for name, what in TOP if (project / name).exists()]
    for package in PACKAGES:
        init, *modules = sorted(
            (project / package).glob("*.py"), key=lambda file: (file.name != "__init__.py", file.name)
        )
        lines += ["", f"**`{package}/`** {_first_line(init)}", ""]
        lines += [f"- `{file.name}` – {_first_line(file)}" for file in modules]
    return "\n".join(lines)


def _first_line(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def with_tree(readme: str, tree: str) -> str:
    """The README with the tree between its markers."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tree}\n\n{END}{after}"


if __name__ == "__main__":
    readme_file = PROJECT / "README.md"
    readme_file.write_text(with_tree(readme_file.read_text(encoding="utf-8"), file_tree()), encoding="utf-8")
