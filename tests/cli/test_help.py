"""Every command can say what it is for."""

import click
import pytest
import typer
from typer.testing import CliRunner

from deltawire.cli.main import app


def _paths(command: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    children = getattr(command, "commands", {})
    return [path, *(p for name, child in children.items() for p in _paths(child, (*path, name)))]


@pytest.mark.parametrize("path", _paths(typer.main.get_command(app)), ids=" ".join)
def test_a_command_explains_itself(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in click.unstyle(result.output)
