"""What a person does on the page, as functions for the tests."""

import csv
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import ConsoleMessage, Locator, Page, expect

PROJECT = Path(__file__).parents[2]
EXAMPLES = PROJECT / "examples"
ANSWER_TIMEOUT_MS = 60_000


ARRIVED, LEAVING = "a page has arrived", "a page is being left"
TELL_WHEN_LEFT = f"""if (window === top) {{
    console.debug("{ARRIVED}");
    addEventListener("beforeunload", () => console.debug("{LEAVING}"));
}}"""


@dataclass
class Watched:
    """What a page did that a person would not see.

    Gradio's `beforeunload` handler aborts its streams, and its client reports that, for every event under way, as
    errors in the console of the page that is being left. Nobody sees them, so they do not count once the next page has
    arrived.
    """

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    num_before_leaving: int | None = None

    def attach(self, page: Page) -> None:
        page.add_init_script(TELL_WHEN_LEFT)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(f"{message.text} ({message.location.get('url', '')})")
        elif message.text == LEAVING:
            self.num_before_leaving = len(self.errors)
        elif message.text == ARRIVED and self.num_before_leaving is not None:
            del self.errors[self.num_before_leaving :]
            self.num_before_leaving = None


def open_decide(page: Page, url: str) -> None:
    page.goto(url, wait_until="domcontentloaded")
    expect(page.locator("#card-0")).to_be_visible()
    expect(page.locator("#meter .tokens")).to_contain_text("16,384")


def open_batch(page: Page, url: str) -> None:
    page.goto(url, wait_until="domcontentloaded")
    expect(page.locator("#workers .chip").first).to_be_visible()


def upload(page: Page, table: Path, questions: Path | None = None) -> None:
    """Choose a table, and questions from a file; wait for the preview."""
    page.locator("#batch-file input[type=file]").set_input_files(table)
    expect(page.locator("#table-line")).to_contain_text(table.name)
    if questions is not None:
        page.locator("#upload-questions").locator("xpath=..").locator("input[type=file]").set_input_files(questions)
    expect(page.locator("#preview .prow").first).to_be_visible()


def many_messages(folder: Path, copies: int) -> Path:
    """The example's rows so many times over, so that there is time to stop them; identical ones are computed once."""
    with (EXAMPLES / "messages.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    table = folder / "many_messages.csv"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        for copy in range(copies):
            writer.writerows(
                row | {"id": f"{row['id']}-{copy}", "message": f"{row['message']} ({copy})"} for row in rows
            )
    return table


def unfold(page: Page, number: int) -> None:
    """Open a question card, if it is folded."""
    head = page.locator(f"#card-{number} > button")
    if "open" not in (head.get_attribute("class") or ""):
        head.click()
    expect(page.locator(f"#card-{number} .f-id textarea, #card-{number} .f-id input").first).to_be_visible()


def field_of(page: Page, number: int, name: str) -> Locator:
    """A text field of a card: `id`, `instructions` or `options`."""
    return page.locator(f"#card-{number} .f-{name} :is(input, textarea)").first


def write_json(page: Page, text: str) -> None:
    """Open the JSON view and replace what stands there, once the editor has loaded its language and is itself."""
    page.get_by_role("tab", name="JSON").click()
    code = page.locator("#questions-json .cm-content")
    expect(code.locator(".cm-line span").first).to_be_visible()
    code.fill(text)


def press_decide(page: Page) -> None:
    """Decide and wait for all answers."""
    page.locator("#decide").click()
    expect(page.locator("#results .answers")).to_be_visible(timeout=ANSWER_TIMEOUT_MS)
    expect(page.locator("#results .pending")).to_have_count(0, timeout=ANSWER_TIMEOUT_MS)
