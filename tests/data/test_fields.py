from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from genkit.data import fields as module
from genkit.data.fields import FieldForecast
from genkit.errors import ConfigError, MissingExtraError

xarray = pytest.importorskip("xarray")
pytest.importorskip("netCDF4")

TIMES, LAT, LON, LEVELS = 80, 5, 6, (850.0, 500.0)


def fields(times: int = TIMES):
    """Sea surface temperature that is missing over land, and geopotential on two levels, in an unusual order."""
    draw = np.random.default_rng(0)
    sst = 290 + draw.normal(size=(times, LAT, LON)).cumsum(0)
    sst[:, 1:3, 2:4] = np.nan
    z = 1e4 * np.array([1.0, 5.0]) + draw.normal(size=(LAT, LON, times, 2)).cumsum(2) * [3.0, 7.0]
    return xarray.Dataset(
        {
            "sst": (("time", "lat", "lon"), sst, {"units": "K"}),
            "z": (("lat", "lon", "time", "level"), z, {"units": "m2 s-2"}),
            "mask": (("lat", "lon"), np.ones((LAT, LON))),
        },
        coords={
            "time": np.datetime64("2020-01-01", "ns") + 6 * np.arange(times) * np.timedelta64(1, "h"),
            "lat": np.linspace(60, -60, LAT),
            "lon": np.linspace(0, 300, LON),
            "level": list(LEVELS),
        },
        attrs={"title": "made"},
    )


@pytest.fixture
def netcdf(tmp_path):
    path = tmp_path / "fields.nc"
    fields().to_netcdf(path)
    return path


def channels(data) -> np.ndarray:
    """(T, 3, H, W): the oracle."""
    z = data["z"].transpose("time", "level", "lat", "lon").values
    return np.concatenate([data["sst"].values[:, None], z], axis=1)


# items


@pytest.mark.parametrize("lead", [1, 3])
def test_items_against_numpy(netcdf, lead):
    x, data = channels(fields()), FieldForecast(netcdf, lead=lead)
    train = x[:64]
    mean, std = np.nanmean(train, (0, 2, 3)), np.nanstd(train, (0, 2, 3))
    scale = np.sqrt(np.nanmean((train[lead:] - train[:-lead]) ** 2, (0, 2, 3)))
    assert data.names == ("sst", "z@850", "z@500") and len(data) == 64 - lead
    for found, expected in ((data.mean, mean), (data.std, std), (data.scale, scale)):
        assert found.numpy() == pytest.approx(expected, rel=1e-9)
    index = np.array([9, 0, 9, 40])
    batch = {name: value.numpy() for name, value in data[torch.from_numpy(index)].items()}
    grid = (-1, 1, 1)
    residual = (x[index + lead] - x[index]) / scale.reshape(grid)
    scaled = (x[index] - mean.reshape(grid)) / std.reshape(grid)
    assert np.allclose(batch["observation"], residual, equal_nan=True, atol=1e-5)
    assert np.allclose(batch["sample"], np.nan_to_num(residual), atol=1e-5)
    assert np.allclose(batch["condition"][:, :3], np.nan_to_num(scaled), atol=1e-5)
    assert np.array_equal(batch["condition"][:, 3:], (~np.isnan(x[index])).astype(np.float32))
    assert np.allclose(batch["state"], x[index], equal_nan=True) and np.allclose(
        batch["target"], x[index + lead], equal_nan=True
    )


def test_land_is_masked_and_nowhere_else(netcdf):
    batch = FieldForecast(netcdf)[torch.arange(8)]
    land = torch.zeros(LAT, LON, dtype=torch.bool)
    land[1:3, 2:4] = True
    assert torch.equal(batch["observation"][:, 0].isnan(), land.expand(8, LAT, LON))
    assert not bool(batch["observation"][:, 1:].isnan().any())
    assert bool((batch["sample"][:, 0][:, land] == 0).all()) and bool((batch["condition"][:, 3][:, land] == 0).all())
    assert bool(batch["sample"].isfinite().all() and batch["condition"].isfinite().all())


@pytest.mark.parametrize("kind", ["residual", "state"])
def test_restore_gives_the_target_back(netcdf, kind):
    data = FieldForecast(netcdf, kind=kind)
    batch = data[torch.arange(len(data))]
    assert torch.allclose(
        data.restore(batch["observation"], batch["state"]), batch["target"], rtol=1e-6, equal_nan=True
    )
    assert torch.allclose(data.condition(batch["state"].double()).float(), batch["condition"], atol=1e-3)
    known = batch["observation"][~batch["observation"].isnan()]
    assert float(known.square().mean()) == pytest.approx(1.0, abs=0.02)


def test_refused_missing_values_name_variable_time_and_place(netcdf):
    with pytest.raises(ConfigError, match=r"sst is missing at time=2020-01-01T00:00:00\S*, lat=30, lon=120"):
        FieldForecast(netcdf, nan="refuse")
    data = FieldForecast(netcdf, nan="refuse", variables=["z"])
    assert data[torch.tensor([0])]["condition"].shape == (1, 2, LAT, LON)  # no mask is needed


def test_latitudes_are_those_of_the_file(netcdf):
    assert FieldForecast(netcdf).latitudes.tolist() == [60.0, 30.0, 0.0, -30.0, -60.0]


# splits and statistics


def test_the_scale_sees_training_alone():
    def statistics(time):
        changed = fields()
        if time is not None:
            changed["z"][:, :, time] += 1e3
        data = FieldForecast(changed)
        return torch.cat((data.mean, data.std, data.scale))

    assert torch.equal(statistics(64), statistics(None))  # the first time of the test
    assert not torch.equal(statistics(63), statistics(None))  # the control: the last of the training


def test_splits_are_ordered_and_apart(netcdf):
    train, test, both = (FieldForecast(netcdf, split=s, gap=4, lead=2) for s in ("train", "test", "all"))
    assert train.rows.tolist() == list(range(0, 62)) and test.rows.tolist() == list(range(68, 78))
    assert both.rows.tolist() == list(range(0, 78))
    assert torch.equal(train.scale, test.scale)
    assert str(test.times[0]).startswith("2020-01-18T00")  # 68 steps of six hours


def test_only_the_rows_of_an_index_are_read(netcdf, monkeypatch):
    data = FieldForecast(netcdf, lead=2)
    read = []
    original = xarray.backends.netCDF4_.NetCDF4ArrayWrapper._getitem

    def recorded(self, key):
        read.append((self.variable_name, key))
        return original(self, key)

    monkeypatch.setattr(xarray.backends.netCDF4_.NetCDF4ArrayWrapper, "_getitem", recorded)
    data[torch.tensor([30, 5, 30])]
    sst = [key for name, key in read if name == "sst"]
    assert len(sst) == 1 and np.asarray(sst[0][0]).tolist() == [5, 7, 30, 32]


# other sources and names


def test_a_dataset_with_other_names_of_its_dimensions(netcdf):
    names = {"time": "valid_time", "lat": "latitude", "lon": "longitude", "level": "pressure_level"}
    renamed = fields().rename(names)
    options = {"time_dim": "valid_time", "lat_dim": "latitude", "lon_dim": "longitude", "level_dim": "pressure_level"}
    found, expected = FieldForecast(renamed, **options), FieldForecast(netcdf)
    index = torch.tensor([3])
    assert torch.equal(found[index]["condition"], expected[index]["condition"])
    with pytest.raises(ConfigError, match="Did you mean 'latitude'"):
        FieldForecast(renamed, time_dim="valid_time", lat_dim="latitud", lon_dim="longitude")


def test_a_zarr_store(tmp_path):
    pytest.importorskip("zarr")
    fields().to_zarr(tmp_path / "store")
    found, expected = FieldForecast(tmp_path / "store"), FieldForecast(fields())
    index = torch.tensor([3, 50])
    assert torch.equal(found[index]["condition"], expected[index]["condition"])


def test_a_store_that_would_run_code_is_refused(tmp_path):
    folder = tmp_path / "store" / "sst"
    folder.mkdir(parents=True)
    (tmp_path / "store" / ".zgroup").write_text('{"zarr_format": 2}')
    (folder / ".zarray").write_text(json.dumps({"filters": [{"id": "pickle"}]}).replace("p", "\\u0070", 1))
    with pytest.raises(ConfigError, match="codec pickle"):
        FieldForecast(tmp_path / "store")
    (folder / ".zarray").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        FieldForecast(tmp_path / "store")


# forecasts out


def test_a_forecast_is_written_back_and_read_again(netcdf, tmp_path):
    data, source = FieldForecast(netcdf), fields()
    batch = data[torch.tensor([10, 11])]
    forecast = torch.stack([batch["target"], batch["target"] + 1.0, batch["target"] - 1.0])
    out = data.to_dataset(forecast, data.times[[11, 12]], member=["a", "b", "c"])
    assert out["z"].dims == ("member", "lat", "lon", "time", "level") and out["sst"].attrs == {"units": "K"}
    assert set(out.data_vars) == {"sst", "z"} and out.attrs == {"title": "made"}
    out.to_netcdf(tmp_path / "out.nc")
    with xarray.open_dataset(tmp_path / "out.nc") as back:
        expected = source[["sst", "z"]].isel(time=[11, 12])
        xarray.testing.assert_allclose(back.sel(member="a", drop=True), expected, rtol=1e-6)
        assert float((back.sel(member="b") - back.sel(member="c"))["z"].mean()) == pytest.approx(2.0, abs=1e-2)
    numbered = data.to_dataset(forecast, data.times[[11, 12]])
    assert numbered["member"].values.tolist() == [0, 1, 2]
    for wrong in (forecast[0], forecast[:, :1], forecast[:, :, :2]):
        with pytest.raises(ConfigError, match=r"\(M, T, C, H, W\)"):
            data.to_dataset(wrong, data.times[[11, 12]])


# refusals


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda d: d, {"variables": ["zz"]}, r"no variable 'zz'.*Did you mean 'z'"),
        (lambda d: d, {"variables": "sst"}, "expected a list"),
        (lambda d: d, {"variables": ["mask"]}, "without time"),
        (lambda d: d.rename(level="height"), {}, "level_dim='height'"),
        (lambda d: d.drop_vars("lat"), {}, "no latitudes"),
        (lambda d: d.isel(time=0), {}, "no dimension 'time'"),
        (lambda d: d.isel(time=[0, 2, 1]), {}, "unsorted or irregular"),
        (lambda d: d.isel(time=[2, 1, 0]), {}, "unsorted or irregular"),
        (lambda d: d.isel(time=[0, 1, 3, 4]), {}, "2020-01-01T18.* follows 2020-01-01T06"),
        (lambda d: d.isel(time=[0, 0, 1]), {}, "unsorted or irregular"),
        (lambda d: d.isel(time=[0]), {}, "have 1 times"),
        (lambda d: d, {"lead": 64}, "hold no pair lead=64 apart"),
        (lambda d: d, {"split": "test", "gap": 16}, "test has 0 of 80 times"),
        (lambda d: d.assign(sst=d["sst"] * 0 + 3), {}, "channel 'sst' has no known value or a constant one"),
        (lambda d: d.assign(sst=d["sst"] * np.nan), {}, "channel 'sst' has no known value"),
        (lambda d: d, {"nan": "masked"}, "Did you mean 'mask'"),
        (lambda d: d, {"kind": "residuals"}, "Did you mean 'residual'"),
        (lambda d: d, {"holdout": 1.0}, "holdout=1.0"),
    ],
)
def test_refused_data(change, options, message):
    with pytest.raises(ConfigError, match=message):
        FieldForecast(change(fields()), **options)


def test_refused_files(tmp_path, netcdf):
    (tmp_path / "text.nc").write_text("no netCDF")
    with pytest.raises(ConfigError, match="neither a netCDF file nor a zarr store"):
        FieldForecast(tmp_path / "text.nc")
    with pytest.raises(ConfigError, match="Did you mean 'fields.nc'"):
        FieldForecast(tmp_path / "field.nc")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="without a zarr store"):
        FieldForecast(tmp_path / "empty")
    with pytest.raises(ConfigError, match="expected a path"):
        FieldForecast(3)


def test_missing_packages_are_named(monkeypatch, netcdf):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "xarray", None)
        with pytest.raises(MissingExtraError, match=r"genkit-diffusion\[weather\]"):
            FieldForecast(netcdf)
    monkeypatch.setattr(module, "_installed", lambda package: False)
    monkeypatch.setattr(xarray, "open_dataset", lambda *_, **__: (_ for _ in ()).throw(ValueError("no engine")))
    with pytest.raises(MissingExtraError, match="netCDF4, which is not installed"):
        FieldForecast(netcdf)
