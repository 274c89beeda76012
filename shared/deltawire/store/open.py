"""A store's URI -> the store. The client library of a medium is imported only when it is chosen."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pydantic import SecretStr

from deltawire.protocol.errors import SettingsError
from deltawire.store.base import Store, check_key
from deltawire.store.local import LocalStore

_FORMS = "file:///folder, hf://buckets/owner/name[/prefix] or s3://bucket[/prefix]"


def open_store(uri: str, *, token: SecretStr | None = None) -> Store:
    """Open the bucket that `uri` names.

    * ``file:///data/bucket`` or a plain path: a folder.
    * ``hf://buckets/owner/name/prefix``: a bucket of the Hugging Face Hub, made private if it is
      new. `token`, else the one that `huggingface_hub` finds.
    * ``s3://bucket/prefix?endpoint_url=…&region=…``: S3 and what speaks it. Keys and endpoint come
      from the usual AWS variables and files.

    Raises SettingsError for anything else, and when the client library is not installed.
    """
    parts = urlsplit(uri)
    match parts.scheme:
        case "" | "file":
            return LocalStore(_folder(uri, parts))
        case "hf":
            return _open_hub(uri, parts, token)
        case "s3":
            return _open_s3(uri, parts)
        case _:
            raise SettingsError(f"store {uri!r}: expected {_FORMS}")


def _folder(uri: str, parts: SplitResult) -> Path:
    if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
        raise SettingsError(f"store {uri!r}: expected a folder as file:///data/bucket")
    return Path(unquote(parts.path))


def _open_hub(uri: str, parts: SplitResult, token: SecretStr | None) -> Store:
    names = parts.path.strip("/").split("/")
    if parts.netloc != "buckets" or len(names) < 2 or not all(names):
        raise SettingsError(f"store {uri!r}: expected hf://buckets/owner/name[/prefix]")
    try:
        from deltawire.store.hub import HubStore
    except ImportError as error:
        raise _not_installed(uri, "hub") from error
    return HubStore("/".join(names[:2]), prefix=_prefix(names[2:]), token=token)


def _open_s3(uri: str, parts: SplitResult) -> Store:
    options = _options(uri, parts, allowed=("endpoint_url", "region"))
    if not parts.netloc:
        raise SettingsError(f"store {uri!r}: expected s3://bucket[/prefix]")
    try:
        from deltawire.store.s3 import S3Store
    except ImportError as error:
        raise _not_installed(uri, "s3") from error
    names = [name for name in parts.path.split("/") if name]
    return S3Store(
        parts.netloc,
        prefix=_prefix(names),
        endpoint_url=options.get("endpoint_url"),
        region=options.get("region"),
    )


def _prefix(names: list[str]) -> str:
    return check_key("/".join(names)) if names else ""


def _options(uri: str, parts: SplitResult, *, allowed: tuple[str, ...]) -> Mapping[str, str]:
    options = dict(parse_qsl(parts.query))
    for name in options:
        if name not in allowed:
            raise SettingsError(f"store {uri!r}: unknown option {name!r}, known: {allowed}")
    return options


def _not_installed(uri: str, extra: str) -> SettingsError:
    return SettingsError(f"store {uri!r} needs `pip install 'deltawire[{extra}]'`")
