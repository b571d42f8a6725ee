"""Settings: order of the sources, refusal by name, secrets."""

import json
from pathlib import Path

import pytest

from tinker_claw.config.load import load, parser
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(__import__("os").environ):
        if name.startswith("TINKER_CLAW_"):
            monkeypatch.delenv(name)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_command_line_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "s.toml", "[gateway]\nport = 1\nhost = 'localhost'\n")
    assert load([]).gateway.port == 30000
    assert load(["--config", file]).gateway.port == 1
    monkeypatch.setenv("TINKER_CLAW_GATEWAY__PORT", "2")
    assert load(["--config", file]).gateway.port == 2
    settings = load(["--config", file, "--port", "3"])
    assert (settings.gateway.port, settings.gateway.host) == (3, "localhost")


def test_defaults_are_those_of_the_method() -> None:
    training = load([]).training
    assert (training.batch_size, training.lora_rank, training.learning_rate) == (16, 32, 1e-4)
    assert (training.opd_mode, training.opd_topk, training.opd_clip) == ("topk", 4, 1.0)
    assert (training.teacher, training.baseline, training.max_staleness) == (
        "base",
        "batch_mean",
        4,
    )
    assert (training.clip_low, training.clip_high) == (0.8, 1.28)
    assert load([]).judge.prm_m == 3


def test_rl_is_binary() -> None:
    assert load(["--method", "rl"]).run.method == "binary"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[gateway]\nprot = 1\n", "gateway.prot"),
        ("[gatewy]\nport = 1\n", "gatewy"),
        ("port = 1\n", "port"),
        ("[training]\nbatch_size = 0\n", "training.batch_size"),
        ("[run]\nmethod = 1\n", "run.method"),
        ("[run\n", "not valid TOML"),
    ],
)
def test_bad_file_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        load(["--config", write(tmp_path / "s.toml", text)])


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read"):
        load(["--config", str(tmp_path / "nowhere.toml")])


@pytest.mark.parametrize("name", ["TINKER_CLAW_GATEWAY__PROT", "TINKER_CLAW_PORT"])
def test_unknown_environment_variable_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=r"no such setting|names no setting"):
        load([])


def test_unknown_flag_exits_with_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load(["--max-context-tokns", "1"])
    assert stop.value.code == 2
    assert "--max-context-tokns" in capsys.readouterr().err


KEY, OTHER = "open-sesame-0123456789", "a-key-of-somebody-else"


def users(*pairs: tuple[str, str]) -> str:
    """TOML."""
    return "".join(f"[[users]]\nname = '{name}'\nkey = '{key}'\n" for name, key in pairs)


def test_secrets_are_never_printed(tmp_path: Path) -> None:
    file = write(tmp_path / "s.toml", users(("anna", OTHER)))
    settings = load(["--config", file, "--api-key", KEY, "--judge-api-key", "hunter2"])
    assert settings.gateway.api_key is not None
    assert settings.gateway.api_key.get_secret_value() == KEY
    assert settings.users[0].key.get_secret_value() == OTHER
    for text in (repr(settings), str(settings), settings.model_dump_json()):
        for secret in (KEY, OTHER, "hunter2"):
            assert secret not in text


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "192.168.1.7", "gateway.example", "::ffff:10.0.0.1", "0", "127.1"]
)
def test_reachable_address_without_a_key_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        load(["--host", host])
    assert load(["--host", host, "--api-key", KEY]).gateway.host == host
    file = write(tmp_path / "s.toml", users(("anna", KEY)))
    assert load(["--host", host, "--config", file]).gateway.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1", "::ffff:127.0.0.1"])
def test_loopback_needs_no_key(host: str) -> None:
    settings = load(["--host", host])
    assert settings.gateway.api_key is None
    assert settings.users == ()


def test_users_come_from_the_file_or_as_json_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "s.toml", users(("anna", KEY), ("ben-2", OTHER)))
    assert [user.name for user in load(["--config", file]).users] == ["anna", "ben-2"]
    monkeypatch.setenv("TINKER_CLAW_USERS", json.dumps([{"name": "carl", "key": KEY}]))
    (carl,) = load(["--config", file]).users
    assert (carl.name, carl.key.get_secret_value()) == ("carl", KEY)
    monkeypatch.setenv("TINKER_CLAW_USERS", f"[{KEY}")
    with pytest.raises(ConfigError, match="TINKER_CLAW_USERS must be a JSON list") as raised:
        load([])
    assert KEY not in everything_said(raised.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (users(("Anna Bell", KEY)), r"users\.0\.name"),
        (users(("", KEY)), r"users\.0\.name"),
        (users(("x" * 33, KEY)), r"users\.0\.name"),
        (users(("anna", "sesame")), "fewer than 16 characters"),
        (users(("anna", "")), "without blanks"),
        (users(("anna", "open sesame, and 0123456789")), "without blanks"),
        (users(("anna", "öffne-dich-sesam-öffne-dich")), "without blanks"),
        (users(("anna", KEY), ("anna", OTHER)), "'anna' is given twice"),
        (users(("anna", KEY), ("ben", KEY)), "the same key"),
        (f"{users(('anna', KEY))}[gateway]\napi_key = '{KEY}'\n", "the same key"),
        (f"{users(('default', KEY))}[gateway]\napi_key = '{OTHER}'\n", "'default' is given twice"),
        ("[gateway]\napi_key = 'sesame'\n", "--api-key: a key of fewer than 16"),
        ("[[users]]\nname = 'anna'\n", r"users\.0\.key"),
        (f"[[users]]\nname = 'anna'\nkey = '{KEY}'\nkye = '{OTHER}'\n", r"users\.0\.kye"),
        (f"[users]\nanna = '{KEY}'\n", "users"),
    ],
)
def test_users_that_cannot_be_told_apart_or_kept_out_are_refused(
    text: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        load(["--config", write(tmp_path / "s.toml", text)])
    said = everything_said(raised.value)
    assert not any(key in said for key in (KEY, OTHER, "sesame", "sesam-"))


def everything_said(error: BaseException) -> str:
    """What an error and all that caused it would print."""
    return f"{error}{everything_said(error.__cause__) if error.__cause__ else ''}"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load([]).gateway.port = 5  # type: ignore[misc]


def test_every_setting_has_a_flag_with_help_and_default() -> None:
    text = " ".join(parser().format_help().split())
    for section, model in Settings.model_fields.items():
        assert section in text
        if section == "users":
            continue  # a command line is there for all to read
        for name, field in model.annotation.model_fields.items():  # type: ignore[union-attr]
            assert f"--{name.replace('_', '-')} " in text, name
            assert field.description, name


def test_data_directory_names_model_and_method() -> None:
    assert load([]).run.directory == Path("runs/Qwen3-8B-combine")
    assert load(["--data-dir", "/d"]).run.directory == Path("/d")


def test_the_pages_settings_for_several_users_work(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "access.md").read_text()
    block = page.split("```toml\n")[1].split("```")[0]
    for key in (KEY, OTHER):
        block = block.replace('"…"', f'"{key}"', 1)
    settings = load(["--config", write(tmp_path / "s.toml", block)])
    assert settings.gateway.host == "0.0.0.0"
    assert [user.name for user in settings.users] == ["anna", "ben"]
