"""Reads and writes the objects of a folder in object storage, through TensorStore."""

import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import tensorstore as ts

from zinf.checkpoint.place import ObjectFolder
from zinf.checkpoint.storage import AbstractStorage
from zinf.core.memory.storage_error import StorageError

# Requests are repeated for about 4 minutes for the bytes of a save, so that an outage
# does not end a run, and for 2 s for the first request, so that a wrong address is
# reported soon.
PATIENT = {"max_retries": 12, "initial_delay": "1s", "max_delay": "32s"}
PROMPT = {"max_retries": 3, "initial_delay": "300ms", "max_delay": "1s"}
# Objects that are deleted at once.
NUM_AT_ONCE = 64
# What TensorStore appends to its messages, each in brackets.
DETAILS = re.compile(r" \[\w[\w-]*=(?:'(?:[^'\\]|\\.)*'|[^\]]*)\]", re.DOTALL)
DENIED = re.compile(
    "PERMISSION_DENIED|UNAUTHENTICATED|http_response_code='40[13]'|AccessDenied"
    "|InvalidAccessKeyId|SignatureDoesNotMatch"
)
CREDENTIALS = {
    "s3": "Give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE, or the "
    "role of the machine) of an identity that may list, read, write and delete there",
    "gs": "Run `gcloud auth application-default login`, or set "
    "GOOGLE_APPLICATION_CREDENTIALS, for an identity that may list, read, write and "
    "delete there",
    "file": "Give this user the right to read and write there",
}


class Store(AbstractStorage[ObjectFolder]):
    """The objects below a folder, by names with slashes.

    Reads no file of credentials itself: TensorStore takes them as other programs of the
    provider do. For s3, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL names another server
    than Amazon's, and AWS_REGION or AWS_DEFAULT_REGION the region.
    """

    def __init__(
        self, folder: ObjectFolder, retries: Mapping[str, Any] = PATIENT
    ) -> None:
        self.folder, self._retries = folder, retries

    def put(self, name: str, content: bytes) -> "Put":
        """Begin to write an object; all of it appears at once, or nothing."""
        future = self._kv.write(name, content)
        future.force()
        return Put(self, name, future)

    def get(self, name: str, part: slice | None = None) -> bytes:
        """The content of an object, or a range of its bytes.

        Raises:
            FileNotFoundError: there is no such object. (It is a StorageError.)
        """
        what = f"Cannot read {name}"
        try:
            if part is None:
                found = self._kv.read(name).result()
            else:
                found = self._kv.read(name, byte_range=part).result()
        except ValueError as error:
            raise self.failure(what, error) from error
        if found.state != "value":
            raise self._error(
                what,
                errno.ENOENT,
                "there is no such object",
                "The checkpoint is not complete any more. Use another one",
                name,
            )
        return found.value

    def names(self, below: str = "", *, is_first: bool = False) -> list[str]:
        """Names of all objects, or of those that begin with `below`.

        Args:
            is_first: the first request of a run, which fails soon.
        """
        kv = self._open(PROMPT) if is_first else self._kv
        bounds = _range(below)
        try:
            found = kv.list(bounds).result()
        except ValueError as error:
            raise self.failure("Cannot list checkpoints", error) from error
        return sorted(key.decode() for key in found)

    def delete(self, names: Iterable[str]) -> None:
        waiting = list(names)
        what = "Cannot delete an old checkpoint"
        while waiting:
            some, waiting = waiting[:NUM_AT_ONCE], waiting[NUM_AT_ONCE:]
            try:
                for future in [self._kv.write(name, None) for name in some]:
                    future.result()
            except ValueError as error:
                raise self.failure(what, error) from error

    def is_empty(self) -> bool:
        return not self.names(is_first=True)

    def clear(self) -> None:
        with suppress(StorageError):
            hasty = Store(self.folder, PROMPT)
            hasty.delete(hasty.names())

    def failure(self, what: str, error: Exception) -> StorageError:
        """A StorageError for an error of TensorStore."""
        message, folder = str(error), self.folder
        found = DETAILS.sub("", message).strip().rstrip(".")
        if "NoSuchBucket" in message or "bucket does not exist" in message:
            return self._error(
                what,
                errno.ENOENT,
                f"there is no bucket {folder.bucket!r}",
                "Make it, or name another one (run.checkpoints)",
            )
        if DENIED.search(message):
            return self._error(
                what,
                errno.EACCES,
                f"access is denied ({found})",
                CREDENTIALS[folder.scheme],
            )
        if "CURL error" in message or "curl_code" in message:
            where = _endpoint() or f"the servers of {folder.scheme}://"
            return self._error(
                what,
                errno.EHOSTUNREACH,
                f"{where} cannot be reached ({found})",
                "Check the network and AWS_ENDPOINT_URL",
            )
        if "Invalid" in message and "bucket name" in message:
            advice = "Name a bucket, as in s3://BUCKET/PREFIX (run.checkpoints)"
            return self._error(what, errno.EINVAL, found, advice)
        return self._error(what, errno.EIO, found, "Check the storage and the network")

    def _error(
        self, what: str, code: int, found: str, advice: str, name: str = ""
    ) -> StorageError:
        kind = MissingObject if code == errno.ENOENT and name else StorageError
        place = self.folder / name if name else self.folder
        return kind(code, f"{what}: {found}. {advice}", str(place))

    @cached_property
    def _kv(self) -> ts.KvStore:
        return self._open(self._retries)

    def _open(self, retries: Mapping[str, Any]) -> ts.KvStore:
        try:
            return ts.KvStore.open(_spec(self.folder, retries)).result()
        except ValueError as error:
            raise self.failure("Cannot open the storage", error) from error


class MissingObject(StorageError, FileNotFoundError):
    """There is no object of that name."""


class Put:
    """An object that is being written."""

    def __init__(self, store: Store, name: str, future: Any) -> None:
        self._store, self._name, self._future = store, name, future

    def wait(self) -> None:
        """Wait until the object is there, or failed."""
        self._future.exception()

    def result(self) -> None:
        """Wait until the object is there.

        Raises:
            StorageError: it was not written.
        """
        try:
            self._future.result()
        except ValueError as error:
            raise self._store.failure(f"Cannot save {self._name}", error) from error


def _spec(folder: ObjectFolder, retries: Mapping[str, Any]) -> dict[str, Any]:
    path = f"{folder.prefix}/" if folder.prefix else ""
    if folder.scheme == "file":
        return {"driver": "file", "path": f"/{path}"}
    spec: dict[str, Any] = {"bucket": folder.bucket, "path": path}
    if folder.scheme == "gs":
        return {**spec, "driver": "gcs", "gcs_request_retries": dict(retries)}
    endpoint = _endpoint()
    # Another server than Amazon's does not tell the region of a bucket.
    default = "us-east-1" if endpoint else None
    environment = os.environ
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    more = {"endpoint": endpoint, "aws_region": region or default}
    given = {key: value for key, value in more.items() if value}
    return {**spec, **given, "driver": "s3", "s3_request_retries": dict(retries)}


def _endpoint() -> str | None:
    environment = os.environ
    return environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")


def _range(below: str) -> ts.KvStore.KeyRange:
    if not below:
        return ts.KvStore.KeyRange()
    # The first key after all that begin with it. Names are ASCII.
    return ts.KvStore.KeyRange(below, below[:-1] + chr(ord(below[-1]) + 1))


def contents(names: Sequence[str], below: str) -> list[str]:
    """The names in the folder `below`."""
    return [name for name in names if name.startswith(f"{below}/")]
