"""Settings: from variables and from files, masked when shown, refused when they open a door."""

from pathlib import Path

import pytest
from pydantic_settings import SettingsConfigDict

from deltawire.protocol.errors import SettingsError
from deltawire.service.serve import bind
from deltawire.service.settings import ServiceSettings, load_settings


class DemoSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="DEMO_", frozen=True, extra="ignore")

    size: int = 3


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOST", "PORT", "TOKEN", "SIZE"):
        monkeypatch.delenv(f"DEMO_{name}", raising=False)


def test_a_wrong_value_is_one_line_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_SIZE", "many")
    with pytest.raises(SettingsError, match="DEMO_SIZE: Input should be a valid integer"):
        load_settings(DemoSettings, [])


def test_an_open_port_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_HOST", "0.0.0.0")
    with pytest.raises(SettingsError, match="DEMO_TOKEN"):
        load_settings(DemoSettings, [])
    monkeypatch.setenv("DEMO_TOKEN", "t")
    assert load_settings(DemoSettings, []).host == "0.0.0.0"


def test_a_secret_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    settings = load_settings(DemoSettings, [], {"DEMO_TOKEN_FILE": str(tmp_path / "token")})
    assert settings.token is not None
    assert settings.token.get_secret_value() == "from-file"


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe"])
def test_a_token_file_that_says_nothing_opens_no_door(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(SettingsError, match="DEMO_TOKEN_FILE"):
        load_settings(DemoSettings, [], {"DEMO_TOKEN_FILE": str(tmp_path / "token")})


def test_printed_settings_hide_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEMO_TOKEN", "hush-hush")
    with pytest.raises(SystemExit):
        load_settings(DemoSettings, ["--print-settings"])
    assert "hush-hush" not in capsys.readouterr().out


def test_a_taken_port_is_one_clear_sentence() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind("127.0.0.1", port)
