"""The price table: known models, unknown ones, and errors of a wrong file."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from tinker_claw.billing.prices import Price, check_budget, load, price_in_force
from tinker_claw.config.load import load as load_settings
from tinker_claw.errors import ConfigError
from tinker_claw.types import Usage

ROOT = Path(__file__).parents[2]
TINKER = ("--model-name", "Qwen/Qwen3-8B")
EVERYTHING = Usage(prefill=1_000_000, cached=1_000_000, sampled=1_000_000, trained=1_000_000)


@pytest.fixture(autouse=True)
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)


def table(path: Path, rows: str, head: str = "as_of = 2026-01-02\n") -> Path:
    file = path / "prices.toml"
    file.write_text(head + rows)
    return file


def test_shipped_table_prices_the_default_model() -> None:
    price = load()[load_settings([]).run.model_name]
    assert (price.prefill, price.cached, price.sample, price.train) == (0.195, 0.039, 0.6, 0.44)
    assert price.usd(EVERYTHING) == pytest.approx(0.195 + 0.039 + 0.6 + 0.44)
    assert price.as_of == date(2026, 10, 7)


def test_every_shipped_row_is_dated_and_a_cached_token_costs_less() -> None:
    shipped = load()
    assert len(shipped) > 10
    for name, price in shipped.items():
        assert price.as_of is not None, name
        assert price.prefill is not None, name
        assert price.cached is not None, name
        assert price.sample is not None, name
        assert price.cached < price.prefill < price.sample, name


def test_unknown_price_is_no_dollars_and_unused_ones_do_not_matter() -> None:
    price = Price(prefill=2.0, sample=4.0)
    assert price.usd(Usage(prefill=500_000, sampled=250_000)) == 2.0
    assert price.usd(Usage(prefill=1, trained=1)) is None
    assert price.usd(Usage()) == 0.0
    assert price.missing == ("cached", "train")


def test_model_is_found_by_its_exact_id_only() -> None:
    models = load()
    assert models["Qwen/Qwen3.5-397B-A17B:peft:262144"].prefill == 4.0
    for other in ("demo", "Qwen/Qwen3-8B:peft:262144", "qwen/qwen3-8b"):
        assert other not in models
    assert models["Qwen/Qwen3.8-27B"].missing == ("train",)


def test_cached_share_holds_where_a_row_has_no_price_of_its_own(tmp_path: Path) -> None:
    rows = "[models.a]\nprefill = 2.0\n[models.b]\nprefill = 2.0\ncached = 1.5\n"
    found = load(table(tmp_path, rows, "as_of = 2026-01-02\ncached_share = 0.5\n"))
    assert (found["a"].cached, found["b"].cached) == (1.0, 1.5)
    assert load(table(tmp_path, rows))["a"].cached is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[models.a]\nprefil = 1.0\n", r"models\.a\.prefil: Unexpected"),
        ("[models.a]\nprefill = -1.0\n", r"models\.a\.prefill: .*greater than or equal to 0"),
        ("[models.a]\nprefill = 'free'\n", r"models\.a\.prefill: .*number"),
        ("[models.a]\nprefill = nan\n", r"models\.a\.prefill: .*finite"),
        ("[models.a]\nprefill = true\n", r"models\.a\.prefill: .*number"),
        ("prices = 1\n[models.a]\n", r"prices: there is no such setting"),
        ("[models\n", "is not valid TOML"),
    ],
)
def test_wrong_table_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"--prices .*prices.toml.*{says}"):
        load(table(tmp_path, text))


def test_table_without_a_date_and_missing_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="as_of: Field required"):
        load(table(tmp_path, "[models.a]\n", head=""))
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read"):
        load(tmp_path / "nowhere.toml")


def test_shipped_prices_are_the_providers_and_no_one_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert price_in_force(load_settings([*TINKER])).prefill == 0.195
    theirs = ("--base-url", "https://tinker.thinkingmachines.dev/services/tinker-prod")
    assert price_in_force(load_settings([*TINKER, *theirs])).prefill == 0.195
    mine = ("--base-url", "http://127.0.0.1:8000")
    assert price_in_force(load_settings([*TINKER, *mine])) == Price()
    assert price_in_force(load_settings([*TINKER, "--backend", "local"])) == Price()
    given = ("--prices", str(table(tmp_path, '[models."Qwen/Qwen3-8B"]\nprefill = 7.0\n')))
    assert price_in_force(load_settings([*TINKER, *mine, *given])).prefill == 7.0
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:8000")
    assert price_in_force(load_settings([*TINKER])) == Price()


def test_budget_without_prices_or_without_bills_is_refused() -> None:
    def check(*flags: str) -> None:
        settings = load_settings(["--budget-usd", "5", *flags])
        check_budget(settings, price_in_force(settings))

    check()
    with pytest.raises(ConfigError, match=r"Qwen/Qwen3\.8-27B .*not known \(train\).*--prices"):
        check("--model-name", "Qwen/Qwen3.8-27B")
    with pytest.raises(ConfigError, match="prefill, cached, sample, train"):
        check("--base-url", "http://127.0.0.1:8000")
    with pytest.raises(ConfigError, match="--backend local bills nothing"):
        check("--backend", "local")
