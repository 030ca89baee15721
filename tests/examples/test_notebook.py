"""The notebook for a first look runs from its first cell to its last, as somebody would run it."""

import pytest

from tests.docs.page import ROOT


@pytest.mark.slow
def test_first_steps() -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'zerocast[docs]'")
    client = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'zerocast[docs]'")
    for package in ("accelerate", "compressed_tensors", "transformers"):
        pytest.importorskip(package, reason=f"{package} is not installed: make readers")
    notebook = nbformat.read(ROOT / "examples/first_steps.ipynb", as_version=4)
    assert len(notebook.cells) <= 12 and not any(cell.get("outputs") for cell in notebook.cells), "kept without output"
    client.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(ROOT / "examples")}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert "[14, 15, 16, 17, 18, 19, 20, 21]" in shown[-1]["text"]
