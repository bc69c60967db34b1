from __future__ import annotations

import importlib.util
from datetime import date, timedelta
from pathlib import Path

import pytest
import torch

from genkit.data.make_returns import SOURCE_VERSION, closes_table
from genkit.data.returns import MarketReturns, ewma_volatility, log_returns, market_closes, read_price_table
from genkit.errors import ConfigError
from genkit.metrics.tails import hill

TABLE = Path(__file__).parents[2] / "genkit" / "data" / "tables" / "market_returns.csv"


def installed_arch() -> bool:
    return importlib.util.find_spec("arch") is not None and importlib.metadata.version("arch") == SOURCE_VERSION


def test_shipped_table_covers_the_common_dates_and_stays_small():
    closes = market_closes()
    assert closes.names == ("sp500", "nasdaq", "wti")
    assert (closes.dates[0], closes.dates[-1], len(closes.dates)) == (date(1999, 1, 4), date(2018, 12, 28), 5012)
    assert bool((closes.values > 0).all())  # ends before WTI's negative settlement of April 2020
    assert TABLE.stat().st_size <= 200_000


# The published facts are of each series on its own dates; common dates drop 19 of 5030 days, hence the tolerances.
@pytest.mark.parametrize(
    ("asset", "std", "kurtosis", "hill_5", "hill_2"),
    [(0, 1.204, 8.17, 2.97, 3.43), (1, 1.593, 5.43, 3.22, 3.52)],
)
def test_facts_of_the_shipped_table(asset, std, kurtosis, hill_5, hill_2):
    r = market_closes().returns()[1][:, asset]
    z = r - r.mean()
    assert len(r) == 5011
    assert float(r.std()) == pytest.approx(std, rel=2e-3)
    assert float((z**4).mean() / (z**2).mean() ** 2 - 3) == pytest.approx(kurtosis, rel=4e-3)
    assert hill(z, fraction=0.05).tail_index == pytest.approx(hill_5, rel=0.03)
    assert hill(z, fraction=0.02).tail_index == pytest.approx(hill_2, rel=0.05)


@pytest.mark.skipif(not installed_arch(), reason=f"arch {SOURCE_VERSION} is not installed")
def test_table_is_regenerated_bit_for_bit():
    assert closes_table().encode() == TABLE.read_bytes()


def test_log_returns_of_a_geometric_path_are_constant():
    prices = (1.01 ** torch.arange(50, dtype=torch.float64)).unsqueeze(1)
    assert torch.allclose(log_returns(prices), torch.full((49, 1), 0.995033085316809, dtype=torch.float64), atol=1e-11)


def test_ewma_equals_the_weighted_sum_of_past_squares():
    r = torch.randn(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sigma = ewma_volatility(r, decay=0.9, warmup=20)
    assert bool(sigma[:20].isnan().all())
    for day in (20, 21, 57, 199):
        age = torch.arange(day - 20, dtype=torch.float64).flip(0)
        brute = (0.1 * 0.9**age) @ r[20:day].square() + 0.9 ** (day - 20) * r[:20].square().mean(0)
        assert torch.allclose(sigma[day].square(), brute, rtol=1e-12)


def first_changed_day(volatility) -> int:
    """The first day whose volatility moves when the return of day 60 is replaced."""
    r = torch.randn(120, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shocked = r.clone()
    shocked[60] += 50.0
    before, after = volatility(r), volatility(shocked)
    return int(((before != after) & ~before.isnan()).any(dim=1).nonzero()[0])


def test_volatility_has_no_look_ahead():
    assert first_changed_day(lambda r: ewma_volatility(r, warmup=30)) == 61
    assert first_changed_day(lambda r: ewma_volatility(r, warmup=30).roll(-1, 0)) == 60  # the control: σ_t for σ_{t-1}
    assert first_changed_day(lambda r: r.std(0).expand(120, 3)) == 0  # and a full-sample volatility


def test_splits_are_ordered_disjoint_and_of_the_asked_share():
    train, test, both = (MarketReturns(split=s) for s in ("train", "test", "all"))
    assert train.dates + test.dates == both.dates
    assert len(test) == int(0.2 * (5011 - 100))
    assert torch.equal(torch.cat((train.sample, test.sample)), both.sample)
    assert torch.equal(test.history[test.start :], test.returns)


def test_samples_times_scale_are_the_returns():
    for kind in ("ewma", "raw"):
        data = MarketReturns(kind, split="test")
        assert torch.allclose(data.sample.double() * data.scale, data.returns, rtol=1e-6, atol=1e-7)
    index = torch.tensor([5, 0, 5])
    assert torch.equal(data[index]["sample"], data.sample[index])


def test_filtering_removes_the_regime_that_raw_returns_keep():
    def gap(kind):
        quantiles = [MarketReturns(kind, split=s).sample[:, 0].double().quantile(0.99) for s in ("train", "test")]
        return float(quantiles[0] / quantiles[1] - 1)

    assert abs(gap("ewma")) < 0.05 < 0.5 < gap("raw")


def write(path: Path, rows: list[str], header: str = "Date,A,B") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def days(n: int) -> list[str]:
    return [(date(2020, 1, 1) + timedelta(i)).isoformat() for i in range(n)]


def test_reader_takes_prices_or_returns_of_chosen_columns(tmp_path):
    path = write(tmp_path / "own.csv", [f"{d},{100 + i},{-i}" for i, d in enumerate(days(10))])
    table = read_price_table(path, columns=["A"])
    assert table.names == ("A",) and table.values.shape == (10, 1) and table.returns()[1].shape == (9, 1)
    assert torch.equal(
        read_price_table(path, columns=["B"], values="returns").returns()[1].flatten(), -torch.arange(10.0).double()
    )


def test_own_file_gives_the_shipped_results(tmp_path):
    own = tmp_path / "own.csv"
    own.write_bytes(TABLE.read_bytes())
    assert torch.equal(MarketReturns(path=own, columns=["wti", "sp500"]).sample, MarketReturns().sample[:, [2, 0]])


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (["2020-01-01,1,2", "2020-01-02,,2", "2020-01-03,nan,."], {}, r"2 of 3 rows hold a missing .* 2020-01-02"),
        (["2020-01-01,1,2", "2020-01-02,-36.98,2"], {}, r"1 prices are not positive \(first: A = -36.98 on 2020-01-02"),
        (["2020-01-02,1,2", "2020-01-01,1,2"], {}, r"line 3: 2020-01-01 comes after 2020-01-02"),
        (["2020-01-01,1,2", "2020-01-01,1,2"], {}, "must increase strictly"),
        (["01/02/2020,1,2", "01/03/2020,1,2"], {}, "not an ISO date"),
        (["2020-01-01,1,2"], {}, "has 1 rows of data"),
        (["2020-01-01,1,2", "2020-01-02,1"], {}, "1 rows do not have the header's 3 fields"),
        (["2020-01-01,1,2", "2020-01-02,1,2"], {"columns": ["AB"]}, "has no column 'AB'; it has Date, A, B"),
        (["2020-01-01,1,2", "2020-01-02,1,2"], {"date_column": "dat"}, "Did you mean 'Date'"),
        (["2020-01-01,1,2", "2020-01-02,1,2"], {"values": "price"}, "Did you mean 'prices'"),
        (["2020-01-01,1,2", "", "2020-01-02,1,buy"], {}, r"line 4: column 'B' holds 'buy', expected a number"),
        (["2020-01-01,1,2", '2020-01-02,1,"1,234.5"'], {}, "line 3: column 'B' holds '1,234.5'.*thousands"),
        (["2020-01-01,1,2,", "2020-01-02,1,2,"], {}, "2 rows do not have .*line 2.*a comma at the end of a line"),
        (["2020-01-01,1,2", "2020-01-02,1,2"], {"columns": ["A", "a"]}, "name a column twice"),
        (["2020-01-01 16:00:00,1,2", "2020-01-02,1,2"], {}, "not an ISO date"),
    ],
)
def test_bad_files_are_named(tmp_path, rows, options, message):
    with pytest.raises(ConfigError, match=message):
        read_price_table(write(tmp_path / "own.csv", rows), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "emwa"}, "Did you mean 'ewma'"),
        ({"split": "tset"}, "Did you mean 'test'"),
        ({"decay": 1.0}, "decay must lie"),
        ({"holdout": 0.0}, "holdout must be a share"),
        ({"holdout": 0.001}, "at least 100 and 20 are needed"),
        ({"warmup": 5000}, "too few days"),
        ({"columns": ["sp50"]}, "Did you mean 'sp500'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        MarketReturns(**options)


def test_missing_file_names_its_neighbour(tmp_path):
    write(tmp_path / "returns.csv", ["2020-01-01,1,2"])
    with pytest.raises(ConfigError, match=r"Did you mean 'returns.csv'"):
        read_price_table(tmp_path / "retruns.csv")


def test_missing_file_does_not_guess_at_unlike_names(tmp_path):
    write(tmp_path / "prices.csv", ["2020-01-01,1,2"])
    with pytest.raises(ConfigError) as caught:
        read_price_table(tmp_path / "closes.csv")
    assert "Did you mean" not in str(caught.value)


def test_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "own.csv", ["2020-01-01,1,2", "2020-01-02,3,4"])
    assert read_price_table("~/own.csv").names == ("A", "B")


TWO_DAYS = ["2020-01-01,1,2", "2020-01-02,3,4"]


def test_equal_names_are_refused_and_case_only_decides_between_different_ones(tmp_path):
    for header, options in (("Date,A,A", {}), ("Date,A,A", {"columns": ["a"]}), ("Date,Bb,BB", {"columns": ["bb"]})):
        with pytest.raises(ConfigError, match=r"has 2 columns for .*\(column 2\).*\(column 3\)"):
            read_price_table(write(tmp_path / "own.csv", TWO_DAYS, header), **options)
    table = read_price_table(write(tmp_path / "own.csv", TWO_DAYS, "Date,A,a"))
    assert table.values.tolist() == [[1, 2], [3, 4]]  # and no copies of the first
    assert read_price_table(tmp_path / "own.csv", columns=["a"]).values.flatten().tolist() == [2, 4]


def test_an_index_without_a_name_is_no_asset(tmp_path):
    rows = [f"{i},{row}" for i, row in enumerate(TWO_DAYS, start=1)]
    for header in (",Date,A,B", '"",Date,A,B', "Unnamed: 0,Date,A,B"):
        with pytest.raises(ConfigError, match=r"column 1 has no name .*drop it, name it, or choose columns="):
            read_price_table(write(tmp_path / "own.csv", rows, header))
        assert read_price_table(tmp_path / "own.csv", columns=["A", "B"]).values.tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ConfigError, match="no column 'date'; it has '', A, B.*Name the column without a name"):
        read_price_table(write(tmp_path / "own.csv", TWO_DAYS, ",A,B"))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le"])
def test_other_encodings_are_named_with_the_remedy(tmp_path, encoding):
    path = tmp_path / "own.csv"
    path.write_bytes("\n".join(["Date,A,Börse", *TWO_DAYS]).encode(encoding))
    with pytest.raises(ConfigError, match=r"own\.csv is not UTF-8 text .*save it as UTF-8"):
        read_price_table(path)


@pytest.mark.parametrize(("mark", "shown"), [(";", '";"'), ("\t", "tabs")])
def test_other_separators_are_named(tmp_path, mark, shown):
    path = write(tmp_path / "own.csv", [row.replace(",", mark) for row in TWO_DAYS], mark.join(("Date", "A", "B")))
    with pytest.raises(ConfigError, match=f'fields are separated by {shown}; expected ","'):
        read_price_table(path)


def test_midnights_are_dates(tmp_path):
    rows = ["2020-01-01 00:00:00,1,2", "2020-01-02T00:00:00.000,3,4", "2020-01-03 00:00:00-05:00,5,6"]
    dates = read_price_table(write(tmp_path / "own.csv", rows)).dates
    assert dates == (date(2020, 1, 1), date(2020, 1, 2), date(2020, 1, 3))


def test_prices_do_not_pass_as_returns(tmp_path):
    with pytest.raises(ConfigError, match="the shipped table holds prices"):
        MarketReturns(values="returns")
    own = write(tmp_path / "own.csv", [f"{d},{i % 3 - 1},{100 + i}" for i, d in enumerate(days(400))])
    with pytest.raises(ConfigError, match="'B' is positive on all 400 days with median .*set values: prices"):
        MarketReturns(path=own, values="returns")
    assert MarketReturns(path=own, values="returns", columns=["A"]).names == ("A",)


def test_constant_column_is_refused(tmp_path):
    own = write(tmp_path / "own.csv", [f"{d},{100 + i % 7},5" for i, d in enumerate(days(400))])
    with pytest.raises(ConfigError, match="volatility of 'B' is zero"):
        MarketReturns(path=own)
