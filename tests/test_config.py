"""Settings: order of the sources, refusal by name, secrets."""

from pathlib import Path

import pytest

from tinker_claw import config
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
    assert config.load([]).gateway.port == 30000
    assert config.load(["--config", file]).gateway.port == 1
    monkeypatch.setenv("TINKER_CLAW_GATEWAY__PORT", "2")
    assert config.load(["--config", file]).gateway.port == 2
    settings = config.load(["--config", file, "--port", "3"])
    assert (settings.gateway.port, settings.gateway.host) == (3, "localhost")


def test_defaults_are_those_of_the_method() -> None:
    training = config.load([]).training
    assert (training.batch_size, training.lora_rank, training.learning_rate) == (16, 32, 1e-4)
    assert (training.opd_mode, training.opd_topk, training.opd_clip) == ("topk", 4, 1.0)
    assert (training.teacher, training.baseline, training.max_staleness) == (
        "base",
        "batch_mean",
        4,
    )
    assert (training.clip_low, training.clip_high) == (0.8, 1.28)
    assert config.load([]).judge.prm_m == 3


def test_rl_is_binary() -> None:
    assert config.load(["--method", "rl"]).run.method == "binary"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[gateway]\nprot = 1\n", "gateway.prot"),
        ("[gatewy]\nport = 1\n", "gatewy"),
        ("port = 1\n", "port"),
        ("[training]\nbatch_size = 0\n", "training.batch_size"),
        ("[run]\nmethod = 'sft'\n", "run.method"),
        ("[run\n", "not valid TOML"),
    ],
)
def test_bad_file_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        config.load(["--config", write(tmp_path / "s.toml", text)])


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read"):
        config.load(["--config", str(tmp_path / "nowhere.toml")])


@pytest.mark.parametrize("name", ["TINKER_CLAW_GATEWAY__PROT", "TINKER_CLAW_PORT"])
def test_unknown_environment_variable_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=r"no such setting|names no setting"):
        config.load([])


def test_unknown_flag_exits_with_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        config.load(["--max-context-tokns", "1"])
    assert stop.value.code == 2
    assert "--max-context-tokns" in capsys.readouterr().err


def test_secrets_are_never_printed() -> None:
    settings = config.load(["--api-key", "open-sesame", "--judge-api-key", "hunter2"])
    assert settings.gateway.api_key is not None
    assert settings.gateway.api_key.get_secret_value() == "open-sesame"
    for text in (repr(settings), str(settings), settings.model_dump_json()):
        assert "open-sesame" not in text
        assert "hunter2" not in text


def test_reachable_address_without_a_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        config.load(["--host", "0.0.0.0"])
    assert config.load(["--host", "0.0.0.0", "--api-key", "k"]).gateway.host == "0.0.0.0"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config.load([]).gateway.port = 5  # type: ignore[misc]


def test_every_setting_has_a_flag_with_help_and_default() -> None:
    text = " ".join(config.parser().format_help().split())
    for section, model in config.Settings.model_fields.items():
        assert section in text
        for name, field in model.annotation.model_fields.items():  # type: ignore[union-attr]
            assert f"--{name.replace('_', '-')} " in text, name
            assert field.description, name


def test_data_directory_names_model_and_method() -> None:
    assert config.load([]).run.directory == Path("runs/Qwen3-8B-combine")
    assert config.load(["--data-dir", "/d"]).run.directory == Path("/d")
