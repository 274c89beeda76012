"""`python -m deltawire.service.healthcheck URL`: exit 0 when it answers 200. For containers."""

import sys
import urllib.request

_TIMEOUT_S = 4


def main(argv: list[str]) -> int:
    """Ask once."""
    url = argv[1] if len(argv) > 1 else "http://127.0.0.1:7860/healthz"
    if not url.startswith(("http://", "https://")):
        sys.stderr.write(f"{url!r} is not an http(s) URL\n")
        return 2
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return 0 if answer.status == 200 else 1
    except OSError as error:
        sys.stderr.write(f"{url}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
