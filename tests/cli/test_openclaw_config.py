"""`tinker-claw openclaw-config`: what it prints, and does to a file, as its users run it."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import json5
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.npm import npm
from tests.openclaw import OpenClaw, readme_block
from tests.processes import ROOT
from tinker_claw.cli import main, openclaw_file
from tinker_claw.cli.openclaw_file import parse, set_values
from tinker_claw.config.check import API_KEY
from tinker_claw.errors import ConfigError

KEY = "a-key-that-is-long-enough"
DEMO = ("--model-name", "demo", "--backend", "local")
MINE = """\
// what I chose myself
{
  "agents": { "defaults": { "model": { "primary": "other/model" }, "workspace": "~/claw" } },
  models: {
    'providers': {
      "other": { baseUrl: "https://example.com/v1", apiKey: "${OTHER}", }, // the one I pay for
    },
  },
  /* nothing
     below */
}
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TINKER_"):
            monkeypatch.delenv(name)


def run(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """As a shell would."""
    done = subprocess.run(
        [sys.executable, "run.py", "openclaw-config", *flags],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "Traceback" not in done.stderr
    return done


def write(path: Path, *flags: str, key: str = "") -> int:
    """The same in this process, which is faster. `key`: of the gateway."""
    with pytest.MonkeyPatch.context() as environment:
        if key:
            environment.setenv(API_KEY, key)
        return main.main(["openclaw-config", "--write", str(path), *DEMO, *flags])


def ours(path: Path) -> dict[str, Any]:
    return json5.loads(path.read_text())["models"]["providers"]["tinker-claw"]


def backups(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.bak-*"))


def test_prints_the_block_of_the_readme_for_the_default_settings() -> None:
    done = run()
    assert done.returncode == 0
    assert json.loads(done.stdout) == readme_block()
    readme = (ROOT / "README.md").read_text()
    assert f"```json\n{done.stdout}```" in readme, "to the letter"
    assert "contextWindow 40960: " in done.stderr, "it says where the number comes from"


def test_the_block_follows_the_settings() -> None:
    flags = (*DEMO, "--port", "31234", "--served-model-name", "mine/claw", "--host", "localhost")
    told = json.loads(run(*flags, "--max-reply-tokens", "500").stdout)
    provider = told["models"]["providers"]["tinker-claw"]
    assert provider["baseUrl"] == "http://localhost:31234/v1"
    assert provider["models"] == [
        {"id": "mine/claw", "name": "claw", "contextWindow": 65536, "maxTokens": 500}
        | {"compat": {"sendSessionAffinityHeaders": True, "supportsPromptCacheKey": True}}
    ]
    assert told["agents"]["defaults"]["model"]["primary"] == "tinker-claw/mine/claw"


@pytest.mark.parametrize(
    ("flags", "window", "source"),
    [
        ((), 65536, "the config.json of demo says so"),
        (("--context-tokens", "20000"), 20000, "--context-tokens"),
        (("--context-tokens", "99999"), 65536, "which is below --context-tokens"),
        (("--context-tokens", "4000"), 4000, "too few for OpenClaw"),
        (("--model-name", "nobody/nothing"), 40960, "a guess"),
        (("--backend", "tinker"), 65536, "TINKER_API_KEY is not set"),
    ],
)
def test_context_and_where_it_comes_from(
    flags: tuple[str, ...], window: int, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["openclaw-config", *DEMO, *flags]) == 0
    told = capsys.readouterr()
    (model,) = json.loads(told.out)["models"]["providers"]["tinker-claw"]["models"]
    assert model["contextWindow"] == window
    assert model["maxTokens"] == min(4096, window)
    assert source in told.err


def test_a_gateway_that_listens_everywhere_is_called_by_a_real_address(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, KEY)
    for host, shown in (("0.0.0.0", "127.0.0.1"), ("::", "[::1]")):
        assert main.main(["openclaw-config", *DEMO, "--host", host]) == 0
        told = capsys.readouterr()
        assert f'"http://{shown}:30000/v1"' in told.out
        assert "On another one put this machine's name" in told.err
    assert main.main(["openclaw-config", *DEMO, "--port", "0"]) == 2
    assert "give the port that it chose" in capsys.readouterr().err


def test_a_key_is_shown_only_when_asked_for() -> None:
    done = run(*DEMO, **{API_KEY: KEY})
    assert KEY not in done.stdout + done.stderr
    assert '"apiKey": "${CLAW_GATEWAY_KEY}"' in done.stdout
    assert "the variable CLAW_GATEWAY_KEY" in done.stderr
    assert f'"apiKey": "{KEY}"' in run(*DEMO, "--show-key", **{API_KEY: KEY}).stdout


def test_of_several_users_one_has_to_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    openclaw_file = tmp_path / "users.toml"
    people = {name: f"{KEY}-of-{name}" for name in ("ada", "ben")}
    openclaw_file.write_text(
        "".join(f'[[users]]\nname="{n}"\nkey="{k}"\n' for n, k in people.items())
    )
    flags = ["openclaw-config", *DEMO, "--config", str(openclaw_file)]
    assert main.main(flags) == 0
    assert "${CLAW_GATEWAY_KEY}" in capsys.readouterr().out
    assert main.main([*flags, "--show-key"]) == 2
    assert "with --user: ada, ben" in capsys.readouterr().err
    assert main.main([*flags, "--show-key", "--user", "ben"]) == 0
    told = capsys.readouterr().out
    assert people["ben"] in told
    assert people["ada"] not in told


def test_a_missing_file_is_made_and_is_private(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "openclaw.json"
    assert write(path) == 0
    assert list(json.loads(path.read_text())) == ["models"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["openclaw.json"]
    assert "is not set: --primary sets it to tinker-claw/demo" in capsys.readouterr().out
    assert write(tmp_path / "nowhere" / "openclaw.json") == 2
    assert "there is no folder" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


def test_merging_keeps_every_other_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "openclaw.json"
    path.write_text(MINE)
    path.chmod(0o640)
    assert write(path) == 0
    merged = path.read_text()
    added = [line for line in merged.splitlines() if line not in MINE.splitlines()]
    assert [line for line in merged.splitlines() if line not in added] == MINE.splitlines()
    assert json5.loads("{" + "".join(added).rstrip(",") + "}") == {"tinker-claw": ours(path)}
    assert json5.loads(merged)["agents"] == json5.loads(MINE)["agents"]
    (backup,) = backups(path)
    assert backup.read_text() == MINE
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (path, backup)]
    assert modes == [0o640, 0o600], "the backup is nobody else's"
    told = capsys.readouterr().out
    assert f"As it was before: {backup}" in told
    assert "left at other/model: --primary sets it to tinker-claw/demo" in told


def test_a_second_time_there_is_nothing_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "openclaw.json"
    path.write_text(MINE)
    assert write(path, "--primary") == 0
    before, inode = path.read_bytes(), path.stat().st_ino
    capsys.readouterr()
    assert write(path, "--primary") == 0
    assert "nothing to change" in capsys.readouterr().out
    assert (path.read_bytes(), path.stat().st_ino) == (before, inode)
    assert len(backups(path)) == 1
    assert json5.loads(before.decode())["agents"]["defaults"] == {
        "model": {"primary": "tinker-claw/demo"},
        "workspace": "~/claw",
    }


def test_agents_with_a_model_of_their_own_are_left_alone_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "openclaw.json"
    path.write_text('{agents: {entries: {main: {}, work: {model: "other/model"}}}}')
    assert write(path, "--primary") == 0
    told = capsys.readouterr().out
    assert told.count("left alone") == 1
    assert "agent work has a model of its own, other/model: left alone." in told
    assert json5.loads(path.read_text())["agents"]["entries"]["work"] == {"model": "other/model"}


def test_only_what_differs_of_an_earlier_block_is_set(tmp_path: Path) -> None:
    path = tmp_path / "openclaw.json"
    assert write(path, "--port", "30001") == 0
    data = json.loads(path.read_text())
    provider = data["models"]["providers"]["tinker-claw"]
    provider |= {"apiKey": "secret-that-works", "headers": {"X-Mine": "1"}}
    provider["models"][0] |= {"contextWindow": 10, "name": "Mine"}
    provider["models"][0]["compat"] = {"a": True, "supportsPromptCacheKey": False}
    provider["models"].insert(0, {"id": "other", "name": "Other"})
    path.write_text(json.dumps(data, indent="\t"))
    assert write(path, key=KEY) == 0
    now = ours(path)
    assert now["baseUrl"] == "http://127.0.0.1:30000/v1"
    assert (now["apiKey"], now["headers"]) == ("secret-that-works", {"X-Mine": "1"})
    assert now["models"][0] == {"id": "other", "name": "Other"}
    assert now["models"][1]["contextWindow"] == 65536
    assert now["models"][1]["name"] == "Mine"
    assert now["models"][1]["compat"] == {
        "a": True,
        "supportsPromptCacheKey": False,
        "sendSessionAffinityHeaders": True,
    }, "what is not there is added, what is false was chosen"
    assert write(path, "--show-key", "--served-model-name", "new", key=KEY) == 0
    assert ours(path)["apiKey"] == KEY
    assert [model["id"] for model in ours(path)["models"]] == ["new", "other", "demo"]


def test_a_guessed_context_does_not_overwrite_a_known_one(tmp_path: Path) -> None:
    path = tmp_path / "openclaw.json"
    flags = ("--model-name", "nobody/nothing")
    assert write(path, *flags, "--context-tokens", "123456") == 0
    assert write(path, *flags) == 0
    assert ours(path)["models"][0]["contextWindow"] == 123456


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not valid JSON5"),
        (b'{"models": {', "not valid JSON5"),
        (b'{"a": 1} and more', "not valid JSON5"),
        (b"\xff\xfe{}", "not valid JSON5"),
        (b"[" * 5000, "nested too deeply"),
        (b"[1, 2]", "no JSON object"),
        (b'{"models": 3}', "models is not an object"),
        (b'{"models": {"providers": []}}', "models.providers is not an object"),
    ],
)
def test_a_file_that_is_not_understood_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, says: str
) -> None:
    path = tmp_path / "openclaw.json"
    path.write_bytes(content)
    assert write(path) == 2
    assert says in capsys.readouterr().err
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["openclaw.json"]


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    kept, link = tmp_path / "dotfiles", tmp_path / "openclaw.json"
    kept.mkdir()
    (kept / "mine.json").write_text(MINE)
    link.symlink_to(kept / "mine.json")
    assert write(link) == 0
    assert link.is_symlink()
    assert ours(kept / "mine.json") == ours(link)
    assert [backup.read_text() for backup in backups(kept / "mine.json")] == [MINE]
    dangling = tmp_path / "dangling.json"
    dangling.symlink_to(kept / "new.json")
    assert write(dangling) == 0
    assert dangling.is_symlink()
    assert ours(kept / "new.json")


def test_a_file_that_changes_meanwhile_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "openclaw.json"
    path.write_text(MINE)
    found = openclaw_file.read(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="has changed meanwhile"):
        openclaw_file.save(found, "{1: 1}")
    assert path.read_text() == "{}"
    assert os.listdir(tmp_path) == ["openclaw.json"]


def test_backups_of_one_second_do_not_replace_one_another(tmp_path: Path) -> None:
    path = tmp_path / "openclaw.json"
    texts = [f'{{"n": {n}}}' for n in range(4)]
    path.write_text(texts[0])
    for text in texts[1:]:
        found = openclaw_file.read(path)
        openclaw_file.save(found, text)
    assert sorted(backup.read_text() for backup in backups(path)) == texts[:-1]


def test_a_folder_that_cannot_be_written_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(tmp_path) == 2
    assert "cannot be read: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{}", '{\n  "a": {\n    "b": 1\n  }\n}'),
        ('{"x": 1}', '{"a": {"b": 1}, "x": 1}'),
        ("{ x: 1, }", '{ "a": {"b": 1}, x: 1, }'),
        ("{\n\tx: 1 // one\n}", '{\n\t"a": {\n\t\t"b": 1\n\t},\n\tx: 1 // one\n}'),
        ("{ // all\n  x: 1,\n}\n", '{ // all\n  "a": {\n    "b": 1\n  },\n  x: 1,\n}\n'),
        ("{\r\n  x: 1\r\n}", '{\r\n  "a": {\r\n    "b": 1\r\n  },\r\n  x: 1\r\n}'),
        ("{ // none yet\n}", '{ // none yet\n  "a": {\n    "b": 1\n  }\n}'),
        ("{a: {b: 0x2 /* two */}}", "{a: {b: 1 /* two */}}"),
        ("{a: {b: 'x\\'}'}, 'a': {b: 5}}", "{a: {b: 'x\\'}'}, 'a': {b: 1}}"),
        ('\ufeff{"a": {}}', '\ufeff{"a": {\n  "b": 1\n}}'),
        ('{"\\u0061": {"c": [1, 2]}}', '{"\\u0061": {"b": 1, "c": [1, 2]}}'),
        ("{'//': '/* }', a: {}}", "{'//': '/* }', a: {\n  \"b\": 1\n}}"),
        ("{/* the first */ x: 1}", '{"a": {"b": 1}, /* the first */ x: 1}'),
        ("{a: {null: 1, true: 2}}", '{a: {"b": 1, null: 1, true: 2}}'),
        ('{"x": "\u2028", a: {b: 0}}', '{"x": "\u2028", a: {b: 1}}'),
        ("{a: {$include: ['b.json5',],},}", "{a: {\"b\": 1, $include: ['b.json5',],},}"),
        ("{a: [], a: {b: 2}, x: 1}", "{a: [], a: {b: 1}, x: 1}"),
    ],
)
def test_how_a_value_is_put_in(before: str, after: str) -> None:
    assert set_values(before, [(("a", "b"), 1)]) == after


def test_what_is_no_object_is_not_replaced() -> None:
    with pytest.raises(ConfigError, match="a is not an object"):
        set_values('{"a": 3}', [(("a", "b"), 1)])


KEYS = st.sampled_from(["a", "b", "models", "x y", "//", "é"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "}", '"', "// no", "*/"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    data=st.dictionaries(KEYS, VALUES, max_size=4),
    indent=st.sampled_from([None, 2, "\t"]),
    trailing=st.booleans(),
    comments=st.lists(st.sampled_from(["/*}*/", "// {\n", "/* a\n b */", "  "]), min_size=1),
    value=VALUES,
)
def test_whatever_else_is_there_stays(
    data: dict[str, Any], indent: Any, trailing: bool, comments: list[str], value: Any
) -> None:
    text = commented(json.dumps(data, indent=indent), comments, trailing)
    assert parse(text) == data
    path = ("models", "providers", "p")
    models = data.get("models", {})
    if not isinstance(models, dict):
        with pytest.raises(ConfigError, match="models is not an object"):
            set_values(text, [(path, value)])
        return
    changed = set_values(text, [(path, value)])
    wanted = json.loads(json.dumps(data))
    wanted.setdefault("models", {}).setdefault("providers", {})["p"] = value
    assert json5.loads(changed) == wanted
    note = re.compile(r"/\*}\*/|// \{\n|/\* a\n b \*/")
    assert note.findall(changed) == note.findall(text)


def commented(text: str, comments: list[str], trailing: bool) -> str:
    """JSON with comments between its tokens, and commas behind last members."""
    tokens = re.findall(r'"(?:\\.|[^"\\])*"|[{}\[\],:]|\s+|[^\s{}\[\],:"]+', text)
    out, n = list[str](), 0
    for at, token in enumerate(tokens):
        solid = next((t for t in reversed(tokens[:at]) if t.strip()), "")
        if trailing and token in "}]" and solid not in "{[":
            out.append(",")
        if token in "{}[],:":
            out.append(comments[n % len(comments)])
            n += 1
        out.append(token)
    return "".join(out)


@pytest.mark.openclaw
@pytest.mark.slow
@pytest.mark.skipif(npm() is None, reason="npm is not installed: OpenClaw cannot be run")
def test_openclaw_accepts_what_is_printed_and_what_is_merged(tmp_path: Path) -> None:
    claw = OpenClaw.create(tmp_path / "user", "http://127.0.0.1:1/v1", "demo")
    path = claw.home / "openclaw.json"
    path.write_text(run(*DEMO).stdout)
    assert claw.check_config() == {"valid": True, "warnings": []}
    path.write_text(MINE.replace('apiKey: "${OTHER}"', 'apiKey: "x", models: []'))
    assert write(path, "--primary", key=KEY) == 0
    checked = claw.check_config()
    assert checked["valid"], checked
    assert "CLAW_GATEWAY_KEY" in checked["warnings"][0]["message"], "it reads the reference"
    path.write_text(path.read_text().replace("timeoutSeconds", "timeoutMoons"))
    assert not claw.check_config()["valid"], "it does look"
