"""The History screen in a real browser: what was decided is found and opened again."""

from pathlib import Path
from uuid import uuid4

from browser.steps import EXAMPLES, many_messages, open_batch, open_decide, press_decide, upload
from playwright.sync_api import Page, expect


def open_history(page: Page, app_url: str) -> None:
    page.goto(f"{app_url}/history", wait_until="domcontentloaded")
    expect(page.locator("#history .links li").first).to_be_visible()


def test_a_decision_is_listed_first_found_by_its_words_and_opened_again(page: Page, app_url: str) -> None:
    word = uuid4().hex
    open_decide(page, app_url)
    page.locator("#state textarea").fill(f"Find {word} again, <b>please</b>")
    press_decide(page)
    open_history(page, app_url)
    expect(page.locator("#history li").first).to_contain_text(f"Find {word} again, <b>please</b>")
    page.locator("#history-text :is(input, textarea)").fill(word[:12])
    expect(page.locator("#history li")).to_have_count(1)
    page.locator("#history li a").click()
    expect(page.locator("#results .answers")).to_be_visible()
    expect(page.locator("#state textarea")).to_have_value(f"Find {word} again, <b>please</b>")


def test_entries_are_filtered_by_kind_and_variant(page: Page, app_url: str, tmp_path: Path) -> None:
    open_decide(page, app_url)
    page.locator("#variants label", has_text="BF16").click()
    press_decide(page)
    open_batch(page, f"{app_url}/batch")
    upload(page, many_messages(tmp_path, 15), EXAMPLES / "questions.json")
    expect(page.locator("#plan .fact").first).to_contain_text("600")
    page.locator("#batch-variants label", has_text="MXFP4").click()
    page.locator("#run").click()
    expect(page.locator("#batch-head")).to_contain_text("many_messages.csv")
    page.locator("#cancel").click()
    expect(page.locator("#progress strong")).to_have_text("Cancelled", timeout=60_000)
    open_history(page, app_url)
    page.locator("#history-kind label", has_text="Batches").click()
    expect(page.locator("#history .h-decision")).to_have_count(0)
    expect(page.locator("#history .h-batch").first).to_be_visible()
    page.locator("#history-kind label", has_text="All").click()
    page.locator("#history-variant label", has_text="BF16").click()
    expect(page.locator("#history .h-decision").first).to_be_visible()
    expect(page.locator("#history li", has_text="cancelled")).to_have_count(0)


def test_what_fits_no_filter_gets_a_helpful_empty_list(page: Page, app_url: str) -> None:
    open_decide(page, app_url)
    press_decide(page)
    open_history(page, app_url)
    page.locator("#history-text :is(input, textarea)").fill("no state has these words")
    expect(page.locator("#history .empty")).to_contain_text("Nothing fits")


def test_a_batch_is_opened_from_the_history(page: Page, app_url: str, tmp_path: Path) -> None:
    open_batch(page, f"{app_url}/batch")
    upload(page, many_messages(tmp_path, 15), EXAMPLES / "questions.json")
    expect(page.locator("#plan .fact").first).to_contain_text("600")
    page.locator("#run").click()
    expect(page.locator("#batch-head")).to_contain_text("many_messages.csv")
    page.wait_for_url("**/batch?batch=*")
    number = page.url.partition("batch=")[2]
    page.locator("#cancel").click()
    open_history(page, app_url)
    page.locator(f"#history a[href='/batch?batch={number}']").click()
    expect(page.locator("#batch-head")).to_contain_text(f"Batch {number}")
