"""A run that is saved, loaded and continued is the run that was never interrupted."""

import pytest

from tests.megatron.checkpoints import resume
from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.training import Case
from tests.workers import Ranks

pytestmark = needs_megatron
pytest.importorskip("psutil", reason="Megatron's checkpoints need psutil")


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("formats", ["nvfp4", "mixed"])
def test_resume_is_exact(ranks: Ranks, formats: str, overlap: bool) -> None:
    for same, wrong in ranks(2)(resume, Case(formats, overlap)):
        assert all(same.values()), same
        assert not wrong
