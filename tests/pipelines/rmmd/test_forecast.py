"""Forecasts: codecs agree with their sets, roll-outs with a loop by hand, datasets keep their coordinates."""

import numpy as np
import pytest
import torch

from genkit.data import FieldForecast, Lorenz96, StationWeather
from genkit.errors import ConfigError
from genkit.pipelines.rmmd.forecast import ForecastCodec, forecast_dataset, roll_out
from genkit.pipelines.rmmd.networks import MLPDenoiser
from genkit.pipelines.rmmd.pipeline import RMMDPipeline
from genkit.schedulers import VPScheduler

xarray = pytest.importorskip("xarray")


def zero(condition, generator):
    return torch.zeros(len(condition), 15)


@pytest.fixture(scope="module")
def weather():
    return StationWeather("test")


def test_the_codec_gives_what_the_set_of_stations_gives(weather):
    codec = ForecastCodec.of(weather)
    index = torch.tensor([0, 17, 300])
    item, rows = weather[index], weather.rows[index]
    states = [weather.table.values[rows - h].to(torch.float32) for h in (0, 12)]
    torch.testing.assert_close(codec.condition(states, weather.times[index]), item["condition"], rtol=1e-5, atol=1e-4)
    restored = codec.restore(item["sample"], item["state"])
    known = ~torch.isnan(item["target"])
    torch.testing.assert_close(restored[known], item["target"][known], rtol=1e-4, atol=1e-3)
    again = ForecastCodec.from_dict(codec.to_dict())
    assert again.to_dict() == codec.to_dict()


def test_the_codec_gives_what_gridded_fields_give(tmp_path):
    values = np.random.default_rng(0).normal(size=(12, 2, 3, 4)).astype(np.float32)
    values[:, :, 0, 0] = np.nan
    fields = xarray.Dataset(
        {"z": (("time", "level", "lat", "lon"), values), "t": (("time", "lat", "lon"), values[:, 0] + 5.0)},
        {"time": np.arange(12), "level": [500, 850], "lat": [10.0, 0.0, -10.0], "lon": [0.0, 1.0, 2.0, 3.0]},
    )
    for kind in ("residual", "state"):
        data = FieldForecast(fields, kind=kind)
        codec, item = ForecastCodec.of(data), data[torch.arange(3)]
        condition = codec.condition([item["state"]], None)
        torch.testing.assert_close(condition, item["condition"], rtol=1e-4, atol=1e-5)
        known = ~torch.isnan(item["target"])
        torch.testing.assert_close(
            codec.restore(item["sample"], item["state"])[known], item["target"][known], rtol=1e-4, atol=1e-4
        )


def test_a_rollout_is_the_loop_by_hand(weather):
    """Residuals that depend on the condition, two steps, one member more than one: the second step must see the state
    of the first, and as its history the state that the first started from."""
    codec = ForecastCodec.of(weather)
    index = torch.tensor([3, 40])
    rows, times = weather.rows[index], weather.times[index]
    now, before = (weather.table.values[rows - h].to(torch.float32) for h in (0, 12))
    mixing = torch.randn(34, 15, generator=torch.Generator().manual_seed(0)) / 6

    def draw(condition, generator):
        return condition @ mixing

    found = roll_out(codec, draw, [now, before], times, 3, 2, None)
    first = codec.restore(codec.condition([now, before], times) @ mixing, now)
    second = codec.restore(codec.condition([first, now], times + 12) @ mixing, first)
    for member in range(3):
        torch.testing.assert_close(found[0, member], first)
        torch.testing.assert_close(found[1, member], second)
    wrong = codec.restore(codec.condition([first, before], times + 12) @ mixing, first)
    assert (wrong - second).abs().max() > 0.1


def test_a_history_between_two_steps_is_refused(weather):
    codec = ForecastCodec.of(StationWeather("test", history_hours=(0, 6)))
    state = torch.zeros(1, 15)
    with pytest.raises(ConfigError, match="6 hours before"):
        roll_out(codec, zero, [state, state], torch.tensor([0]), 2, 2, None)
    assert roll_out(codec, zero, [state, state], torch.tensor([0]), 2, 1, None).shape == (1, 2, 1, 15)


def stations(weather, hours=24):
    rows = weather.rows[0] + torch.arange(-hours, 1)
    values = weather.table.values[rows].numpy()
    times = weather.table.times[rows].numpy().astype("datetime64[h]").astype("datetime64[ns]")
    variables = {
        n: (("time",), values[:, i], {"units": u})
        for i, (n, u) in enumerate(zip(weather.names, weather.units, strict=True))
    }
    return xarray.Dataset(variables, {"time": times}, {"title": "stations"})


def test_a_dataset_becomes_an_ensemble_at_the_times_ahead(weather):
    codec, dataset = ForecastCodec.of(weather), stations(weather)
    found = forecast_dataset(codec, zero, dataset, 4, 3, None)
    assert dict(found.sizes) == {"member": 4, "time": 3}
    assert found["jfk_temp"].attrs == {"units": "degC"} and found.attrs == {"title": "stations"}
    last = dataset["time"].values[-1]
    assert list(found["time"].values - last) == [np.timedelta64(12 * (i + 1), "h") for i in range(3)]
    np.testing.assert_allclose(found["jfk_temp"].values, float(dataset["jfk_temp"][-1]), rtol=1e-5)  # no change drawn


def test_what_a_dataset_lacks_is_named(weather):
    codec, dataset = ForecastCodec.of(weather), stations(weather)
    with pytest.raises(ConfigError, match="Did you mean"):
        forecast_dataset(codec, zero, dataset.rename(jfk_temp="jfk_tmp"), 2, 1, None)
    with pytest.raises(ConfigError, match="12 before the last time"):
        forecast_dataset(codec, zero, dataset.isel(time=slice(-6, None)), 2, 1, None)
    with pytest.raises(ConfigError, match="expected 'time'"):
        forecast_dataset(codec, zero, dataset.rename(time="t"), 2, 1, None)


def test_a_pipeline_forecasts_with_its_own_network_and_is_saved_with_its_fields(weather, tmp_path):
    import genkit

    with torch.random.fork_rng():
        torch.manual_seed(0)
        teacher = MLPDenoiser([15], cond_channels=34, width=16, blocks=1)
        torch.nn.init.normal_(teacher.mlp.output.weight, std=0.1)
    fields = ForecastCodec.of(weather).to_dict()
    made = RMMDPipeline.from_teacher(teacher, VPScheduler("edm"), num_inference_steps=2, fields=fields)
    made.save_pretrained(tmp_path / "pipe")
    pipe = genkit.load(tmp_path / "pipe")
    pipe.set_progress_bar_config(disable=True)
    dataset, generator = stations(weather), torch.Generator().manual_seed(0)
    found = pipe.forecast(dataset, 5, num_steps=2, generator=generator)
    condition = weather[torch.tensor([0])]["condition"].expand(5, -1)
    samples = pipe(5, condition=condition, generator=torch.Generator().manual_seed(0)).samples
    state = weather[torch.tensor([0])]["state"]
    np.testing.assert_allclose(
        found["lga_v"].values[:, 0], weather.restore(samples, state)[:, 14].numpy(), rtol=1e-4, atol=1e-4
    )
    assert float(found["lga_v"].std("member").min()) > 0
    plain = RMMDPipeline.from_teacher(teacher, VPScheduler("edm"))
    with pytest.raises(ConfigError, match="forecasts nothing"):
        plain.forecast(dataset)


def test_a_system_without_a_clock_has_a_codec_too():
    data = Lorenz96("test", num_samples=50, num_trajectories=50)
    codec, item = ForecastCodec.of(data), data[torch.arange(4)]
    torch.testing.assert_close(codec.condition([item["state"]], None), item["condition"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(codec.restore(item["sample"], item["state"]), item["target"], rtol=1e-4, atol=1e-3)
