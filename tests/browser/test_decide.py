"""The Decide screen in a real browser: from an example to bars, and everything that can go wrong in the form."""

import json
import re
from pathlib import Path

import pytest
from browser.steps import PROJECT, field_of, open_decide, press_decide, unfold, write_json
from playwright.sync_api import Page, expect

EXAMPLES = PROJECT / "examples"
MARKUP = "<img src=x onerror=\"document.title='hacked'\"><b>bold</b>"


def test_from_an_example_over_an_edited_question_and_an_image_to_bars_of_both_variants(decide: Page) -> None:
    decide.locator("#example-0").click()
    unfold(decide, 0)
    field_of(decide, 0, "id").fill("team")
    field_of(decide, 0, "options").fill("billing: Payments or invoices\ntechnical: Bugs or outages\nsales: Offers")
    field_of(decide, 0, "options").blur()
    expect(decide.locator("#card-0 > button")).to_contain_text("team · choice · 3 options")
    decide.locator("#images input[type=file]").first.set_input_files(EXAMPLES / "receipt_bakery.png")
    expect(decide.locator("#images .gallery-item img")).to_have_count(1)
    expect(decide.locator("#meter")).to_contain_text(re.compile(r"images \d+"))

    press_decide(decide)

    cards = decide.locator("#results .q")
    expect(cards).to_have_count(3)
    expect(cards.nth(0).locator(".q-id")).to_have_text("team")
    expect(cards.nth(0).locator("tbody tr")).to_have_count(3)
    expect(cards.nth(0).locator(".fill")).to_have_count(3)
    expect(cards.nth(0).locator(".tick")).to_have_count(3)
    expect(cards.nth(1).locator(".mark")).to_have_count(2)
    expect(cards.nth(2).locator("tbody tr")).to_have_count(1)
    expect(decide.locator("#results .facts")).to_contain_text("MXFP4")
    expect(decide.locator("#results .facts")).to_contain_text("BF16")
    expect(decide.locator("#results .facts")).to_contain_text("ms")
    for row in cards.nth(0).locator("tbody tr").all():
        fill, tick = row.locator(".fill").bounding_box(), row.locator(".tick").bounding_box()
        assert fill is not None
        assert tick is not None
        assert fill["width"] > 0
        assert tick["height"] > fill["height"], "the tick stands out of the bar"


def test_the_probabilities_of_a_question_add_up_to_one(decide: Page) -> None:
    decide.locator("#example-2").click()
    expect(decide.locator("#card-0 > button")).to_contain_text("12 options")
    press_decide(decide)
    decide.locator("#results .more summary").click()
    rows = decide.locator("#results tbody tr")
    expect(rows).to_have_count(12)
    for column in (0, 1):
        values = [float(row.locator("td.p").nth(column).inner_text().replace("<", "0")) for row in rows.all()]
        assert sum(values) == pytest.approx(1, abs=12 * 0.0005), "each value is rounded to three decimals"


def test_a_reload_brings_back_inputs_and_answers(decide: Page) -> None:
    decide.locator("#example-1").click()
    expect(decide.locator("#card-2 > button")).to_contain_text("total_band")
    press_decide(decide)
    before = decide.locator("#results .answers").inner_text()
    assert re.search(r"[?&]request=\d+", decide.url)

    decide.reload(wait_until="domcontentloaded")

    expect(decide.locator("#results .answers")).to_be_visible()
    assert decide.locator("#results .answers").inner_text() == before
    expect(decide.locator("#state textarea")).to_have_value("Picture sent with an expense claim.")
    expect(decide.locator("#images .gallery-item img")).to_have_count(1)
    expect(decide.locator("#card-2 > button")).to_contain_text("total_band · choice · 4 options")


def test_a_restored_request_can_be_decided_again(decide: Page) -> None:
    decide.locator("#example-1").click()
    expect(decide.locator("#card-2 > button")).to_contain_text("total_band")
    press_decide(decide)
    first = decide.locator("#results .results").get_attribute("data-request")
    decide.reload(wait_until="domcontentloaded")
    expect(decide.locator("#results .answers")).to_be_visible()
    decide.locator("#decide").click()
    expect(decide.locator(f"#results .results:not([data-request='{first}']) .answers")).to_be_visible(timeout=60_000)


def test_one_variant_alone_is_decided_alone(decide: Page) -> None:
    decide.locator("#variants label", has_text="BF16").click()
    press_decide(decide)
    expect(decide.locator("#results .legend .key")).to_have_count(1)
    expect(decide.locator("#results .tick")).to_have_count(0)
    expect(decide.locator("#results .facts")).not_to_contain_text("MXFP4")


def test_the_systemone_response_can_be_copied_as_json(decide: Page) -> None:
    press_decide(decide)
    decide.locator("#raw > button").click()
    expect(decide.locator("#raw .cm-content").first).to_contain_text("answers")
    decide.context.grant_permissions(["clipboard-read", "clipboard-write"])
    decide.locator("#raw button[title='Copy']").first.click()
    response = json.loads(decide.evaluate("() => navigator.clipboard.readText()"))
    assert (response["model"], response["x_variant"]) == ("clef", "mxfp4")
    assert list(response["answers"]) == ["department", "urgency", "outage"]
    assert response["usage"]["output_tokens"] == 0


def test_the_small_model_is_named_in_plain_words(decide: Page) -> None:
    expect(decide.locator("#notice")).to_contain_text("This is clef-nano, not Clef.")


def test_cards_can_be_added_copied_moved_and_removed_without_losing_what_was_typed(decide: Page) -> None:
    decide.locator("#example-0").click()
    unfold(decide, 0)
    field_of(decide, 0, "instructions").fill("typed, not yet stored")
    decide.locator("#add-question").click()
    expect(decide.locator(".card")).to_have_count(4)
    unfold(decide, 0)
    expect(field_of(decide, 0, "instructions")).to_have_value("typed, not yet stored")
    decide.locator("#card-0 .do-duplicate").click()
    expect(decide.locator("#card-1 > button")).to_contain_text("department_2 · choice · 2 options")
    decide.locator("#card-0 .do-down").click()
    expect(decide.locator("#card-0 > button")).to_contain_text("department_2")
    expect(decide.locator("#card-1 > button")).to_contain_text("department ·")
    unfold(decide, 0)
    decide.locator("#card-0 .do-remove").click()
    expect(decide.locator(".card")).to_have_count(4)
    expect(decide.locator("#card-0 > button")).to_contain_text("department ·")


def test_cards_and_json_are_kept_in_step_both_ways(decide: Page) -> None:
    decide.locator("#example-0").click()
    unfold(decide, 2)
    field_of(decide, 2, "id").fill("is_down")
    decide.get_by_role("tab", name="JSON").click()
    code = decide.locator("#questions-json .cm-content")
    expect(code).to_contain_text("is_down")
    questions = {"mood": {"type": "score", "criteria": ["bad", "good"]}, "late": {"type": "noul"}}
    write_json(decide, json.dumps(questions))
    decide.get_by_role("tab", name="Questions").click()
    expect(decide.locator(".card")).to_have_count(2)
    expect(decide.locator("#card-0 > button")).to_contain_text("mood · score · 2 levels")
    expect(decide.locator("#card-1 > button")).to_contain_text("late · noul")


def test_going_back_from_a_json_view_nobody_edited_keeps_what_was_just_typed(decide: Page) -> None:
    unfold(decide, 0)
    field_of(decide, 0, "instructions").fill("typed at the last moment")
    decide.get_by_role("tab", name="JSON").click()
    decide.get_by_role("tab", name="Questions").click()
    expect(field_of(decide, 0, "instructions")).to_have_value("typed at the last moment")
    expect(decide.locator("#card-0 > button")).to_contain_text("department · choice")


def test_what_stands_in_the_json_view_is_what_is_decided(decide: Page) -> None:
    write_json(decide, '{"only": {"type": "noul"}}')
    press_decide(decide)
    expect(decide.locator("#results .q-id")).to_have_text(["only"])


def test_broken_json_is_named_where_it_stands(decide: Page) -> None:
    write_json(decide, '{"a": {"type": "boolean"}}')
    expect(decide.locator("#question-problems")).to_contain_text("noul")
    decide.locator("#decide").click()
    expect(decide.locator("#problems")).to_contain_text("needs a change")
    expect(decide.locator("#results .answers")).to_have_count(0)


def test_a_whole_request_pasted_as_json_fills_the_form_and_names_what_is_unknown(decide: Page) -> None:
    request = json.loads((EXAMPLES / "receipt_request.json").read_text()) | {"temperature": 0.2}
    write_json(decide, json.dumps(request))
    expect(decide.locator("#question-problems")).to_contain_text("temperature")
    expect(decide.locator("#state textarea")).to_have_value("Picture sent with an expense claim.")
    expect(decide.locator("#images .gallery-item img")).to_have_count(1)


def test_problems_stand_at_the_card_they_belong_to(decide: Page) -> None:
    decide.locator("#example-0").click()
    unfold(decide, 0)
    field_of(decide, 0, "options").fill("only one")
    unfold(decide, 1)
    field_of(decide, 1, "id").fill("outage")
    decide.locator("#card-0 > button").click()
    decide.locator("#decide").click()
    expect(decide.locator("#problems")).to_contain_text("needs a change")
    expect(decide.locator("#card-0 .problems")).to_contain_text("2 to 255 options")
    expect(decide.locator("#card-0 .f-options")).to_be_visible()
    expect(decide.locator("#card-2 .problems")).to_contain_text("used by two questions")
    expect(decide.locator("#card-1 .problems")).to_have_count(0)


def test_a_state_that_should_be_json_and_is_not_is_refused_at_the_state(decide: Page) -> None:
    decide.locator("#state textarea").fill('{"order": 1, "order": 2}')
    expect(decide.locator("#meter")).to_contain_text("Read as plain text")
    decide.locator("#read-as label", has_text="JSON").click()
    decide.locator("#decide").click()
    expect(decide.locator("#state-problems")).to_contain_text("order")


def test_a_json_state_is_recognised_and_said_so(decide: Page) -> None:
    decide.locator("#state textarea").fill('{"subject": "Late", "body": "Where is it?"}')
    expect(decide.locator("#meter")).to_contain_text("Read as a JSON object with 2 keys")
    decide.locator("#read-as label", has_text="Text").click()
    expect(decide.locator("#meter")).to_contain_text("Read as plain text")


def test_a_state_that_is_too_long_is_refused_with_its_count_until_cutting_is_allowed(decide: Page) -> None:
    expect(decide.locator("#truncate")).to_have_count(0)
    decide.locator("#state textarea").fill("word " * 20_000)
    expect(decide.locator("#meter .over")).to_be_visible()
    decide.locator("#decide").click()
    expect(decide.locator("#state-problems")).to_contain_text("16,384")
    expect(decide.locator("#truncate")).to_be_visible()


def test_a_file_that_is_no_image_is_refused_at_the_images(decide: Page, tmp_path: Path) -> None:
    fake = tmp_path / "fake.png"
    fake.write_bytes(b"this is no image")
    decide.locator("#images input[type=file]").first.set_input_files(fake)
    expect(decide.locator("#images .gallery-item")).to_have_count(1)
    decide.locator("#decide").click()
    expect(decide.locator("#image-problems")).to_contain_text("not a PNG, JPEG or WebP")


def test_markup_of_a_user_is_shown_as_text_everywhere(decide: Page) -> None:
    questions = {
        MARKUP: {"type": "choice", "instructions": MARKUP, "criteria": {MARKUP: MARKUP, "b": None}},
        "scale": {"type": "score", "criteria": [MARKUP, "high"]},
    }
    decide.locator("#state textarea").fill(MARKUP)
    write_json(decide, json.dumps(questions))
    decide.get_by_role("tab", name="Questions").click()
    expect(decide.locator("#card-1 > button")).to_contain_text("scale")
    press_decide(decide)
    expect(decide.locator("#results")).to_contain_text(MARKUP)
    expect(decide.locator("#card-0 > button")).to_contain_text(MARKUP)
    decide.reload(wait_until="domcontentloaded")
    expect(decide.locator("#results .answers")).to_be_visible()
    assert decide.locator("img[src='x']").count() == 0
    assert decide.locator("#results b", has_text="bold").count() == 0
    assert decide.title() != "hacked"


def test_a_link_to_a_decision_that_does_not_exist_says_so(page: Page, app_url: str) -> None:
    open_decide(page, f"{app_url}/?request=999999")
    expect(page.locator("#problems")).to_contain_text("no decision '999999'")


def test_clear_empties_the_form_and_the_address(decide: Page) -> None:
    press_decide(decide)
    decide.locator("#clear").click()
    expect(decide.locator("#state textarea")).to_have_value("")
    expect(decide.locator(".card")).to_have_count(0)
    expect(decide.locator("#results")).to_contain_text("No decision yet")
    assert "request=" not in decide.url
