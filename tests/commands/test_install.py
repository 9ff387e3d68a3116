"""`accel-sft install`: what pip is asked, which tasks came, and one line where pip is missing or fails."""

import json
import re
import zipfile

import pytest
from fake_plugins import GOOD, accel_sft

from accel_sft.api.errors import UserError
from accel_sft.commands.install import requirement


@pytest.fixture
def wheels(tmp_path):
    """A folder with one wheel, as `pip wheel` leaves it."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "accel_sft_mine-1.5.dist-info"
    files = {
        "accel_sft_mine.py": GOOD,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: accel-sft-mine\nVersion: 1.5\nSummary: Mine.\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[accel_sft.tasks]\nmine = accel_sft_mine:Good\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / "accel_sft_mine-1.5-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(name, text)
    return folder


def test_a_task_comes_from_a_folder_of_wheels_and_is_told(tmp_path, wheels):
    site = tmp_path / "site"
    site.mkdir()
    offline = ("--", "--no-index", "--find-links", str(wheels), "--target", str(site), "--disable-pip-version-check")
    done = accel_sft("install", "mine", *offline, site=site)
    assert done.returncode == 0, done.stderr
    assert f"-m pip install --no-index --find-links {wheels}" in done.stdout
    assert done.stdout.splitlines()[-1] == "mine  accel-sft-mine 1.5  Mine."
    (mine,) = [task for task in json.loads(accel_sft("tasks", "--json", site=site).stdout) if task["name"] == "mine"]
    assert (mine["version"], mine["entry_point"], mine["usable"]) == ("1.5", "accel_sft_mine:Good", True)
    (site / "accel_sft_mine.py").write_text("import no_such_module")
    (mine,) = [task for task in json.loads(accel_sft("tasks", "--json", site=site).stdout) if task["name"] == "mine"]
    assert not mine["usable"]
    assert "No module named 'no_such_module'" in mine["problems"][0]
    absent = accel_sft("install", "absent", *offline, site=site)
    assert absent.returncode == 1
    assert "install absent: pip ended with status 1; what it printed above says why" in absent.stderr


def test_a_token_in_a_url_is_not_printed(tmp_path):
    url = f"git+file://me:hf_secret@localhost{tmp_path}/none"
    done = accel_sft("install", url, "--", "--no-index", "--disable-pip-version-check")
    assert done.returncode == 1
    assert f"install git+file://***@localhost{tmp_path}/none: pip ended with status 1" in done.stderr
    named = accel_sft("install", "mine @ https://me:hunter2@127.0.0.1:9/x", "--", "--retries", "0", "--timeout", "1")
    for each in (done, named):
        assert each.returncode == 1
        assert not re.search("hf_secret|hunter2", each.stdout + each.stderr)  # in what pip prints neither


def test_a_package_s_words_do_not_steer_the_terminal_and_names_run_nothing(tmp_path):
    info = tmp_path / "accel_sft_esc-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accel-sft-esc\nVersion: 1\nSummary: A\x1b]0;b\x07\n")
    (info / "entry_points.txt").write_text("[accel_sft.tasks]\nesc = accel_sft_esc\x1b[31m:X\n")
    for words in (("--help",), ("tasks",)):
        assert not re.search("\x1b|\x07", accel_sft(*words, site=tmp_path).stdout)
    (tmp_path / "a folder").mkdir()
    offline = ("--", "--no-index", "--disable-pip-version-check")
    for name in (
        str(tmp_path / "a folder"),
        f"git+file:///$(touch {tmp_path}/run)",
        f"https://`touch {tmp_path}/run`/x",
    ):
        done = accel_sft("install", name, *offline)
        assert done.returncode == 1
        assert "pip ended with status" in done.stderr
    assert not (tmp_path / "run").exists()


def test_where_there_is_no_pip_one_line_says_what_to_do(tmp_path):
    hide = "import importlib.util as u\nf = u.find_spec\nu.find_spec = lambda n: None if n == 'pip' else f(n)\n"
    (tmp_path / "sitecustomize.py").write_text(hide)
    done = accel_sft("install", "mine", site=tmp_path)
    assert done.returncode == 1
    assert "install mine: this environment has no pip; " in done.stderr
    assert "uv pip install accel-sft-mine" in done.stderr


def test_what_pip_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert requirement("mine") == requirement("accel-sft-mine") == "accel-sft-mine"
    assert requirement("mine==1.5") == "accel-sft-mine==1.5"
    for whole in ("./mine", str(tmp_path / "mine"), "git+https://host/mine.git", "https://host/mine-1.5.tar.gz"):
        assert requirement(whole) == whole
    for wrong in ("-r", "", "Mine Task", "./absent", "absent.whl"):
        with pytest.raises(UserError, match="NAME"):
            requirement(wrong)
