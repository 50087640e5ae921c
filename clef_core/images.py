"""Images of a request: from the shapes a caller may send to checked bytes, and from bytes to upright RGB pixels.

Accepted are still PNG, JPEG and WebP images. Size and pixels are checked in the file's header, before Pillow sees
it; then the image is decoded once, so that a truncated file fails here and not in the model. Knows nothing of
prompts or of the model's own resizing.

Surprising: nothing here opens a path or fetches a URL, whatever a caller sends. A declared type is only checked to be
one of the three; the bytes decide. Transparency is dropped, not blended, as in the reference (`convert("RGB")`).
Animations are refused, because only their first frame would be seen; the second picture that phones hide in a JPEG
(a preview) is ignored. A side more than 200 times the other is refused because the processor cannot resize it.
"""

from __future__ import annotations

import binascii
import hashlib
import io
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from PIL import Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from clef_core.errors import Loc, Problem, RequestError, describe

MAX_IMAGES = 4
MAX_IMAGE_BYTES = 4 * 2**20
MAX_ALL_IMAGES_BYTES = 8 * 2**20
MAX_IMAGE_PIXELS = 16_000_000
MAX_ASPECT_RATIO = 200  # the processor's smart_resize refuses more
MAX_JPEG_SCANS = 100  # progressive files have about 10; each scan costs a pass over all pixels

MediaType = Literal["image/png", "image/jpeg", "image/webp"]

_DECLARED_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp")
_SHAPES = (
    'a data URL, base64 text, {"content_type", "base64"}, {"type": "image", "format", "data_base64"} '
    'or {"type": "image_url", "image_url": {"url": "data:…"}}'
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_DATA_URL = re.compile(r"data:(?P<type>[^,;]{0,100})(?P<parameters>[^,]{0,200}),", re.IGNORECASE)
_ORIENTATION_TAG = 0x0112
_TURN_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# What Pillow raises for broken files.
_DECODING_ERRORS = (OSError, EOFError, ValueError, SyntaxError, LookupError, TypeError, ArithmeticError, struct.error)


@dataclass(frozen=True)
class EncodedImage:
    """A checked image as it was sent; `width` and `height` are those of the upright image."""

    data: bytes = field(repr=False)
    sha256: str
    media_type: MediaType
    width: int
    height: int


def encode_images(sources: Sequence[tuple[Loc, object]]) -> tuple[EncodedImage, ...]:
    """Read and check all images of one request, each given with its place in the request.

    Raises:
        RequestError: with the problems of all of them, or that they are too many or too large together.
    """
    if len(sources) > MAX_IMAGES:
        first_surplus = sources[MAX_IMAGES][0]
        msg = f"A request may have at most {MAX_IMAGES} images; this one has {len(sources):,}."
        raise RequestError.at(first_surplus[:1], msg, "too_many_images")
    problems: list[Problem] = []
    files: list[tuple[Loc, bytes]] = []
    for loc, value in sources:
        try:
            files.append((loc, read_image_source(value, loc)))
        except RequestError as error:
            problems.extend(error.problems)
    num_bytes = sum(len(data) for _, data in files)
    if num_bytes > MAX_ALL_IMAGES_BYTES:
        msg = f"The images may have {_mib(MAX_ALL_IMAGES_BYTES)} together; these have {_mib(num_bytes)}."
        raise RequestError((*problems, Problem(files[-1][0][:1], msg, "images_too_large")))
    images: list[EncodedImage] = []
    for loc, data in files:
        try:
            images.append(check_image(data, loc))
        except RequestError as error:
            problems.extend(error.problems)
    if problems:
        raise RequestError(tuple(problems))
    return tuple(images)


def read_image_source(value: object, loc: Loc) -> bytes:
    """Take the bytes out of one of the shapes in which a request may carry an image (or bytes, from Python).

    Raises:
        RequestError: another shape, not base64, too large, or a URL or path (which is never opened).
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _read_text(value, loc)
    if isinstance(value, dict):
        if value.get("type") == "image_url":
            part = value.get("image_url")
            if isinstance(part, dict) and isinstance(part.get("url"), str):
                return _read_text(part["url"], (*loc, "image_url", "url"))
            msg = 'An image_url part is {"type": "image_url", "image_url": {"url": "data:image/…;base64,…"}}.'
            raise RequestError.at((*loc, "image_url"), msg, "image_shape")
        if "data_base64" in value:
            return _read_declared(value, "format", "data_base64", loc)
        if "base64" in value:
            return _read_declared(value, "content_type", "base64", loc)
    raise RequestError.at(loc, f"An image is {_SHAPES}; this is {describe(value)}.", "image_shape")


def check_image(data: bytes, loc: Loc) -> EncodedImage:
    """Check one image file: the limits by its header, then that all of it decodes.

    Raises:
        RequestError: says which limit it breaks, or that it is damaged or of another kind.
    """
    image, media_type = _decode(data, loc)
    with image:
        width, height = image.size if _orientation(image) < 5 else image.size[::-1]
    return EncodedImage(data, hashlib.sha256(data).hexdigest(), media_type, width, height)


def open_image(data: bytes) -> Image.Image:
    """Decode an image file to upright RGB.

    Raises:
        RequestError: `check_image` would refuse it.
    """
    image, _ = _decode(data, ())
    with image:
        turn = _TURN_UPRIGHT.get(_orientation(image))
        image.info.pop("transparency", None)  # else Pillow warns that a palette's transparency is lost
        rgb = _grey_8_bits(image).convert("RGB") if image.mode.startswith("I") else image.convert("RGB")
    return rgb if turn is None else rgb.transpose(turn)


def _decode(data: bytes, loc: Loc) -> tuple[ImageFile.ImageFile, MediaType]:
    if len(data) > MAX_IMAGE_BYTES:
        raise _too_large(len(data), loc)
    media_type = _sniff(data)
    if media_type is None:
        msg = (
            f"This is not a PNG, JPEG or WebP image: it begins with {repr(data[:16])[1:]}."
            if data
            else "The image is empty."
        )
        raise RequestError.at(loc, msg, "image_type")
    if media_type == "image/jpeg" and data.count(b"\xff\xda") > MAX_JPEG_SCANS:
        msg = f"This JPEG has more than {MAX_JPEG_SCANS} scans, which would take too long to decode."
        raise RequestError.at(loc, msg, "image_scans")
    try:
        image = _open(data, media_type)
        _check_header(image, loc)
        image.load()
    except _DECODING_ERRORS as error:
        msg = f"This {media_type[6:].upper()} image cannot be decoded: the file is truncated or damaged."
        raise RequestError.at(loc, msg, "image_damaged") from error
    return image, media_type


def _grey_8_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit grey; Pillow's own conversion clips at 255, which shows nearly everything as white."""
    return image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")


def _sniff(data: bytes) -> MediaType | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def _open(data: bytes, media_type: MediaType) -> ImageFile.ImageFile:
    """Read the header only. The plugin itself rather than `Image.open`, which warns about large images."""
    file = io.BytesIO(data)
    if media_type == "image/png":
        return PngImageFile(file)
    return JpegImageFile(file) if media_type == "image/jpeg" else WebPImageFile(file)


def _check_header(image: ImageFile.ImageFile, loc: Loc) -> None:
    width, height = image.size
    size = f"this one has {width:,} × {height:,}"
    if width * height > MAX_IMAGE_PIXELS:
        raise RequestError.at(loc, f"An image may have {MAX_IMAGE_PIXELS:,} pixels; {size}.", "image_pixels")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        msg = f"One side of an image may be at most {MAX_ASPECT_RATIO} times the other; {size}."
        raise RequestError.at(loc, msg, "image_aspect_ratio")
    num_frames = getattr(image, "n_frames", 1)
    if num_frames > 1:
        msg = f"Animations are not accepted, because only a still image is seen; this has {num_frames:,} frames."
        raise RequestError.at(loc, msg, "image_animated")


def _orientation(image: ImageFile.ImageFile) -> int:
    """The EXIF orientation, 1 to 8; 1 (upright) where there is none or it cannot be read."""
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except _DECODING_ERRORS:
        return 1
    return value if isinstance(value, int) and value in _TURN_UPRIGHT else 1


def _read_declared(value: dict[str, Any], type_key: str, data_key: str, loc: Loc) -> bytes:
    declared, text = value.get(type_key), value[data_key]
    if not isinstance(declared, str):
        raise RequestError.at((*loc, type_key), f"The type must be given as text; this is {describe(declared)}.")
    if value.get("type", "image") != "image":
        raise RequestError.at((*loc, "type"), f'The type must be "image"; this is {describe(value["type"])}.')
    _check_declared(declared if type_key == "content_type" else f"image/{declared}", declared, (*loc, type_key))
    if not isinstance(text, str):
        raise RequestError.at((*loc, data_key), f"The image must be base64 text; this is {describe(text)}.")
    return _decode_base64(text, (*loc, data_key))


def _read_text(text: str, loc: Loc) -> bytes:
    text = text.strip()
    scheme = _SCHEME.match(text)
    if scheme is None:
        return _decode_base64(text, loc)
    if scheme[0].lower() != "data:":
        msg = f"URLs and paths are never opened: send the image itself, as data URL or base64, not {describe(text)}."
        raise RequestError.at(loc, msg, "image_url")
    head = _DATA_URL.match(text)
    if head is None or not head["parameters"].lower().endswith(";base64"):
        msg = f'A data URL must read "data:image/…;base64,…"; this is {describe(text)}.'
        raise RequestError.at(loc, msg, "image_data_url")
    _check_declared(head["type"], head["type"], loc)
    return _decode_base64(text[head.end() :], loc)


def _check_declared(media_type: str, shown: str, loc: Loc) -> None:
    if media_type.strip().lower() not in _DECLARED_TYPES:
        msg = f"An image must be PNG, JPEG or WebP; this one is declared as {describe(shown)}."
        raise RequestError.at(loc, msg, "image_type")


def _decode_base64(text: str, loc: Loc) -> bytes:
    compact = "".join(text.split())
    num_bytes = len(compact) // 4 * 3 - compact.count("=", -2)
    if num_bytes > MAX_IMAGE_BYTES:
        raise _too_large(num_bytes, loc)
    try:
        return binascii.a2b_base64(compact, strict_mode=True)
    except ValueError:
        msg = f"This is neither base64 nor a data URL (and paths are never opened): {describe(text)}."
        raise RequestError.at(loc, msg, "image_base64") from None


def _too_large(num_bytes: int, loc: Loc) -> RequestError:
    msg = f"An image may have {_mib(MAX_IMAGE_BYTES)}; this one has {_mib(num_bytes)}."
    return RequestError.at(loc, msg, "image_too_large")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.2f} MiB ({num_bytes:,} bytes)"
