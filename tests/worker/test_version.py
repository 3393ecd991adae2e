"""The version of sources that are not installed; `tests/test_cli.py` has that of a package."""

from importlib import metadata

from jdp.worker.build_info import version


def test_sources_that_were_built_and_not_installed_have_their_version(tmp_path, monkeypatch):
    (tmp_path / "jdp.egg-info").mkdir()
    text = "Metadata-Version: 2.4\nName: jdp\nVersion: 7.8.9\n\nVersion: 1\n"
    (tmp_path / "jdp.egg-info" / "PKG-INFO").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert version.__wrapped__() == metadata.version("jdp") == "7.8.9"


def test_sources_that_were_never_built_have_none(monkeypatch):
    def distribution(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    assert version.__wrapped__() == "0+unknown"
