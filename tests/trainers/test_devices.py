"""Settings of GPUs, as far as they can be seen without one."""

from collections.abc import Iterator

import pytest
import torch

from trainers.config import Config, RunConfig
from trainers.devices import check_dtype, configure_arithmetic
from trainers.errors import TrainerError
from trainers.strategies.options import FsdpOptions

GPU = torch.device("cuda", 0)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's settings, as a GPU would get them; restored afterwards."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kernels = (torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled())
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_mem_efficient_sdp(kernels[0])
    torch.backends.cuda.enable_cudnn_sdp(kernels[1])


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(("precision", "is_rounded"), [("high", True), ("highest", False)])
def test_precision_applies_to_products_and_convolutions(precision: str, is_rounded: bool) -> None:
    configure_arithmetic(RunConfig(matmul_precision=precision))
    assert torch.get_float32_matmul_precision() == precision
    assert torch.backends.cudnn.allow_tf32 is is_rounded


@pytest.mark.usefixtures("settings")
def test_deterministic_run_uses_no_attention_kernel_without_a_fixed_order() -> None:
    configure_arithmetic(RunConfig(deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.mem_efficient_sdp_enabled() and not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()


HALF = FsdpOptions(param_dtype="bfloat16")


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        (Config(dtype="bfloat16"), "--dtype float16`"),
        (Config(dtype="float16", strategy="fsdp", fsdp=HALF), "--dtype float16 --fsdp.param_dtype float32"),
        (Config(dtype="float16", strategy="ddp", fsdp=HALF), ""),
        (Config(), ""),
    ],
)
def test_bfloat16_is_refused_on_a_gpu_without_it(config: Config, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    check_dtype(torch.device("cpu"), config)
    if not hint:
        check_dtype(GPU, config)
        return
    with pytest.raises(TrainerError, match="Tesla V100 has no bfloat16") as caught:
        check_dtype(GPU, config)
    assert hint in str(caught.value)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    check_dtype(GPU, config)
