"""The notebooks: whole and portable as they lie there, and right when they are run."""

from __future__ import annotations

import json
import re

import nbformat
import pytest
from dockerfile import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BADGE = "[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
LOCAL = re.compile(r"/(root|home|tmp|work|usr|content|Users)/|\.venv|site-packages|127\.0\.0\.1:\d")
INSTALL = "SOURCE = "
MOST_BYTES = 400_000
CELL_S = 300
DTYPE = re.compile(r"^DTYPE = .*$", re.MULTILINE)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # a notebook chooses by device


def _read(path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def _shown(notebook: nbformat.NotebookNode) -> str:
    """All text that its cells have printed."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


def _figures(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_there_are_three():
    names = ["functional_tpu", "quickstart", "streaming_market"]
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_portable_and_begins_with_a_badge(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    notebook = nbformat.reads(text, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    first, *_ = notebook.cells
    assert first.cell_type == "markdown" and first.source.startswith(BADGE)
    named = path.stem.replace("_", "-")
    assert [cell.id for cell in notebook.cells] == [
        f"{named}-{number:02}" for number in range(len(notebook.cells))
    ]
    for cell in notebook.cells:
        outputs = [{**output, "data": None} for output in cell.get("outputs", ())]
        for said in (cell.source, json.dumps(outputs)):
            assert not LOCAL.search(said), said


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_shows_came_of_one_run_from_top_to_bottom(path):
    cells = [cell for cell in _read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert sum(cell.source.count(INSTALL) for cell in cells) == 1  # the one placeholder
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [one for one in outputs if one.output_type == "error" or one.get("name") == "stderr"]
    assert _figures(_read(path)) >= 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a notebook in a fresh kernel on the CPU, somewhere else; any error fails."""

    def run(name: str, dtype: str) -> nbformat.NotebookNode:
        notebook = _read(ROOT / "notebooks" / f"{name}.ipynb")
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
            cell.source = DTYPE.sub(f'DTYPE = "{dtype}"', cell.source)
        folder = tmp_path_factory.mktemp(name)
        from nbclient import NotebookClient  # of the long suite only

        NotebookClient(
            notebook, timeout=CELL_S, kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
        ).execute()  # fmt: skip
        assert not list(folder.iterdir())  # it leaves nothing behind
        return notebook

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.delenv("XLA_FLAGS", raising=False)
        yield run


@pytest.mark.long
def test_quickstart_goes_from_an_engine_to_a_server(run, smollm2_path):
    shown = _shown(notebook := run("quickstart", "float32"))
    assert _figures(notebook) == 2
    for source in ("FLASH", "RESUMED", "COMPUTED"):
        assert re.search(rf"^\w[\w ]+ {source} +version", shown, re.MULTILINE), shown
    # Version 30, unless the answer to version 31 has come in between.
    assert re.search(r"^stale +FLASH +version 3(0, age 1|1, age 0),  0 tokens", shown, re.MULTILINE)
    assert re.search(r"^fresh +FLASH +version 31, age 0,  0 tokens", shown, re.MULTILINE), shown
    assert "sources: {'FLASH'}" in shown
    assert shown.count("restored answer equal: True") == 2  # in process, and by the server
    assert "asked: FLASH, 0 tokens forwarded" in shown
    assert "server ended with status 0" in shown


@pytest.mark.long
@DTYPES
def test_the_market_is_answered_truly_and_within_its_gates(run, dtype):
    shown = _shown(notebook := run("streaming_market", dtype))
    assert f" on cpu, {dtype}\n" in shown
    assert _figures(notebook) == 2
    counts = {
        source: (int(number), float(right))
        for source, number, right in re.findall(
            r"^([A-Z]+) +(\d+) +[\d.]+ +\d+ +([\d.]+)%$", shown, re.MULTILINE
        )
    }
    assert counts.keys() == {"FLASH", "RESUMED", "GATED", "COMPUTED"}, shown
    assert sum(number for number, _ in counts.values()) == 60 * 13
    assert all(right > 80 for _, right in counts.values()), shown
    bounds = [float(bound) for bound in re.findall(r"opens above .* bound ([\d.]+)%", shown)]
    assert bounds and max(bounds) <= 5, shown
    assert "Evidence(gap=" in shown and "risk=0.05" in shown


@pytest.mark.long
@DTYPES
def test_the_functional_session_runs_on_all_devices_and_comes_back(run, dtype):
    shown = _shown(notebook := run("functional_tpu", dtype))
    assert _figures(notebook) == 1
    assert f"{dtype}, 2 x cpu" in shown and "8 sessions on 2 devices" in shown
    apart = float(re.findall(r"from its run alone by (\S+) logits", shown)[0])
    assert apart < (1e-3 if dtype == "float32" else 0.25)  # of leads of around 10
    assert int(re.findall(r"right at (\d+)% of 384 questions", shown)[0]) > 90
    for claim in ("resumed answer", "bitwise", "restored answer", "fleet bitwise"):
        assert f"{claim} equal: True" in shown, shown
