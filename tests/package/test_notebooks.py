"""Every notebook runs from its first cell to its last, on a CPU."""

import gzip
import json

import pytest
from cases import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")


@pytest.mark.slow
def test_first_gpu_run_reports_on_a_machine_without_a_gpu(tmp_path):
    notebook = nbformat.read(ROOT / "examples/first_gpu_run.ipynb", as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": tmp_path}})
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) == 3 and all(cell.outputs for cell in cells)
    info, report, _ = ("".join(each.get("text", "") for each in cell.outputs) for cell in cells)
    assert "cpu cpu: can run" in info
    assert "exit code 0: all right" in report
    assert any("image/png" in each.get("data", {}) for each in cells[2].outputs)
    steps = json.loads(gzip.decompress((tmp_path / "results/first_gpu_run.json.gz").read_bytes()))["steps"]
    assert {"right"} <= {step["status"] for step in steps.values()} <= {"right", "skipped"}
