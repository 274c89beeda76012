"""Errors become HTTP answers in one table; every class of the tree has a row (tested)."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from deltawire.protocol import errors
from deltawire.protocol.control import SERVING_HEADER, Problem

log = logging.getLogger(__name__)

STATUS_OF: dict[type[errors.DeltawireError], int] = {
    errors.DeltawireError: 500,
    errors.ProtocolError: 400,
    errors.UnknownSchema: 400,
    errors.MalformedMessage: 400,
    errors.WeightsError: 409,
    errors.MalformedObject: 409,
    errors.ChecksumMismatch: 409,
    errors.DigestMismatch: 409,
    errors.LayoutMismatch: 409,
    errors.VersionGap: 409,
    errors.StoreError: 502,
    errors.ObjectMissing: 404,
    errors.ObjectExists: 409,
    errors.InvalidKey: 400,
    errors.Fenced: 409,
    errors.StoreUnavailable: 503,
    errors.StreamError: 502,
    errors.StreamUnavailable: 503,
    errors.LeaseLost: 409,
    errors.PayloadTooLarge: 413,
    errors.EngineError: 503,
    errors.VersionNotServed: 409,
    errors.ReplicaBroken: 503,
    errors.EnvironmentFault: 502,
    errors.CapacityReached: 503,
    errors.EpisodeFailed: 502,
    errors.JobError: 400,
    errors.SettingsError: 500,
    errors.RemoteError: 502,
}


def problem_of(error: errors.DeltawireError) -> Problem:
    """The problem body for an error of the tree."""
    kind = type(error)
    status = next(STATUS_OF[parent] for parent in kind.__mro__ if parent in STATUS_OF)
    title = (kind.__doc__ or kind.__name__).splitlines()[0]
    return Problem(type=kind.__name__, title=title, status=status, detail=str(error))


def install_problem_handlers(app: FastAPI) -> None:
    """Answer errors of the tree, and bad requests, with problems."""
    app.add_exception_handler(errors.DeltawireError, _answer_known)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(Exception, _answer_unknown)


async def _answer_known(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, errors.DeltawireError)
    problem = problem_of(error)
    headers = {}
    if isinstance(error, errors.VersionNotServed):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
        headers[SERVING_HEADER] = "" if error.serving is None else str(error.serving)
    elif problem.status == 503:
        headers["Retry-After"] = "1"
    return JSONResponse(problem.model_dump(), status_code=problem.status, headers=headers)


async def _answer_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    detail = "; ".join(
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()
    )
    problem = Problem(type="Invalid", title="the request is not valid", status=422, detail=detail)
    return JSONResponse(problem.model_dump(), status_code=422)


async def _answer_unknown(request: Request, error: Exception) -> JSONResponse:
    # The border of the service: whatever a handler did not foresee is logged, never shown.
    log.error("unexpected error", extra={"path": request.url.path}, exc_info=error)
    problem = Problem(
        type="Unexpected", title="the service failed", status=500, detail="see its log"
    )
    return JSONResponse(problem.model_dump(), status_code=500)
