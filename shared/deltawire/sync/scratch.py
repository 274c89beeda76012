"""A folder for files on their way to or from the bucket."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deltawire.protocol.errors import StoreError


@contextmanager
def scratch_folder(inside: Path | None = None) -> Iterator[Path]:
    """Below `inside`, else where temporary files go; it goes when the block ends.

    Raises StoreError where the disk does not take what is written there: to whoever publishes that
    is one more reason why an object did not reach the bucket.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="deltawire-", dir=inside) as folder:
            yield Path(folder)
    except OSError as error:
        where = inside or tempfile.gettempdir()
        raise StoreError(f"preparing an object in {where}: {error.strerror or error}") from error
