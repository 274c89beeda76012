"""Put one service on the Hub as a Space: `python -m spaces.deploy NAME OWNER/SPACE`.

Stages the service, creates the Space (private unless told otherwise), sets its secrets and
variables, then uploads. Doing it again updates the same Space. Log in with `hf auth login`, or set
HF_TOKEN.

    TRAINER_TOKEN=... python -m spaces.deploy trainer me/my-trainer \
        --secret TRAINER_TOKEN --variable TRAINER_STORE=hf://buckets/me/weights
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from spaces.stage import SERVICES, stage

ROOT = Path(__file__).resolve().parent.parent


def deploy(
    name: str,
    repo_id: str,
    *,
    secrets: Mapping[str, str],
    variables: Mapping[str, str],
    public: bool = False,
) -> str:
    """Returns the Space's URL. Settings come before the files, so that the first build has them.

    A public Space's REST face is open to the world: without {NAME}_TOKEN among the secrets it is
    refused (ValueError). What the Hub refuses is an HfHubHTTPError, which is an OSError.
    """
    from huggingface_hub import HfApi

    token = f"{name.upper()}_TOKEN"
    if public and not secrets.get(token):
        raise ValueError(f"a public Space needs a token: --secret {token}")
    api = HfApi()
    url = api.create_repo(
        repo_id, repo_type="space", space_sdk="docker", private=not public, exist_ok=True
    )
    for key, value in secrets.items():
        api.add_space_secret(repo_id, key, value)
    for key, value in variables.items():
        api.add_space_variable(repo_id, key, value)
    with tempfile.TemporaryDirectory() as folder:
        stage(name, Path(folder), root=ROOT)
        api.upload_folder(
            repo_id=repo_id,
            repo_type="space",
            folder_path=folder,
            commit_message=f"deltawire {name}",
            delete_patterns="*",  # what is no longer part of the service
        )
    return str(url)


def named_secrets(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Secrets by name from the environment, never from the command line, which others can read.

    Raises ValueError naming one that is not set.
    """
    for name in names:
        if not environment.get(name):
            raise ValueError(f"--secret {name}: set {name} in the environment of this command")
    return {name: environment[name] for name in names}


def named_variables(pairs: Sequence[str]) -> dict[str, str]:
    """`NAME=value` pairs. Raises ValueError for one without a name or an equals sign."""
    variables = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ValueError(f"--variable {pair!r} is not NAME=value")
        variables[key] = value
    return variables


def main(argv: list[str] | None = None) -> int:
    """Deploy and say where."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=SERVICES)
    parser.add_argument("space", help="OWNER/NAME on the Hub")
    parser.add_argument("--secret", action="append", default=[], metavar="NAME")
    parser.add_argument("--variable", action="append", default=[], metavar="NAME=value")
    parser.add_argument("--public", action="store_true")
    options = parser.parse_args(argv)
    try:
        url = deploy(
            options.name,
            options.space,
            secrets=named_secrets(options.secret, os.environ),
            variables=named_variables(options.variable),
            public=options.public,
        )
    except (ValueError, OSError) as error:  # the Hub's errors are OSErrors
        print(error, file=sys.stderr)
        return 2
    print(url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
