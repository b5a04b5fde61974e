"""Every notebook runs from its first cell to its last, on a CPU."""

import gzip
import json
import re

import pytest
from cases import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")


def run(name, folder):
    """Return the cells of code of a notebook after it ran in a folder."""
    notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells), "outputs are not committed"
    nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": folder}}).execute()
    return cells


@pytest.mark.slow
def test_first_gpu_run_reports_on_a_machine_without_a_gpu(tmp_path):
    cells = run("first_gpu_run.ipynb", tmp_path)
    assert len(cells) == 3 and all(cell.outputs for cell in cells)
    info, report, _ = ("".join(each.get("text", "") for each in cell.outputs) for cell in cells)
    assert "cpu cpu: can run" in info
    assert "exit code 0: all right" in report
    assert any("image/png" in each.get("data", {}) for each in cells[2].outputs)
    steps = json.loads(gzip.decompress((tmp_path / "results/first_gpu_run.json.gz").read_bytes()))["steps"]
    assert {"right"} <= {step["status"] for step in steps.values()} <= {"right", "skipped"}


@pytest.mark.slow
def test_tour_shows_what_it_says(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    cells = run("tour.ipynb", tmp_path)
    assert [cell.source.split(".")[0] for cell in cells] == [f"# {n}" for n in range(1, 13)]
    shown = [each for cell in cells for each in cell.outputs]
    assert all(cell.outputs for cell in cells) and not any(each.get("name") == "stderr" for each in shown)
    drawn = [sorted(each.get("data", {})) for cell in cells for each in cell.outputs if each.get("data")]
    assert drawn.count(["text/html", "text/plain"]) == 3 and ["image/png", "text/plain"] in drawn
    said = ["".join(each.get("text", "") for each in cell.outputs) for cell in cells]
    differences = [float(said[i].split()[-1]) for i in (3, 8)]
    assert max(differences) <= 128 * 2**-24 * 6  # keys of a row, float32's rounding, more than any value
    backend, errors = (cells[i].outputs[0]["data"]["text/plain"] for i in (6, 7))
    assert "254016 needed" in backend and errors.count(" ok") == 5
    all_pairs, documents = (float(number) for number in re.findall(r"\d+\.\d+", said[11]))
    assert 2 * documents < all_pairs
