"""What holds for every screen: it fits a phone, follows the dark mode, names its fields."""

import re

import pytest
from browser.steps import Watched, open_decide, press_decide
from playwright.sync_api import Browser, Page, expect

SCREENS = ["/", "/batch", "/compare", "/history"]
LUMINANCE = """(selector) => {
    const [r, g, b] = getComputedStyle(document.querySelector(selector)).backgroundColor.match(/\\d+/g).map(Number);
    return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;
}"""
UNNAMED_FIELDS = """() => [...document.querySelectorAll('input:not([type=file]), textarea, select')].filter(field => {
    if (field.closest('[aria-hidden=true]') || field.type === 'hidden') return false;
    const named = field.labels?.length || field.ariaLabel || field.getAttribute('aria-labelledby') || field.title;
    return !named;
}).map(field => field.outerHTML.slice(0, 200))"""


@pytest.mark.parametrize("screen", SCREENS)
def test_a_screen_fits_a_phone_without_scrolling_sideways(browser: Browser, app_url: str, screen: str) -> None:
    phone = browser.new_context(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    page = phone.new_page()
    watched = Watched()
    watched.attach(page)
    page.goto(app_url + screen, wait_until="domcontentloaded")
    expect(page.locator("#workers .chip").first).to_be_visible()
    if screen == "/":
        expect(page.locator("#card-0")).to_be_visible()
        press_decide(page)
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert watched.errors == []
    phone.close()


def test_the_page_follows_the_dark_mode_of_the_system(browser: Browser, app_url: str) -> None:
    for scheme, is_dark in (("light", False), ("dark", True)):
        context = browser.new_context(color_scheme=scheme)  # type: ignore[arg-type]  # both are schemes
        page = context.new_page()
        open_decide(page, app_url)
        press_decide(page)
        for selector in ("body", "#results .q"):
            assert (page.evaluate(LUMINANCE, selector) < 0.5) is is_dark
        context.close()


def test_every_screen_has_the_navigation_and_says_what_it_is(page: Page, app_url: str) -> None:
    for screen, title in zip(SCREENS, ("Clef workbench", "Batch", "Compare", "History"), strict=True):
        page.goto(app_url + screen, wait_until="domcontentloaded")
        expect(page.locator("#masthead h1")).to_have_text(title)
        expect(page.locator("#masthead p")).to_have_text(re.compile(r"^[^.]{20,160}\.( [^.]+\.)?$"))
        expect(page.locator("nav a")).to_have_text(["Decide", "Batch", "Compare", "History"])
        expect(page.locator("#workers .chip")).to_have_count(2)


def test_every_field_has_a_name_for_a_screen_reader(page: Page, app_url: str) -> None:
    open_decide(page, app_url)
    page.locator("#card-0 > button").click()
    expect(page.locator("#card-0 .f-options textarea")).to_be_visible()
    assert page.evaluate(UNNAMED_FIELDS) == []


def test_no_event_of_the_page_is_a_public_api(page: Page, app_url: str) -> None:
    open_decide(page, app_url)
    info = page.request.get(f"{app_url}/gradio_api/info").json()
    assert info["named_endpoints"] == {}
    assert info["unnamed_endpoints"] == {}
