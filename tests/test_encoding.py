"""Encoding of single records and their collation; equality with the reference is in test_golden."""

import numpy as np
import pytest
from paths import PROJECT
from PIL import Image

from clef_core.encoding import Encoder, Record, collate
from clef_core.errors import RequestError, TooLongError
from clef_core.model import Release, load_release
from clef_core.schema import parse_request


@pytest.fixture(scope="module")
def release() -> Release:
    return load_release(PROJECT / "checkpoints" / "random-bf16")


@pytest.fixture
def encoder(release) -> Encoder:
    return Encoder(release.tokenizer, release.processor)


def request(state="The till is down.", **more):
    questions = {"q": {"type": "choice", "instructions": "Which?", "criteria": {"b": "second", "a": None}}}
    return parse_request({"model": "clef", "state": state, "questions": questions, **more}).request


def decode(release, encoded, span):
    return release.tokenizer._plain.decode(list(encoded.input_ids[slice(*span)]), skip_special_tokens=False)


def test_spans_cover_instructions_and_option_json_and_nothing_else(release, encoder):
    encoded = encoder.encode(Record(request()))
    (question,) = encoded.questions
    assert decode(release, encoded, question.span) == "Which?"
    texts = {option.id: decode(release, encoded, option.span) for option in question.options}
    assert texts == {"a": '{"option_id":"a"}', "b": '{"description":"second","option_id":"b"}'}
    assert [option.id for option in question.options] == ["a", "b"]


def test_images_stand_between_prefix_and_state(release, encoder):
    encoded = encoder.encode(Record(request(), (Image.new("RGB", (64, 64), "red"), Image.new("RGB", (300, 40)))))
    assert encoded.media is not None
    start, end = encoded.media_offset, encoded.media_offset + len(encoded.media.input_ids)
    assert decode(release, encoded, (0, start)).endswith("STATE:\n")
    assert decode(release, encoded, (end, end + 8)).startswith("\nThe till")
    image_id = release.backbone.config.image_token_id
    types = encoded.media.mm_token_type_ids
    assert [token == image_id for token in encoded.media.input_ids] == [kind == 1 for kind in types]
    assert len(encoded.media.pixels["image_grid_thw"]) == 2


def test_a_cut_state_loses_its_end_and_keeps_the_rest(release, encoder):
    whole = encoder.encode(Record(request(state="abc " * 300)))
    limit = len(whole.input_ids) - 50
    short = Encoder(release.tokenizer, release.processor, limit).encode(
        Record(request(state="abc " * 300, x_truncate="end"))
    )
    assert short.truncated_tokens == 50
    assert len(short.input_ids) == limit
    schema = len(whole.input_ids) - whole.questions[0].span[0]
    assert short.input_ids[-schema:] == whole.input_ids[-schema:]
    assert short.questions[0].span[0] == whole.questions[0].span[0] - 50


def test_too_long_fails_when_no_cut_was_allowed(release):
    with pytest.raises(TooLongError):
        Encoder(release.tokenizer, release.processor, 200).encode(Record(request(state="abc " * 300)))


def test_a_strip_of_an_image_is_the_users_problem(encoder):
    with pytest.raises(RequestError, match="too narrow"):
        encoder.encode(Record(request(), (Image.new("RGB", (3000, 10)),)))


@pytest.mark.filterwarnings("ignore")
def test_videos_are_frames_as_images_or_arrays(encoder):
    frames = [Image.new("RGB", (64, 64), (shade, 0, 0)) for shade in (0, 80, 160, 240)]
    one = encoder.encode(Record(request(), videos=(frames,)))
    other = encoder.encode(Record(request(), videos=(np.stack([np.asarray(frame) for frame in frames]),)))
    assert one.input_ids == other.input_ids
    assert one.media is not None
    assert "video_grid_thw" in one.media.pixels


def test_collate_pads_on_the_right_and_joins_pixels(encoder):
    image = Image.new("RGB", (64, 64))
    encoded = [encoder.encode(Record(request())), encoder.encode(Record(request("longer " * 20), (image,)))]
    batch = collate(encoded, pad_id=7)
    assert batch.lengths.tolist() == [len(one.input_ids) for one in encoded]
    assert batch.input_ids[0, batch.lengths[0] :].unique().tolist() == [7]
    assert batch.attention_mask.sum(1).tolist() == batch.lengths.tolist()
    assert batch.mm_token_type_ids is not None
    assert batch.mm_token_type_ids[0].sum() == 0
    assert batch.pixels["image_grid_thw"].shape == (1, 3)
    assert collate(encoded[:1], 0).mm_token_type_ids is None
    assert collate(encoded[:1], 0, pad_to=512).input_ids.shape == (1, 512)
