"""Where a checkpoint is: in a folder of a file system, or in object storage."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

SCHEMES = ("s3", "gs", "file")
URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)


@dataclass(frozen=True, order=True)
class ObjectFolder:
    """All objects of a bucket whose keys begin with `prefix` and a slash.

    Attributes:
        scheme: "s3", "gs", or "file" for a folder that is used like a bucket.
        bucket: name of the bucket; empty for "file".
        prefix: without slashes at its ends.
    """

    scheme: str
    bucket: str
    prefix: str

    def __truediv__(self, name: str) -> "ObjectFolder":
        prefix = f"{self.prefix}/{name}" if self.prefix else name
        return ObjectFolder(self.scheme, self.bucket, prefix)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"

    @property
    def parent(self) -> "ObjectFolder":
        return ObjectFolder(self.scheme, self.bucket, self.prefix.rpartition("/")[0])

    @property
    def name(self) -> str:
        return self.prefix.rpartition("/")[2]


Place = Path | ObjectFolder


def as_place(where: str | os.PathLike[str] | ObjectFolder) -> Place:
    """The place that a path or a URL names.

    Raises:
        ValueError: it is a URL of another kind, or has no bucket.
    """
    if isinstance(where, ObjectFolder):
        return where
    found = URL.fullmatch(os.fspath(where)) if isinstance(where, str) else None
    if found is None:
        return Path(where).absolute()
    scheme, rest = found["scheme"], found["rest"]
    if scheme not in SCHEMES:
        raise ValueError(
            f"Checkpoints cannot be at {where}: zinf knows s3://BUCKET/PREFIX, "
            "gs://BUCKET/PREFIX, file:///FOLDER and paths of folders."
        )
    bucket, _, prefix = rest.partition("/")
    if bool(bucket) == (scheme == "file") or (scheme == "file" and not prefix):
        form = "file:///FOLDER" if scheme == "file" else f"{scheme}://BUCKET/PREFIX"
        raise ValueError(f"The address of checkpoints {where} is not {form}.")
    return ObjectFolder(scheme, bucket, prefix.strip("/"))
