"""A client's mistakes over HTTP are 422 with a reason."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import HTTPException
from pydantic import ValidationError

from deltawire.job.world import BadAction


@contextmanager
def client_faults() -> Iterator[None]:
    """Inside the block, what the client got wrong becomes the answer."""
    try:
        yield
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)
        raise HTTPException(422, detail=[{**item} for item in wrong]) from None
    except BadAction as error:
        raise HTTPException(422, detail=str(error)) from None
