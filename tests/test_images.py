"""Images: every accepted shape and mode, every limit at its edge, hostile files, and that nothing is ever opened."""

import base64
import hashlib
import io
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import DATA
from PIL import Image, ImageOps

from clef_core.errors import RequestError
from clef_core.images import (
    MAX_ALL_IMAGES_BYTES,
    MAX_IMAGE_BYTES,
    EncodedImage,
    check_image,
    encode_images,
    open_image,
    read_image_source,
)

LOC = ("images", 0)
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8))
ORIENTATION_TAG = 0x0112


def encode(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


PNG = encode(PICTURE, "PNG")
TEXT = base64.b64encode(PNG).decode()


def refusal(data: bytes) -> str:
    with pytest.raises(RequestError) as caught:
        check_image(data, LOC)
    (problem,) = caught.value.problems
    assert problem.loc == LOC
    return problem.type


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[ORIENTATION_TAG] = orientation
    return tags


@pytest.mark.parametrize(
    "source",
    [
        f"data:image/png;base64,{TEXT}",
        f"DATA:image/PNG;charset=x;BASE64,{TEXT}",
        TEXT,
        "\n".join(TEXT[start : start + 76] for start in range(0, len(TEXT), 76)) + "\n",
        {"content_type": "image/png", "base64": TEXT},
        {"type": "image", "format": "png", "data_base64": TEXT},
        {"type": "image", "format": "PNG", "data_base64": TEXT},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{TEXT}", "detail": "low"}},
        {"content_type": "image/jpg", "base64": TEXT},  # the bytes decide
        PNG,
    ],
)
def test_every_accepted_shape_gives_the_same_bytes(source: object) -> None:
    assert read_image_source(source, LOC) == PNG


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("http://169.254.169.254/latest/meta-data", "never opened"),
        ("https://example.com/a.png", "never opened"),
        ("file:///etc/hostname", "never opened"),
        ("C:\\images\\a.png", "never opened"),
        ("/etc/hostname", "never opened"),
        ("../a.png", "never opened"),
        (f"data:image/png,{TEXT}", "must read"),
        ("data:", "must read"),
        (f"data:image/gif;base64,{TEXT}", '"image/gif"'),
        (f"data:;base64,{TEXT}", "declared as"),
        (f"data:text/html;base64,{TEXT}", '"text/html"'),
        ("data:image/png;base64,***", "base64"),
        (TEXT.rstrip("=")[:-1], "base64"),
        (TEXT.replace("/", "_").replace("+", "-"), "base64"),
        ("é" * 8, "base64"),
        ("\ud83d" * 8, "base64"),
        (None, "this is null"),
        (True, "this is true"),
        ([TEXT], "an array of 1 entry"),
        ({}, "an object with 0 keys"),
        ({"base64": TEXT}, "must be given as text; this is null"),
        ({"content_type": "image/png", "base64": 7}, "this is 7"),
        ({"type": "image_url", "image_url": TEXT}, "An image_url part is"),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "never opened"),
    ],
)
def test_every_other_source_is_refused_with_a_reason(source: object, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_image_source(source, LOC)
    (problem,) = caught.value.problems
    assert problem.loc[:2] == LOC
    assert said in problem.msg


def test_a_path_to_a_real_image_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    for source in (str(path), path.as_uri(), {"content_type": "image/png", "base64": str(path)}):
        with pytest.raises(RequestError):
            encode_images([(LOC, source)])


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_a_checked_image_knows_its_bytes_type_and_size(format: str) -> None:
    data = encode(PICTURE, format)
    expected = EncodedImage(data, hashlib.sha256(data).hexdigest(), f"image/{format.lower()}", 40, 24)
    assert check_image(data, LOC) == expected


@pytest.mark.parametrize("format", ["GIF", "BMP", "TIFF", "ICO", "PPM"])
def test_other_formats_are_refused(format: str) -> None:
    assert refusal(encode(PICTURE, format)) == "image_type"


@pytest.mark.parametrize("data", [b"", b"\x89PNG", b"RIFF", b"\xff\xd8", b"<svg/>", b"%PDF-1.7"])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    assert refusal(data) == "image_type"


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_a_truncated_file_is_refused(format: str, kept: float) -> None:
    data = encode(PICTURE, format)
    assert refusal(data[: int(len(data) * kept)]) == "image_damaged"


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_seen_upright_by_its_exif(format: str, orientation: int) -> None:
    data = encode(PICTURE, format, exif=exif(orientation))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    image, checked = open_image(data), check_image(data, LOC)
    assert image.size == (checked.width, checked.height) == upright.size
    assert image.tobytes() == upright.tobytes()


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_means_upright(orientation: int) -> None:
    data = encode(PICTURE, "PNG", exif=exif(orientation))
    assert open_image(data).tobytes() == PICTURE.tobytes()


@pytest.mark.filterwarnings("ignore")  # Pillow warns of the broken tag
def test_broken_exif_means_upright() -> None:
    data = encode(PICTURE, "JPEG", exif=exif(6))
    broken = data.replace(b"MM\x00*\x00\x00\x00\x08\x00\x01", b"MM\x00*\x00\x00\xff\x08\xff\x01")
    assert broken != data
    assert open_image(broken).size == PICTURE.size


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_every_png_mode_becomes_the_rgb_of_its_colours(mode: str) -> None:
    image = PICTURE.convert(mode)
    assert open_image(encode(image, "PNG")).tobytes() == image.convert("RGB").tobytes()


def test_transparency_is_dropped_and_not_blended() -> None:
    image = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert open_image(encode(image, "PNG")).getpixel((0, 0)) == (10, 20, 30)
    palette = Image.new("RGB", (4, 4), (10, 20, 30)).quantize(2)
    assert open_image(encode(palette, "PNG", transparency=bytes(2))).getpixel((0, 0)) == (10, 20, 30)


def test_16_bit_grey_is_scaled_and_not_clipped() -> None:
    values = np.arange(256, dtype=np.uint16).reshape(16, 16)
    image = open_image(encode(Image.fromarray(values * 257), "PNG"))
    assert np.array_equal(np.asarray(image), np.repeat(values[..., None], 3, axis=2))


def test_cmyk_is_converted() -> None:
    image = open_image(encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    red, green, blue = image.getpixel((4, 4))
    assert red > 240
    assert max(green, blue) < 15


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_an_animation_is_refused(format: str) -> None:
    frames = [PICTURE.rotate(180)]
    assert refusal(encode(PICTURE, format, save_all=True, append_images=frames)) == "image_animated"


def test_the_preview_that_phones_put_behind_a_jpeg_is_ignored() -> None:
    data = encode(PICTURE, "MPO", save_all=True, append_images=[PICTURE.resize((8, 8))])
    checked = check_image(data, LOC)
    assert (checked.media_type, checked.width, checked.height) == ("image/jpeg", 40, 24)


def test_16_megapixels_are_the_limit() -> None:
    assert check_image(encode(Image.new("1", (4000, 4000)), "PNG"), LOC).width == 4000
    assert refusal(encode(Image.new("1", (4001, 4000)), "PNG")) == "image_pixels"


def test_a_side_of_200_times_the_other_is_the_limit() -> None:
    assert check_image(encode(Image.new("1", (2000, 10)), "PNG"), LOC).width == 2000
    assert refusal(encode(Image.new("1", (2001, 10)), "PNG")) == "image_aspect_ratio"
    assert refusal(encode(Image.new("1", (10, 2001)), "PNG")) == "image_aspect_ratio"


def test_4_mib_are_the_limit_of_an_image() -> None:
    padded = PNG + bytes(MAX_IMAGE_BYTES - len(PNG))  # what follows the last chunk is not read
    assert check_image(padded, LOC).data == padded
    assert refusal(padded + b"\0") == "image_too_large"
    assert len(read_image_source(base64.b64encode(padded).decode(), LOC)) == MAX_IMAGE_BYTES
    with pytest.raises(RequestError, match="4,194,305 bytes"):
        read_image_source(base64.b64encode(padded + b"\0").decode(), LOC)


def test_8_mib_are_the_limit_of_all_images_together() -> None:
    half = PNG + bytes(MAX_ALL_IMAGES_BYTES // 2 - len(PNG))
    assert len(encode_images([(("images", 0), half), (("images", 1), half)])) == 2
    with pytest.raises(RequestError, match=r"8,388,608 bytes\) together"):
        encode_images([(("images", 0), half), (("images", 1), half), (("images", 2), PNG)])


def test_the_problems_of_all_images_are_reported() -> None:
    sources: list[tuple[tuple[str | int, ...], object]] = [
        (("images", 0), "http://x"),
        (("images", 1), PNG),
        (("assets", "a"), base64.b64encode(b"<html>").decode()),
    ]
    with pytest.raises(RequestError) as caught:
        encode_images(sources)
    assert [problem.loc for problem in caught.value.problems] == [("images", 0), ("assets", "a")]


def test_bombs_are_refused_by_their_header() -> None:
    png = (DATA / "cases" / "images" / "bomb_30000x30000.png").read_bytes()
    webp = b"RIFF\x1a\x00\x00\x00WEBPVP8L\x0e\x00\x00\x00/\xfe\xbf\xff\x0f\x07\x10\x11\xfd\x0fDD\xff\x03\x00"
    start = time.perf_counter()
    assert [refusal(png), refusal(webp)] == ["image_pixels", "image_pixels"]
    assert time.perf_counter() - start < 0.5  # decoding takes seconds and gigabytes


def test_a_jpeg_that_costs_a_pass_over_all_pixels_every_30_bytes_is_refused() -> None:
    data = encode(Image.new("L", (1000, 1000)), "JPEG", progressive=True)
    last_scan = data[data.rindex(b"\xff\xda") : -2]
    start = time.perf_counter()
    assert refusal(data[:-2] + last_scan * 100_000 + data[-2:]) == "image_scans"
    assert time.perf_counter() - start < 0.5


@pytest.mark.filterwarnings("ignore")  # Pillow warns of some broken tags
def test_mutated_files_are_decoded_or_refused_and_nothing_else() -> None:
    chance = random.Random(0)
    seeds = [
        encode(PICTURE, "PNG", exif=exif(6)),
        encode(PICTURE.quantize(16), "PNG", transparency=bytes(range(16))),
        encode(PICTURE, "JPEG", exif=exif(6)),
        encode(PICTURE, "JPEG", progressive=True),
        encode(PICTURE.convert("CMYK"), "JPEG"),
        encode(PICTURE, "WEBP", exif=exif(6)),
        encode(PICTURE.convert("RGBA"), "WEBP", lossless=True),
    ]
    outcomes = {"decoded": 0, "refused": 0}
    for _ in range(3000):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.choice([1, 2, 8])):
            data[chance.randrange(12, chance.choice([80, len(data)]))] = chance.choice([0, 255, chance.randrange(256)])
        try:
            checked = check_image(bytes(data), LOC)
            image = open_image(bytes(data))
        except RequestError:
            outcomes["refused"] += 1
        else:
            outcomes["decoded"] += 1
            assert (image.mode, image.size) == ("RGB", (checked.width, checked.height))
    assert min(outcomes.values()) > 300
