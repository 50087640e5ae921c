"""The bytes of images, each in a file named by its SHA-256; never a name that a user gave.

Goes through fsspec, so that several hosts may share `s3://…`. A file is written beside its place and then moved, so a
reader never sees half of one.
"""

import hashlib
import os
import uuid

import fsspec
from fsspec.implementations.local import LocalFileSystem


class ImageStore:
    """Images under one URL (`file://…`, `s3://…`). Storing the same bytes twice is one file."""

    def __init__(self, url: str) -> None:
        self._files, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")

    def put(self, data: bytes, sha256: str) -> None:
        path = self._path(sha256)
        if self._files.exists(path):
            return
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        part = f"{path}.{uuid.uuid4().hex}.part"
        self._files.pipe_file(part, data)
        if isinstance(self._files, LocalFileSystem):
            with open(part, "rb+") as stream:
                os.fsync(stream.fileno())
        self._files.mv(part, path)

    def get(self, sha256: str) -> bytes:
        """The bytes of an image.

        Raises:
            OSError: the file is missing, unreadable, or its bytes are not the ones stored.
        """
        data: bytes = self._files.cat_file(self._path(sha256))
        if hashlib.sha256(data).hexdigest() != sha256:
            raise OSError(f"the stored image {sha256} is damaged")
        return data

    def _path(self, sha256: str) -> str:
        return f"{self._root}/{sha256[:2]}/{sha256}"
