"""The Compare screen in a real browser: from a batch with labels to a comparison that is explored and downloaded."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from browser.steps import EXAMPLES, Watched, many_messages, open_batch, open_decide, press_decide, upload
from playwright.sync_api import Browser, Page, expect

RUN_TIMEOUT_MS = 240_000
REPORT = "#report .verdict-line"


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's questions and one without a right answer: on the example's own the variants seldom differ."""
    asked = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
    colours = dict.fromkeys(("amber", "blue", "green", "grey", "orange", "pink", "red", "violet"))
    asked["colour"] = {"type": "choice", "instructions": "Which colour would suit this message?", "criteria": colours}
    file = tmp_path_factory.mktemp("questions") / "questions.json"
    file.write_text(json.dumps(asked), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def compared_url(browser: Browser, app_url: str, questions: Path) -> str:
    """A finished comparison of the example's 40 labelled messages, started as a person would start it."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(30_000)
    watched = Watched()
    watched.attach(page)
    open_batch(page, f"{app_url}/batch")
    upload(page, EXAMPLES / "messages.csv", questions)
    expect(page.locator("#map-labels")).to_contain_text("label:department")
    page.locator("#batch-variants label", has_text="BF16").click()
    page.locator("#run").click()
    expect(page.locator("#progress strong")).to_have_text("Done", timeout=RUN_TIMEOUT_MS)
    page.locator("#compare").click()
    page.wait_for_url(re.compile(r"/compare\?batch=\d+"))
    expect(page.locator("#compare-batch input")).to_have_value(re.compile(r"messages\.csv \(batch \d+, 40 rows\)"))
    expect(page.locator("#compare-left input")).to_have_value("BF16")
    expect(page.locator("#compare-right input")).to_have_value("MXFP4")
    page.locator("#compare-start").click()
    expect(page.locator("#progress strong")).to_be_visible()
    page.wait_for_url(re.compile(r"/compare\?comparison=\d+"))
    expect(page.locator(REPORT)).to_be_visible(timeout=RUN_TIMEOUT_MS)
    expect(page.locator("#progress strong")).to_have_count(0)
    assert watched.errors == []
    url = page.url
    context.close()
    return url


@pytest.fixture
def compared(page: Page, compared_url: str) -> Page:
    """The comparison in a new tab; nothing is in its memory but the address."""
    page.goto(compared_url, wait_until="domcontentloaded")
    expect(page.locator(REPORT)).to_be_visible()
    expect(page.locator("#flips .hint")).to_be_visible()
    return page


def number_of(page: Page, kind: str) -> int:
    """How many answers a filter leaves."""
    page.locator("#flip-kind label", has_text=kind).click()
    expect(page.locator("#flip-kind label.selected")).to_have_text(kind)
    page.wait_for_timeout(700)
    line = page.locator("#flips .hint")
    found = re.search(r"of ([\d,]+) answer", line.inner_text()) if line.count() else None
    return int(found[1].replace(",", "")) if found else 0


def download(page: Page, kind: str) -> str:
    with page.expect_download() as started:
        page.locator(f"#download-{kind}").click()
    return Path(started.value.path()).read_text(encoding="utf-8")


def test_a_comparison_says_in_words_and_figures_how_far_the_variants_are_apart(compared: Page) -> None:
    expect(compared.locator(REPORT)).to_contain_text(re.compile(r"MXFP4 picked the same option as BF16 for \d+ of 160"))
    expect(compared.locator(REPORT)).to_contain_text("BF16 against itself in another batch shape")
    tables = compared.locator("#report table.figures")
    asked = ["department", "urgency", "outage", "colour"]
    expect(tables.nth(0).locator("tbody th")).to_have_text(["all questions", *asked])
    expect(tables.nth(1).locator("tbody th")).to_have_text(["all questions", "department"])
    expect(compared.locator("#report svg")).to_have_count(3)
    expect(compared.locator("#notice")).to_contain_text("This is clef-nano, not Clef.")


def test_flips_are_filtered_and_a_click_shows_both_decisions(compared: Page) -> None:
    every, near, broke, fixed = (number_of(compared, kind) for kind in ("All flips", "Near ties", "Broke", "Fixed"))
    same = number_of(compared, "No flip")
    assert every + same == 160
    assert every > 0
    assert near <= every
    assert broke + fixed <= every
    figures = compared.locator("#report table.figures").nth(0).locator("tbody tr").first.locator("td")
    expect(figures.nth(5)).to_have_text(f"{every} ({near})")

    assert number_of(compared, "All flips") == every
    row = compared.locator("#flips button").first
    row.click()
    expect(compared.locator("#flips .unfolded")).to_have_count(1)
    expect(row).to_have_attribute("aria-expanded", "true")
    expect(compared.locator(".unfolded .legend .key")).to_have_text(["MXFP4", "BF16", "FLOOR"])
    expect(compared.locator(".unfolded .flag")).to_have_text("answers differ")
    compared.locator("#flips button").first.click()
    expect(compared.locator("#flips .unfolded")).to_have_count(0)


def test_a_question_narrows_the_list_and_pages_turn(compared: Page) -> None:
    assert number_of(compared, "No flip") > 20
    expect(compared.locator("#flips-next")).to_be_visible()
    expect(compared.locator("#flips-previous")).to_be_hidden()
    first = compared.locator("#flips button").first.inner_text()
    compared.locator("#flips-next").click()
    expect(compared.locator("#flips .hint")).to_contain_text("21 to")
    assert compared.locator("#flips button").first.inner_text() != first
    compared.locator("#flips-previous").click()
    expect(compared.locator("#flips .hint")).to_contain_text("1 to 20")
    compared.locator("#flip-question input").click()
    compared.get_by_role("option", name="urgency").click()
    expect(compared.locator("#flips .f-question").first).to_have_text("urgency")
    expect(compared.locator("#flips .f-question", has_text="department")).to_have_count(0)


def test_the_slider_changes_coverage_and_accuracy(compared: Page) -> None:
    expect(compared.locator("#coverage thead")).to_contain_text("At 0.80 and above")
    field = compared.locator("#threshold input[type=number]")
    field.fill("0")
    field.press("Enter")
    expect(compared.locator("#coverage thead")).to_contain_text("At 0.00 and above")
    expect(compared.locator("#coverage tbody tr").first).to_contain_text("100.0 % 39 of 39")
    compared.locator("#threshold input[type=range]").focus()
    for _ in range(30):
        compared.keyboard.press("ArrowRight")
    expect(compared.locator("#coverage thead")).to_contain_text("At 0.30 and above")


def test_everything_can_be_downloaded(compared: Page) -> None:
    body = json.loads(download(compared, "json"))
    assert body["overall"]["n"] == 160
    assert "nano" in json.dumps(body["comparison"]["parameters"]["releases"])
    assert download(compared, "markdown").startswith("**mxfp4 picked the same option as bf16")
    rows = list(csv.DictReader(io.StringIO(download(compared, "csv"))))
    assert len(rows) == 160
    assert sum(row["agree"] == "false" for row in rows) == body["overall"]["num_flips"]
    assert len(download(compared, "jevl").splitlines()) == 80


def test_a_reload_shows_the_same_comparison_and_the_list_has_it(
    compared: Page, compared_url: str, app_url: str
) -> None:
    sentence = compared.locator(REPORT).inner_text()
    compared.reload(wait_until="domcontentloaded")
    expect(compared.locator(REPORT)).to_have_text(sentence)
    compared.goto(f"{app_url}/compare", wait_until="domcontentloaded")
    item = compared.locator(f'#comparisons a[href="/compare{compared_url.split("/compare")[1]}"]')
    expect(item).to_contain_text("messages.csv")
    expect(item).to_contain_text("% the same")
    item.click()
    expect(compared.locator(REPORT)).to_have_text(sentence)


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_comparison_fits_phone_and_desk_in_both_themes(
    browser: Browser, compared_url: str, width: int, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    watched = Watched()
    watched.attach(page)
    page.goto(compared_url, wait_until="domcontentloaded")
    expect(page.locator(REPORT)).to_be_visible()
    page.locator("#flips button").first.click()
    expect(page.locator("#flips .unfolded")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    smallest = page.evaluate(
        "() => Math.min(...[...document.querySelectorAll('.plot-svg text')].map(t => t.getBoundingClientRect().height))"
    )
    assert smallest >= 9, "a text of a plot is too small to read"
    page.wait_for_timeout(300)
    assert watched.errors == []
    context.close()


def test_a_comparison_can_be_stopped_and_gone_on_with(page: Page, app_url: str, tmp_path: Path) -> None:
    open_batch(page, f"{app_url}/batch")
    upload(page, many_messages(tmp_path, 5), EXAMPLES / "questions.json")
    expect(page.locator("#plan .fact").first).to_contain_text("200")
    page.locator("#batch-variants label", has_text="BF16").click()
    page.locator("#run").click()
    expect(page.locator("#progress strong")).to_have_text("Done", timeout=RUN_TIMEOUT_MS)
    page.locator("#compare").click()
    expect(page.locator("#compare-batch input")).to_have_value(re.compile("many_messages"))
    page.locator("#compare-right input").click()
    page.get_by_role("option", name="BF16").click()
    page.locator("#compare-floor input").uncheck()
    page.locator("#compare-start").click()
    page.locator("#cancel").click()
    expect(page.locator("#resume")).to_be_visible(timeout=60_000)
    expect(page.locator("#progress")).to_contain_text("not made")
    page.locator("#resume").click()
    expect(page.locator(REPORT)).to_contain_text(
        "BF16 run again picked the same option as BF16 for 600 of 600", timeout=RUN_TIMEOUT_MS
    )
    expect(page.locator("#comparison-head")).to_contain_text("no noise floor")


def test_an_address_that_names_nothing_says_so(page: Page, app_url: str) -> None:
    for asked, words in (("comparison=999999", "no comparison '999999'"), ("sensitivity=x", "no sensitivity run 'x'")):
        page.goto(f"{app_url}/compare?{asked}", wait_until="domcontentloaded")
        expect(page.locator("#compare-problems")).to_contain_text(words)
        expect(page.locator("#compare-start")).to_be_visible()
        expect(page.locator("#sensitivity-runs")).to_contain_text("python -m worker sensitivity")


def test_the_questions_of_a_decision_are_asked_alone_too(page: Page, app_url: str) -> None:
    open_decide(page, app_url)
    press_decide(page)
    page.locator("#together").click()
    expect(page.locator("#together-result table.plain tbody tr")).to_have_count(6, timeout=60_000)
    expect(page.locator("#together-result .summary").first).to_contain_text("MXFP4")
    page.locator("#clear").click()
    expect(page.locator("#together")).to_be_hidden()
    expect(page.locator("#together-result")).to_be_empty()
