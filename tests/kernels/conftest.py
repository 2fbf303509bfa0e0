import pytest
import torch

E4M3_NAN = 0x7F


@pytest.fixture(scope="session")
def device():
    """Where the Triton kernels run: a GPU, or the CPU, interpreted (tests/conftest.py sees to it)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned_outputs(monkeypatch):
    """NaN in whatever ``torch.empty*`` returns: an element that a kernel leaves unwritten then shows."""

    def poison(allocate):
        def allocate_poisoned(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.dtype == torch.uint8:
                return tensor.fill_(E4M3_NAN)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocate_poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
