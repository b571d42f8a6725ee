"""Settings: order of the sources, refusal by name, secrets."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from pydantic.fields import FieldInfo

from docs.settings_page import settings_page
from tinker_claw.config import canaries
from tinker_claw.config.check import API_KEY
from tinker_claw.config.flags import has_flag
from tinker_claw.config.load import flags, load, read_toml
from tinker_claw.config.settings import sections
from tinker_claw.errors import ConfigError
from tinker_claw.judge.prompts import Prompts


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
    assert (training.batch_size, training.lora_rank, training.learning_rate) == (16, 32, "auto")
    assert (training.opd_mode, training.opd_topk) == ("topk", 4)
    assert load(["--opd-topk", "0"]).training.opd_mode == "token"
    assert (training.recipe, training.max_staleness) == ("default", 4)
    assert load([]).judge.prm_m == 3


def test_the_papers_recipe_turns_off_what_is_not_set_and_scores_three_hints() -> None:
    usual, paper = load([]).training, load(["--recipe", "paper"]).training
    assert (usual.gate, usual.hints_scored) == ("on", 1)
    assert (paper.gate, paper.lessons, paper.hints_scored) == ("off", "off", 3)
    paper = load(["--recipe", "paper", "--gate", "on", "--lessons", "on"]).training
    assert (paper.gate, paper.lessons) == ("on", "on")


def test_rl_is_binary() -> None:
    assert load(["--method", "rl"]).run.method == "binary"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[gateway]\nprot = 1\n", "gateway.prot"),
        ("[gatewy]\nport = 1\n", "gatewy"),
        ("port = 1\n", "port"),
        ("[training]\nbatch_size = 0\n", "training.batch_size"),
        ("[run]\nmethod = 1\n", "run.method"),
        ("[training]\nw_rl = inf\n", "training.w_rl"),
        ("[spend]\nbudget_usd = inf\n", "spend.budget_usd"),
        ('[run]\ndata_dir = "a\\u0000b"\n', "run.data_dir"),
        ("[run\n", "not valid TOML"),
    ],
)
def test_bad_file_is_refused_by_name(tmp_path: Path, text: str, name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(name)):
        load(["--config", write(tmp_path / "s.toml", text)])


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read"):
        load(["--config", str(tmp_path / "nowhere.toml")])


@pytest.mark.parametrize("name", ["TINKER_CLAW_GATEWAY__PROT", "TINKER_CLAW_PORT"])
def test_unknown_environment_variable_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=r"gateway\.prot: there is no|names no setting"):
        load([])


def test_unknown_flag_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--max-context-tokns"):
        load(["--max-context-tokns", "1"])


def test_a_key_on_the_command_line_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Invalid value for '--api-key': .* is not 'none'"):
        load(["--api-key", KEY])
    assert load(["--api-key", "none"]).gateway.api_key is None


KEY, OTHER = "open-sesame-0123456789", "a-key-of-somebody-else"


def users(*pairs: tuple[str, str]) -> str:
    """TOML of several users."""
    return "".join(f"[[users]]\nname = '{name}'\nkey = '{key}'\n" for name, key in pairs)


def test_secrets_are_never_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = "[judge]\njudge_url = 'http://judge/v1'\njudge_api_key = 'hunter2'\n"
    file = write(tmp_path / "s.toml", judge + users(("anna", OTHER)))
    monkeypatch.setenv(API_KEY, KEY)
    settings = load(["--config", file])
    assert settings.gateway.api_key is not None
    assert settings.gateway.api_key.get_secret_value() == KEY
    assert settings.users[0].key.get_secret_value() == OTHER
    for text in (repr(settings), str(settings), settings.model_dump_json()):
        for secret in (KEY, OTHER, "hunter2"):
            assert secret not in text


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "192.168.1.7", "gateway.example", "::ffff:10.0.0.1", "0", "127.1"]
)
def test_reachable_address_without_a_key_is_refused(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"set {API_KEY}, or give each user"):
        load(["--host", host])
    with monkeypatch.context() as environment:
        environment.setenv(API_KEY, KEY)
        assert load(["--host", host]).gateway.host == host
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
    with pytest.raises(ConfigError, match="a JSON list: TINKER_CLAW_USERS") as raised:
        load([])
    assert KEY not in everything_said(raised.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (users(("Anna Bell", KEY)), r"users\.0\.name"),
        (users(("", KEY)), r"users\.0\.name"),
        (users(("x" * 33, KEY)), r"users\.0\.name"),
        (users(("anna", "sesame")), "of at least 16"),
        (users(("anna", "")), "without blanks"),
        (users(("anna", "open sesame, and 0123456789")), "without blanks"),
        (users(("anna", "öffne-dich-sesam-öffne-dich")), "without blanks"),
        (users(("anna", KEY), ("anna", OTHER)), "'anna' is given twice"),
        (users(("anna", KEY), ("ben", KEY)), "the same key"),
        (f"{users(('anna', KEY))}[gateway]\napi_key = '{KEY}'\n", "the same key"),
        (f"{users(('default', KEY))}[gateway]\napi_key = '{OTHER}'\n", "'default' is given twice"),
        ("[gateway]\napi_key = 'sesame'\n", f"{API_KEY}: a key is made .* at least 16"),
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


@pytest.mark.parametrize(
    "owners",
    [
        users(("anna", KEY), ("ben", OTHER)),
        f"{users(('anna', KEY))}[gateway]\napi_key = '{OTHER}'\n",
        "[gateway.chats]\nowners = ['telegram:1', 'signal:1', 'telegram:2']\n",
    ],
)
def test_lessons_of_several_owners_are_not_practised(owners: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 share this policy"):
        load(["--config", write(tmp_path / "s.toml", owners), "--practice", "on"])
    load(["--config", write(tmp_path / "s.toml", owners)])
    load(["--config", write(tmp_path / "s.toml", users(("anna", KEY))), "--practice", "on"])


def everything_said(error: BaseException) -> str:
    """Text that an error and all its causes would print."""
    return f"{error}{everything_said(error.__cause__) if error.__cause__ else ''}"


def declared() -> Iterator[tuple[str, str, FieldInfo]]:
    """Section, name and field of every setting."""
    for section, model in sections().items():
        for name, field in model.model_fields.items():
            yield section, name, field


def test_every_setting_is_declared_whole() -> None:
    """The help, the settings page and the brief help are made of declarations."""
    known = {flag: parameter for parameter in flags() for flag in parameter.opts}
    named: list[str] = []
    for section, name, field in declared():
        extra = cast("dict[str, str]", field.json_schema_extra)
        assert field.description, name
        annotation = str(field.annotation)
        counts = bool(re.search(r"\b(int|float)\b", annotation))
        pure = {"port", "seed", "learning_rate", "lora_rank"}
        pure |= {"w_rl", "w_opd"}
        assert bool(extra["unit"]) == (counts and name not in pure), name
        free = {"seed", "learning_rate", "budget_usd"}
        assert bool(field.metadata) == (counts and name not in free), name
        if has_flag(field):
            flag = known[f"--{name.replace('_', '-')}"]
            assert flag.name == f"{section}__{name}"
            assert field.description in flag.help  # type: ignore[attr-defined]
            named.append(flag.opts[0])
    assert sorted(named) == sorted({*known} - {"--config", "--api-key"})
    assert len(set(named)) <= 62, "each that is added takes the place of one that nobody sets"


def test_the_settings_page_is_what_the_declarations_say() -> None:
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    renew = "python -m docs.settings_page > docs/settings.md"
    assert page.read_text() == settings_page(), f"renew it: {renew}"
    for section, name, field in declared():
        row = next(line for line in page.read_text().splitlines() if f"`{section}.{name}`" in line)
        flag = f"--{name.replace('_', '-')}" if has_flag(field) else "no flag"
        assert flag in row
        assert f"`TINKER_CLAW_{section.upper()}__{name.upper()}`" in row


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


def test_a_byte_order_mark_before_a_file_is_skipped(tmp_path: Path) -> None:
    """Editors of Windows write one. All files are read by one function; prices stand for them."""
    file = tmp_path / "s.toml"
    file.write_text("[gateway]\nport = 7\n", encoding="utf-8-sig")
    assert load(["--config", str(file)]).gateway.port == 7
    text = (CANARIES_FILE, PRICES, PROMPTS)
    for number, whole in enumerate(text):
        (tmp_path / f"{number}.toml").write_text(whole, encoding="utf-8-sig")
    assert canaries.read(tmp_path / "0.toml")[0].replies == ["Hello."]
    assert read_toml("--prices", tmp_path / "1.toml") == {"model": []}
    assert Prompts.read(tmp_path / "2.toml").user == "Was it good? {reply} {next_state}"


CANARIES_FILE = '[[canary]]\nmessages = ["Say hello."]\nreplies = ["Hello."]\n'
PRICES = "model = []\n"
PROMPTS = 'user = "Was it good? {reply} {next_state}"\n'


def test_named_origins_are_origins_and_need_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in ("*", "null", "obsidian.md", "app://obsidian.md/", "https://a.example/x"):
        with pytest.raises(ConfigError, match="is no origin"):
            load(["--allow-origin", wrong])
    named = ["--allow-origin", "app://obsidian.md, http://localhost:8080"]
    with pytest.raises(ConfigError, match="only with a key"):
        load([*named, "--api-key", "none"])
    data = ["--data-dir", str(tmp_path)]
    (tmp_path / "ledger.sqlite").touch()
    settings = load([*named, *data])
    assert settings.gateway.origins == ("app://obsidian.md", "http://localhost:8080")
    assert settings.key_file == tmp_path / "api-key", "it makes one"
    monkeypatch.setenv(API_KEY, "a-key-that-is-long-enough")
    assert load([*named, *data]).key_file is None


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--lessons", "tell"], "--lessons on"),
        (["--lessons", "practice"], "--practice on"),
        (["--practice", "on", "--lessons", "off"], "practice trains lessons"),
    ],
)
def test_values_of_lessons_that_are_none_say_what_to_write(flags: list[str], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        load(flags)


def test_a_number_of_more_than_64_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--seed.*64 bits"):
        load(["--seed", str(2**63)])
