"""Options of buckets that callers give: for which URLs they hold, and how long."""

import gc
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.stores.locate import store_at
from eformer._engine.stores.store_options import options_of
from eformer.checkpoint import Run, SaveOptions, load, save, save_async, store_options
from eformer.errors import NotFoundError
from support.commands import run
from support.object_server import credentials, serving

numbers = itertools.count()


@pytest.fixture
def server():
    with serving() as server:
        yield server


@pytest.fixture
def url():
    return f"s3://options-{next(numbers)}/run"


def test_options_hold_for_all_that_is_below_a_url():
    with store_options("s3://b/run", region="r"):
        assert options_of("s3://b/run") == options_of("s3://b/run/step/x") == {"region": "r"}
        for other in ("s3://b/run2", "s3://b", "gs://b/run", "s3://c/run"):
            assert options_of(other) == {}
    assert options_of("s3://b/run") == {}


def test_options_of_longer_urls_and_later_ones_win():
    with (
        store_options("", timeout=1, retries=1, region="a"),
        store_options("s3://b/run/", region="d"),
        store_options("s3://", region="b", retries=2),
        store_options("s3://b", region="c"),
        store_options("s3://b", region="e"),
    ):
        assert options_of("s3://b/run/x") == {"timeout": 1, "retries": 2, "region": "d"}
        assert options_of("s3://b/other")["region"] == "e"
        assert options_of("gs://b")["region"] == "a"


def test_a_client_is_made_once_for_the_same_settings():
    with store_options("s3://once", **credentials()):
        first = store_at("s3://once/a").objects
        assert store_at("s3://once/b/c").objects is first
        with store_options("s3://once", timeout=7):
            other = store_at("s3://once/a").objects
            assert other is not first
        assert store_at("s3://once/a").objects is first


def test_another_environment_makes_another_client(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "first-of-tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "first")
    first = store_at("s3://rotated/a").objects
    assert store_at("s3://rotated/a").objects is first
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "second")
    assert store_at("s3://rotated/a").objects is not first


@pytest.mark.parametrize("start", ["", "s3://", "s3://b"])
def test_an_unknown_option_is_an_error_at_once_that_lists_the_known_ones(start):
    known = r"'endpont'.*anonymous.*endpoint.*proxy_url.*S3Store"
    with pytest.raises(TypeError, match=known) as raised:
        store_options(start, endpont="https://SENTINEL", **credentials())
    assert "SENTINEL" not in str(raised.value)
    assert options_of("s3://b/x") == {}
    with pytest.raises(TypeError, match=known):
        save({"w": 1}, "s3://b/x", options=SaveOptions(store_options={"endpont": "x"}))


@pytest.mark.parametrize("name", ["root_certificate", "default_headers", "proxy_url", "http2_only"])
def test_options_of_the_client_of_obstore_are_those_of_all_clouds(name):
    with store_options("", **{name: "x"}):
        assert all(options_of(f"{cloud}://b", cloud) == {name: "x"} for cloud in ("s3", "gcs", "azure"))


def test_an_option_of_one_cloud_for_all_buckets_holds_for_that_cloud():
    """Of ours, and of obstore's; for a URL of another cloud it is an error."""
    given = {"profile": "", "account_key": "SENTINEL", "account_name": "a", "timeout": 7}
    with store_options("", **given, **credentials(), anonymous=True):
        s3, gcs = store_at("s3://some/x").objects, store_at("gs://some/x").objects
        azure = store_at("az://some/x").objects
        assert {objects._timeout for objects in (s3, gcs, azure)} == {7}
    with store_options("gs://", region="r"), pytest.raises(ValueError, match="region is for s3 only"):
        store_at("gs://some/x")
    with (
        store_options("gs://", account_key="SENTINEL"),
        pytest.raises(TypeError, match="account_key") as raised,
    ):
        store_at("gs://some/x")
    assert "SENTINEL" not in str(raised.value)


@pytest.fixture
def options(server):
    return credentials() | {"endpoint": server.url}


def test_options_of_a_call_hold_for_that_call_alone(options, url):
    seen = []
    save({"w": np.ones(3)}, url, options=SaveOptions(store_options=options))
    assert options_of(url) == {}
    loaded = load(
        url,
        options={"store_options": options},
        callback=lambda array, _: seen.append(options_of(f"{url}/x")) or array,
    )
    assert loaded["w"].tolist() == [1, 1, 1]
    assert seen == [options]
    assert options_of(url) == {}


def test_a_later_call_without_options_does_not_see_those_of_an_earlier_one(options, url, monkeypatch):
    for name, value in credentials().items():
        monkeypatch.setenv(f"AWS_{name.upper()}", str(value))
    save({"w": np.ones(3)}, url, options=SaveOptions(store_options=options))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # no server is there
    load(url, options={"store_options": options})
    with store_options("", retries=0, timeout=3), pytest.raises(OSError, match="9"):
        load(url)


def test_options_of_a_call_do_not_hold_after_its_error(options, url):
    with pytest.raises(NotFoundError):
        load(url, options={"store_options": options})
    assert options_of(url) == {}


def test_other_threads_do_not_see_the_options_of_a_call(options, url):
    save({"w": np.ones(3)}, url, options=SaveOptions(store_options=options))
    with ThreadPoolExecutor(1) as thread:

        def note(array, _):
            seen.append(thread.submit(options_of, url).result())
            return array

        seen = []
        load(url, options={"store_options": options}, callback=note)
    assert seen == [{}]


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
def test_a_save_in_the_background_has_its_options_until_it_is_done(options, url, kind, caplog):
    """Also for the checkpoint beside it that `reuse` names."""
    first = SaveOptions(store_options=options)
    save_async({"w": np.ones(3)}, f"{url}/a", format=kind, options=first).result()
    second = SaveOptions(store_options=options, reuse=f"{url}/a")
    save_async({"w": np.ones(3)}, f"{url}/b", format=kind, options=second).result()
    assert "reuse: cannot read" not in caplog.text
    assert options_of(f"{url}/a") == options_of(f"{url}/b") == {}
    assert load(f"{url}/b", options={"store_options": options})["w"].tolist() == [1, 1, 1]


def test_an_open_view_keeps_the_options_with_which_it_was_opened(options, url):
    save({"w": np.ones(3)}, url, options=SaveOptions(store_options=options))
    with store_options(url, **options):
        view = checkpoint.open(url)
    with view:
        assert view["w"][:1].tolist() == [1]


def test_a_run_has_its_options_until_it_is_closed(options, url):
    with Run(url, every=1, options={"store_options": options}) as training:
        training.after(1, {"w": np.ones(3)})
        training.wait()
        assert [step.number for step in checkpoint.steps(url)] == [1]
    assert options_of(url) == {}
    with Run(url, every=1, options={"store_options": options}) as training:
        assert training.resume().step == 1


def test_a_run_that_is_not_closed_gives_its_options_back_when_it_is_collected(options, url):
    training = Run(url, every=1, options={"store_options": options})
    assert options_of(url) == options
    del training
    gc.collect()
    assert options_of(url) == {}


def test_options_for_a_local_path_are_refused(tmp_path):
    with pytest.raises(ValueError, match="store_options are for buckets"):
        save({"w": np.ones(3)}, tmp_path / "x", options=SaveOptions(store_options={"region": "x"}))
    with pytest.raises(ValueError, match="store_options are for buckets"):
        load(tmp_path / "x", options={"store_options": {"region": "x"}})
    assert not list(tmp_path.iterdir())


def test_values_are_not_shown():
    assert "SENTINEL" not in repr(store_options("s3://shown", secret_access_key="SENTINEL"))
    assert "SENTINEL" not in repr(SaveOptions(store_options={"secret_access_key": "SENTINEL"}))


# --------------------------------------------------------------------------------------- command line


def test_the_command_line_takes_options(server, url):
    options = credentials() | {"endpoint": server.url}
    save({"w": np.ones(3)}, url, options=SaveOptions(store_options=options))
    given = [f"--store-option={name}={value}" for name, value in options.items()]
    assert "float64" in run("inspect", url, *given).stdout
    assert run("verify", url, *given).returncode == 0
    assert "timeout is a number" in run("verify", url, *given, "--store-option", "timeout=x", code=1).stderr


def test_the_command_line_refuses_what_is_no_option(url):
    shown = run("inspect", url, "--store-option", "SENTINEL", code=2).stderr
    assert "NAME=VALUE" in shown
    assert "SENTINEL" not in shown


def test_options_of_a_command_end_with_it(server):
    from click.testing import CliRunner

    from eformer.cli.commands import main

    CliRunner().invoke(main, ["inspect", "/no/such", "--store-option", "region=x"])
    assert options_of("s3://b") == {}
