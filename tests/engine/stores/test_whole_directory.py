"""A directory of several files appears at once, or not at all, and replaces another one whole."""

import pytest

from eformer._engine.stores import whole_directory
from eformer._engine.stores.whole_directory import WholeDirectory


def make(final, text, **options):
    with WholeDirectory(final) as new:
        (new.path / "inner").mkdir()
        (new.path / "inner" / "file").write_text(text)
        assert not final.exists() or options
        new.commit(**options)


def test_it_appears_whole_and_nothing_is_left(tmp_path):
    make(tmp_path / "deep" / "it", "one")
    assert (tmp_path / "deep" / "it" / "inner" / "file").read_text() == "one"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["it"]


def test_without_a_commit_nothing_is_left(tmp_path):
    with WholeDirectory(tmp_path / "it") as new:
        (new.path / "file").write_text("x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_exchange", [True, False])
def test_another_one_is_replaced_whole(tmp_path, monkeypatch, has_exchange):
    if not has_exchange:
        monkeypatch.setattr(whole_directory, "_renameat2", None)
    make(tmp_path / "it", "one")
    (tmp_path / "it" / "note").write_text("old")
    make(tmp_path / "it", "two", replace=True)
    assert (tmp_path / "it" / "inner" / "file").read_text() == "two"
    assert not (tmp_path / "it" / "note").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_a_name_that_is_taken_is_refused(tmp_path):
    make(tmp_path / "it", "one")
    with WholeDirectory(tmp_path / "it") as new:
        (new.path / "x").write_text("x")
        with pytest.raises(FileExistsError):
            new.commit()


def test_others_join_by_the_token_and_remains_of_dead_writers_are_swept(tmp_path):
    with WholeDirectory(tmp_path / "it") as first, WholeDirectory(tmp_path / "it", first.token) as second:
        (second.path / "file").write_text("x")
        second.close()
        first.commit()
    dead = WholeDirectory(tmp_path / "dead")
    dead._scratch.abandon()
    make(tmp_path / "other", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it", "other"]
