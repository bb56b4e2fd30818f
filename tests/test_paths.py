"""Local paths, and names in buckets, tested against a small server with the interface of Google Cloud Storage."""

import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from eformer import checkpoint
from eformer.paths import GCSPath, LocalPath, MLUtilPath, ePath, ePathLike
from support.object_server import serving

# ------------------------------------------------------------------------------------------- factory


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("a/b", LocalPath("a/b")),
        ("~/x", LocalPath("~/x")),
        ("step:3/x", LocalPath("step:3/x")),
        (Path("/a"), LocalPath("/a")),
        ("file:///a/b%20c", LocalPath("/a/b c")),
        ("file://localhost/a", LocalPath("/a")),
        ("gs://bucket/a", GCSPath("gs://bucket/a")),
    ],
)
def test_the_text_decides_the_kind_of_path(given, path):
    assert type(ePath(given)) is type(path)
    assert ePath(given) == path


@pytest.mark.parametrize("path", [LocalPath("a"), GCSPath("gs://bucket/a")])
def test_our_own_paths_stay_as_they_are(path):
    assert ePath(path) is path


def test_the_factory_is_an_instance_of_the_documented_class():
    assert isinstance(ePath, MLUtilPath)
    assert MLUtilPath()("x") == LocalPath("x")


@pytest.mark.parametrize("path", [LocalPath("a"), GCSPath("gs://bucket/a"), ePath])
def test_the_documented_annotation_covers_all_of_them(path):
    assert isinstance(path, ePathLike)


@pytest.mark.parametrize("path", ["s3://bucket/x", "http://host/x", Path("s3://bucket/x")])
def test_another_scheme_is_refused_and_the_known_are_named(path):
    with pytest.raises(ValueError, match="only gs:// and file:// are supported"):
        ePath(path)


@pytest.mark.parametrize("path", ["file://host/x", "file:/x"])
def test_a_file_of_nowhere_is_refused(path):
    with pytest.raises(ValueError, match="expected file:///absolute/path"):
        ePath(path)


@pytest.mark.parametrize("path", ["gs://", "gs:///x", Path("gs://bucket/x")])
def test_an_address_without_a_bucket_is_refused(path):
    with pytest.raises(ValueError, match="expected gs://bucket/name"):
        ePath(path)


def test_an_empty_path_is_refused():
    with pytest.raises(ValueError, match="the path is empty"):
        ePath("")


def test_names_need_neither_jax_nor_a_client():
    code = (
        "import sys; from eformer.paths import ePath; ePath('gs://bucket/a') / 'b'\n"
        "assert not {'jax', 'tensorstore', 'obstore'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --------------------------------------------------------------------------------------------- local


def test_a_local_path_is_a_pathlib_path_and_stays_ours(tmp_path):
    path = ePath(tmp_path) / "a.b.txt"
    assert isinstance(path, Path)
    assert path == tmp_path / "a.b.txt"
    assert hash(path) == hash(tmp_path / "a.b.txt")
    assert {type(p) for p in (path, path.parent, path.with_suffix(".x"), path.resolve())} == {LocalPath}
    assert (path.name, path.stem, path.suffix, path.parts[-1]) == ("a.b.txt", "a.b", ".txt", "a.b.txt")
    assert repr(LocalPath("a")) == "LocalPath('a')"
    assert os.fspath(path) == str(path)


def test_a_local_path_lists_its_directory(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.json").touch()
    assert list(ePath(tmp_path).iterdir()) == [LocalPath(tmp_path / "a")]
    assert list(ePath(tmp_path).glob("**/*.json")) == [LocalPath(tmp_path / "a" / "x.json")]


def test_the_facts_of_a_local_path_are_a_dict_and_those_of_os(tmp_path):
    path = ePath(tmp_path) / "a"
    path.write_bytes(b"abc")
    os.utime(path, (1, 2.5))
    found, expected = path.stat(), os.stat(path)
    assert (found["size"], found.get("mtime", 0), found["atime"]) == (3, 2.5, 1)
    assert {name: found[name] for name in ("ctime", "mode", "uid", "gid")} == {
        name: getattr(expected, f"st_{name}") for name in ("ctime", "mode", "uid", "gid")
    }
    assert (found.st_mtime_ns, found.st_ino) == (expected.st_mtime_ns, expected.st_ino)
    assert tuple(found[number] for number in range(10)) == tuple(expected)
    assert pickle.loads(pickle.dumps(found)) == found
    for name in ("st_nothing", "mtime"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(found, name)


def test_pathlib_still_finds_the_facts_that_it_needs(tmp_path):
    path = ePath(tmp_path) / "link"
    path.symlink_to("nowhere")
    assert path.lstat().st_mode == os.lstat(path).st_mode
    assert (path.is_symlink(), path.exists(), path.parent.is_dir()) == (True, False, True)
    assert path.parent.samefile(tmp_path)
    with pytest.raises(FileNotFoundError):
        path.stat()


def test_local_writes_create_parents_and_say_how_much(tmp_path):
    path = ePath(tmp_path) / "a" / "b"
    assert path.write_bytes(b"abc") == 3
    assert path.read_bytes() == b"abc"
    assert path.write_text("é\n", encoding="latin-1", newline="\r\n") == 2
    assert path.read_bytes() == b"\xe9\r\n"


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_text("new \N{SNOWMAN}", encoding="ascii"),
        lambda path: path.write_text(b"new"),
        lambda path: path.write_bytes("new"),
    ],
)
def test_a_local_write_that_fails_keeps_the_old_file_and_leaves_no_trace(tmp_path, write):
    path = ePath(tmp_path) / "a"
    path.write_text("old")
    with pytest.raises((UnicodeEncodeError, TypeError)):
        write(path)
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


# ------------------------------------------------------------------------------------- names in buckets


def test_a_name_in_a_bucket_comes_apart_as_with_pathlib():
    path = ePath("gs://bucket/a") / "b" / "c.tar.gz"
    assert str(path) == path.as_posix() == "gs://bucket/a/b/c.tar.gz"
    assert repr(path) == "GCSPath('gs://bucket/a/b/c.tar.gz')"
    assert path.parts == ("gs://bucket/", "a", "b", "c.tar.gz")
    assert (path.bucket, path.name, path.stem, path.suffix) == ("bucket", "c.tar.gz", "c.tar", ".gz")
    assert path.parent == GCSPath("gs://bucket/a/b")
    assert path.with_name("d") == GCSPath("gs://bucket/a/b/d")
    assert path.with_suffix(".zst") == GCSPath("gs://bucket/a/b/c.tar.zst")
    assert path.relative_to("gs://bucket/a") == PurePosixPath("b/c.tar.gz")


def test_a_bucket_is_its_own_parent_and_has_no_name():
    bucket = ePath("gs://bucket/")
    assert bucket == bucket.parent == GCSPath("gs://bucket")
    assert (bucket.name, bucket.parts) == ("", ("gs://bucket/",))


def test_slashes_and_dots_that_say_nothing_are_dropped():
    assert GCSPath("gs://bucket//a/./b//") == GCSPath("gs://bucket/a/b")


def test_equal_names_are_equal_keys_and_names_have_an_order():
    a, b = GCSPath("gs://bucket/a"), GCSPath("gs://bucket/b")
    assert {a: 1}[b.with_name("a")] == 1
    assert a != "gs://bucket/a"
    assert sorted([b, a]) == [a, b]
    assert pickle.loads(pickle.dumps(a)) == a


@pytest.mark.parametrize(
    "join",
    [
        lambda: ePath("gs://bucket/../x"),
        lambda: ePath("gs://../x"),
        lambda: ePath("gs://bucket/a") / "../x",
        lambda: ePath("gs://bucket/a").joinpath("b", ".."),
        lambda: ePath("gs://bucket/a").with_name(".."),
    ],
)
def test_a_name_that_leads_out_is_refused(join):
    with pytest.raises(ValueError, match=r"contains '\.\.'"):
        join()


@pytest.mark.parametrize("name", ["/x", "gs://other/x", "s3://other/x"])
def test_only_names_can_be_joined(name):
    with pytest.raises(ValueError, match="is not a name below gs://bucket/a"):
        ePath("gs://bucket/a") / name


@pytest.mark.parametrize("base", ["gs://bucket/b", "gs://other/a"])
def test_a_name_is_not_relative_to_where_it_is_not(base):
    with pytest.raises(ValueError, match="not"):
        ePath("gs://bucket/a/b").relative_to(base)


def test_a_name_in_a_bucket_is_not_taken_for_a_file():
    with pytest.raises(TypeError, match="GCSPath"):
        os.fspath(GCSPath("gs://bucket/a"))


# ----------------------------------------------------------------------------------- objects in buckets


@pytest.fixture
def service(monkeypatch):
    with serving() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield server


@pytest.fixture
def bucket(service):
    return ePath("gs://bucket")


def test_an_object_is_written_and_read(bucket, service):
    path = bucket / "a b" / "c?#%.txt"
    assert path.write_text("é\r\n") == 3
    assert service.objects == {"a b/c?#%.txt": "é\r\n".encode()}
    assert path.read_text() == "é\r\n"
    assert path.write_bytes(memoryview(b"new")) == 3
    assert path.read_bytes() == b"new"


def test_an_object_is_a_file_and_the_names_above_are_directories(bucket):
    (bucket / "a/b").write_bytes(b"")
    assert (bucket / "a/b").is_file()
    assert not (bucket / "a/b").is_dir()
    assert (bucket / "a").is_dir()
    assert not (bucket / "a").is_file()
    assert bucket.is_dir()
    assert not bucket.is_file()
    assert [path.exists() for path in (bucket / "a", bucket / "a/b", bucket / "a/c")] == [True, True, False]


def test_a_longer_name_is_not_below_a_shorter(bucket):
    (bucket / "ab/c").write_bytes(b"")
    assert not (bucket / "a").exists()


def test_a_directory_lists_its_entries_once_and_in_order(bucket):
    for name in ("a/d/1", "a/d/2", "a/c", "ab"):
        (bucket / name).write_bytes(b"")
    assert list((bucket / "a").iterdir()) == [bucket / "a/c", bucket / "a/d"]
    assert list(bucket.iterdir()) == [bucket / "a", bucket / "ab"]
    assert list((bucket / "nothing").iterdir()) == []


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.json", ["x.json"]),
        ("*/*.json", ["b/y.json"]),
        ("**/*.json", ["b/c/z.json", "b/y.json", "x.json"]),
        ("b/?", ["b/c"]),
        ("b/**", ["b", "b/c", "b/c/z.json", "b/y.json"]),
    ],
)
def test_a_pattern_finds_objects_and_directories_below(bucket, pattern, found):
    for name in ("a/x.json", "a/b/y.json", "a/b/c/z.json", "other.json"):
        (bucket / name).write_bytes(b"")
    assert list((bucket / "a").glob(pattern)) == [bucket / "a" / name for name in found]


@pytest.mark.parametrize("pattern", ["", "/a", "a/"])
def test_a_pattern_that_could_not_be_followed_is_refused(pattern):
    with pytest.raises(ValueError, match="Unacceptable pattern"):
        GCSPath("gs://bucket").glob(pattern)


def test_the_facts_of_an_object_and_of_a_directory(bucket, service):
    for seconds, (name, data) in enumerate([("run-2/a", b"abc"), ("run-2/b/c", b"de"), ("run-1", b"")]):
        (bucket / name).write_bytes(data)
        service.times[name] = 1_700_000_000 + seconds
    found = (bucket / "run-2/a").stat()
    assert (found["size"], found.get("mtime", 0)) == (3, 1_700_000_000)
    assert (found.st_size, stat.S_ISREG(found.st_mode)) == (3, True)
    below = (bucket / "run-2").stat()
    assert (below["size"], below["mtime"], stat.S_ISDIR(below["mode"])) == (5, 1_700_000_001, True)
    assert bucket.stat()["mtime"] == 1_700_000_002


def test_placeholders_of_directories_are_listed(bucket, service):
    service.objects.update(dict.fromkeys(["a/", "f"], b""))
    assert list(bucket.glob("**/*")) == [bucket / "a", bucket / "f"]


@pytest.mark.parametrize("key", ["b//c", "d/../e"])
def test_a_key_that_no_path_can_say_is_an_error_that_names_it(bucket, service, key):
    service.objects.update(dict.fromkeys(["a", key], b""))
    with pytest.raises(OSError, match=f"{bucket}.*{key}"):
        bucket.iterdir()


def test_an_object_is_removed(bucket):
    path = bucket / "a"
    path.write_bytes(b"")
    path.unlink()
    path.unlink(missing_ok=True)
    assert not path.exists()


@pytest.mark.parametrize("act", [GCSPath.read_bytes, GCSPath.read_text, GCSPath.stat, GCSPath.unlink])
def test_a_missing_object_is_a_file_that_is_not_found(bucket, act):
    with pytest.raises(FileNotFoundError, match=f"No such object: '{bucket}/a'"):
        act(bucket / "a")


def test_a_directory_needs_not_be_made(bucket, service):
    (bucket / "a/b").mkdir(parents=True)
    (bucket / "a/b").mkdir(parents=True, exist_ok=True)
    assert service.objects == {}


def test_a_directory_that_is_there_is_not_made_again(bucket):
    (bucket / "a/b").write_bytes(b"")
    with pytest.raises(FileExistsError, match=f"'{bucket}/a'"):
        (bucket / "a").mkdir()


@pytest.mark.parametrize(
    "act",
    [
        GCSPath.exists,
        GCSPath.is_file,
        GCSPath.is_dir,
        GCSPath.iterdir,
        GCSPath.read_bytes,
        GCSPath.unlink,
        lambda path: path.write_bytes(b""),
        lambda path: path.parent.iterdir(),
    ],
)
def test_a_service_that_refuses_is_not_an_empty_one(bucket, service, act):
    service.objects["a/b"] = b""
    service.refuse_with = 403, b"<Error><Code>AccessDenied</Code></Error>"
    with pytest.raises(OSError, match=f"{bucket}.*403"):
        act(bucket / "a")


def test_options_of_the_bucket_are_used(service):
    with checkpoint.store_options("gs://other", endpoint=service.url, bearer_token="of-tests"):
        (ePath("gs://other") / "a").write_bytes(b"1")
    assert service.requests[-1][2]["authorization"] == "Bearer of-tests"


@pytest.mark.parametrize("data", [3, "text"])
def test_only_bytes_are_written_as_bytes(bucket, service, data):
    with pytest.raises(TypeError, match="bytes-like"):
        (bucket / "a").write_bytes(data)
    assert service.objects == {}
