"""Files between the browser and this process: uploaded ones in, images and results out.

A visitor decides which path an upload field hands over, so no path is opened before it is known to lie inside Gradio's
upload folder, links resolved. Bytes that the page should show are written into the same folder under their checksum.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from gradio.utils import get_upload_folder

from clef_core.errors import Loc, Problem, RequestError
from clef_core.images import MAX_IMAGE_BYTES, EncodedImage, check_image

SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "image/webp": ".webp"}
_MAX_CHECKED_IMAGES = 16


def uploaded(path: str, loc: Loc = ()) -> Path:
    """The real path of an uploaded file.

    Raises:
        RequestError: it is not a file inside the upload folder.
    """
    real = Path(path).resolve()
    if not real.is_relative_to(Path(get_upload_folder()).resolve()) or not real.is_file():
        raise RequestError.at(loc, "this file was not uploaded here, or is gone; upload it again", "foreign_file")
    return real


def read_images(paths: Sequence[str]) -> tuple[EncodedImage, ...]:
    """The checked images of a gallery, in order.

    Raises:
        RequestError: all problems, each at `("images", index)`.
    """
    images: list[EncodedImage] = []
    problems: list[Problem] = []
    for index, path in enumerate(paths):
        try:
            images.append(_read_image(uploaded(path, ("images", index)), index))
        except RequestError as error:
            problems += error.problems
    if problems:
        raise RequestError(tuple(problems))
    return tuple(images)


@lru_cache(maxsize=_MAX_CHECKED_IMAGES)
def _read_image(path: Path, index: int) -> EncodedImage:
    """Uploads never change (their folder is named by their checksum), so each is decoded once."""
    loc = ("images", index)
    if path.stat().st_size > MAX_IMAGE_BYTES:
        raise RequestError.at(loc, f"the image is larger than {MAX_IMAGE_BYTES // 2**20} MiB", "too_large")
    return check_image(path.read_bytes(), loc)


def publish_image(image_bytes: bytes, name: str, media_type: str) -> str:
    """Put an image where the gallery can show it; the same image twice is one file."""
    folder = Path(get_upload_folder()) / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"image{SUFFIXES[media_type]}"
    if not path.exists():
        path.write_bytes(image_bytes)
    return str(path)


def publish_file(source: Path) -> str:
    """A copy of a file of ours that an upload field can hold, as if it had been uploaded."""
    folder = Path(get_upload_folder()) / hashlib.sha256(source.read_bytes()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    return shutil.copyfile(source, folder / source.name).as_posix()


def new_download(file_name: str) -> Path:
    """A path for a result file, in a folder whose name cannot be guessed."""
    root = Path(get_upload_folder())
    root.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="download-", dir=root)) / file_name
